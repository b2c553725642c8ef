// The lanes of one panel: tasks, idle time by cause, the critical path, and the selection.

/** Black or white, to be read on a colour. */
function inkOn(colour) {
  const [red, green, blue] = rgbOf(colour);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#10131a" : "#ffffff";
}

const acrossOf = (time, scale) => LEFT + (time - state.from) * scale;

/** A picture of the step, measured or simulated: `simulation` is null, or a simulation's number. */
class Panel {
  constructor(simulation) {
    this.simulation = simulation;
    this.title = element("h3");
    const aria = { describedby: "keys selected" };
    this.canvas = element("canvas", { tabIndex: 0, role: "application", aria });
    this.laneHeight = Math.max(8, Math.min(28, Math.floor(560 / profile.lanes.length)));
    this.inks = profile.types.map((type) => inkOn(type.colour));
    this.rename();
  }

  get measured() {
    return this.simulation === null;
  }

  get height() {
    return profile.lanes.length * this.laneHeight;
  }

  times(lane) {
    return this.measured ? lane.measured : lane.simulated[this.simulation];
  }

  span(place) {
    if (this.measured || place.gap) return profile.span(place);
    const times = this.times(place.lane);
    return [times.starts[place.k], times.ends[place.k]];
  }

  rename() {
    const { label, makespan, hint } = this.measured
      ? { label: profile.name, makespan: profile.makespan, hint: "" } : profile.simulations[this.simulation];
    this.title.title = hint;
    const name = element("span", { className: hint ? "hint" : "" }, label);
    this.title.replaceChildren(name, ` ${duration(makespan)}`);
    const lanes = `one lane for each of ${profile.lanes.length} groups`;
    this.canvas.setAttribute("aria-label", `${label}, ${duration(makespan)}, ${lanes}`);
  }

  /** Pixels of colours are kept until the theme changes. */
  palettes() {
    if (this.paletteOf === state.theme.lane) return;
    this.paletteOf = state.theme.lane;
    this.lanePixel = pixelOf(state.theme.lane);
    this.tasks = Uint32Array.from(profile.types, (type) => pixelOf(type.colour));
    this.dimmed = this.tasks.map((pixel) => mixed(pixel, this.lanePixel, 0.78));
    this.causes = Uint32Array.from(profile.causes, ({ colour, dark }) => pixelOf(state.dark ? dark : colour));
  }

  draw() {
    const [context, width, ratio] = fitted(this.canvas, this.height + AXIS);
    if (width <= LEFT) return;
    this.palettes();
    this.drawPixels(context, width, ratio);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT, this.height);
    context.clip();
    const scale = (width - LEFT) / (state.to - state.from);
    if (this.laneHeight >= 14) this.drawNumbers(context, scale);
    if (this.measured && byId("show-path").checked) this.drawPath(context, scale);
    if (state.selected && state.selected.panel === this) this.drawSelection(context, scale);
    context.restore();
    const every = Math.ceil(13 / this.laneHeight);
    for (let group = 0; group < profile.lanes.length; group += every) {
      drawLabel(context, group, (group + 0.5) * this.laneHeight + 4);
    }
    drawAxis(context, width, this.height);
  }

  drawPixels(context, width, ratio) {
    const across = Math.round((width - LEFT) * ratio);
    const down = Math.round(this.height * ratio);
    if (!this.image || this.image.width !== across || this.image.height !== down) {
      this.image = context.createImageData(across, down);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.edge = new Row(across);
      this.middle = new Row(across);
    }
    const view = { from: state.from, to: state.to, scale: across / (state.to - state.from) };
    const bar = Math.max(3, this.laneHeight * 0.4);
    for (const lane of profile.lanes) {
      this.edge.clear(this.lanePixel);
      fillTasks(this.edge, lane, this.times(lane), view, this.tasks, this.dimmed);
      if (this.measured) {
        this.middle.copy(this.edge);
        fillGaps(this.middle, lane, view, this.causes);
      }
      const top = lane.group * this.laneHeight;
      const middle = top + this.laneHeight / 2;
      const [first, begin, end, last] = [top + 1, middle - bar / 2, middle + bar / 2, top + this.laneHeight]
        .map((y) => Math.round(y * ratio));
      for (let y = first; y < last; y++) {
        const row = this.measured && y >= begin && y < end ? this.middle : this.edge;
        this.pixels.set(row.pixels, y * across);
      }
    }
    context.putImageData(this.image, Math.round(LEFT * ratio), 0);
  }

  drawNumbers(context, scale) {
    context.textAlign = "left";
    for (const lane of profile.lanes) {
      const times = this.times(lane);
      const [first, end] = inSight(times, state.from, state.to);
      if ((end - first) * 9 > this.canvas.clientWidth * 2) continue; // no room for any
      for (let k = first; k < end; k++) {
        const left = Math.max((times.starts[k] - state.from) * scale, 0);
        const room = (times.ends[k] - state.from) * scale - left;
        if (room < 17) continue;
        const long = room > 70 || lane.microbatch[k] < 0;
        const text = long ? profile.taskName({ lane, k }) : String(lane.microbatch[k]);
        if (context.measureText(text).width > room - 6) continue;
        context.fillStyle = this.inks[lane.type[k]];
        context.fillText(text, LEFT + left + 4, (lane.group + 0.5) * this.laneHeight + 4);
      }
    }
  }

  drawPath(context, scale) {
    const { task, start, end } = profile.path;
    const thickness = this.laneHeight > 12 ? 2 : 1.25;
    context.lineJoin = "round";
    context.beginPath();
    let before = null;
    for (let i = 0; i < task.length; i++) {
      if (before && before.time > state.to) break;
      const y = (lastIndexBefore(profile.firsts, task[i]) + 1) * this.laneHeight - 2;
      if (end[i] >= state.from) {
        if (before) {
          context.moveTo(acrossOf(before.time, scale), before.y);
          context.lineTo(acrossOf(start[i], scale), y);
        }
        context.moveTo(acrossOf(start[i], scale), y);
        context.lineTo(acrossOf(end[i], scale), y);
      }
      before = { time: end[i], y };
    }
    context.strokeStyle = state.theme.page; // a halo, to be seen on tasks of any colour
    context.lineWidth = thickness + 2.5;
    context.stroke();
    context.strokeStyle = state.theme.path;
    context.lineWidth = thickness;
    context.stroke();
  }

  drawSelection(context, scale) {
    const place = state.selected;
    const [start, end] = this.span(place);
    const top = place.lane.group * this.laneHeight;
    context.strokeStyle = state.theme.accent;
    context.lineWidth = 2;
    const width = Math.max((end - start) * scale + 2, 3);
    context.strokeRect(acrossOf(start, scale) - 1, top + 1, width, this.laneHeight - 1);
    const source = sourceOf(place);
    if (source < 0) return;
    const from = profile.place(source);
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(acrossOf(profile.span(from)[1], scale), (from.lane.group + 0.5) * this.laneHeight);
    context.lineTo(acrossOf(place.gap ? end : start, scale), top + this.laneHeight / 2);
    context.stroke();
    context.setLineDash([]);
  }

  /** The task or gap at a point in CSS pixels, or null. */
  at(x, y) {
    const lane = profile.lanes[Math.floor(y / this.laneHeight)];
    const time = timeAt(this.canvas, x);
    if (!lane || x < LEFT || time < 0) return null;
    const { starts, ends } = this.times(lane);
    const k = lastIndexBefore(starts, time);
    if (k >= 0 && time < ends[k]) return { panel: this, lane, k, gap: false };
    if (!this.measured || time > profile.makespan || !lane.idle[k + 1]) return null;
    return { panel: this, lane, k: k + 1, gap: true };
  }
}
