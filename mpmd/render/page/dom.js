// Elements. Text enters as text nodes alone, so nothing that a name holds can become markup.

const byId = (id) => document.getElementById(id);

/** An element with properties; those of `style`, `data` and `aria` are set one by one. */
function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key === "style") Object.assign(node.style, value);
    else if (key === "data") Object.assign(node.dataset, value);
    else if (key === "aria") for (const [name, text] of Object.entries(value)) node.setAttribute(`aria-${name}`, text);
    else if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** The colour of a part or a type of task, as CSS, by the theme. */
const paint = ({ colour, dark = colour }) => (dark === colour ? colour : `light-dark(${colour}, ${dark})`);

const swatch = (part) => element("i", { className: "swatch", style: { background: paint(part) }, aria: { hidden: "true" } });

const button = (text, onclick, properties = {}) => element("button", { type: "button", onclick, ...properties }, text);

const legendItems = (items) => items.map((part) => element("li", { title: part.meaning }, swatch(part), part.label,
  part.gloss ? element("span", { className: "gloss" }, ` ${part.gloss}`) : null));

/** A bar of parts, one behind the other. A part has a colour, a label and an amount; `whole` fills the width. */
function stack(parts, whole, text, className = "stack") {
  const shown = parts.filter((part) => part.amount > 0);
  const label = shown.map((part) => `${part.label} ${text(part.amount)}`).join(", ");
  return element(
    "div", { className, role: "img", aria: { label: label || "nothing" } },
    shown.map((part) => element("span", {
      title: `${part.label}: ${text(part.amount)}`,
      style: { background: paint(part), width: `${(100 * part.amount) / whole}%` },
    })),
  );
}

const meter = (share) => element("span", { className: "meter", style: { width: `${100 * Math.max(share, 0)}%` }, aria: { hidden: "true" } });

/** A bar to the left of the middle for less, to the right for more. */
const diverging = (share) => element("div", { className: "diverging", aria: { hidden: "true" } },
  element("span", { className: share < 0 ? "less" : "more", style: { width: `${100 * Math.min(Math.abs(share), 1)}%` } }));

/**
 * A table. A column has a `title`, `cell(row)`, and perhaps `className`, and `key(row)` to sort by; the first
 * column names the row.
 */
function table(caption, columns, rows, { foot, tall, sorted } = {}) {
  const body = element("tbody");
  const heads = columns.map((column) => {
    if (!column.key) return element("th", { scope: "col", className: column.className }, column.title);
    const head = element("th", { scope: "col", className: column.className });
    head.append(button(column.title, () => sort(column, head)));
    return head;
  });
  const fill = (ordered) => body.replaceChildren(...ordered.map((row) => element("tr", {},
    columns.map((column, number) => element(
      number ? "td" : "th", { className: column.className, scope: number ? undefined : "row" }, column.cell(row),
    )))));
  function sort(column, head) {
    const descending = head.getAttribute("aria-sort") !== "descending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const sign = descending ? -1 : 1;
    fill([...rows].sort((a, b) => {
      const [x, y] = [column.key(a), column.key(b)];
      return sign * (x < y ? -1 : x > y ? 1 : 0);
    }));
  }
  const whole = element("table", {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, heads)),
    body,
    foot && element("tfoot", {}, element("tr", {}, foot.map((cell, number) => element(
      number ? "td" : "th", { className: columns[number].className, scope: number ? undefined : "row" }, cell,
    )))),
  );
  if (sorted === undefined) fill(rows);
  else sort(columns[sorted], heads[sorted]);
  const className = tall ? "scroll tall" : "scroll";
  return element("div", { className, tabIndex: 0, role: "region", aria: { label: caption } }, whole);
}
