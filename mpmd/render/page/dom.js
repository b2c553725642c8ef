// Elements. Text enters as text nodes alone, so nothing that a name holds can become markup.

const byId = (id) => document.getElementById(id);

/** An element with properties; those of `style` and `aria` are set one by one. */
function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key === "style") Object.assign(node.style, value);
    else if (key === "aria") for (const name in value) node.setAttribute(`aria-${name}`, value[name]);
    else if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** The colour of a part or a type of task, as CSS, by the theme. */
const paint = ({ colour, dark = colour }) => (dark === colour ? colour : `light-dark(${colour}, ${dark})`);

const swatch = (part) => element("i", {
  className: "swatch", style: { background: paint(part) }, aria: { hidden: "true" },
});

const button = (text, onclick) => element("button", { type: "button", onclick }, text);

/** A list of parts with their colours; `text` says what follows the name of each. */
const legend = (parts, label, text) => element("ul", { className: "legend", aria: { label } },
  parts.map((part) => element("li", { title: part.hint },
    swatch(part), part.label, element("span", {}, ` ${text(part)}`))));

/** A bar of parts, one behind the other. A part has an `amount`; `whole` fills the width. */
function stack(parts, whole, text, className = "stack") {
  const shown = parts.filter((part) => part.amount > 0);
  const label = shown.map((part) => `${part.label} ${text(part.amount)}`).join(", ");
  return element("div", { className, role: "img", aria: { label: label || "nothing" } },
    shown.map((part) => element("span", {
      title: `${part.label}: ${text(part.amount)}`,
      style: { background: paint(part), width: `${(100 * part.amount) / whole}%` },
    })));
}

const fold = (title, ...children) => element("details", {}, element("summary", {}, title), ...children);
