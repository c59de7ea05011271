// What fits where: computes, from the plan's own footprints, what the plan says of a cell, for any batch and GPU.
// Names from a study reach the page as text nodes, never as markup.
const D = JSON.parse($("data").textContent);

// ---- the plan's formulas -----------------------------------------------------------------------------------

const cut = (n, size) => Math.ceil(n / size);
const powerOfTwo = (n, most) => (n >= most ? most : 1 << (31 - Math.clz32(Math.max(n, 1))));

/** Bytes of a sum's buffer on a GPU that holds so many threads at once, computed as in reductions.py. */
function sumBytes([outFixed, outEach, inFixed, inEach, together, size], samples, threads) {
  const outputs = Math.round(outFixed + outEach * samples), inputs = Math.round(inFixed + inEach * samples);
  const { block, warp, least, most: most_numbers, counter } = D.sums;
  const most = Math.floor(block / together), sums = Math.floor(outputs / together);
  let width = Math.min(powerOfTwo(sums, most), warp);
  const height = Math.min(powerOfTwo(inputs, most), Math.floor(most / width));
  width = Math.min(powerOfTwo(sums, most), Math.floor(most / height));
  if (inputs < Math.min(height * least, most_numbers)) return 0;
  const each = cut(inputs, height), blocks = cut(sums, width), atOnce = Math.floor(threads / (width * height));
  if (each < most_numbers || blocks > atOnce) return 0;
  const parts = Math.max(Math.min(cut(atOnce, blocks), cut(each, least)), cut(each, most_numbers));
  return parts === 1 ? 0 : size * outputs * parts * width * together + counter * blocks;
}

/** Bytes that a rank with this footprint needs, by what they are for: `Footprint.compute_needed_bytes`. */
function neededOf(footprint, samples, threads) {
  let bytes = -1, highest = null, buffer = 0;
  for (const moment of footprint.moments) {
    const sum = moment[2] && threads ? sumBytes(moment[2], samples, threads) : 0;
    let total = sum;
    for (let i = 0; i < moment[1].length; i += 2) total += moment[1][i] + moment[1][i + 1] * samples;
    if (total > bytes) [bytes, highest, buffer] = [total, moment, sum];
  }
  let evaluation = 0;
  for (const n of footprint.evaluation) evaluation += n;
  return { bytes: Math.max(bytes, evaluation) + footprint.copy, peak: bytes, evaluates: evaluation > bytes, highest, buffer, footprint };
}

const NAMED = [...D.groups, "data", "warm-up’s copy"];
const mixed = (a, b, share) => a.map((n, i) => share * n + (1 - share) * b[i]);

/** What a worker needs on the rank that needs most, of all stages: bytes with the data, and by what they are for. */
function needs(entry, samples, threads) {
  if (entry.between) {
    const [low, high] = entry.between.map((given) => needs(given, samples, threads));
    return { ...high, bytes: mixed([low.bytes], [high.bytes], entry.share)[0], parts: mixed(low.parts, high.parts, entry.share) };
  }
  let n = null;
  for (const i of entry.footprints) {
    const found = neededOf(D.footprints[i], samples, threads);
    if (!n || found.bytes > n.bytes) n = found;
  }
  const line = n.highest[1], data = entry.data[0] + entry.data[1] * samples;
  const parts = D.groups.map((_, i) => (n.evaluates ? n.footprint.evaluation[i] : line[2 * i] + line[2 * i + 1] * samples));
  if (!n.evaluates) parts[D.groups.indexOf("temporary")] += n.buffer;
  return { bytes: n.bytes + data, parts: [...parts, data, n.footprint.copy], phase: n.evaluates ? "evaluation" : n.highest[0] };
}

/** Bytes up to which a need fits, with the reserve and the margin. */
const roomOf = (device) => (device.memory_bytes - device.reserve_bytes) / (1 + D.margin);

/** Bytes up to which a need may run: it may be predicted too high by the margin. */
const tightOf = (device) => device.memory_bytes * (device.is_gpu ? 1 + D.margin : 1);

/** The most samples that a worker can compute on at once; 0 if not even one fits. */
function mostSamples(entry, device) {
  const room = roomOf(device);
  let low = 0, high = 2 ** 24 - 1;
  while (low < high) {
    const middle = Math.floor((low + high) / 2), samples = middle + 1;
    if (room < needs(entry, samples, device.resident_threads).bytes) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The share of `steps` in which workers exchange. */
function exchangingShare(wire, steps) {
  const apart = Math.max(0, steps - wire.start);
  return (steps - apart + Math.ceil(apart / wire.period)) / steps;
}

/** Bytes that a worker sends in a step, as a mean over `steps`. */
function sentBytes(entry, samples, steps) {
  const wire = entry.wire;
  if (!wire) return entry.sent;
  const each = exchangingShare(wire, steps) * (wire.line[0] + wire.line[1] * samples);
  const first = Math.min(wire.plain_steps, steps);
  return (first * wire.plain + (steps - first) * each) / steps;
}

/** Of the worker that computes most: operations of a sample, kernels of a step, bytes that they touch, share of attention. */
function workOf(entry) {
  if (entry.between) return mixed(...entry.between.map(workOf), entry.share);
  const f = D.footprints[entry.footprints[entry.slowest]];
  return [f.flops, f.operations, ...f.touched, f.attention];
}

/** Seconds of `steps` steps at best, at worst, and as one time to compare by, with the public runs that they are from, as DeviceFit has them; null if they are not known. */
function timesOf(entry, device, s, samples, sent, steps) {
  const found = secondsByRates(entry, device, s, samples, sent, steps);
  if (!found) return null;
  const [low, high, usual] = found.map((t) => t.seconds), runs = D.rates.public;
  const alike = entry.public && device.public && usual >= steps * runs.least_s && 1 - (steps * found[2].computes) / usual <= D.rates.waiting_share;
  return alike ? { low: usual * runs.low, high: usual * runs.high, usual, source: runs.source } : { low, high, usual, source: null };
}

/** Seconds of `steps` steps and of one's computing by the device's rates: `predict_step_duration`. */
function secondsByRates(entry, device, s, samples, sent, steps) {
  const kind = device.is_gpu ? "gpu" : "cpu", R = D.rates;
  const rate = device.is_gpu ? device.flops_per_s[s.precision] : device.flops_per_s[""] / s.workers;
  if (!rate) return null;
  const [computed_flops, operations, touched, touched_each, attention] = workOf(entry);
  const slower = device.attention_utilisation ? 1 + attention * (R.utilisation[kind][2] / device.attention_utilisation - 1) : 1;
  const link = entry.nodes === 1 ? device.link_bytes_per_s : Math.min(device.link_bytes_per_s, device.network_bytes_per_s);
  const [within, within_each] = entry.wire?.within ?? [0, 0];
  const local = entry.wire ? exchangingShare(entry.wire, steps) * (within + within_each * samples) : 0;
  const flops = computed_flops * samples;
  return [0, 1, 2].map((rates) => {
    const computing = ((rates === 2 ? slower : 1) * flops) / (rate * R.utilisation[kind][rates]), launches = entry.fused * operations * R.launch_s[kind][rates];
    const memory = device.memory_bytes_per_s ? (entry.fused * (touched + touched_each * samples)) / (device.memory_bytes_per_s * R.memory[rates]) : 0;
    const best = Math.max(computing, memory, launches), worst = computing + memory + launches, usual = Math.max(computing + memory, launches);
    const computes = ([best, worst * entry.slowdown, usual * entry.slowdown][rates] * entry.pushes) / (1 - entry.bubble);
    const sending = (bytes, inside) => ((bytes - inside) / link + inside / device.link_bytes_per_s) / R.link[rates];
    const sends = Math.max(sending(sent, local), sending(entry.link, 0), entry.served / R.server[rates]);
    const awaited = entry.awaits ? sending(entry.wire.line[1] * samples, within_each * samples) : 0;
    return { computes, seconds: steps * (computes + awaited + Math.max(0, sends - awaited - R.hiding[rates] * computes) + entry.host_s[rates]) };
  });
}

// ---- what is chosen ----------------------------------------------------------------------------------------

const networkOf = (s) => D.networks.find((n) => n.name === s.network);
const devicesOf = (network) => D.devices.filter((d) => d.is_gpu === network.on_cuda);
const deviceOf = (s) => D.devices.find((d) => d.name === s.device);
const kindOf = (s) => s.precision + (s.checkpointing ? "+checkpointing" : "");
/** The numbers of workers of a strategy whose amounts are a line in 1 / workers. */
const regularOf = (given) => Object.keys(given).map(Number).filter((n) => given[n].regular).sort((a, b) => a - b);

/** What the plan has of a choice; on numbers of workers that it lacks, from two that it has: a line in 1 / workers. */
function entryOf(s) {
  const given = networkOf(s).kinds[kindOf(s)]?.[s.strategy] ?? {};
  if (given[s.workers]) return given[s.workers];
  const counts = regularOf(given), beyond = s.workers > counts.at(-1);
  const low = beyond ? counts.at(-2) : counts.findLast((n) => n < s.workers), high = beyond ? counts.at(-1) : counts.find((n) => n > s.workers);
  if (!low || !high) return undefined;
  const share = (1 / s.workers - 1 / high) / (1 / low - 1 / high), between = [given[low], given[high]];
  const [a, b] = between.map((entry) => entry.wire);
  const wire = { ...a, within: [0, 0], line: mixed(a.line, b.line, share), plain: mixed([a.plain], [b.plain], share)[0] };
  const nodes = Math.ceil(s.workers / D.gpus_per_node);
  const host_s = mixed(given[low].host_s, given[high].host_s, share);
  return { ...given[high], between, share, wire, host_s, nodes, replicas: s.workers, recorded: aheadOf(s).find((p) => p.workers === s.workers) ?? null };
}

/** What the study's records were projected to, on numbers of workers that it lacks. */
const aheadOf = (s) => networkOf(s).ahead[kindOf(s)]?.[s.strategy] ?? [];

/** The columns of the table: the numbers of workers that the plan has, and the one chosen. */
const columnsOf = (network) => [...new Set([...network.counts, S.workers])].sort((a, b) => a - b);

/** The state of a choice, fit, tight, no or none, and all figures of it. `whole`: with those that the table does not show. */
function figures(s, whole = true) {
  const entry = entryOf(s), device = deviceOf(s), network = networkOf(s);
  if (!entry) return { state: "none", reason: `this plan has no ${s.strategy} on ${pluralize(s.workers, "worker")} in ${kindOf(s).replace("+", " with ")}` };
  if (entry.reason !== undefined) return { state: "none", reason: entry.reason };
  const unit = entry.replicas * entry.pushes * entry.parts;
  const found = { entry, most: 0 };
  if (whole) {
    const samples = mostSamples(entry, device);
    found.mostSamples = samples;
    found.most = samples * entry.pushes * entry.replicas;
  }
  if (s.batch % unit) return { ...found, state: "none", reason: `a batch of ${countText(s.batch)} cannot be divided into ${countText(unit)} equal parts` };
  const samples = s.batch / entry.replicas / entry.pushes;
  if (samples < entry.least) return { ...found, state: "none", reason: "it normalises over the batch (BatchNorm), and a worker’s batch is one sample" };
  const n = needs(entry, samples, device.resident_threads);
  found.needed = n.bytes;
  found.state = found.needed > tightOf(device) ? "no" : found.needed > roomOf(device) ? "tight" : "fit";
  if (!whole) return found;
  const steps = network.steps || network.epochs * Math.floor(network.train_samples / s.batch);
  const sent = steps ? sentBytes(entry, samples, steps) : 0;
  const recorded = entry.recorded && entry.recorded.batch === s.batch && D.own_of[+network.on_cuda] === device.name ? entry.recorded : null;
  const times = steps ? timesOf(entry, device, s, samples, sent, steps) : null;
  const span = recorded ? recorded.span : times && [times.low, times.high], usual = times && times.usual;
  return { ...found, samples, sent, steps, span, usual, recorded, times, parts: Object.fromEntries(NAMED.map((name, i) => [name, n.parts[i]])), phase: n.phase };
}

// ---- words -------------------------------------------------------------------------------------------------

const gibText = (bytes) => digits(bytes / 2 ** 30);
function spanText([low, high]) {
  const [unit, name] = high < 120 ? [1, "s"] : high < 7200 ? [60, "min"] : [3600, "h"];
  return high < 1 ? "under 1 s" : `${digits(low / unit)} to ${digits(high / unit)} ${name}`;
}
const GLYPH = { fit: "●", tight: "◐", no: "×", none: "–" };
const WORD = { fit: "Fits", tight: "Tight", no: "Does not fit", none: "Not possible" };

// ---- the page ----------------------------------------------------------------------------------------------

const form = $("controls");
const BATCHES = [];
for (let b = 1; b <= 2 ** 16; b *= 2) BATCHES.push(b, ...(b > 1 ? [b * 1.5] : []));
const S = {};

/** Makes the choice one that this plan has; what cannot be kept is as in the study. */
function settle() {
  if (!networkOf(S)) S.network = D.networks[0].name;
  const network = networkOf(S), kinds = Object.keys(network.kinds), first = kinds[0].split("+");
  if (!devicesOf(network).some((d) => d.name === S.device)) S.device = devicesOf(network)[0].name;
  if (!kinds.some((k) => k.split("+")[0] === S.precision)) S.precision = first[0];
  if (!network.kinds[kindOf(S)]) S.checkpointing = network.kinds[`${S.precision}+checkpointing`] ? 1 : 0;
  const { counts, strategies } = network;
  if (!(Number.isInteger(S.workers) && S.workers >= counts[0] && S.workers <= network.most_workers)) S.workers = counts.findLast((n) => n <= 8) ?? counts[0];
  if (!strategies.includes(S.strategy)) S.strategy = strategies.find((strategy) => counts.every((workers) => entryOf({ ...S, strategy, workers }))) || strategies[0];
  if (!(Number.isInteger(S.batch) && S.batch >= 1 && S.batch < 2 ** 24)) S.batch = network.batch;
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const key of ["network", "device", "strategy", "precision"]) S[key] = given.get(key) ?? S[key];
  for (const key of ["workers", "batch", "checkpointing"]) if (given.has(key)) S[key] = Number(given.get(key));
  S.checkpointing = S.checkpointing ? 1 : 0;
  settle();
}

const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;
const options = (name, values) => form[name].replaceChildren(...values.map((v) => el("option", { value: v }, v)));
function radios(name, values) {
  $(name).replaceChildren(...values.map((v) => el("label", {}, el("input", { type: "radio", name, value: v, checked: v === S[name] }), el("span", {}, String(v)))));
}

/** Fills the controls with what the network has, and shows the choice in them. */
function show() {
  const network = networkOf(S), kinds = network.kinds;
  options("network", D.networks.map((n) => n.name));
  options("device", devicesOf(network).map((d) => d.name));
  options("strategy", network.strategies);
  radios("workers", network.counts);
  radios("precision", network.precisions);
  for (const key of ["network", "device", "strategy"]) form[key].value = S[key];
  Object.assign(form.count, { value: S.workers, min: network.counts[0], max: network.most_workers });
  form.batch.value = S.batch;
  form.slider.value = BATCHES.findLastIndex((b) => b <= S.batch);
  form.slider.setAttribute("aria-valuetext", countText(S.batch));
  form.checkpointing.checked = Boolean(S.checkpointing);
  form.checkpointing.disabled = !(kinds[S.precision] && kinds[`${S.precision}+checkpointing`]);
  draw();
}

function verdict(f, device) {
  if (f.state === "none") return `Not possible: ${f.reason}.`;
  if (f.state === "fit") return `Fits: ${bytesText(f.needed)} needed, up to ${bytesText(roomOf(device))} fit.`;
  if (f.state === "tight") return `Tight: ${bytesText(f.needed)} needed, up to ${bytesText(roomOf(device))} fit, up to ${bytesText(tightOf(device))} may run.`;
  return `Does not fit: ${bytesText(f.needed)} needed, up to ${bytesText(tightOf(device))} may run.`;
}

function hint(f) {
  const network = networkOf(S), workers = pluralize(S.workers, "worker");
  if (f.state === "fit") return `${S.strategy} on ${workers} trains ${S.network} with ${countText(S.batch / f.entry.replicas)} samples per ${f.entry.replicas === S.workers ? "worker" : "copy of the network"}.`;
  const better = network.strategies.filter((strategy) => strategy !== S.strategy && figures({ ...S, strategy }, false).state === "fit");
  const others = better.length ? `On ${workers} ${listed(better.length > 3 ? [...better.slice(0, 3), `${better.length - 3} more`] : better)} would fit` : `No other strategy fits on ${workers}`;
  const most = !f.entry ? "" : f.most ? `; with ${S.strategy} the largest batch is ${countText(f.most)}` : `; with ${S.strategy} no batch ${f.state === "tight" ? `leaves ${percent(D.margin)} free` : "fits"}`;
  return `${others}${most}.`;
}

function bar(f, device) {
  $("bar").hidden = f.state === "none";
  if (f.state === "none") return;
  const whole = device.whole_bytes, top = Math.max(whole, f.needed) * 1.005, share = (n) => `${(100 * n) / top}%`;
  const parts = Object.entries(f.parts).filter(([, n]) => n > 0);
  const piece = (className, from, width, title = "") =>
    el("i", { className, title, style: `left:${share(from)};width:${share(width)}` });
  const usable = device.memory_bytes - device.reserve_bytes, before = parts.map((_, k) => parts.slice(0, k).reduce((sum, [, n]) => sum + n, 0));
  $("track").replaceChildren(piece("card", 0, whole), piece("reserve", usable, whole - usable),
    ...parts.map(([name, n], k) => piece(`part p${NAMED.indexOf(name) + 1}`, before[k], n, `${name}: ${bytesText(n)}`)), el("i", { className: "edge", style: `left:${share(whole)}` }));
  $("cardname").textContent = `${device.name}: ${bytesText(whole)}`;
  $("cardname").style.width = share(whole);
  $("parts").replaceChildren(...parts.map(([name, n]) => el("span", {}, el("i", { className: `part p${NAMED.indexOf(name) + 1}` }), `${name} `, el("b", {}, bytesText(n)))));
  $("reserved").textContent = `At the peak of a worker, in its ${f.phase}${device.is_gpu ? "; hatched: kept free for the driver, CUDA, NCCL and cuDNN" : "; hatched: kept free for the process itself"}.`;
}

function facts(f, device) {
  const network = networkOf(S), none = f.state === "none";
  $("most").textContent = f.most ? countText(f.most) : "No batch";
  $("mostsub").textContent = !f.entry ? "" : f.most ? `largest batch that fits, ${percent(D.margin)} kept as margin: ${countText(f.most / f.entry.replicas)} a ${f.entry.replicas === S.workers ? "worker" : "copy of the network"}` : `fits, ${percent(D.margin)} kept as margin: what the batch does not change is too large`;
  $("sent").textContent = none ? "–" : f.sent ? bytesText(f.sent) : "nothing";
  $("time").textContent = none ? "–" : f.span ? spanText(f.span) : "Not known";
  const by = f.recorded ? f.recorded.source : !f.span && !none && f.steps ? `the datasheet has no rate for ${S.precision}` : f.times?.source ? `from ${f.times.source}` : device.is_gpu ? "theory, by the card’s datasheet" : "theory, by this host’s CPU";
  const compared = f.usual && !f.recorded ? `${spanText([f.usual, f.usual]).replace(/.* to /, "")} to compare by; ` : "";
  $("timesub").textContent = none ? "" : f.steps ? `${compared}${network.length}; ${by}` : `the data set has fewer than ${countText(S.batch)} samples`;
}

// ---- the training's time over workers ----------------------------------------------------------------------

/** Times of the chosen strategy on numbers of workers: by records and what they were projected to, and by theory. */
function timesOverWorkers() {
  const network = networkOf(S), counts = new Set([...network.counts, ...aheadOf(S).map((p) => p.workers)]);
  for (let n = network.counts[0]; n <= network.most_workers; n *= 2) counts.add(n);
  const found = { theory: [], measured: [], projected: [], nearby: [] };
  for (const workers of [...counts].sort((a, b) => a - b)) {
    const f = figures({ ...S, workers });
    if (!f.steps) continue;
    if (f.times) found.theory.push([workers, f.times.low, f.times.high]);
    if (f.recorded) found[f.recorded.kind].push([workers, ...f.recorded.span]);
  }
  return found;
}

/** A round time for an axis, and its text. */
const TIMES = [0.01, 0.1, 1, 10, 60, 600, 3600, 36000, 360000, 3600000, 36000000];
const timeText = (v) => (v < 60 ? `${+v.toPrecision(2)} s` : v < 3600 ? `${+(v / 60).toPrecision(2)} min` : `${digits(v / 3600)} h`);

/** Draws the times, and says what is measured, what projected and what theory. */
function fan() {
  const times = timesOverWorkers(), all = Object.values(times).flat();
  $("over").hidden = new Set(all.map(([n]) => n)).size < 2;
  if ($("over").hidden) return;
  const counts = [...new Set(all.map(([n]) => n))].sort((a, b) => a - b), seconds = all.flatMap(([, low, high]) => [low, high]);
  const scaleOver = (values) => {
    const [low, high] = [Math.min(...values), Math.max(...values)].map(Math.log);
    return (v) => 0.03 + (0.94 * (Math.log(v) - low)) / (high - low || 1);
  };
  const x = scaleOver(counts), y = scaleOver(seconds), share = (at) => `${(100 * at).toFixed(2)}%`;
  const round = TIMES.filter((t) => t >= Math.min(...seconds) && t <= Math.max(...seconds));
  const rows = round.length > 1 ? round : [Math.min(...seconds), Math.max(...seconds)];
  const outline = (spans) => [...spans.map(([n, , high]) => [n, high]), ...spans.map(([n, low]) => [n, low]).reverse()];
  const area = (className, spans) => spans.length < 2 ? [] :
    [el("i", { className, style: `clip-path:polygon(${outline(spans).map(([n, v]) => `${share(x(n))} ${share(1 - y(v))}`)})` })];
  const bars = ["measured", "projected", "nearby"].flatMap((kind) => times[kind].map(([n, low, high]) =>
    el("i", { className: `range ${kind}`, style: `left:${share(x(n))};bottom:${share(y(low))};height:${share(y(high) - y(low))}` })));
  const last = times.measured.at(-1);
  $("times").replaceChildren(
    ...rows.map((t) => el("i", { className: "row", style: `bottom:${share(y(t))}` })),
    ...area("theory", times.theory),
    ...area("fan", last ? [last, ...times.projected.filter(([n]) => n > last[0])] : times.projected),
    ...bars,
    el("i", { className: "now", style: `left:${share(x(S.workers))}` }),
  );
  $("fan").querySelector(".ylabels").replaceChildren(...labels(rows.map((t) => [y(t), timeText(t)])));
  const every = Math.ceil(counts.length / 8);
  $("fan").querySelector(".xlabels").replaceChildren(...labels(counts.filter((_, i) => i % every === 0).map((n) => [x(n), n])));
  $("oversub").textContent = `${S.strategy} at a batch of ${countText(S.batch)}. ${timesText(times)}.`;
}

/** What each of the times is from, as a sentence. */
function timesText(times) {
  const on = (spans) => listed(spans.map(([n]) => String(n))), runs = figures(S).times?.source, parts = [];
  if (times.measured.length) parts.push(`measured on ${on(times.measured)} (dots, with 10 % to either side)`);
  if (times.projected.length) parts.push(`projected to ${on(times.projected)} from records${times.measured.length ? "" : " of this study"}: the fan is to hold 80 of 100 cases`);
  if (times.nearby.length) parts.push(`on ${on(times.nearby)} between perfect scaling and none, from the nearest record`);
  parts.push(runs ? `grey is from ${runs}` : `grey is theory, by ${deviceOf(S).is_gpu ? "the card’s datasheet" : "this host’s CPU"}: a range that no record narrows`);
  const sentence = parts.join("; ");
  return sentence[0].toUpperCase() + sentence.slice(1);
}

function table() {
  const network = networkOf(S), counts = columnsOf(network);
  const head = el("tr", {}, el("th", { scope: "col" }, "workers"), ...counts.map((n) => el("th", { scope: "col" }, String(n))));
  const rows = network.strategies.map((strategy) => el("tr", {}, el("th", { scope: "row" }, strategy), ...counts.map((workers) => {
    const choice = { ...S, strategy, workers };
    if (!entryOf(choice)) return el("td", { className: "absent" });
    const f = figures(choice), shown = f.needed === undefined ? "" : gibText(f.needed);
    const most = f.most ? `≤ ${countText(f.most)}` : f.entry ? "no batch" : "";
    const said = f.state === "none" ? `Not possible: ${f.reason}` : `${WORD[f.state]}: ${shown} GiB`;
    return el("td", {}, el("button", {
      type: "button", className: f.state, title: said, "aria-pressed": strategy === S.strategy && workers === S.workers,
      "aria-label": `${strategy} on ${workers}. ${said}. ${f.most ? `Largest batch ${countText(f.most)}` : ""}`, onclick: () => choose({ strategy, workers }),
    }, el("span", { className: "g" }, GLYPH[f.state]), shown, el("small", {}, most)));
  })));
  $("table").replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
}

function cards() {
  const network = networkOf(S), counts = columnsOf(network), strategies = network.strategies;
  const names = D.beside.includes(S.device) ? D.beside : [S.device, ...D.beside];
  const shown = names.map((name) => devicesOf(network).find((d) => d.name === name)).filter(Boolean);
  $("others").hidden = shown.length < 2;
  $("cards").replaceChildren(...(shown.length < 2 ? [] : shown).map((device) => {
    let fits = 0, all = 0;
    const cells = strategies.flatMap((strategy) => counts.map((workers) => {
      const choice = { ...S, device: device.name, strategy, workers };
      if (!entryOf(choice)) return el("i", { className: "absent" });
      const { state } = figures(choice, false);
      all += 1;
      fits += state === "fit";
      return el("i", { className: state + (strategy === S.strategy && workers === S.workers ? " on" : "") });
    }));
    return el("button", { type: "button", "aria-pressed": device.name === S.device, onclick: () => choose({ device: device.name }) },
      el("b", {}, device.name), el("span", { className: "sub" }, `${fits} of ${all} fit`),
      el("span", { className: "mini", "aria-hidden": "true", style: `grid-template-columns:repeat(${counts.length},1fr)` }, ...cells));
  }));
}

function draw() {
  const f = figures(S), device = deviceOf(S);
  $("verdict").replaceChildren(el("span", { className: `glyph ${f.state}`, "aria-hidden": "true" }, GLYPH[f.state]), verdict(f, device));
  $("hint").textContent = hint(f);
  $("kept").textContent = form.checkpointing.disabled ? `In ${S.precision} ${S.checkpointing ? "every" : "no"} cell of ${S.network} has it.` : "";
  $("about").textContent = networkOf(S).about;
  bar(f, device);
  facts(f, device);
  fan();
  table();
  cards();
  history.replaceState(null, "", `#${new URLSearchParams(S)}`);
}

/** Takes a choice from the table or the cards, and leaves the focus where it was. */
function choose(change) {
  const place = document.activeElement?.getAttribute("aria-label") ?? document.activeElement?.textContent;
  Object.assign(S, change);
  show();
  const same = [...document.querySelectorAll("#table button, #cards button")].find((b) => (b.getAttribute("aria-label") ?? b.textContent) === place);
  (same || document.querySelector("#table button[aria-pressed=true]"))?.focus({ preventScroll: true });
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", (event) => {
  const { name, value, checked } = event.target;
  if (name === "slider") S.batch = BATCHES[value];
  else if (name === "checkpointing") S.checkpointing = Number(checked);
  else if (name === "workers" || name === "batch") S[name] = Number(value);
  else if (name === "count") S.workers = Number(value);
  else S[name] = value;
  if (name === "network") S.batch = networkOf(S).batch;
  if (event.target.type === "number" && !(event.target.checkValidity() && value)) return; // while it is typed
  const typed = document.activeElement;
  settle();
  show();
  if (name === "workers" || name === "precision") form.querySelector(`input[name=${name}]:checked`)?.focus();
  else typed?.focus?.();
});
addEventListener("hashchange", () => { readAddress(); show(); });
readAddress();
show();
