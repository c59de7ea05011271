// What the interactive pages share: elements, numbers as text, and a form whose state is in the address.
const $ = (id) => document.getElementById(id);

/** A new element with these properties or attributes, and with these children. */
function el(tag, given, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(given)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/** Labels of an axis, at shares of it, for chart.css. */
const labels = (ticks) => ticks.map(([at, text]) => el("span", { title: text, style: `--at:${at}` }, text));

const countText = (number) => Math.round(number).toLocaleString("en");
/** The count with its noun: `1 worker`, `4 workers`. */
const pluralize = (count, noun) => `${countText(count)} ${noun}${count === 1 ? "" : "s"}`;
const listed = (names) => [names.slice(0, -1).join(", "), ...names.slice(-1)].filter(Boolean).join(" and ");
const unique = (values) => [...new Set(values)];

/** A number with three digits, or with all digits before its point. */
function digits(number) {
  const decimals = (number < 99.95) + (number < 9.995);
  return number >= 99.95 ? countText(number) : number >= 1 ? number.toFixed(decimals) : number.toPrecision(2);
}

/** An amount of memory, as `format_bytes` has it. */
function bytesText(bytes) {
  if (bytes >= 2 ** 30) return `${digits(bytes / 2 ** 30)} GiB`;
  if (bytes >= 2 ** 20) return `${countText(bytes / 2 ** 20)} MiB`;
  return bytes ? `${countText(bytes / 1024)} KiB` : "0";
}

/** A measured value with five digits; very large and very small ones as powers of ten. */
function numberText(value) {
  const size = Math.abs(value);
  if (value && (size >= 1e7 || size < 1e-3)) return value.toExponential(3).replace(/\.?0+e\+?/, "e");
  return String(size >= 1e4 ? Math.round(value * 10) / 10 : Number(value.toPrecision(5)));
}

/** What a control has at first: whether a box is checked, or a value. */
function startOf({ type, options, defaultChecked, defaultValue }) {
  if (!options) return type === "checkbox" ? defaultChecked : defaultValue;
  return ([...options].find((option) => option.defaultSelected) ?? options[0]).value;
}

/** What of a form is not as the page has it at first: values, and the boxes that are turned over. */
function addressOf(form) {
  const stateOf = (control) => (control.type === "checkbox" ? control.checked : control.value);
  const changed = [...form.elements].filter((c) => c.name && stateOf(c) !== startOf(c));
  return new URLSearchParams(changed.map((c) => [c.name, c.value])).toString();
}

/** Fills a form by an address; values that it does not offer stay as they are at first. */
function fillForm(form, address) {
  const given = new URLSearchParams(address);
  form.reset();
  for (const control of form.elements) {
    if (!given.has(control.name)) continue;
    const values = given.getAll(control.name);
    if (control.type === "checkbox") control.checked = values.includes(control.value) !== startOf(control);
    else control.value = values[0];
    if (control.selectedIndex === -1) control.value = startOf(control);
  }
}
