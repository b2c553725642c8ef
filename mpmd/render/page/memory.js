// The memory of one group over time, by what it is for.

const CHART = 190; // CSS pixels

class MemoryChart {
  constructor() {
    const { kinds, rows, groups } = profile.memory;
    this.kinds = kinds;
    this.rows = rows;
    this.sums = rows.map(sum);
    this.groups = groups;
    this.times = groups.map(({ steps }) => laneTimes(steps, steps.map(() => 0)).starts);
    const peaks = groups.map(({ row, peak }) => this.sums[row[peak]]);
    this.canvas = element("canvas", { role: "img" });
    this.choose(peaks.indexOf(Math.max(...peaks)));
  }

  choose(group) {
    this.group = group;
    const peak = this.peak();
    const most = `at most ${bytes(peak.bytes)}, at ${duration(peak.time)}`;
    this.canvas.setAttribute("aria-label", `Memory of group ${group} over time: ${most}`);
    redraw();
  }

  peak() {
    const { row, peak, task } = this.groups[this.group];
    return { time: this.times[this.group][peak], bytes: this.sums[row[peak]], task };
  }

  draw() {
    const [context, width] = fitted(this.canvas, CHART + AXIS);
    if (width <= LEFT) return;
    const peak = this.peak();
    const top = Math.max(peak.bytes, 1) * 1.12;
    const scale = (width - LEFT) / (state.to - state.from);
    this.drawParts(context, this.highest(width, scale), top);
    this.drawPeak(context, width, peak, top, scale);
    drawLabel(context, "0", CHART);
    drawAxis(context, width, CHART);
  }

  /** The highest state within each pixel is shown, so that no peak is lost between pixels. */
  highest(width, scale) {
    const times = this.times[this.group];
    const { row } = this.groups[this.group];
    const shown = new Int32Array(Math.max(1, Math.ceil(width - LEFT))).fill(-1);
    const first = Math.max(0, lastIndexBefore(times, state.from));
    for (let i = first; i < times.length && times[i] < state.to; i++) {
      const left = Math.max(0, Math.floor((times[i] - state.from) * scale));
      const until = i + 1 < times.length ? times[i + 1] : profile.makespan;
      const right = Math.min(shown.length, Math.max(left + 1, Math.floor((until - state.from) * scale)));
      for (let x = left; x < right; x++) {
        if (shown[x] < 0 || this.sums[row[i]] > this.sums[shown[x]]) shown[x] = row[i];
      }
    }
    return shown;
  }

  drawParts(context, shown, top) {
    const base = new Float64Array(shown.length).fill(CHART);
    this.kinds.forEach((kind, number) => {
      context.fillStyle = state.dark ? kind.dark : kind.colour;
      for (let x = 0; x < shown.length; x++) {
        const height = shown[x] < 0 ? 0 : (this.rows[shown[x]][number] / top) * CHART;
        base[x] -= height;
        if (height > 0) context.fillRect(LEFT + x, base[x], 1, height);
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
    const during = peak.task >= 0 ? ` during ${profile.taskName(profile.place(peak.task))}` : "";
    const isLeft = x < width / 2;
    context.textAlign = isLeft ? "left" : "right";
    const anchor = Math.min(Math.max(x, LEFT), width) + (isLeft ? 8 : -8);
    context.fillText(`peak ${bytes(peak.bytes)}${during}`, anchor, y - 5);
    if (x >= LEFT) context.fillRect(x - 3, y - 3, 6, 6);
  }
}

/** The chart, with a choice of the group. */
function memoryChart() {
  const chart = new MemoryChart();
  state.chart = chart;
  const { kinds, rows, groups, note } = profile.memory;
  const choice = element("select", { onchange: () => chart.choose(Number(choice.value)) },
    groups.map((_, group) => element("option", { value: group }, `group ${group}`)));
  choice.value = chart.group;
  const shown = kinds.filter((_, number) => rows.some((row) => row[number]));
  return [
    element("div", { className: "controls" }, element("label", {}, "Memory of ", choice)),
    chart.canvas,
    legend(shown, "Colours of memory", () => ""),
    note && element("p", { className: "note" }, note),
  ];
}
