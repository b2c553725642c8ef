// The section of two profiles: what changed, by cause.

/** A change as text: green if it is less, red if it is more, and plain where no digit that is shown differs. */
function colouredChange(value, text) {
  const name = text(Math.abs(value)) === text(0) ? "" : value < 0 ? "better" : "worse";
  return element("span", { className: name }, name ? signed(value, text) : text(0));
}

function causesTable({ parts }) {
  const most = Math.max(...parts.map((part) => Math.abs(part.after - part.before)), 1);
  const sum = (key) => parts.reduce((all, part) => all + part[key], 0);
  const change = (part) => part.after - part.before;
  const coloured = (value) => colouredChange(value, duration);
  const columns = [
    { title: "Part of the step", className: "text", cell: (part) => [swatch(part), part.label] },
    { title: "Before", cell: (part) => duration(part.before) },
    { title: "After", cell: (part) => duration(part.after) },
    { title: "Change", cell: (part) => coloured(change(part)), key: change },
    { title: "Less, more", className: "middle", cell: (part) => diverging(change(part) / most) },
  ];
  const foot = ["Step", duration(sum("before")), duration(sum("after")), coloured(sum("after") - sum("before")), ""];
  return table("Mean time of a group: its tasks, and its idle time by cause; the parts add up to the step", columns, parts, { foot });
}

function typesTable({ types }) {
  const ratio = (type) => (type.before && type.after ? type.after / type.before - 1 : 0);
  const columns = [
    { title: "Task", className: "text", cell: (type) => type.label, key: (type) => type.label },
    { title: "Group", cell: (type) => String(type.group), key: (type) => type.group },
    { title: "Before", cell: (type) => (type.before === null ? "none" : duration(type.before)) },
    { title: "After", cell: (type) => (type.after === null ? "none" : duration(type.after)) },
    { title: "Change", cell: (type) => (type.before === null || type.after === null ? "" : colouredChange(ratio(type), percent)), key: ratio },
    { title: "Change of the sum", cell: (type) => signed(type.sum_after - type.sum_before, duration), key: (type) => type.sum_after - type.sum_before },
  ];
  return table("Median times of tasks, the largest change of the sum first", columns, types, { tall: types.length > 10 });
}

function buildComparison(comparison) {
  const section = byId("changed");
  section.hidden = false;
  byId("change-sentences").append(...comparison.sentences.map((sentence) => element("li", {}, sentence)));
  byId("change-causes").append(causesTable(comparison));
  byId("change-types").append(typesTable(comparison));
}
