// The memory of one group over time, by what it is for.

const CHART = 190; // CSS pixels

class MemoryChart {
  constructor(profile) {
    const { kinds, rows, groups } = profile.memory;
    this.profile = profile;
    this.kinds = kinds;
    this.rows = rows;
    this.sums = rows.map((row) => row.reduce((sum, amount) => sum + amount, 0));
    this.groups = groups;
    this.times = groups.map((group) => {
      let time = 0;
      return Float64Array.from(group.steps, (step) => (time += step));
    });
    this.group = groups.reduce((most, group, number) => (group.peak.bytes > groups[most].peak.bytes ? number : most), 0);
    this.canvas = element("canvas", { role: "img" });
    this.choose(this.group);
  }

  choose(group) {
    this.group = group;
    const { peak } = this.groups[group];
    this.canvas.setAttribute("aria-label",
      `Memory of group ${group} over time: at most ${bytes(peak.bytes)}, at ${duration(peak.time)}`);
    redraw();
  }

  draw() {
    const [context, width] = fitted(this.canvas, CHART + AXIS);
    if (width <= LEFT) return;
    const { peak } = this.groups[this.group];
    const top = Math.max(peak.bytes, 1) * 1.12;
    const scale = (width - LEFT) / (state.to - state.from);
    this.drawParts(context, width, top, scale);
    this.drawPeak(context, width, peak, top, scale);
    context.fillStyle = state.theme.faint;
    context.font = FONT;
    context.textAlign = "right";
    context.fillText("0", LEFT - 8, CHART);
    drawAxis(context, width, 0, CHART);
  }

  /** The highest state within each pixel is shown, so that no peak is lost between pixels. */
  highest(width, scale) {
    const times = this.times[this.group];
    const { row } = this.groups[this.group];
    const shown = new Int32Array(Math.max(1, Math.ceil(width - LEFT))).fill(-1);
    const first = Math.max(0, lastIndexBefore(times, state.from));
    for (let i = first; i < times.length && times[i] < state.to; i++) {
      const left = Math.max(0, Math.floor((times[i] - state.from) * scale));
      const until = i + 1 < times.length ? times[i + 1] : this.profile.makespan;
      const right = Math.min(shown.length, Math.max(left + 1, Math.floor((until - state.from) * scale)));
      for (let x = left; x < right; x++) {
        if (shown[x] < 0 || this.sums[row[i]] > this.sums[shown[x]]) shown[x] = row[i];
      }
    }
    return shown;
  }

  drawParts(context, width, top, scale) {
    const shown = this.highest(width, scale);
    const base = new Float64Array(shown.length).fill(CHART);
    this.kinds.forEach((kind, number) => {
      context.fillStyle = state.dark ? kind.dark : kind.colour;
      for (let x = 0; x < shown.length; ) {
        let end = x + 1;
        while (end < shown.length && shown[end] === shown[x]) end++;
        const height = shown[x] < 0 ? 0 : (this.rows[shown[x]][number] / top) * CHART;
        if (height > 0) context.fillRect(LEFT + x, base[x] - height, end - x, height);
        const y = base[x] - height;
        for (; x < end; x++) base[x] = y;
      }
    });
  }

  drawPeak(context, width, peak, top, scale) {
    const x = LEFT + (peak.time - state.from) * scale;
    const y = CHART * (1 - peak.bytes / top);
    context.strokeStyle = context.fillStyle = state.theme.path;
    context.lineWidth = 1;
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width, y);
    context.stroke();
    context.setLineDash([]);
    context.font = FONT;
    const during = peak.task >= 0 ? ` during ${this.profile.nameOf(peak.task)}` : "";
    const text = `peak ${bytes(peak.bytes)}${during}`;
    const right = x > LEFT && x < width && x < width / 2;
    context.textAlign = right || x <= LEFT ? "left" : "right";
    context.fillText(text, Math.min(Math.max(x, LEFT), width) + (context.textAlign === "left" ? 8 : -8), y - 5);
    if (x < LEFT || x > width) return;
    context.beginPath();
    context.arc(x, y, 3.5, 0, 7);
    context.fill();
  }
}

function memorySection(profile) {
  if (!profile.memory) return null;
  const chart = new MemoryChart(profile);
  state.chart = chart;
  const { kinds, rows, groups } = profile.memory;
  const choice = element("select", { onchange: (event) => chart.choose(Number(event.target.value)) },
    groups.map((_, group) => element("option", { value: group, selected: group === chart.group }, `group ${group}`)));
  const most = Math.max(...groups.map((group) => group.peak.bytes), 1);
  const shown = kinds.map((kind, number) => ({ ...kind, number })).filter(({ number }) => rows.some((row) => row[number]));
  const columns = [
    { title: "Group", cell: (group) => String(groups.indexOf(group)) },
    { title: "Peak", cell: (group) => bytes(group.peak.bytes), key: (group) => group.peak.bytes },
    { title: "Its parts", className: "text", cell: (group) => stack(kinds.map((kind, number) => ({ ...kind, amount: rows[group.peak.row][number] })), most, bytes) },
    { title: "During", className: "text", cell: ({ peak }) => (peak.task < 0 ? "" : button(profile.nameOf(peak.task), () => selectTask(profile, peak.task, { scroll: true }))) },
    ...shown.map(({ label, number }) => ({ title: label, cell: (group) => (rows[group.peak.row][number] ? bytes(rows[group.peak.row][number]) : "") })),
  ];
  return [
    element("div", { className: "controls" }, element("label", {}, "Memory of ", choice)),
    chart.canvas,
    element("ul", { className: "legend", aria: { label: "Colours of memory" } }, legendItems(shown)),
    profile.memory.note && element("p", { className: "note" }, profile.memory.note),
    table("Bytes on each device at the peak of each group", columns, groups, { tall: groups.length > 16 }),
  ];
}
