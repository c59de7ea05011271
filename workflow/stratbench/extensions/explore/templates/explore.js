// The page of all cells. Texts of records reach the page as text nodes and on the canvas, never as markup.
const form = $("controls");

/** The page's data; many are compressed. */
async function readData() {
  const text = $("data").textContent;
  if (text.startsWith("{")) return JSON.parse(text);
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
const D = await readData();

// ---- columns -------------------------------------------------------------------------------------------
const NOT_RECORDED = "not recorded";
const columns = new Map(D.columns.map((c) => {
  const level = (i) => (c.at ? c.at[i] : 0);
  return [c.name, { ...c, level, get: c.levels ? (i) => c.levels[level(i)] : (i) => c.values[i] }];
}));
const column = (name) => columns.get(name);
const picked = (key) => column(form.elements[key].value);
const status = column("status"), kinds = column("device_kind"), repeat = column("repeat");
const coordinates = D.coordinates.map(column).filter(Boolean);
const range = (count) => [...Array(count).keys()];
const EVERY = range(D.cells);

const isNumber = (value) => typeof value === "number";
const isOk = (i) => status.get(i) === "ok";
const workerNoun = (kind, count) => (D.nouns[kind] || D.nouns[""])[count === 1 ? 0 : 1];
const levelText = (level) => (level === null ? NOT_RECORDED : String(level));
const rulesOn = (i) => (D.audit.cells[i] || []).map((rule) => D.audit.rules[rule]);
const severityOn = (i) => D.audit.severities.find((s) => rulesOn(i).some((rule) => rule.severity === s));

function textOf(c, i) {
  const value = c.get(i);
  if (value === null) return "";
  if (c.name === "gpus") return `${value} ${workerNoun(kinds?.get(i), value)}`;
  return isNumber(value) ? numberText(value) : value;
}

// ---- which cells are shown: by the form, which is in the address after # -------------------------------
const boxesIn = (set) => [...set.elements].filter((element) => element.name);
const filters = [...form.querySelectorAll("fieldset")].map((s) => [column(s.dataset.column), boxesIn(s)]);
let chosen = [];  // the cells that the filters leave
let sorted = [];  // the same, as the table lists them

const isLog = (key) => picked(key).number && form.elements[`l${key}`].value === "1";
const bounds = (key) => [`${key}from`, `${key}to`].map((name) => form.elements[name].valueAsNumber);
const checked = () => [...form.elements.column].filter((box) => box.checked).map((box) => column(box.value));
const tableColumns = () => unique([...checked(), ...["x", "y", "colour", "marker"].map(picked)]);

function pinned() {
  const text = form.elements.cell.value;
  return text !== "" && EVERY[text] !== undefined ? Number(text) : null;
}

function chooseCells() {
  const hides = filters.filter(([, boxes]) => !boxes.every((box) => box.checked));
  const hidden = hides.map(([c, boxes]) => [c, boxes.map((box) => !box.checked)]);
  const ranges = ["x", "y"].filter((key) => picked(key).number && !bounds(key).every(isNaN));
  const limits = ranges.map((key) => [picked(key), ...bounds(key)]);
  const words = form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean);
  const searched = tableColumns().filter((c) => !c.number);
  chosen = EVERY.filter((i) => {
    if (hidden.some(([c, levels]) => levels[c.level(i)])) return false;
    if (limits.some(([c, low, high]) => c.get(i) === null || c.get(i) < low || c.get(i) > high)) return false;
    if (!words.length) return true;
    const text = searched.map((c) => textOf(c, i)).join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

const collator = new Intl.Collator("en", { numeric: true });
function sortCells() {
  const name = form.elements.sort.value, turn = name.startsWith("-") ? -1 : 1;
  const c = column(name.replace(/^-/, ""));
  sorted = chosen.slice();
  if (!c) return;
  const value = c.levels ? c.level : c.get;
  const compare = c.levels || c.number ? (a, b) => a - b : collator.compare;
  const order = (a, b) => compare(value(a), value(b));
  const isAbsent = (i) => c.get(i) === null;
  sorted.sort((a, b) => isAbsent(a) - isAbsent(b) || (isAbsent(a) ? 0 : turn * order(a, b)) || a - b);
}

function extent(c, cells) {
  const values = Float64Array.from(cells.map(c.get).filter(isNumber)).sort();
  return [values[0] ?? Infinity, values.at(-1) ?? -Infinity];
}

// ---- looks ---------------------------------------------------------------------------------------------
const SCALE = "#440154 #472d7b #3b528b #2c728e #21918c #28ae80 #5ec962 #addc30 #fde725".split(" ");
const RINGS = { unusable: "bad", warning: "caution" };
const dark = matchMedia("(prefers-color-scheme: dark)");
const themed = (pair) => pair[dark.matches ? 1 : 0];
const css = (name) => getComputedStyle(form).getPropertyValue(`--${name}`);  // canvases follow no style

function levelColour(c, n) {
  if (c.name === "strategy") return themed(D.styles[c.levels[n]][0]);
  return c.levels[n] === null ? css("muted") : themed(D.colours[n % D.colours.length]);
}
function levelMarker(c, n) {
  return c.name === "strategy" ? D.styles[c.levels[n]][1] : D.markers[n % D.markers.length];
}
const isFarApart = ([low, high]) => low > 0 && high > 50 * low;

/** The colour of each cell. */
function colouring(c) {
  if (c.levels) {
    const colours = c.levels.map((_, n) => levelColour(c, n));
    return (i) => colours[c.level(i)];
  }
  const ends = extent(c, chosen), by = isFarApart(ends) ? Math.log : (v) => v, [low, high] = ends.map(by);
  const share = (v) => (high > low ? (by(v) - low) / (high - low) : 0.5), absent = css("muted");
  return (i) => (isNumber(c.get(i)) ? SCALE[Math.round((SCALE.length - 1) * share(c.get(i)))] : absent);
}

/** As in the figures, with more fillings; a cell without a full result is crossed out. */
function drawMark(g, colour, marker, isFull, x, y, r) {
  const [shape, fill] = marker.split(" "), polygon = D.shapes[shape], path = new Path2D();
  if (polygon.length) polygon.forEach(([px, py]) => path.lineTo(x + px * r, y + py * r));
  else path.arc(x, y, r * 0.92, 0, 7);
  path.closePath();
  g.fillStyle = css("paper"); g.fill(path);
  g.save(); g.clip(path); g.fillStyle = colour;
  for (const [left, top, wide, high] of isFull ? D.fills[fill] : [])
    g.fillRect(x + left * r, y + top * r, wide * r, high * r);
  g.restore();
  g.strokeStyle = colour; g.lineWidth = 1.4; g.stroke(path);
  if (!isFull) g.stroke(new Path2D(`M${x - r},${y - r}l${2 * r},${2 * r}m0,${-2 * r}l${-2 * r},${2 * r}`));
}

function drawRing(g, severity, x, y, r) {
  g.strokeStyle = css(RINGS[severity]); g.lineWidth = severity === "unusable" ? 2 : 1.4;
  g.beginPath(); g.arc(x, y, r + 3, 0, 7); g.stroke();
}

/** A square canvas on which `draw` draws around its middle. */
function sprite(side, draw) {
  const pixels = side * devicePixelRatio, style = `width:${side}px;height:${side}px`;
  const canvas = el("canvas", { width: pixels, height: pixels, style });
  const g = canvas.getContext("2d");
  g.scale(devicePixelRatio, devicePixelRatio);
  draw(g, side / 2, side / 2);
  return canvas;
}

// ---- axes: places are shares of the axis ---------------------------------------------------------------
function ticksBetween(low, high, isLog) {
  const decades = isLog ? Math.log10(high / low) : 0;
  if (decades > 1.2) {
    const powers = range(Math.ceil(decades) + 2).map((k) => 10 ** (k + Math.floor(Math.log10(low))));
    const ticks = powers.flatMap((power) => (decades > 3.5 ? [1] : [1, 2, 5]).map((by) => by * power));
    return ticks.filter((v) => v >= low && v <= high);
  }
  const step = 10 ** Math.floor(Math.log10((high - low) / 8));
  const wide = step * [1, 2, 5, 10].find((by) => (high - low) / (by * step) <= 8);
  const first = Math.ceil(low / wide - 1e-9), count = Math.floor(high / wide + 1e-9) - first + 1;
  return range(Math.max(0, count) || 0).map((k) => Number(((first + k) * wide).toPrecision(12)));
}

/** The levels of a column that are among the cells shown. */
const levelsOf = (c) => unique(chosen.map(c.level)).sort((a, b) => a - b);

/** An axis: where cells are on it, its ticks, and the value at a place. */
function axisOf(key) {
  const c = picked(key), log = isLog(key);
  if (!c.number) {
    const present = levelsOf(c), slot = 1 / present.length;
    const at = new Map(present.map((n, k) => [n, (k + 0.5) * slot]));
    const ticks = present.map((n) => [at.get(n), levelText(c.levels[n])]);
    return { c, slot, ticks, place: (i) => at.get(c.level(i)) };
  }
  const by = log ? Math.log10 : (v) => v, back = log ? (v) => 10 ** v : (v) => v;
  const isPlaced = (i) => isNumber(c.get(i)) && !(log && c.get(i) <= 0);
  let [low, high] = extent(c, chosen.filter(isPlaced)).map(by);
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  const room = (high - low) * 0.05 || Math.abs(low) * 0.1 || 1, [from, to] = bounds(key).map(by);
  const isFromZero = !log && low >= 0 && low < 0.6 * high;
  low = Number.isFinite(from) ? from : isFromZero ? 0 : low - room;
  high = Number.isFinite(to) ? to : high + room;
  const share = (v) => (by(v) - low) / (high - low || 1);
  const ticks = ticksBetween(back(low), back(high), log).map((v) => [share(v), numberText(v)]);
  const place = (i) => (isPlaced(i) ? share(c.get(i)) : undefined);
  return { c, ticks, place, back: (at) => back(low + at * (high - low)) };
}

function axisHeading(key) {
  const c = picked(key), isCount = c.name === "gpus" && kinds;
  const found = isCount ? unique(chosen.map(kinds.get)).filter(Boolean) : [];
  const nouns = found.length ? `: ${listed(found.map((kind) => workerNoun(kind, 2)))}` : "";
  return `${c.heading}${nouns}${isLog(key) ? ", logarithmic" : ""}`;
}

// ---- the chart: texts are HTML, marks are on a canvas --------------------------------------------------
const points = $("points"), tip = $("tip"), ROW_PX = 17, GUTTER_PX = 46;
let view;  // axes, places and radius of what is drawn
let hovered = null;

/** Cells without a place on the y axis have rows above the chart, by status. */
const rowName = (i) => (isOk(i) ? "no value" : status.get(i));

function drawAxes() {
  const x = axisOf("x"), y = axisOf("y");
  const rows = unique(chosen.filter((i) => y.place(i) === undefined).map(rowName)).sort();
  const top = rows.length * ROW_PX, left = chosen.some((i) => x.place(i) === undefined) ? GUTTER_PX : 0;
  $("chart").style.cssText = `--top:${top}px;--left:${left}px`;
  const above = rows.map((name, k) => el("span", { style: `top:${ROW_PX * (k + 0.5)}px` }, name));
  const before = left ? [el("span", { style: `left:${left / 2 - 3}px` }, "none")] : [];
  const longest = Math.max(...x.ticks.map(([, text]) => text.length));
  $("ylabels").replaceChildren(...above, ...labels(y.ticks));
  $("xlabels").replaceChildren(...before, ...labels(x.ticks));
  $("xlabels").classList.toggle("upright", x.slot * points.clientWidth < 7 * longest);
  $("xname").textContent = axisHeading("x");
  $("yname").textContent = axisHeading("y");
  points.ariaLabel = `Chart of ${axisHeading("y")} by ${axisHeading("x")}, ${chosen.length} cells. `
    + "Arrow keys walk through the marks, Enter shows all of one.";
  view = { x, y, rows, top, left, width: points.clientWidth, height: points.clientHeight };
}

/** Where each chosen cell is: cells of one slot are side by side, by colour and repeat. */
function placeCells({ x, y, rows, top, left, width, height }) {
  const group = picked("colour"), isApart = !x.c.number && group.levels && group !== x.c;
  const groups = isApart ? levelsOf(group) : [0], rank = new Map(groups.map((n, k) => [n, k]));
  const most = repeat ? extent(repeat, chosen)[1] + 1 : 1;
  for (const i of chosen) {
    const turn = repeat ? (repeat.get(i) + 0.5) / most - 0.5 : 0, across = x.place(i), up = y.place(i);
    let px = left + across * (width - left), py = top + (1 - up) * (height - top);
    if (across === undefined) px = left / 2 - 3 + turn * 16;
    else if (!x.c.number) {
      const part = (0.84 * x.slot * (width - left)) / groups.length;
      px += (isApart ? (rank.get(group.level(i)) + 0.5 - groups.length / 2) * part : 0) + turn * part * 0.8;
    }
    if (up === undefined) py = ROW_PX * (rows.indexOf(rowName(i)) + 0.5);
    else if (!y.c.number && x.c.number) py += turn * y.slot * (height - top) * 0.5;
    view.at[i] = [px, py];
  }
}

function drawPoints() {
  const { clientWidth: width, clientHeight: height } = points, many = chosen.length;
  const [r, alpha] = many > 3000 ? [3, 0.6] : many > 400 ? [4, 0.8] : [5.5, 1], side = Math.ceil(2 * r + 12);
  Object.assign(view, { width, height, at: [], near: new Map() });
  placeCells(view);
  Object.assign(points, { width: width * devicePixelRatio, height: height * devicePixelRatio });
  const g = points.getContext("2d"), wide = width - view.left, high = height - view.top;
  g.scale(devicePixelRatio, devicePixelRatio);
  g.fillStyle = css("raised");
  g.fillRect(0, 0, width, view.top - 4); g.fillRect(0, view.top, view.left - 6, height);
  g.fillStyle = css("line");
  for (const [at] of view.y.ticks) g.fillRect(view.left, Math.round(view.top + (1 - at) * high), width, 1);
  const edge = (at) => Math.round(view.left + (at + (view.x.slot ?? 0) / 2) * wide) - 1;
  for (const [at] of view.x.ticks) g.fillRect(edge(at), view.top, 1, height);
  const colour = colouring(picked("colour")), marker = picked("marker"), sprites = new Map();
  g.globalAlpha = alpha;
  for (const i of chosen) {  // each look is drawn once, and copied
    const ring = severityOn(i), look = [colour(i), marker.level(i), isOk(i), ring].join();
    if (!sprites.has(look)) sprites.set(look, sprite(side, (s, x, y) => {
      drawMark(s, colour(i), levelMarker(marker, marker.level(i)), isOk(i), x, y, r);
      if (RINGS[ring]) drawRing(s, ring, x, y, r);
    }));
    const [x, y] = view.at[i], key = (x >> 5) * 1000 + (y >> 5);
    g.drawImage(sprites.get(look), x - side / 2, y - side / 2, side, side);
    view.near.has(key) ? view.near.get(key).push(i) : view.near.set(key, [i]);
  }
}

/** The cell whose mark is next to a place, 18 pixels away at most. */
function nearest(x, y) {
  const away = (i) => Math.hypot(view.at[i][0] - x, view.at[i][1] - y), around = [-1, 0, 1];
  const fields = around.flatMap((a) => around.map((b) => ((x >> 5) + a) * 1000 + (y >> 5) + b));
  const close = fields.flatMap((field) => view.near.get(field) ?? []).filter((i) => away(i) <= 18);
  return close.length ? close.reduce((best, i) => (away(i) <= away(best) ? i : best)) : null;
}

const named = coordinates.filter((c) => c !== repeat);
const repeatsOf = (i) => chosen.filter((j) => named.every((c) => c.get(j) === c.get(i)));

/** Rings around the cells that are looked at and their repeats, and the rectangle of a drag. */
function drawRings(drag) {
  const box = (className, [x, y, ...size]) => el("i", { className, style: `left:${x}px;top:${y}px`
    + (size.length ? `;width:${size[0]}px;height:${size[1]}px` : "") });
  const shown = [pinned(), hovered].filter((i) => i !== null && view.at[i]);
  $("rings").replaceChildren(...shown.flatMap(repeatsOf).map((i) => box("repeat", view.at[i])),
    ...shown.map((i) => box("here", view.at[i])), ...(drag ? [box("drag", drag)] : []));
}

// ---- one cell: next to the pointer, and in full --------------------------------------------------------
const nameOf = (i) => coordinates.map((c) => (c === repeat ? "repeat " : "") + textOf(c, i)).join(", ");
const gradeOf = (rule) => (RINGS[rule.severity] ? "bad" : "muted");
const ruleText = (rule) => `${rule.severity}: ${rule.id}`;

const linesOf = (i) => unique(["x", "y", "colour"].map(picked)).filter((c) => !coordinates.includes(c))
  .map((c) => `${c.label}: ${textOf(c, i) ? `${textOf(c, i)} ${c.unit}`.trim() : NOT_RECORDED}`);

const PROVENANCE = ["device_kind", "device_name", "host", "cpu_model", "torch", "driver", "revision",
  "precision", "global_batch", "epochs"].map(column).filter(Boolean);

function showTip() {
  const i = hovered;
  tip.hidden = i === null || !view.at[i];
  if (tip.hidden) return;
  const family = repeatsOf(i).length, rules = rulesOn(i);
  const from = PROVENANCE.filter((c) => textOf(c, i)).map((c) => `${c.label} ${textOf(c, i)}`).join(", ");
  const outcome = [status.get(i), textOf(column("reason") ?? status, i)].filter(Boolean).join(": ");
  tip.replaceChildren(el("b", {}, nameOf(i)), ...linesOf(i).map((line) => el("p", {}, line)),
    ...(isOk(i) ? [] : [el("p", { className: "bad" }, outcome)]),
    ...rules.slice(0, 4).map((rule) => el("p", { className: gradeOf(rule) }, `Audit: ${ruleText(rule)}`)),
    ...(rules.length > 4 ? [el("p", {}, `and ${rules.length - 4} more`)] : []),
    el("p", { className: "muted" }, `${from || "No provenance recorded"}. `,
      family > 1 ? `One of ${family} repeats shown.` : "The only repeat shown."));
  const [x, y] = view.at[i], { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(4, x + 16 + width > view.width ? x - 16 - width : x + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, view.height - height - 6))}px`;
}

/** Looks at a cell, or at none. `from`: where; for keys the cell is also put into words. */
function hover(i, from) {
  if (i === hovered) return;
  hovered = i;
  drawRings();
  showTip();
  if (from.endsWith("keys"))
    $("said").textContent = i === null ? "" : `${nameOf(i)}. ${linesOf(i).join(". ")}. ${status.get(i)}`;
  if (from !== "table" && i !== null) bringIntoSight(i);
  drawRows();
}

function pin(i) {
  form.elements.cell.value = pinned() === i ? "" : i;
  writeAddress(); drawRings(); drawDetails(); drawRows();
}

function linkTo(kind, i) {
  const path = D.files[kind].path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(column(name).get(i)));
  return el("a", { href: `./${path}` }, kind);
}

function drawDetails() {
  const box = $("details"), i = pinned();
  box.hidden = i === null;
  if (box.hidden) return;
  const shown = [...columns.values()].filter((c) => c.name !== "audit" && textOf(c, i) !== "");
  const files = Object.keys(D.files).filter((kind) => D.files[kind].cells.includes(i));
  const close = el("button", { type: "button", onclick: () => pin(i) }, "Close");
  const rules = rulesOn(i).map((rule) => el("li", {}, el("b", { className: gradeOf(rule) }, ruleText(rule)),
    ` (affects ${rule.affects}). ${rule.explanation}`));
  const row = (c) => el("div", { title: c.definition }, el("dt", {}, c.heading), el("dd", {}, textOf(c, i)));
  box.replaceChildren(
    el("div", { className: "bar" }, el("h2", { id: "which" }, nameOf(i)),
      ...files.map((kind) => linkTo(kind, i)), el("span", { className: "end" }, close)),
    el("ul", {}, ...rules), el("dl", {}, ...shown.map(row)),
  );
}

// ---- the table: only the rows in sight exist -----------------------------------------------------------
const ROW = 27, frame = $("frame"), table = $("table"), body = table.tBodies[0];

function drawHead() {
  const sort = form.elements.sort.value, shown = tableColumns();
  const sample = sorted.filter((_, n) => n % Math.ceil(sorted.length / 150) === 0);
  const longest = (c) => Math.max(c.heading.length + 2, ...sample.map((i) => textOf(c, i).length));
  const widths = shown.map((c) => Math.min(280, 26 + 7.3 * longest(c)));
  $("widths").replaceChildren(...widths.map((width) => el("col", { style: `width:${width}px` })));
  table.style.width = `max(100%, ${widths.reduce((a, b) => a + b, 0)}px)`;
  table.tHead.rows[0].replaceChildren(...shown.map((c) => el("th", {
    scope: "col", className: c.number ? "n" : "", title: c.definition,
    ariaSort: { [c.name]: "ascending", [`-${c.name}`]: "descending" }[sort] ?? null,
  }, el("button", { type: "button", onclick: () => sortBy(c.name) }, c.heading))));
  frame.style.height = `${Math.min(400, (sorted.length + 1) * ROW + 20)}px`;
  table.ariaRowCount = sorted.length + 1;
  table.ariaColCount = shown.length;
}

/** Sorts by a column, in the other order at the second press, and as the study has the cells at the third. */
function sortBy(name) {
  const { sort } = form.elements;
  sort.value = sort.value === name ? `-${name}` : sort.value === `-${name}` ? "" : name;
  sortCells(); drawHead(); drawRows(); writeAddress();
  [...table.tHead.rows[0].cells][tableColumns().findIndex((c) => c.name === name)].firstChild.focus();
}

function drawRows() {
  const { scrollTop, clientHeight } = frame, first = Math.max(0, Math.floor(scrollTop / ROW) - 6);
  const last = first + Math.ceil(clientHeight / ROW) + 12, shown = tableColumns();
  const space = (count) => el("tr", { className: "space", ariaHidden: "true",
    style: `height:${Math.max(0, count) * ROW}px` }, el("td", { colSpan: shown.length }));
  const classOf = (c, i) => (c.number ? "n" : c === status && !isOk(i) ? "bad" : "");
  const rows = sorted.slice(first, last).map((i, n) => el("tr", {
    id: `row${i}`, "data-cell": i, ariaRowIndex: first + n + 2, ariaSelected: String(i === pinned()),
    className: `cell ${i === hovered ? "here" : ""} ${i === pinned() ? "pinned" : ""}`,
  }, ...shown.map((c) => el("td", { className: classOf(c, i) }, textOf(c, i)))));
  body.replaceChildren(space(first), ...rows, space(sorted.length - last));
  table.setAttribute("aria-activedescendant", hovered === null ? "" : `row${hovered}`);
}

function bringIntoSight(i) {
  const top = sorted.indexOf(i) * ROW, { scrollTop, clientHeight } = frame;
  const isInSight = top >= scrollTop && top <= scrollTop + clientHeight - 3 * ROW;
  if (!isInSight) frame.scrollTop = top - clientHeight / 2 + ROW;
}

// ---- what the marks mean: buttons that press the filters' boxes ----------------------------------------
const MAX_ENTRIES = 24;

function drawLegend() {
  const colour = picked("colour"), marker = picked("marker"), entries = [], muted = css("muted");
  const mark = (...look) => sprite(18, (g, x, y) => drawMark(g, ...look, x, y, 5));
  const list = (c, draw) => {
    const boxes = filters.find(([filtered]) => filtered === c)?.[1] ?? [];
    const present = new Set(chosen.map(c.level)), isOff = (n) => boxes[n]?.checked === false;
    const levels = range(c.levels.length).filter((n) => present.has(n) || isOff(n));
    const entryOf = (n) => {
      const content = [draw(n), levelText(c.levels[n])], box = boxes[n];
      if (!box) return el("span", {}, ...content);
      return el("button", { type: "button", "aria-pressed": box.checked, "data-box": box.id,
        onclick: () => box.click() }, ...content);
    };
    entries.push(el("span", { className: "name" }, c.label), ...levels.slice(0, MAX_ENTRIES).map(entryOf));
    if (levels.length > MAX_ENTRIES) entries.push(el("span", {}, `and ${levels.length - MAX_ENTRIES} more`));
  };
  const shape = (n) => (marker === colour ? levelMarker(marker, n) : "square full");
  if (colour.levels) list(colour, (n) => mark(levelColour(colour, n), shape(n), true));
  else {
    const ends = extent(colour, chosen);
    const [low, high] = ends.map((v) => (Number.isFinite(v) ? numberText(v) : ""));
    const bar = el("i", { style: `background:linear-gradient(to right,${SCALE})` });
    const scale = isFarApart(ends) ? ", logarithmic" : "";
    entries.push(el("span", { className: "name" }, colour.heading), low, bar, high, scale);
  }
  if (marker !== colour) list(marker, (n) => mark(muted, levelMarker(marker, n), true));
  if (!chosen.every(isOk)) entries.push(el("span", {}, mark(muted, "circle full", false), "no full result"));
  for (const severity of Object.keys(RINGS).filter((found) => chosen.some((i) => severityOn(i) === found))) {
    const ringed = mark(muted, "circle full", true);
    drawRing(ringed.getContext("2d"), severity, 9, 9, 5);
    entries.push(el("span", {}, ringed, `audit: ${severity}`));
  }
  const focused = $("legend").contains(document.activeElement) && document.activeElement.dataset.box;
  $("legend").replaceChildren(...entries);
  entries.find((entry) => focused && entry.dataset.box === focused)?.focus({ preventScroll: true });
}

function drawTexts() {
  const off = chosen.filter((i) => view.x.place(i) === undefined || view.y.place(i) === undefined).length;
  $("count").textContent = `${countText(chosen.length)} of ${countText(D.cells)} cells`;
  $("placed").textContent = off ? `${countText(off)} without a value on an axis: in the grey margins` : "";
  const meaning = (c) => el("span", {}, el("b", {}, `${c.label}: `), `${c.definition} `);
  $("meaning").replaceChildren(...unique([view.y.c, view.x.c]).map(meaning));
  for (const key of ["x", "y"]) $(`${key}numbers`).hidden = !picked(key).number;
}

// ---- everything together -------------------------------------------------------------------------------
const writeAddress = () => history.replaceState(null, "", `#${addressOf(form)}`);

function changed() {
  hovered = null;
  chooseCells(); sortCells();
  drawLegend(); drawAxes(); drawPoints(); drawRings(); showTip(); drawTexts();
  frame.scrollTop = 0;
  drawHead(); drawRows(); drawDetails();
  writeAddress();
}

function clearRanges(...keys) {
  for (const key of keys) for (const end of ["from", "to"]) form.elements[key + end].value = "";
}

const placeOf = (event) => [event.offsetX, event.offsetY];
let start = null;  // of a drag
points.addEventListener("pointermove", (event) => {
  const [x, y] = placeOf(event);
  if (!start) return hover(nearest(x, y), "chart");
  drawRings([Math.min(start[0], x), Math.min(start[1], y), Math.abs(x - start[0]), Math.abs(y - start[1])]);
});
points.addEventListener("pointerleave", () => { if (!start) hover(null, "chart"); });
points.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  start = placeOf(event);
  points.setPointerCapture(event.pointerId);
});
points.addEventListener("pointercancel", () => { start = null; drawRings(); });
points.addEventListener("pointerup", (event) => {
  if (!start) return;
  const from = start, to = placeOf(event), i = nearest(...to);
  const isWide = from.map((begin, k) => Math.abs(begin - to[k]) >= 6);
  start = null;
  if (!isWide.some(Boolean)) { if (i !== null) pin(i); return drawRings(); }
  const { left, top, width, height } = view;
  const share = { x: ([x]) => (x - left) / (width - left), y: ([, y]) => 1 - (y - top) / (height - top) };
  ["x", "y"].forEach((key, k) => {
    if (!view[key].c.number || !isWide[k]) return;
    const ends = [from, to].map((place) => Number(view[key].back(share[key](place)).toPrecision(4)));
    ends.sort((a, b) => a - b);
    [form.elements[`${key}from`].value, form.elements[`${key}to`].value] = ends;
  });
  changed();
});
points.addEventListener("dblclick", () => { clearRanges("x", "y"); changed(); });
points.addEventListener("blur", () => hover(null, "chart"));

/** Arrow keys walk through cells in an order, Enter shows one in full, Escape goes back. */
function listenToKeys(node, from, orderBy, page) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -D.cells, End: D.cells,
    PageDown: page, PageUp: -page };
  node.addEventListener("keydown", (event) => {
    const { key } = event, step = steps[key];
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== node) return;
    if (step && chosen.length) {
      const order = orderBy(key), before = step > 0 ? -1 : order.length;
      const n = hovered === null ? before : order.indexOf(hovered);
      hover(order[Math.max(0, Math.min(order.length - 1, n + step))], from);
    } else if ((key === "Enter" || key === " ") && hovered !== null) pin(hovered);
    else if (key === "Escape" && pinned() !== null) { pin(pinned()); hover(null, from); }
    else if (key === "Escape") { clearRanges("x", "y"); changed(); }
    else return;
    event.preventDefault();
  });
}
listenToKeys(points, "chart keys", (key) => {
  const k = key === "ArrowUp" || key === "ArrowDown" ? 1 : 0, at = view.at;
  return chosen.slice().sort((i, j) => at[i][k] - at[j][k] || at[i][1 - k] - at[j][1 - k] || i - j);
}, 10);
listenToKeys(table, "table keys", () => sorted, 12);

function rowOf(event) {
  const row = event.target.closest("tr.cell");
  return row && Number(row.dataset.cell);
}
body.addEventListener("pointerover", (event) => hover(rowOf(event), "table"));
body.addEventListener("pointerleave", () => hover(null, "table"));
body.addEventListener("click", (event) => { if (rowOf(event) !== null) pin(rowOf(event)); });
frame.addEventListener("scroll", () => requestAnimationFrame(drawRows));

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", (event) => {
  if (["x", "y"].includes(event.target.name)) clearRanges(event.target.name);
  changed();
});
form.addEventListener("click", (event) => {  // all of a filter's boxes, or none where all are checked
  const boxes = event.target.matches("legend button") ? boxesIn(event.target.closest("fieldset")) : [];
  const isFull = boxes.every((box) => box.checked);
  boxes.forEach((box) => { box.checked = !isFull; });
  if (boxes.length) changed();
});
form.elements.q.addEventListener("input", changed);
const restore = () => { fillForm(form, location.hash.slice(1)); changed(); };
$("reset").addEventListener("click", () => { history.replaceState(null, "", "#"); restore(); });
addEventListener("hashchange", restore);
dark.addEventListener("change", changed);
restore();
new ResizeObserver(() => {
  if (view.width === points.clientWidth && view.height === points.clientHeight) return;
  drawAxes(); drawPoints(); drawRings(); drawRows();
}).observe(points);
