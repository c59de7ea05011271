// The page of all cells. Texts of records reach the page as text nodes and on the canvas, never as markup.
const $ = (id) => document.getElementById(id);

/** The page's data; many are compressed. */
async function readData() {
  const text = $("data").textContent;
  if (text.startsWith("{")) return JSON.parse(text);
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
const D = await readData();

function el(tag, given, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(given || {})) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

// ---- columns -------------------------------------------------------------------------------------------
const NOT_RECORDED = "not recorded", MAX_LEVELS = 60, MAX_NUMBER_LEVELS = 8;
const columns = new Map();

const getter = (c) => (c.values ? (i) => c.values[i] : c.at ? (i) => c.levels[c.at[i]] : () => c.levels[0]);

function addColumn(c) {
  const get = getter(c);
  const seen = new Map();
  for (let i = 0; i < D.cells; i++) seen.set(get(i), (seen.get(get(i)) || 0) + 1);
  const most = c.number ? MAX_NUMBER_LEVELS : D.coordinates.includes(c.name) ? Infinity : MAX_LEVELS;
  let levels = seen.size <= most ? [...seen.keys()] : null;
  if (levels && !D.coordinates.slice(0, 3).includes(c.name) && !["strategy", "audit"].includes(c.name))
    levels.sort((a, b) => (a === null) - (b === null) || compare(a, b));
  const place = new Map((levels || []).map((level, n) => [level, n]));
  const heading = c.unit ? `${c.label} (${c.unit})` : c.label;
  columns.set(c.name, { ...c, get, levels, place, counts: seen, heading, level: (i) => place.get(get(i)) });
}

const collator = new Intl.Collator("en", { numeric: true });
const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : collator.compare(a, b));

D.columns.forEach(addColumn);
const rulesOf = (i) => D.audit.cells[i] || [];
const severityOf = (i) => Math.min(...rulesOf(i).map((r) => D.audit.severities.indexOf(D.audit.rules[r].severity)));
const UNFOUND = "no finding";
if (D.audit.rules.length) {
  const values = Array.from({ length: D.cells }, (_, i) => D.audit.severities[severityOf(i)] || UNFOUND);
  addColumn({ name: "audit", label: "audit", unit: "", number: false, values,
    definition: "The worst that the audit found on the cell: unusable, warning or note." });
}
const column = (name) => columns.get(name);
const status = column("status"), kinds = column("device_kind");
const EVERY = Array.from({ length: D.cells }, (_, i) => i);
const isOk = (i) => status.get(i) === "ok";

function numberText(value) {
  const size = Math.abs(value);
  if (value && (size >= 1e7 || size < 1e-3)) return value.toExponential(3).replace(/\.?0+e\+?/, "e");
  return String(size >= 1e4 ? Math.round(value * 10) / 10 : Number(value.toPrecision(5)));
}

const countText = (count) => count.toLocaleString("en");

function textOf(c, i) {
  const value = c.get(i);
  if (value === null || value === undefined) return "";
  if (c.name === "gpus") return `${value} ${workerNoun(kinds && kinds.get(i), value)}`;
  return typeof value === "number" ? numberText(value) : value;
}

const workerNoun = (kind, count) => (D.nouns[kind] || D.nouns[""])[count === 1 ? 0 : 1];

// ---- state: all of it is in the address, after # -------------------------------------------------------
const numeric = [...columns.values()].filter((c) => c.number);
const sorted = [...columns.values()].filter((c) => c.levels);
const coordinates = D.coordinates.filter((name) => column(name));
/** What tells cells apart and what was measured come first: a screen has room for so many. */
const START_COLUMNS = [...new Set(["set", "experiment", "strategy", "model", "gpus", "train_time_s", "score_final",
  "peak_memory_bytes", "throughput_samples_per_s", "status", "audit", ...coordinates])].filter((name) => column(name));
const filtered = [...new Set([...D.first, "audit", ...sorted.map((c) => c.name)])]
  .map(column).filter((c) => c && c.levels && c.levels.filter((level) => level !== null).length > 1);
let S;

function startState() {
  const y = (column("train_time_s") || numeric[0] || status).name;
  const [low, high] = extent(column(y), EVERY), wide = low > 0 && high > 20 * low;
  return { x: "gpus", y, colour: "strategy", marker: column("set") ? "set" : "strategy", lx: false, ly: wide, hide: new Map(),
    rx: null, ry: null, q: "", sort: null, up: true, shown: new Set(START_COLUMNS), pin: null };
}

function readState() {
  S = startState();
  const given = new URLSearchParams(location.hash.slice(1));
  const axis = (c) => c && (c.number || c.levels);
  for (const key of ["x", "y", "colour"]) if (axis(column(given.get(key)))) S[key] = given.get(key);
  const marker = column(given.get("marker"));
  if (marker && marker.levels) S.marker = marker.name;
  for (const key of ["lx", "ly"]) if (given.has(key)) S[key] = given.get(key) === "1";
  for (const key of ["rx", "ry"]) {
    const ends = (given.get(key) || "").split("~").map((end) => (end === "" ? NaN : Number(end)));
    if (ends.length === 2 && !ends.every(isNaN)) S[key] = ends.map((end) => (isNaN(end) ? null : end));
  }
  for (const c of filtered) {
    const hidden = new Set(given.getAll(`not.${c.name}`));
    if (hidden.size) S.hide.set(c.name, new Set(c.levels.filter((level) => hidden.has(String(level)))));
  }
  S.q = given.get("q") || "";
  const sort = given.get("sort") || "";
  if (column(sort.replace(/^-/, ""))) [S.sort, S.up] = [sort.replace(/^-/, ""), !sort.startsWith("-")];
  if (given.has("columns")) S.shown = new Set(given.get("columns").split(",").filter((name) => column(name)));
  const pin = Number(given.get("cell"));
  if (given.has("cell") && Number.isInteger(pin) && pin >= 0 && pin < D.cells) S.pin = pin;
}

function stateText() {
  const start = startState(), out = new URLSearchParams();
  for (const key of ["x", "y", "colour", "marker", "q"]) if (S[key] !== start[key]) out.set(key, S[key]);
  for (const key of ["lx", "ly"]) if (S[key] !== start[key]) out.set(key, S[key] ? "1" : "0");
  for (const key of ["rx", "ry"]) if (S[key]) out.set(key, S[key].map((end) => (end === null ? "" : end)).join("~"));
  for (const [name, hidden] of S.hide) for (const level of hidden) out.append(`not.${name}`, String(level));
  if (S.sort) out.set("sort", (S.up ? "" : "-") + S.sort);
  const shown = [...S.shown].join(",");
  if (shown !== [...start.shown].join(",")) out.set("columns", shown);
  if (S.pin !== null) out.set("cell", S.pin);
  return out.toString();
}

function writeState() {
  const text = stateText();
  if (location.hash.slice(1) !== text) history.replaceState(null, "", `#${text}`);
  $("link").hidden = true;
}

// ---- which cells are shown -----------------------------------------------------------------------------
let chosen = [];  // by the filters
let listed = [];  // the same, sorted, as the table lists them
let searched = { columns: "" };  // the texts that a search looks at: words of the table's columns

function choose() {
  const hides = [...S.hide].filter(([, hidden]) => hidden.size).map(([name, hidden]) => [column(name), hidden]);
  const ranges = [[S.rx, column(S.x)], [S.ry, column(S.y)]].filter(([ends, c]) => ends && c.number);
  const words = S.q.toLowerCase().split(/\s+/).filter(Boolean);
  const named = tableColumns().filter((c) => !c.number), key = named.map((c) => c.name).join();
  if (words.length && searched.columns !== key) {
    const texts = Array.from({ length: D.cells }, (_, i) => named.map((c) => textOf(c, i)).join(" ").toLowerCase());
    searched = { columns: key, texts };
  }
  chosen = [];
  for (let i = 0; i < D.cells; i++) {
    if (hides.some(([c, hidden]) => hidden.has(c.get(i)))) continue;
    if (ranges.some(([[low, high], c]) => !within(c.get(i), low, high))) continue;
    if (words.length && !words.every((word) => searched.texts[i].includes(word))) continue;
    chosen.push(i);
  }
  sortRows();
}

const within = (value, low, high) =>
  typeof value === "number" && (low === null || value >= low) && (high === null || value <= high);

function sortRows() {
  listed = chosen.slice();
  if (!S.sort) return;
  const c = column(S.sort), absent = (v) => v === null || v === undefined;
  listed.sort((a, b) => {
    const x = c.get(a), y = c.get(b);
    if (absent(x) || absent(y)) return absent(x) - absent(y);
    return (S.up ? 1 : -1) * (c.levels && !c.number ? c.level(a) - c.level(b) : compare(x, y)) || a - b;
  });
}

// ---- looks ---------------------------------------------------------------------------------------------
/** The colours of the page's theme, which canvases have to be told. */
const dark = matchMedia("(prefers-color-scheme: dark)"), T = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "raised", "ink", "muted", "line", "accent", "bad", "caution"])
    T[name] = style.getPropertyValue(`--${name}`).trim();
}
readTheme();
const themed = (pair) => pair[dark.matches ? 1 : 0];
const SCALE = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"];
const SEVERITY_RINGS = { unusable: "bad", warning: "caution" };

function colourOf(c) {
  if (c.name === "strategy") return (i) => themed(D.styles[c.get(i)][0]);
  if (c.levels) return (i) => levelColour(c, c.level(i));
  const [low, high] = extent(c, chosen), log = low > 0 && high > 50 * low;
  return (i) => {
    const v = c.get(i);
    if (typeof v !== "number") return T.muted;
    return scaleColour(high > low ? (log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low)) : 0.5);
  };
}

const levelColour = (c, n) => (c.levels[n] === null ? T.muted : themed(D.colours[n % D.colours.length]));

function scaleColour(share) {
  const place = Math.min(Math.max(share, 0), 1) * (SCALE.length - 1), n = Math.min(Math.floor(place), SCALE.length - 2);
  const parts = [SCALE[n], SCALE[n + 1]].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return `rgb(${parts[0].map((v, k) => Math.round(v + (parts[1][k] - v) * (place - n))).join(",")})`;
}

const markerOf = (c) => (c.name === "strategy" ? (i) => D.styles[c.get(i)][1] : (i) => levelMarker(c.level(i)));
const levelMarker = (n) => D.markers[n % D.markers.length];

function extent(c, cells) {
  let low = Infinity, high = -Infinity;
  for (const i of cells) {
    const v = c.get(i);
    if (typeof v === "number") { if (v < low) low = v; if (v > high) high = v; }
  }
  return [low, high];
}

function trace(g, shape, x, y, r) {
  const polygon = D.shapes[shape];
  g.beginPath();
  if (!polygon || !polygon.length) g.arc(x, y, r * 0.92, 0, 7);
  else {
    polygon.forEach(([px, py], n) => (n ? g.lineTo(x + px * r, y + py * r) : g.moveTo(x + px * r, y + py * r)));
    g.closePath();
  }
}

/** As in the figures, with more fillings, since no name stands beside it; a cell without a full result is hollow and crossed out. */
function drawMark(g, colour, marker, failed, x, y, r) {
  const [shape, fill] = marker.split(" ");
  trace(g, shape, x, y, r);
  g.fillStyle = T.paper; g.fill();
  g.save(); g.clip(); g.fillStyle = colour;
  if (!failed) for (const [left, top, width, height] of D.fills[fill]) g.fillRect(x + left * r, y + top * r, width * r, height * r);
  g.restore();
  g.strokeStyle = colour; g.lineWidth = 1.4; g.stroke();
  if (failed) {
    g.beginPath(); g.moveTo(x - r, y - r); g.lineTo(x + r, y + r); g.moveTo(x - r, y + r); g.lineTo(x + r, y - r); g.stroke();
  }
}

function drawRing(g, severity, x, y, r) {
  g.strokeStyle = T[SEVERITY_RINGS[severity]]; g.lineWidth = (severity === "unusable" ? 2 : 1.4) * (r > 3 ? 1 : 0.7);
  g.beginPath(); g.arc(x, y, r > 3 ? r + 3.2 : r + 1.4, 0, 7); g.stroke();
}

function swatch(draw) {
  const ratio = devicePixelRatio || 1, canvas = el("canvas", { width: 18 * ratio, height: 18 * ratio });
  canvas.style.cssText = "width:18px;height:18px";
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio); draw(g);
  return canvas;
}

// ---- axes ----------------------------------------------------------------------------------------------
function niceTicks(low, high, most) {
  const step = 10 ** Math.floor(Math.log10((high - low) / most));
  const wide = [1, 2, 5, 10].map((by) => by * step).find((by) => (high - low) / by <= most);
  const ticks = [];
  for (let k = Math.ceil(low / wide - 1e-9); k * wide <= high * (1 + 1e-12) + 1e-300; k++) ticks.push(Number((k * wide).toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low), ticks = [];
  for (let k = Math.floor(Math.log10(low)); 10 ** k <= high; k++)
    for (const by of decades > 3.5 ? [1] : [1, 2, 5]) {
      const tick = Number((by * 10 ** k).toPrecision(12));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  return ticks.length >= 3 ? ticks : niceTicks(low, high, 6);
}

/** Where the values of a column are, from pixel `from` to pixel `to`. */
function axisOf(c, log, range, from, to) {
  if (!c.number) {
    const present = new Set(chosen.map((i) => c.level(i)));
    const shown = c.levels.map((_, n) => n).filter((n) => present.has(n));
    const slot = (to - from) / Math.max(shown.length, 1), at = new Map(shown.map((n, k) => [n, from + slot * (k + 0.5)]));
    const ticks = shown.map((n) => ({ at: at.get(n), text: c.levels[n] === null ? NOT_RECORDED : String(c.levels[n]) }));
    return { c, slot: Math.abs(slot), ticks, place: (i) => at.get(c.level(i)) };
  }
  let [low, high] = extent(c, log ? chosen.filter((i) => c.get(i) > 0) : chosen);
  if (range) [low, high] = [range[0] ?? low, range[1] ?? high];
  if (!(low <= high) || (log && low <= 0)) [low, high] = log ? [1, 10] : [0, 1];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
  const to01 = log ? (v) => Math.log(v / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
  if (!range) {
    if (log) { const by = (high / low) ** 0.04; [low, high] = [low / by, high * by]; }
    else if (low >= 0 && low < 0.6 * high) [low, high] = [0, high * 1.04];
    else { const by = (high - low) * 0.05; [low, high] = [low - by, high + by]; }
  }
  const pixel = (v) => from + to01(v) * (to - from), back = (px) => {
    const share = (px - from) / (to - from);
    return log ? low * (high / low) ** share : low + share * (high - low);
  };
  const most = Math.max(2, Math.floor(Math.abs(to - from) / 55));
  const ticks = (log ? logTicks(low, high) : niceTicks(low, high, most)).map((v) => ({ at: pixel(v), text: numberText(v) }));
  const place = (i) => { const v = c.get(i); return typeof v === "number" && !(log && v <= 0) ? pixel(v) : undefined; };
  return { c, ticks, place, back };
}

// ---- the chart -----------------------------------------------------------------------------------------
const points = $("points"), marks = $("marks"), tip = $("tip");
const ROW_PX = 17, LEAN = 0.5, FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif';
let view;  // axes, places and radius of what is drawn
let hovered = null;

function context(canvas) {
  const ratio = devicePixelRatio || 1, { clientWidth: w, clientHeight: h } = canvas;
  if (canvas.width !== Math.round(w * ratio)) canvas.width = Math.round(w * ratio);
  if (canvas.height !== Math.round(h * ratio)) canvas.height = Math.round(h * ratio);
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, w, h);
  g.font = FONT;
  return { g, w, h };
}

function cut(g, text, width) {
  if (g.measureText(text).width <= width) return text;
  while (text.length > 1 && g.measureText(`${text}…`).width > width) text = text.slice(0, -1);
  return `${text}…`;
}

function axisHeading(c, log) {
  let heading = c.heading;
  if (c.name === "gpus" && kinds) {
    const found = [...new Set(chosen.map((i) => kinds.get(i)).filter(Boolean))];
    if (found.length) heading += `: ${found.map((kind) => workerNoun(kind, 2)).join(" and ")}`;
  }
  return log && c.number ? `${heading}, logarithmic` : heading;
}

/** Which statuses have cells without a place on the y axis; they get rows above the chart. */
function rowsAbove(y, log) {
  const found = new Set();
  for (const i of chosen) if (y.number && !(typeof y.get(i) === "number" && !(log && y.get(i) <= 0))) found.add(rowName(i));
  return [...found].sort();
}
const rowName = (i) => (isOk(i) ? "no value" : status.get(i));

function layOut(g, w, h) {
  const x = column(S.x), y = column(S.y), above = rowsAbove(y, S.ly);
  const lacksX = chosen.some((i) => x.number && !(typeof x.get(i) === "number" && !(S.lx && x.get(i) <= 0)));
  const top = 10 + above.length * ROW_PX + (above.length ? 6 : 0);
  let bottom = h - 44;
  const widest = (ticks) => Math.max(0, ...ticks.map((t) => g.measureText(t.text).width));
  let left = 30 + Math.min(150, Math.max(widest(axisOf(y, S.ly, S.ry, bottom, top).ticks), above.length ? 52 : 0));
  const gutter = lacksX ? 46 : 0;
  let ax = axisOf(x, S.lx, S.rx, left + gutter, w - 14);
  const leans = !x.number && widest(ax.ticks) > ax.slot - 6 ? Math.min(150, widest(ax.ticks)) : 0;
  if (leans) bottom -= Math.max(8, leans * Math.sin(LEAN) - 6);
  const ay = axisOf(y, S.ly, S.ry, bottom, top);
  return { x, y, ax, ay, above, top, bottom, left, gutter, leans, w, h };
}

/** Where each chosen cell is: cells of one slot stand side by side, by colour and repeat. */
function placeCells(v) {
  const group = column(S.colour), repeat = column("repeat");
  const beside = !v.x.number && group.levels && group.name !== S.x;
  const groups = beside ? [...new Set(chosen.map((i) => group.level(i)))].sort((a, b) => a - b) : [0];
  const rank = new Map(groups.map((n, k) => [n, k]));
  const most = repeat ? chosen.reduce((found, i) => Math.max(found, repeat.get(i) + 1), 1) : 1;
  const rowAt = new Map(v.above.map((name, k) => [name, 10 + ROW_PX * (k + 0.5)]));
  v.px = new Float32Array(D.cells).fill(NaN);
  v.py = new Float32Array(D.cells).fill(NaN);
  for (const i of chosen) {
    let px = v.ax.place(i), py = v.ay.place(i);
    const turn = repeat && most > 1 ? (repeat.get(i) + 0.5) / most - 0.5 : 0;
    if (px === undefined) px = v.left + v.gutter / 2 + turn * 16;
    else if (!v.x.number) {
      const part = (0.84 * v.ax.slot) / groups.length;
      px += (beside ? (rank.get(group.level(i)) + 0.5 - groups.length / 2) * part : 0) + turn * part * 0.8;
    }
    if (py === undefined) py = rowAt.get(rowName(i));
    else if (!v.y.number && v.x.number) py += turn * v.ay.slot * 0.5;
    v.px[i] = px; v.py[i] = py;
  }
}

function drawAxes(g, v) {
  g.strokeStyle = T.line; g.lineWidth = 1; g.fillStyle = T.ink; g.textBaseline = "middle"; g.textAlign = "right";
  for (const { at, text } of v.ay.ticks) {
    g.beginPath(); g.moveTo(v.left, Math.round(at) + 0.5); g.lineTo(v.w - 14, Math.round(at) + 0.5); g.stroke();
    g.fillText(cut(g, text, v.left - 28), v.left - 6, at);
  }
  v.above.forEach((name, k) => {
    g.fillStyle = k % 2 ? T.raised : T.line; g.fillRect(v.left, 10 + k * ROW_PX, v.w - 14 - v.left, ROW_PX);
    g.fillStyle = T.ink; g.fillText(name, v.left - 6, 10 + (k + 0.5) * ROW_PX);
  });
  if (v.gutter) {
    g.fillStyle = T.raised; g.fillRect(v.left, v.top, v.gutter - 6, v.bottom - v.top);
    g.fillStyle = T.muted; g.textAlign = "center"; g.fillText("none", v.left + v.gutter / 2 - 3, v.bottom + 12);
  }
  g.strokeStyle = T.line; g.fillStyle = T.ink;
  for (const { at, text } of v.ax.ticks) {
    const edge = Math.round(v.x.number ? at : at + v.ax.slot / 2) + 0.5;
    g.beginPath(); g.moveTo(edge, v.top); g.lineTo(edge, v.bottom); g.stroke();
    if (v.leans) {
      g.save(); g.translate(at + 4, v.bottom + 9); g.rotate(-LEAN); g.textAlign = "right";
      g.fillText(cut(g, text, v.leans), 0, 0); g.restore();
    } else { g.textAlign = "center"; g.fillText(text, at, v.bottom + 12); }
  }
  g.strokeStyle = T.muted; g.beginPath(); g.moveTo(v.left + 0.5, v.top); g.lineTo(v.left + 0.5, v.bottom + 0.5); g.lineTo(v.w - 14, v.bottom + 0.5); g.stroke();
  g.font = FONT.replace("12px", "600 12px"); g.textAlign = "center";
  g.fillText(cut(g, axisHeading(v.x, S.lx), v.w - v.left), (v.left + v.w - 14) / 2, v.h - 12);
  g.save(); g.translate(12, (v.top + v.bottom) / 2); g.rotate(-Math.PI / 2);
  g.fillText(cut(g, axisHeading(v.y, S.ly), v.bottom - v.top + 60), 0, 0); g.restore();
  g.font = FONT;
}

function drawPoints() {
  const { g, w, h } = context(points);
  view = layOut(g, w, h);
  placeCells(view);
  drawAxes(g, view);
  const many = chosen.length, r = (view.r = many > 3000 ? 3 : many > 400 ? 4 : 5.5);
  const colour = colourOf(column(S.colour)), marker = markerOf(column(S.marker));
  const ratio = devicePixelRatio || 1, side = Math.ceil(2 * r + 12), sprites = new Map();
  const spriteOf = (i) => {  // each look is drawn once, and copied
    const ring = D.audit.severities[severityOf(i)] || "", look = [colour(i), marker(i), isOk(i), ring].join();
    if (!sprites.has(look)) {
      const canvas = document.createElement("canvas");
      canvas.width = canvas.height = side * ratio;
      const s = canvas.getContext("2d");
      s.scale(ratio, ratio);
      drawMark(s, colour(i), marker(i), !isOk(i), side / 2, side / 2, r);
      if (SEVERITY_RINGS[ring]) drawRing(s, ring, side / 2, side / 2, r);
      sprites.set(look, canvas);
    }
    return sprites.get(look);
  };
  g.globalAlpha = many > 3000 ? 0.6 : many > 400 ? 0.8 : 1;
  for (const i of chosen) g.drawImage(spriteOf(i), view.px[i] - side / 2, view.py[i] - side / 2, side, side);
  g.globalAlpha = 1;
  view.near = new Map();
  for (const i of chosen) {
    const key = (view.px[i] >> 5) * 1000 + (view.py[i] >> 5);
    if (!view.near.has(key)) view.near.set(key, []);
    view.near.get(key).push(i);
  }
  points.setAttribute("aria-label", `Chart of ${axisHeading(view.y, S.ly)} by ${axisHeading(view.x, S.lx)}, ${chosen.length} cells. Arrow keys walk through the marks, Enter shows all of one.`);
}

function nearest(x, y) {
  let best = null, least = 18 ** 2;
  for (let a = (x >> 5) - 1; a <= (x >> 5) + 1; a++)
    for (let b = (y >> 5) - 1; b <= (y >> 5) + 1; b++)
      for (const i of view.near.get(a * 1000 + b) || []) {
        const d = (view.px[i] - x) ** 2 + (view.py[i] - y) ** 2;
        if (d <= least) [best, least] = [i, d];
      }
  return best;
}

const siblings = (i) => {
  const same = coordinates.filter((name) => name !== "repeat").map(column);
  return chosen.filter((j) => same.every((c) => c.get(j) === c.get(i)));
};

function drawMarks(drag) {
  const { g } = context(marks);
  if (drag) {
    g.fillStyle = `${T.accent}22`; g.strokeStyle = T.accent;
    g.fillRect(...drag); g.strokeRect(...drag);
  }
  for (const i of [S.pin, hovered]) {
    if (i === null || Number.isNaN(view.px[i])) continue;
    const family = siblings(i).sort((a, b) => view.px[a] - view.px[b]);
    g.strokeStyle = T.muted; g.lineWidth = 1; g.setLineDash([3, 3]); g.beginPath();
    family.forEach((j, n) => (n ? g.lineTo(view.px[j], view.py[j]) : g.moveTo(view.px[j], view.py[j])));
    g.stroke(); g.setLineDash([]);
    for (const j of family) { g.beginPath(); g.arc(view.px[j], view.py[j], view.r + 2, 0, 7); g.stroke(); }
    g.strokeStyle = T.ink; g.lineWidth = 2.2; g.beginPath(); g.arc(view.px[i], view.py[i], view.r + 4, 0, 7); g.stroke();
  }
}

// ---- one cell: beside the pointer, and in full ---------------------------------------------------------
const nameOf = (i) => coordinates.map((name) => {
  const text = textOf(column(name), i);
  return name === "repeat" ? `repeat ${text}` : text;
}).join(", ");

function linesOf(i) {
  const lines = [];
  for (const c of new Set([column(S.x), column(S.y), column(S.colour)]))
    if (!coordinates.includes(c.name)) lines.push(`${c.label}: ${textOf(c, i) || NOT_RECORDED}${textOf(c, i) && c.unit ? ` ${c.unit}` : ""}`);
  return lines;
}

const PROVENANCE = ["device_kind", "device_name", "host", "cpu_model", "torch", "driver", "revision", "precision", "global_batch", "epochs"];

function showTip(i) {
  tip.hidden = i === null || Number.isNaN(view.px[i]);
  if (tip.hidden) return;
  const family = siblings(i).length;
  const found = rulesOf(i).map((r) => D.audit.rules[r]).map((rule) => `${rule.severity}: ${rule.id}`);
  const graded = SEVERITY_RINGS[D.audit.severities[severityOf(i)]] ? "bad" : "muted";
  const from = PROVENANCE.map(column).filter((c) => c && textOf(c, i)).map((c) => `${c.label} ${textOf(c, i)}`);
  tip.replaceChildren(
    el("b", {}, nameOf(i)),
    ...linesOf(i).map((line) => el("p", {}, line)),
    ...(isOk(i) ? [] : [el("p", { className: "bad" }, [status.get(i), textOf(column("reason") || status, i)].filter(Boolean).join(": "))]),
    ...(found.length ? [el("p", { className: graded }, `Audit: ${found.slice(0, 4).join("; ")}${found.length > 4 ? ` and ${found.length - 4} more` : ""}`)] : []),
    el("p", { className: "muted" }, `${from.join(", ") || "No provenance recorded"}. ${family > 1 ? `One of ${family} repeats shown.` : "The only repeat shown."}`),
  );
  const box = tip.getBoundingClientRect(), x = view.px[i], y = view.py[i];
  tip.style.left = `${Math.max(4, x + 16 + box.width > view.w ? x - 16 - box.width : x + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, view.h - box.height - 6))}px`;
}

function hover(i, from) {
  if (i === hovered) return;
  hovered = i;
  drawMarks();
  showTip(i);
  if (from === "chart keys" || from === "table keys") $("said").textContent = i === null ? "" : `${nameOf(i)}. ${linesOf(i).join(". ")}. ${status.get(i)}`;
  if (from !== "table" && i !== null) scrollTo(i);
  drawRows();
}

function pin(i) {
  S.pin = S.pin === i ? null : i;
  writeState(); drawMarks(); drawDetails(); drawRows();
}

function link(kind, i) {
  const file = D.files[kind];
  if (!file || !getter(file)(i)) return null;
  const path = file.path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(column(name).get(i)));
  return el("a", { href: `./${path}` }, kind);
}

function drawDetails() {
  const box = $("details"), i = S.pin;
  box.hidden = i === null;
  if (i === null) return box.replaceChildren();
  const shown = [...columns.values()].filter((c) => c.name !== "audit" && textOf(c, i) !== "");
  const links = ["record", "log"].map((kind) => link(kind, i)).filter(Boolean);
  const rules = rulesOf(i).map((r) => D.audit.rules[r]);
  box.replaceChildren(
    el("div", { className: "bar" }, el("h2", { id: "which" }, nameOf(i)), ...links,
      el("span", { className: "end" }, el("button", { type: "button", onclick: () => pin(i) }, "Close"))),
    ...(rules.length ? [el("ul", {}, ...rules.map((rule) => el("li", {}, el("b", { className: SEVERITY_RINGS[rule.severity] ? "bad" : "" }, `${rule.severity}: ${rule.id}`), ` (affects ${rule.affects}). ${rule.explanation}`)))] : []),
    el("dl", {}, ...shown.map((c) => el("div", { title: c.definition }, el("dt", {}, c.heading), el("dd", {}, textOf(c, i))))),
  );
}

// ---- the table: only the rows in sight exist -----------------------------------------------------------
const ROW = 27, frame = $("frame"), table = $("table"), body = table.tBodies[0];
let shownColumns = [];

function tableColumns() {
  const more = [S.x, S.y, S.colour, S.marker].filter((name) => !S.shown.has(name));
  return [...S.shown, ...new Set(more)].map(column).filter(Boolean);
}

function drawHead() {
  shownColumns = tableColumns();
  const sample = listed.filter((_, n) => n % Math.ceil(listed.length / 150 || 1) === 0);
  const widths = shownColumns.map((c) => Math.min(280, 26 + 7.3 * Math.max(c.heading.length + 2, ...sample.map((i) => textOf(c, i).length))));
  table.querySelector("colgroup").replaceChildren(...widths.map((width) => { const col = el("col"); col.style.width = `${width}px`; return col; }));
  table.style.width = `${widths.reduce((a, b) => a + b, 0)}px`;
  table.style.minWidth = "100%";
  table.tHead.rows[0].replaceChildren(...shownColumns.map((c) => {
    const th = el("th", { scope: "col", className: c.number ? "n" : "", title: c.definition },
      el("button", { type: "button", onclick: () => sortBy(c.name) }, c.heading));
    if (c.name === S.sort) th.setAttribute("aria-sort", S.up ? "ascending" : "descending");
    return th;
  }));
  frame.style.height = `${Math.min(400, (listed.length + 1) * ROW + 20)}px`;
  table.setAttribute("aria-rowcount", listed.length + 1);
  table.setAttribute("aria-colcount", shownColumns.length);
}

function sortBy(name) {
  if (S.sort === name && !S.up) S.sort = null;  // a third press: the study's order again
  else [S.up, S.sort] = [S.sort !== name, name];
  sortRows(); drawHead(); drawRows(); writeState();
  [...table.tHead.rows[0].cells][shownColumns.findIndex((c) => c.name === name)].firstChild.focus();
}

function drawRows() {
  const first = Math.max(0, Math.floor(frame.scrollTop / ROW) - 6), last = Math.min(listed.length, first + Math.ceil(frame.clientHeight / ROW) + 12);
  const space = (rows) => { const tr = el("tr", { className: "space", "aria-hidden": "true" }, el("td", { colSpan: shownColumns.length })); tr.style.height = `${rows * ROW}px`; return tr; };
  const rows = [];
  for (let n = first; n < last; n++) {
    const i = listed[n];
    const tr = el("tr", { id: `row${i}`, className: `cell${i === hovered ? " here" : ""}${i === S.pin ? " pinned" : ""}` },
      ...shownColumns.map((c) => el("td", { className: c.number ? "n" : c.name === "status" && !isOk(i) ? "bad" : "" }, textOf(c, i))));
    tr.setAttribute("aria-rowindex", n + 2);
    tr.setAttribute("aria-selected", i === S.pin);
    tr.dataset.cell = i;
    rows.push(tr);
  }
  body.replaceChildren(space(first), ...rows, space(listed.length - last));
  if (hovered !== null && rows.some((tr) => tr.dataset.cell == hovered)) table.setAttribute("aria-activedescendant", `row${hovered}`);
  else table.removeAttribute("aria-activedescendant");
}

function scrollTo(i) {
  const n = listed.indexOf(i), top = n * ROW;
  if (n < 0) return;
  if (top < frame.scrollTop || top > frame.scrollTop + frame.clientHeight - 3 * ROW) frame.scrollTop = top - frame.clientHeight / 2 + ROW;
}

// ---- controls ------------------------------------------------------------------------------------------
function picker(key, label, offered) {
  const option = (c) => el("option", { value: c.name, selected: S[key] === c.name }, c.heading);
  const numbers = offered.filter((c) => c.number), others = offered.filter((c) => !c.number);
  const select = el("select", { onchange: () => { S[key] = select.value; if (key === "x" || key === "y") S[`r${key}`] = null; changed(true); } });
  for (const [title, group] of [["sorts", others], ["numbers", numbers]])
    if (group.length) select.append(el("optgroup", { label: title }, ...group.map(option)));
  select.id = key;
  return el("label", { className: "axis" }, label, select);
}

function axisOptions(key) {
  const c = column(S[key]), log = `l${key}`, range = `r${key}`;
  if (!c.number) return [];
  const ends = [0, 1].map((end) => el("input", { type: "number", step: "any", value: S[range] && S[range][end] !== null ? S[range][end] : "",
    placeholder: end ? "to" : "from", "aria-label": `${key} ${end ? "to" : "from"}`, onchange: () => {
      const values = ends.map((input) => (input.value === "" ? null : Number(input.value)));
      S[range] = values.every((v) => v === null) ? null : values;
      changed(false);
    } }));
  ends.forEach((input, end) => { input.id = `${key}${end ? "to" : "from"}`; });
  const box = el("input", { type: "checkbox", checked: S[log], onchange: () => { S[log] = box.checked; changed(false); } });
  box.id = log;
  return [el("label", {}, box, " logarithmic"), el("div", { className: "ranges" }, ...ends)];
}

function filterOf(c) {
  const hidden = S.hide.get(c.name) || new Set();
  const set = (next) => { if (next.size) S.hide.set(c.name, next); else S.hide.delete(c.name); changed(true); };
  const options = c.levels.map((level) => {
    const box = el("input", { type: "checkbox", checked: !hidden.has(level), onchange: () => {
      const next = new Set(hidden);
      if (box.checked) next.delete(level); else next.add(level);
      set(next);
    } });
    box.dataset.filter = c.name;
    box.dataset.level = String(level);
    return el("label", {}, box, el("span", {}, level === null ? NOT_RECORDED : String(level)), el("small", {}, countText(c.counts.get(level))));
  });
  const every = el("button", { type: "button", onclick: () => set(hidden.size ? new Set() : new Set(c.levels)) }, hidden.size ? "all" : "none");
  every.setAttribute("aria-label", `${hidden.size ? "Show all" : "Hide all"}: ${c.label}`);
  return el("fieldset", { title: c.definition }, el("legend", {}, c.label, every), el("div", { className: "options" }, ...options));
}

function drawControls() {
  const form = $("controls"), focus = document.activeElement && form.contains(document.activeElement) ? keyOf(document.activeElement) : null;
  const open = new Set([...form.querySelectorAll("details[open]")].map((d) => d.id));
  const scrolled = [form.scrollTop, ...[...form.querySelectorAll(".options")].map((o) => o.scrollTop)];
  const first = filtered.filter((c) => D.first.includes(c.name) || c.name === "audit"), rest = filtered.filter((c) => !first.includes(c));
  const picks = [...columns.values()].map((c) => {
    const box = el("input", { type: "checkbox", checked: S.shown.has(c.name), onchange: () => {
      if (box.checked) S.shown.add(c.name); else S.shown.delete(c.name);
      if (S.q) changed(false); else { drawHead(); drawRows(); writeState(); }
    } });
    box.dataset.column = c.name;
    return el("label", { title: c.definition }, box, el("span", {}, c.heading));
  });
  const fold = (id, title, ...inside) => { const d = el("details", { open: open.has(id) }, el("summary", {}, title), ...inside); d.id = id; return d; };
  const axes = [...columns.values()].filter((c) => c.number || c.levels);
  form.replaceChildren(
    el("h2", {}, "Axes"),
    picker("x", "x", axes), ...axisOptions("x"), picker("y", "y", axes), ...axisOptions("y"),
    picker("colour", "colour", axes), picker("marker", "marker", axes.filter((c) => c.levels)),
    el("h2", {}, "Filters"), ...first.map(filterOf),
    ...(rest.length ? [fold("more", `More filters (${rest.length})`, ...rest.map(filterOf))] : []),
    fold("columns", "Columns of the table", el("div", { className: "options" }, ...picks)),
  );
  form.scrollTop = scrolled[0];
  form.querySelectorAll(".options").forEach((o, n) => { o.scrollTop = scrolled[n + 1] || 0; });
  if (focus) { const again = [...form.querySelectorAll("input, select, button, summary")].find((node) => keyOf(node) === focus); if (again) again.focus(); }
}
const keyOf = (node) => node.id || `${node.dataset.filter}=${node.dataset.level}` + (node.getAttribute("aria-label") || "").replace(/^(Show|Hide) all/, "all");

function drawLegend() {
  const colour = column(S.colour), marker = column(S.marker), entries = [], MOST = 24;
  const present = (c) => new Set(filteredWithout(c).map((i) => c.level(i)));
  const toggles = (c, look) => {
    const shown = present(c), hidden = S.hide.get(c.name) || new Set();
    const levels = c.levels.map((level, n) => [level, n]).filter(([, n]) => shown.has(n));
    entries.push(el("span", { className: "name" }, c.label));
    for (const [level, n] of levels.slice(0, MOST)) {
      const name = level === null ? NOT_RECORDED : String(level);
      entries.push(el("button", { type: "button", "aria-pressed": String(!hidden.has(level)), onclick: () => {
        const next = new Set(hidden);
        if (next.has(level)) next.delete(level); else next.add(level);
        if (next.size) S.hide.set(c.name, next); else S.hide.delete(c.name);
        changed(true);
      } }, swatch((g) => look(g, level, n)), name));
    }
    if (levels.length > MOST) entries.push(el("span", {}, `and ${levels.length - MOST} more`));
  };
  const style = (level) => D.styles[level];
  const colourAt = (level, n) => (colour.name === "strategy" ? themed(style(level)[0]) : levelColour(colour, n));
  const markerAt = (level, n) => (marker.name === "strategy" ? style(level)[1] : levelMarker(n));
  if (colour.levels) toggles(colour, (g, level, n) => drawMark(g, colourAt(level, n), marker === colour ? markerAt(level, n) : "square full", false, 9, 9, 5.5));
  else {
    const [low, high] = extent(colour, chosen), bar = el("canvas", { width: 120, height: 12 }), g = bar.getContext("2d");
    for (let x = 0; x < 120; x++) { g.fillStyle = scaleColour(x / 119); g.fillRect(x, 0, 1, 12); }
    entries.push(el("span", {}, el("span", { className: "name" }, colour.heading), Number.isFinite(low) ? numberText(low) : "", bar, Number.isFinite(high) ? `${numberText(high)}${low > 0 && high > 50 * low ? ", logarithmic" : ""}` : ""));
  }
  if (marker !== colour) toggles(marker, (g, level, n) => drawMark(g, T.muted, markerAt(level, n), false, 9, 9, 5.5));
  if (chosen.some((i) => !isOk(i))) entries.push(el("span", {}, swatch((g) => drawMark(g, T.muted, "circle full", true, 9, 9, 4.5)), "no full result"));
  for (const severity of Object.keys(SEVERITY_RINGS))
    if (chosen.some((i) => D.audit.severities[severityOf(i)] === severity))
      entries.push(el("span", {}, swatch((g) => { drawMark(g, T.muted, "circle full", false, 9, 9, 4); drawRing(g, severity, 9, 9, 4); }), `audit: ${severity}`));
  $("legend").replaceChildren(...entries);
}

/** The cells that the other filters leave, so that a hidden value stays in the legend. */
function filteredWithout(c) {
  const hidden = S.hide.get(c.name);
  if (!hidden) return chosen;
  const all = chosen;
  S.hide.delete(c.name);
  choose();
  const found = chosen;
  S.hide.set(c.name, hidden);
  choose();
  return all.length > found.length ? all : found;
}

function drawTexts() {
  $("count").textContent = `${countText(chosen.length)} of ${countText(D.cells)} cells`;
  const x = column(S.x), y = column(S.y);
  const off = chosen.filter((i) => view.ax.place(i) === undefined || view.ay.place(i) === undefined).length;
  $("placed").textContent = off ? `${countText(off)} without a value on an axis: in the grey margins` : "";
  $("meaning").replaceChildren(...[...new Set([y, x])].filter((c) => c.definition).map((c) => el("span", {}, el("b", {}, `${c.label}: `), `${c.definition} `)));
}

// ---- everything together -------------------------------------------------------------------------------
function changed(controls) {
  hovered = null; tip.hidden = true;
  choose();
  drawControls();
  drawLegend();
  drawPoints(); drawMarks(); drawTexts();
  if (controls) frame.scrollTop = 0;
  drawHead(); drawRows(); drawDetails();
  writeState();
}

function restore() {
  readState();
  $("search").value = S.q;
  changed(true);
}

const at = (event) => { const box = points.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
let drag = null;
points.addEventListener("pointermove", (event) => {
  const [x, y] = at(event);
  if (!drag) return hover(nearest(x, y), "chart");
  drag.to = [x, y];
  drawMarks([Math.min(drag.from[0], x), Math.min(drag.from[1], y), Math.abs(x - drag.from[0]), Math.abs(y - drag.from[1])]);
});
points.addEventListener("pointerleave", () => { if (!drag) hover(null, "chart"); });
points.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  drag = { from: at(event), to: at(event) };
  points.setPointerCapture(event.pointerId);
});
points.addEventListener("pointercancel", () => { drag = null; drawMarks(); });
points.addEventListener("pointerup", () => {
  if (!drag) return;
  const { from, to } = drag, [w, h] = [Math.abs(from[0] - to[0]), Math.abs(from[1] - to[1])];
  drag = null;
  if (w < 6 && h < 6) { const i = nearest(...to); if (i !== null) pin(i); return drawMarks(); }
  const ends = (a, b) => [a, b].sort((p, q) => p - q).map((v) => Number(v.toPrecision(4)));
  if (view.x.number && w >= 6) S.rx = ends(view.ax.back(from[0]), view.ax.back(to[0]));
  if (view.y.number && h >= 6) S.ry = ends(view.ay.back(from[1]), view.ay.back(to[1]));
  changed(true);
});
points.addEventListener("dblclick", () => { if (S.rx || S.ry) { S.rx = S.ry = null; changed(true); } });

function walk(order, step) {
  if (!order.length) return null;
  const n = hovered === null ? (step > 0 ? -1 : order.length) : order.indexOf(hovered);
  return order[Math.max(0, Math.min(order.length - 1, n + step))];
}

function onKeys(node, from, orderOf, page) {
  node.addEventListener("keydown", (event) => {
    const order = () => orderOf(event.key);
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -D.cells, End: D.cells };
    if (event.ctrlKey || event.metaKey || event.altKey || (from === "table keys" && event.target !== node)) return;
    if (steps[event.key]) hover(walk(order(), steps[event.key]), from);
    else if ((event.key === "Enter" || event.key === " ") && hovered !== null) pin(hovered);
    else if (event.key === "Escape") { if (S.pin !== null) pin(S.pin); else if (S.rx || S.ry) { S.rx = S.ry = null; changed(true); } hover(null, from); }
    else return;
    event.preventDefault();
  });
}
onKeys(points, "chart keys", (key) => {
  const [a, b] = key === "ArrowUp" || key === "ArrowDown" ? [view.py, view.px] : [view.px, view.py];
  return chosen.slice().sort((i, j) => a[i] - a[j] || b[i] - b[j] || i - j);
}, 10);
onKeys(table, "table keys", () => listed, 12);
points.addEventListener("blur", () => hover(null, "chart"));

let waiting = false;
frame.addEventListener("scroll", () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; drawRows(); });
});
const rowOf = (event) => { const tr = event.target.closest("tr.cell"); return tr ? Number(tr.dataset.cell) : null; };
body.addEventListener("pointerover", (event) => hover(rowOf(event), "table"));
body.addEventListener("pointerleave", () => hover(null, "table"));
body.addEventListener("click", (event) => { const i = rowOf(event); if (i !== null) pin(i); });

let typing;
$("search").addEventListener("input", (event) => {
  clearTimeout(typing);
  typing = setTimeout(() => { S.q = event.target.value; changed(true); }, 120);
});
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("reset").addEventListener("click", () => { history.replaceState(null, "", "#"); restore(); });
$("copy").addEventListener("click", async () => {
  const box = $("link");
  box.value = location.href;
  try {
    await navigator.clipboard.writeText(location.href);
    $("copy").textContent = "Copied";
    setTimeout(() => { $("copy").textContent = "Copy link"; }, 1500);
  } catch { box.hidden = false; box.select(); }  // where the browser keeps the clipboard to itself
});
addEventListener("hashchange", restore);
dark.addEventListener("change", () => { readTheme(); changed(false); });
new ResizeObserver(() => { if (view && (view.w !== points.clientWidth || view.h !== points.clientHeight)) { drawPoints(); drawMarks(); drawRows(); } }).observe($("chart"));
restore();
