// The axis of time below lanes and charts.

const LEFT = 46; // CSS pixels before the first nanosecond
const AXIS = 22;

function tickStep(span, most) {
  const rough = span / most;
  const unit = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * unit).find((step) => step >= rough);
}

/** A tick as text, in one unit for the whole axis. */
function tickText(time, step, end) {
  if (!time) return "0";
  const [size, unit] = end >= 1e9 ? [1e9, "s"] : end >= 1e6 ? [1e6, "ms"] : [1e3, "µs"];
  const decimals = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  return `${(time / size).toFixed(Math.min(decimals, 6))} ${unit}`;
}

function drawAxis(context, width, bottom) {
  const { from, to, theme } = state;
  const scale = (width - LEFT) / (to - from);
  const step = tickStep(to - from, Math.max(2, (width - LEFT) / 110));
  context.textAlign = "center";
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
    const x = LEFT + (time - from) * scale;
    context.fillStyle = theme.rule;
    context.fillRect(Math.round(x), bottom, 1, 5);
    context.fillStyle = theme.faint;
    const text = tickText(time, step, to);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(Math.max(x, LEFT - 8 + half), width - half), bottom + 16);
  }
}

function timeAt(canvas, x) {
  return state.from + ((x - LEFT) / (canvas.clientWidth - LEFT)) * (state.to - state.from);
}
