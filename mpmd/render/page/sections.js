// The sections: the findings, and the tables, whose columns Python has made.

/** A change as text: green for less, red for more, and plain where no digit that is shown differs. */
function change(value, text) {
  const size = text(Math.abs(value));
  if (size === text(0)) return text(0);
  return element("span", { className: value < 0 ? "better" : "worse" }, `${value < 0 ? "−" : "+"}${size}`);
}

function codeLines(lines) {
  const shown = lines.slice(0, 3).flatMap((line, number) => [number ? ", " : "", element("code", {}, line)]);
  return lines.length > 3 ? [...shown, ` and ${lines.length - 3} more`] : shown;
}

const sum = (amounts) => amounts.reduce((all, amount) => all + amount, 0);

/** The largest amount in a column of bars or stacks, which fills its width. */
const largest = (rows, place, amount) => Math.max(...rows.map((row) => amount(row[place])), 1);

function stackCell(amounts, rows, place, parts, text) {
  const shown = parts.map((part, number) => ({ ...part, amount: amounts[number] }));
  return stack(shown, largest(rows, place, sum), text);
}

/** The content of a cell by the unit of its column. */
const CELLS = {
  ...TEXT_OF,
  sentence: String,
  code: codeLines,
  time_change: (value) => change(value, duration),
  share_change: (value) => change(value, percent),
  bar: (amount, rows, place) => element("span", {
    className: "meter", aria: { hidden: "true" },
    style: { width: `${(100 * amount) / largest(rows, place, Number)}%` },
  }),
  time_stack: (...cell) => stackCell(...cell, duration),
  bytes_stack: (...cell) => stackCell(...cell, bytes),
  key: ([label, colour, dark]) => [swatch({ colour, dark }), label],
  task: (number) => (number < 0 ? "the end of the step"
    : button(nameWithGroup(number), () => selectTask(number, { scroll: true }))),
  gap: ([group, k]) => button("Show", () => select(
    { panel: state.panels[0], lane: profile.lanes[group], k, gap: true }, { scroll: true })),
};

const CLASSES = {
  text: "text", key: "text", task: "text", time_stack: "text", bytes_stack: "text",
  bar: "meters", gap: "screen", sentence: "wide", code: "wide",
};

const SORTABLE = ["text", "key", "count", "time", "bytes", "share", "time_change", "share_change"];

const TALL = 16; // rows above which a table scrolls by itself

/** A table; a click on the head of a column sorts its rows. */
function tableOf(table) {
  const [caption, units, rows, foot, parts, sorted, folded] = table;
  const columns = Object.entries(units);
  const line = (cells) => element("tr", {}, cells.map((value, place) => {
    const [, unit] = columns[place];
    const content = value === null ? "" : cells === foot && !place ? value : CELLS[unit](value, rows, place, parts);
    return element(place ? "td" : "th", { className: CLASSES[unit], scope: place ? null : "row" }, content);
  }));
  const lines = rows.map((row) => ({ row, node: line(row) }));
  const body = element("tbody", {}, lines.map(({ node }) => node));
  const heads = columns.map(([title, unit], place) => element(
    "th", { scope: "col", className: CLASSES[unit] },
    title && SORTABLE.includes(unit) ? button(title, () => sort(place)) : title));
  function sort(place) {
    const descending = heads[place].getAttribute("aria-sort") !== "descending";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[place].setAttribute("aria-sort", descending ? "descending" : "ascending");
    const value = ({ row }) => (columns[place][1] === "key" ? row[place][0] : row[place] ?? -Infinity);
    const order = descending ? -1 : 1;
    lines.sort((a, b) => order * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
    body.append(...lines.map(({ node }) => node));
  }
  if (sorted !== null) sort(sorted);
  const whole = element("table", {}, element("caption", {}, caption),
    element("thead", {}, element("tr", {}, heads)), body, foot && element("tfoot", {}, line(foot)));
  const className = rows.length > TALL ? "scroll tall" : "scroll";
  const region = element("div", { className, tabIndex: 0, role: "region", aria: { label: caption } }, whole);
  return folded ? fold(folded, region) : region;
}

function sectionOf({ id, title, notes, tables }, ...content) {
  return element("section", { id, aria: { labelledby: `${id}-title` } },
    element("h2", { id: `${id}-title` }, title), notes.map((note) => element("p", {}, note)),
    content, element("div", { className: "tables" }, tables.map(tableOf)));
}

const FIRST_FINDINGS = 5;

function findingsSection() {
  const figures = element("dl", { className: "figures" }, profile.facts.map(([label, value, unit, hint]) =>
    element("div", { title: hint }, element("dt", { className: hint ? "hint" : "" }, label),
      element("dd", {}, TEXT_OF[unit](value)))));
  const parts = profile.parts.map((part) => ({ ...part, amount: part.total })).filter((part) => part.amount);
  const share = (part) => percent(part.total / profile.whole);
  const meanings = parts.map(({ label, hint }) => element("li", {}, element("b", {}, label), `: ${hint}`));
  const items = profile.findings.map(({ text, saves, task }) => element("li", {},
    element("span", {}, `${text} `,
      task < 0 ? null : button("Show", () => selectTask(task, { scroll: true }))),
    element("span", { className: "saves" }, saves ? `saves ${percent(saves)}` : "")));
  const list = (some, start) => element("ol", {
    className: "findings", start, style: { counterReset: `finding ${start - 1}` },
  }, some);
  const rest = items.length - FIRST_FINDINGS;
  return sectionOf({ id: "findings", title: "Findings", notes: [], tables: [] },
    figures,
    stack(parts, profile.whole, duration, "stack large"),
    legend(parts, "Where the time of the groups goes", share),
    fold("What the colours mean, and what one can do", element("ul", { className: "note" }, meanings)),
    items.length ? list(items.slice(0, FIRST_FINDINGS), 1)
      : element("p", {}, "Nothing that one change would mend costs this step any time to speak of."),
    rest > 0 ? fold(`${rest} more`, list(items.slice(FIRST_FINDINGS), FIRST_FINDINGS + 1)) : null);
}
