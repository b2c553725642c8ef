// The lanes of one panel: tasks, idle time by cause, the critical path, and the selection.

const luminance = (colour) => {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue;
};

/** A picture of a profile, measured or simulated: `simulation` is null, or a simulation's number. */
class Panel {
  constructor(profile, simulation, number) {
    this.profile = profile;
    this.simulation = simulation;
    this.number = number;
    this.title = element("h3");
    this.canvas = element("canvas", { tabIndex: 0, role: "application", aria: { describedby: "keys selected" } });
    this.laneHeight = Math.max(8, Math.min(28, Math.floor(560 / profile.lanes.length)));
    this.inks = profile.types.map((type) => (luminance(type.colour) > 140 ? "#10131a" : "#ffffff"));
    this.rename();
  }

  get measured() {
    return this.simulation === null;
  }

  get height() {
    return this.profile.lanes.length * this.laneHeight;
  }

  times(lane) {
    return this.measured ? lane.measured : lane.simulated[this.simulation];
  }

  span(place) {
    if (this.measured || place.gap) return this.profile.span(place);
    const times = this.times(place.lane);
    return [times.starts[place.k], times.ends[place.k]];
  }

  rename() {
    const { name, makespan, simulations } = this.profile;
    const simulation = this.measured ? null : simulations[this.simulation];
    const [what, time, meaning] = simulation
      ? [simulation.label, simulation.makespan, simulation.meaning] : [name, makespan, ""];
    this.title.replaceChildren(what, element("span", {}, duration(time)), element("span", {}, meaning));
    this.canvas.setAttribute("aria-label", `${what}, ${duration(time)}, one lane for each of ${this.profile.lanes.length} groups`);
  }

  /** Pixels of colours are kept until the theme changes. */
  palettes() {
    if (this.paletteOf !== state.theme.lane) {
      this.paletteOf = state.theme.lane;
      this.lanePixel = pixelOf(state.theme.lane);
      this.tasks = Uint32Array.from(this.profile.types, (type) => pixelOf(type.colour));
      this.dimmed = this.tasks.map((pixel) => mixed(pixel, this.lanePixel, 0.78));
      this.causes = Uint32Array.from(this.profile.causes, (cause) => pixelOf(state.dark ? cause.dark : cause.colour));
    }
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
    context.fillStyle = state.theme.faint;
    context.font = FONT;
    context.textAlign = "right";
    const every = Math.ceil(13 / this.laneHeight);
    for (let group = 0; group < this.profile.lanes.length; group += every) {
      context.fillText(group, LEFT - 8, (group + 0.5) * this.laneHeight + 4);
    }
    drawAxis(context, width, 0, this.height);
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
    const found = state.found && state.found.get(this.profile);
    const bar = Math.max(3, this.laneHeight * 0.4);
    for (const lane of this.profile.lanes) {
      this.edge.clear(this.lanePixel);
      fillTasks(this.edge, lane, this.times(lane), view, this.tasks, this.dimmed, found);
      if (this.measured) {
        this.middle.copy(this.edge);
        fillGaps(this.middle, this.profile, lane, view, this.causes);
      }
      const top = lane.group * this.laneHeight;
      const rows = [top + 1, top + (this.laneHeight - bar) / 2, top + (this.laneHeight + bar) / 2, top + this.laneHeight];
      const [first, begin, end, last] = rows.map((y) => Math.round(y * ratio));
      for (let y = first; y < last; y++) {
        const row = this.measured && y >= begin && y < end ? this.middle : this.edge;
        this.pixels.set(row.pixels, y * across);
      }
    }
    context.putImageData(this.image, Math.round(LEFT * ratio), 0);
  }

  drawNumbers(context, scale) {
    context.font = FONT;
    context.textAlign = "left";
    for (const lane of this.profile.lanes) {
      const times = this.times(lane);
      const [first, end] = inSight(times, state.from, state.to);
      if ((end - first) * 9 > this.canvas.clientWidth * 2) continue; // no room for any
      for (let k = first; k < end; k++) {
        const left = Math.max((times.starts[k] - state.from) * scale, 0);
        const room = (times.ends[k] - state.from) * scale - left;
        if (room < 17) continue;
        const long = room > 70 || lane.microbatch[k] < 0;
        const text = long ? this.profile.taskName({ lane, k }) : String(lane.microbatch[k]);
        if (context.measureText(text).width > room - 6) continue;
        context.fillStyle = this.inks[lane.type[k]];
        context.fillText(text, LEFT + left + 4, (lane.group + 0.5) * this.laneHeight + 4);
      }
    }
  }

  drawPath(context, scale) {
    const { kind, task, start, end } = this.profile.path;
    const across = (time) => LEFT + (time - state.from) * scale;
    const thickness = this.laneHeight > 12 ? 2 : 1.25;
    context.lineJoin = "round";
    context.beginPath();
    let before = null;
    for (let i = 0; i < kind.length; i++) {
      if (kind[i] !== 0 || task[i] < 0) continue;
      if (start[i] > state.to && before && before.time > state.to) break;
      const group = lastIndexBefore(this.profile.firsts, task[i]);
      const y = (group + 1) * this.laneHeight - 2;
      if (end[i] >= state.from) {
        if (before) {
          context.moveTo(across(before.time), before.y);
          context.lineTo(across(start[i]), y);
        }
        context.moveTo(across(start[i]), y);
        context.lineTo(across(end[i]), y);
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
    const across = (time) => LEFT + (time - state.from) * scale;
    const top = place.lane.group * this.laneHeight;
    context.strokeStyle = state.theme.accent;
    context.lineWidth = 2;
    context.strokeRect(across(start) - 1, top + 1, Math.max((end - start) * scale + 2, 3), this.laneHeight - 1);
    const source = this.measured ? sourceOf(place) : -1;
    if (source < 0) return;
    const from = this.profile.place(source);
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(across(this.profile.span(from)[1]), (from.lane.group + 0.5) * this.laneHeight);
    context.lineTo(across(place.gap ? end : start), top + this.laneHeight / 2);
    context.stroke();
    context.setLineDash([]);
  }

  /** The task or gap at a point in CSS pixels, or null. */
  at(x, y) {
    const lane = this.profile.lanes[Math.floor(y / this.laneHeight)];
    const time = timeAt(this.canvas, x);
    if (!lane || x < LEFT || time < 0) return null;
    const times = this.times(lane);
    const k = lastIndexBefore(times.starts, time);
    if (k >= 0 && time < times.ends[k]) return { panel: this, lane, k, gap: false };
    if (!this.measured || time > this.profile.makespan || !lane.idle[k + 1]) return null;
    return { panel: this, lane, k: k + 1, gap: true };
  }
}
