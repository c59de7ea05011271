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
const labels = (ticks) => ticks.map(([at, text]) => el("span", { title: text, style: `--at:${at}` }, String(text)));

const countText = (number) => Math.round(number).toLocaleString("en");
/** The count with its noun: `1 worker`, `4 workers`. */
const pluralize = (count, noun) => `${countText(count)} ${noun}${count === 1 ? "" : "s"}`;
const listed = (names) => (names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`);

/** A number with three digits, or with all digits before its point. */
function digits(number) {
  const decimals = (number < 99.95) + (number < 9.995);
  return number >= 99.95 ? countText(number) : number >= 1 ? number.toFixed(decimals) : number.toPrecision(2);
}

/** An amount of memory, as `bytes_text` has it. */
function bytesText(bytes) {
  if (bytes >= 2 ** 30) return `${digits(bytes / 2 ** 30)} GiB`;
  return bytes ? `${bytes >= 2 ** 20 ? countText(bytes / 2 ** 20) + " MiB" : countText(bytes / 1024) + " KiB"}` : "0";
}

/** A measured value with five digits; very large and very small ones as powers of ten. */
function numberText(value) {
  const size = Math.abs(value);
  if (value && (size >= 1e7 || size < 1e-3)) return value.toExponential(3).replace(/\.?0+e\+?/, "e");
  return String(size >= 1e4 ? Math.round(value * 10) / 10 : Number(value.toPrecision(5)));
}

const isTurned = (control) => control.checked !== control.defaultChecked;
const startOf = ({ options, defaultValue }) => (options ? [...options].find((o) => o.defaultSelected) ?? options[0] : { value: defaultValue }).value;

/** What of a form is not as the page has it at first: values, and the boxes that are turned over. */
function addressOf(form) {
  const changed = [...form.elements].filter((c) => c.name && (c.type === "checkbox" ? isTurned(c) : c.value !== startOf(c)));
  return new URLSearchParams(changed.map((control) => [control.name, control.value])).toString();
}

/** Fills a form by an address; values that it does not offer stay as they are at first. */
function fillForm(form, address) {
  const given = new URLSearchParams(address);
  form.reset();
  for (const control of form.elements) {
    if (!given.has(control.name)) continue;
    if (control.type === "checkbox") control.checked = given.getAll(control.name).includes(control.value) !== control.defaultChecked;
    else control.value = given.get(control.name);
    if (control.selectedIndex === -1) control.value = startOf(control);
  }
}
