// The selected task or gap: which it is, and why it is where it is.

/** The number of the task that a gap waited for, or that a measured task came after; -1 without. */
function sourceOf({ panel, lane, k, gap }) {
  if (!panel.measured) return -1;
  return gap ? lane.waited[k] : lane.after[k];
}

function causesOf({ lane, k }) {
  return profile.causes
    .map((cause, number) => ({ ...cause, amount: lane.causes[number] ? lane.causes[number][k] : 0 }))
    .filter((cause) => cause.amount > 0)
    .sort((a, b) => b.amount - a.amount);
}

function titleOf(place) {
  return place.gap ? `Group ${place.lane.group} is idle` : profile.taskName(place);
}

function whenOf(place) {
  const [start, end] = place.panel.span(place);
  return `${duration(end - start)}, from ${duration(start)} to ${duration(end)}`;
}

/** Lines about a task or a gap. */
function describe(place) {
  const { panel, lane, k, gap } = place;
  if (gap) {
    const cause = profile.causes[lane.culpritCause[k]];
    return [
      lane.waited[k] >= 0 && `Waited for ${nameWithGroup(lane.waited[k])}`,
      lane.culprit[k] >= 0 && `Most by ${nameWithGroup(lane.culprit[k])} (${cause.label.toLowerCase()})`,
    ].filter(Boolean);
  }
  const type = profile.types[lane.type[k]];
  const [start, end] = panel.span(place);
  const ratio = type.count > 1 && type.median ? (end - start) / type.median : null;
  return [`Group ${lane.group}`, ...(panel.measured ? [
    ratio !== null && `${digits(ratio)} times the median of its type, ${duration(type.median)}`,
    lane.processor[k] != null && `Processor time: ${duration(lane.processor[k])}`,
    lane.after[k] >= 0 && `Came after ${nameWithGroup(lane.after[k])}`,
    type.sources.slice(0, 2).join(", "),
  ] : [])].filter(Boolean);
}

function select(place, { scroll = false, near = scroll } = {}) {
  state.selected = place;
  if (!place) redraw();
  else (near ? approach : reveal)(place.panel.span(place));
  showSelected();
  if (scroll && place) {
    byId("timeline").scrollIntoView();
    place.panel.canvas.focus({ preventScroll: true });
  }
}

/** Selects a measured task by its number. */
function selectTask(number, options) {
  select({ panel: state.panels[0], ...profile.place(number) }, options);
}

function showSelected() {
  const card = byId("selected");
  const place = state.selected;
  card.classList.toggle("sticky", Boolean(place)); // so that it is in sight beside many lanes
  if (!place) {
    const hint = "Select a task or a gap to see why it is where it is.";
    card.replaceChildren(element("p", { className: "note" }, hint));
    return;
  }
  const parts = [element("h4", {}, titleOf(place), element("span", {}, whenOf(place)))];
  if (place.gap) {
    const causes = causesOf(place);
    const [start, end] = profile.span(place);
    const amount = (cause) => duration(cause.amount);
    parts.push(stack(causes, end - start, duration), legend(causes, "Causes", amount));
  }
  parts.push(...describe(place).map((line) => element("p", {}, line)));
  const source = sourceOf(place);
  const culprit = place.gap ? place.lane.culprit[place.k] : -1;
  const toSource = place.gap ? "To what it waited for" : "To what it came after";
  card.replaceChildren(...parts, element("div", { className: "buttons" },
    source >= 0 ? button(toSource, () => selectTask(source)) : null,
    culprit >= 0 ? button("To the cause", () => selectTask(culprit)) : null));
}

/** The next task or gap on the same lane. */
function neighbour(place, forward) {
  const { panel, lane, k, gap } = place;
  const isGap = (at) => panel.measured && lane.idle[at] > 0;
  const isTask = (at) => at >= 0 && at < lane.size;
  const after = gap ? k : k + 1; // a gap comes before the task of its number
  const task = forward ? after : k - 1;
  if (!gap && isGap(forward ? k + 1 : k)) return { ...place, k: forward ? k + 1 : k, gap: true };
  return isTask(task) ? { ...place, k: task, gap: false } : place;
}

/** The task at the same time on another lane. */
function beside({ panel, lane, ...place }, way) {
  const { lanes } = profile;
  const other = lanes[Math.max(0, Math.min(lanes.length - 1, lane.group + way))];
  const [start, end] = panel.span({ lane, ...place });
  const k = Math.max(0, lastIndexBefore(panel.times(other).starts, (start + end) / 2));
  return { panel, lane: other, k, gap: false };
}

/** The first task in sight, for keys before anything is selected. */
function firstInSight(panel) {
  const lane = profile.lanes.find(({ size }) => size);
  if (!lane) return null;
  const k = Math.min(Math.max(0, lastIndexBefore(panel.times(lane).ends, state.from) + 1), lane.size - 1);
  return { panel, lane, k, gap: false };
}
