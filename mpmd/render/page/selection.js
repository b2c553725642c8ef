// The selected task or gap: which it is, and what is said of it.

/** The number of the task that a gap waited for, or that a task came after; -1 without. */
function sourceOf({ lane, k, gap }) {
  return gap ? lane.waited[k] : lane.after[k];
}

function causesOf(profile, { lane, k }) {
  return profile.causes
    .map((cause, number) => ({ ...cause, amount: lane.causes[number] ? lane.causes[number][k] : 0 }))
    .filter((cause) => cause.amount > 0)
    .sort((a, b) => b.amount - a.amount);
}

function titleOf(place) {
  return place.gap ? `Group ${place.lane.group} is idle` : place.panel.profile.taskName(place);
}

/** Lines about a task or a gap. */
function describe(place) {
  const { panel, lane, k, gap } = place;
  const { profile } = panel;
  const [start, end] = panel.span(place);
  const when = `${duration(end - start)}, from ${duration(start)} to ${duration(end)}`;
  if (gap) return [when, ...causeLines(profile, place), ...describeGap(profile, place)];
  const type = profile.typeOf(place);
  const lines = [`Group ${lane.group}: ${when}`];
  if (!panel.measured) return lines;
  const ratio = (end - start) / type.median;
  if (type.count > 1 && type.median) lines.push(`${digits(ratio)} times the median of its type, ${duration(type.median)}`);
  if (lane.processor[k] != null) lines.push(`Processor time: ${duration(lane.processor[k])}`);
  if (lane.after[k] >= 0) lines.push(`Came after ${nameWithGroup(profile, lane.after[k])}`);
  if (type.sources.length) lines.push(type.sources.slice(0, 2).join(", "));
  return lines;
}

const causeLines = (profile, place) => causesOf(profile, place).map((cause) => `${cause.label}: ${duration(cause.amount)}`);

function describeGap(profile, { lane, k }) {
  const lines = [];
  if (lane.waited[k] >= 0) lines.push(`Waited for ${nameWithGroup(profile, lane.waited[k])}`);
  if (lane.culprit[k] >= 0) {
    const cause = profile.causes[lane.culpritCause[k]];
    lines.push(`Most by ${nameWithGroup(profile, lane.culprit[k])} (${cause.label.toLowerCase()})`);
  }
  return lines;
}

function nameWithGroup(profile, number) {
  const place = profile.place(number);
  return `${profile.taskName(place)} of group ${place.lane.group}`;
}

function select(place, { scroll = false, near = scroll } = {}) {
  state.selected = place;
  if (place && near) approach(place.panel.span(place));
  else if (place) reveal(place.panel.span(place));
  else redraw();
  showSelected();
  if (scroll && place) {
    byId("timeline").scrollIntoView();
    place.panel.canvas.focus({ preventScroll: true });
  }
}

/** Selects a task by its number in the first panel of a profile. */
function selectTask(profile, number, options) {
  const panel = state.panels.find((panel) => panel.profile === profile);
  select({ panel, ...profile.place(number) }, options);
}

function selectGap(profile, group, k, options) {
  const panel = state.panels.find((panel) => panel.profile === profile);
  select({ panel, lane: profile.lanes[group], k, gap: true }, options);
}

function showSelected() {
  const card = byId("selected");
  const place = state.selected;
  card.classList.toggle("sticky", Boolean(place)); // so that it is in sight beside many lanes
  if (!place) {
    card.replaceChildren(element("p", { className: "note" }, "Select a task or a gap to see why it is where it is."));
    return;
  }
  const { panel, lane, k, gap } = place;
  const { profile } = panel;
  const [when, ...lines] = describe(place);
  const parts = [element("h4", {}, titleOf(place), element("span", {}, when))];
  if (gap) {
    const causes = causesOf(profile, place);
    const [start, end] = profile.span(place);
    parts.push(stack(causes, end - start, duration), element("ul", { className: "legend" }, causes.map((cause) => element(
      "li", { title: cause.meaning }, swatch(cause), `${cause.label}: ${duration(cause.amount)}`))));
    lines.splice(0, causes.length);
  }
  parts.push(...lines.map((line) => element("p", {}, line)));
  const ways = [];
  const source = panel.measured ? sourceOf(place) : -1;
  if (source >= 0) ways.push(button(gap ? "To what it waited for" : "To what it came after", () => selectTask(profile, source)));
  if (gap && lane.culprit[k] >= 0) ways.push(button("To the cause", () => selectTask(profile, lane.culprit[k])));
  card.replaceChildren(...parts, element("div", { className: "buttons" }, ways));
}

/** The next task or gap on the same lane. */
function neighbour(place, forward) {
  const { panel, lane, k, gap } = place;
  const isGap = (at) => panel.measured && lane.idle[at] > 0;
  if (forward) {
    if (gap) return k < lane.size ? { ...place, gap: false } : place;
    if (isGap(k + 1)) return { ...place, k: k + 1, gap: true };
    return k + 1 < lane.size ? { ...place, k: k + 1 } : place;
  }
  if (gap) return k > 0 ? { ...place, k: k - 1, gap: false } : place;
  if (isGap(k)) return { ...place, gap: true };
  return k > 0 ? { ...place, k: k - 1 } : place;
}

/** The task at the same time on another lane. */
function beside(place, way) {
  const { panel, lane } = place;
  const lanes = panel.profile.lanes;
  const other = lanes[Math.max(0, Math.min(lanes.length - 1, lane.group + way))];
  const [start, end] = panel.span(place);
  const k = Math.max(0, lastIndexBefore(panel.times(other).starts, (start + end) / 2));
  return { panel, lane: other, k, gap: false };
}

/** The first task in sight, for keys before anything is selected. */
function firstInSight(panel) {
  const lane = panel.profile.lanes.find((lane) => lane.size);
  if (!lane) return null;
  const k = Math.min(Math.max(0, lastIndexBefore(panel.times(lane).ends, state.from) + 1), lane.size - 1);
  return { panel, lane, k, gap: false };
}
