// The state of the page, and the frames that show it.

const state = {
  from: 0,
  to: 1,
  whole: 1,
  selected: null, // {panel, lane, k, gap}
  found: null, // which tasks a search found
  panels: [], // the measured one, and the simulated one below
  chart: null,
  dark: false,
  theme: {},
};

const drawers = []; // are called in each frame
let frameAsked = false;

const draw = () => drawers.forEach((drawer) => drawer());

function redraw() {
  if (frameAsked) return;
  frameAsked = true;
  requestAnimationFrame(() => {
    frameAsked = false;
    draw();
  });
}

const SHORTEST = 200; // nanoseconds in sight

function show(from, to) {
  const width = Math.max(Math.min(to - from, state.whole), Math.min(SHORTEST, state.whole));
  state.from = Math.max(0, Math.min(from, state.whole - width));
  state.to = state.from + width;
  redraw();
}

const zoom = (factor, centre = (state.from + state.to) / 2) =>
  show(centre - (centre - state.from) * factor, centre + (state.to - centre) * factor);

const pan = (share) => {
  const way = (state.to - state.from) * share;
  show(state.from + way, state.to + way);
};

/** Has a span in sight, with some of its surroundings. */
function surround([start, end], times) {
  const margin = (end - start) * times;
  show(start - margin, end + margin);
}

/** Scrolls in time until a span is in sight; widens the view if the span is longer. */
function reveal([start, end]) {
  const width = state.to - state.from;
  if (end - start > width * 0.9) surround([start, end], 0.2);
  else if (start < state.from || end > state.to) show((start + end - width) / 2, (start + end + width) / 2);
  else redraw();
}

const LEAST_IN_SIGHT = 1 / 60; // the part of the view below which a span can hardly be seen

/** Has a span in sight, and zooms in if it would be too small there. */
function approach(span) {
  if (span[1] - span[0] < (state.to - state.from) * LEAST_IN_SIGHT) surround(span, 20);
  else reveal(span);
}

/** The colours of the theme, read once rather than in each frame. */
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["faint", "lane", "accent", "path", "rule", "page"]) {
    state.theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

/** A canvas of a height in CSS pixels, cleared; its context draws in CSS pixels. */
function fitted(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = '11px system-ui, "DejaVu Sans", sans-serif';
  return [context, width, ratio];
}

/** A text right-aligned before the first nanosecond, such as the number of a group. */
function drawLabel(context, text, y) {
  context.fillStyle = state.theme.faint;
  context.textAlign = "right";
  context.fillText(text, LEFT - 8, y);
}
