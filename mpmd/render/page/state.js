// The state of the page, and the frames that show it.

const state = {
  profiles: [],
  current: 0, // the profile that the sections show
  from: 0,
  to: 1,
  whole: 1,
  selected: null, // {panel, lane, k, gap}
  found: null, // for each panel's profile, which tasks a search found
  panels: [],
  dark: false,
  theme: {},
};

const drawers = []; // what is drawn anew in each frame
let frameAsked = false;

function redraw() {
  if (frameAsked) return;
  frameAsked = true;
  requestAnimationFrame(() => {
    frameAsked = false;
    drawers.forEach((draw) => draw());
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

/** Scrolls in time until a span is in sight; widens the view if the span is longer. */
function reveal([start, end]) {
  const width = state.to - state.from;
  if (end - start > width * 0.9) show(start - (end - start) * 0.2, end + (end - start) * 0.2);
  else if (start < state.from || end > state.to) show((start + end - width) / 2, (start + end + width) / 2);
  else redraw();
}

const LEAST_IN_SIGHT = 1 / 60; // the part of the view below which a span can hardly be seen

/** Has a span in sight, and zooms in if it would be too small there. */
function approach([start, end]) {
  const length = end - start;
  if (length < (state.to - state.from) * LEAST_IN_SIGHT) show(start - length * 20, end + length * 20);
  else reveal([start, end]);
}

/** The colours of the theme, read once rather than in each frame. */
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "faint", "lane", "accent", "path", "rule", "page"]) {
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
  return [context, width, ratio];
}

const FONT = '11px system-ui, "DejaVu Sans", sans-serif';
