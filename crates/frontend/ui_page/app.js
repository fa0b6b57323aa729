// The page /ui: asks /v2/live and /v2/timeline once a second, and draws the answers.
"use strict";

const EVERY_MS = 1000;
// Seconds of samples that the page keeps, and shows in charts over time.
const KEPT_S = 300;
// How often the page asks about the cluster.
const CLUSTER_MS = 5000;
// The server remembers launches for so long.
const PAST_S = 60;
const OBJECTIVE = 0.99;
const COLORS = ["#3b7dd8", "#d9822b", "#2f9e6e", "#b25ac9", "#c94f4f", "#7a8b2f", "#2aa5b5", "#a0703c", "#6f6be0", "#d1589a"];
const REASONS = {
  late: "answered after the deadline", queue_full: "the queue was full", deadline_impossible: "one run alone takes longer than the deadline leaves",
  deadline_hopeless: "could no longer end by the deadline", window_drop: "given up for a larger batch behind it", queue_timeout: "longer in the queue than allowed",
  timeout: "the client's own timeout", engine_error: "the model failed", run_ended: "the run was ended", lost: "the backend was lost",
};
// These are not missed requests: the client or the owner took them back, or the model failed.
const NOT_MISSED = ["cancelled", "unloaded", "engine_error", "run_ended", "lost"];

const $ = (id) => document.getElementById(id);
const state = { samples: [], cluster_ms: 0, history: new Map(), launches: new Map(), clock: null, paused: false, back_s: 0, chosen: null, missed: null, pointed: null, rules: {}, charts: new Map(), boxes: [], backends: [], key: sessionStorage.getItem("key") || "" };

// -- figures

const sum = (numbers) => numbers.reduce((all, number) => all + number, 0);
const fixed = (number, digits) => number.toFixed(digits);
const percent = (share) => (share === null ? "no requests" : share >= 1 ? "100%" : fixed(100 * share, share > 0.999 ? 3 : 2) + "%");
const per_s = (rate) => (rate >= 100 ? fixed(rate, 0) : rate >= 1 ? fixed(rate, 1) : fixed(rate, 2)) + "/s";
const milliseconds = (ms) => (ms === null ? "" : ms >= 100000 ? fixed(ms / 1000, 0) + " s" : ms >= 1000 ? fixed(ms / 1000, 2) + " s" : ms >= 10 ? fixed(ms, 0) + " ms" : ms >= 1 ? fixed(ms, 1) + " ms" : ms === 0 ? "0" : ms >= 0.001 ? fixed(1000 * ms, 0) + " µs" : "under 1 µs");
const grade = (share) => (share === null ? "" : share >= OBJECTIVE ? "good" : share >= 0.95 ? "warn" : "bad");
const name_of = (model) => model.model + (model.version && model.version !== "1" ? " " + model.version : "");
const key_of = (model) => model.model + "\n" + model.version;

// The color of a model: the same on all devices and after a reload of the page.
function color_of(model) {
  let hash = 7;
  for (const letter of model) hash = (31 * hash + letter.codePointAt(0)) >>> 0;
  const taken = color_of.taken || (color_of.taken = new Map());
  if (!taken.has(model)) {
    const free = COLORS.filter((color) => ![...taken.values()].includes(color));
    const colors = free.length ? free : COLORS;
    taken.set(model, colors[hash % colors.length]);
  }
  return taken.get(model);
}

const missed_of = (model) => model.late + sum(Object.entries(model.unanswered).filter(([reason]) => !NOT_MISSED.includes(reason)).map(([, count]) => count));

// How many requests of a model ended so, `late` included.
const count_of = (model, reason) => (!model ? 0 : reason === "late" ? model.late : model.unanswered[reason] || 0);

// What a model did between two samples; `null` before there are two.
function between(model, seconds) {
  const now = state.samples.at(-1);
  const from = state.samples.find((sample) => now.wall_ms - sample.wall_ms <= 1000 * seconds + 500);
  if (!from || from === now) return null;
  const before = from.by_key.get(key_of(model));
  const since = (now.wall_ms - from.wall_ms) / 1000;
  const less = (number, earlier) => Math.max(0, number - (earlier || 0));
  const parts = (its, earlier) => its.map((count, place) => less(count, earlier && earlier[place]));
  const in_time = less(model.in_time, before && before.in_time), missed = less(missed_of(model), before && missed_of(before));
  const reasons = Object.fromEntries(["late", ...Object.keys(model.unanswered)].map((reason) => [reason, less(count_of(model, reason), count_of(before, reason))]));
  return { seconds: since, in_time, missed, offered: in_time + missed, reasons, latency: parts(model.latency, before && before.latency), batches: parts(model.batches, before && before.batches) };
}

// The value below which a share of a histogram lies, between the bounds of its part.
function quantile(parts, bounds, share) {
  const all = sum(parts);
  if (!all) return null;
  let left = share * all;
  for (let place = 0; place < parts.length; place++) {
    if (parts[place] && left <= parts[place]) {
      const low = place ? bounds[place - 1] : 0, high = place < bounds.length ? bounds[place] : low;
      return low + (high - low) * (left / parts[place]);
    }
    left -= parts[place];
  }
  return bounds.at(-1);
}

// Offered requests and those in time of the last seconds, by the history that the server sent at first
// and by what came since.
function attainment(models, seconds) {
  let offered = 0, in_time = 0;
  const first = state.samples[0], now = state.samples.at(-1);
  const since_first = (now.wall_ms - first.wall_ms) / 1000;
  for (const model of models) {
    const lately = between(model, Math.min(seconds, since_first));
    if (lately) (offered += lately.offered), (in_time += lately.in_time);
    for (const [ago, count, good] of state.history.get(key_of(model)) || []) {
      if (ago + since_first <= seconds) (offered += count), (in_time += good);
    }
  }
  return offered ? in_time / offered : null;
}

// -- asking

async function ask(path) {
  const headers = state.key ? { authorization: "Bearer " + state.key } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 401 || answer.status === 403) {
    $("login").hidden = false;
    throw new Error(state.key ? "the key has no scope `read`, or is for some models alone" : "an API key is needed");
  }
  const told = await answer.json().catch(() => ({ error: "status " + answer.status }));
  if (!answer.ok) throw Object.assign(new Error(told.error || "status " + answer.status), { status: answer.status });
  $("login").hidden = true;
  return told;
}

async function look() {
  const live = await ask("/v2/live" + (state.samples.length ? "" : "?history=true"));
  live.by_key = new Map(live.models.map((model) => [key_of(model), model]));
  const last = state.samples.at(-1);
  // The server was started anew: its counts begin again.
  if (last && live.now_ns < last.now_ns) (state.samples = []), state.launches.clear();
  if (!state.samples.length) for (const model of live.models) if (model.history) state.history.set(key_of(model), model.history);
  state.samples.push(live);
  // The first sample stays, since the history ends there.
  while (live.wall_ms - state.samples[0].wall_ms > 1000 * KEPT_S) state.samples.splice(1, 1);
  // All that the server remembers at first, and then what is new since the last answer.
  const since_s = last && state.launches.size ? (live.now_ns - state.clock) / 1e9 + 0.5 : PAST_S;
  if (live.device_busy_s.length) take_launches(await ask("/v2/timeline?seconds=" + Math.min(PAST_S, Math.max(0.5, since_s))));
  if (state.chosen) await look_at_missed(live.by_key.get(state.chosen));
}

// The requests of the chosen model that missed. A model that is not in service has none.
async function look_at_missed(model) {
  const path = model && `/v2/models/${encodeURIComponent(model.model)}${model.version ? "/versions/" + encodeURIComponent(model.version) : ""}/missed`;
  const told = await (path ? ask(path) : Promise.reject(new Error("the model is gone"))).catch((error) => ({ error: error.message, requests: [] }));
  if (model && state.chosen === key_of(model)) state.missed = told;
}

function take_launches(timeline) {
  for (const past of timeline.devices) {
    const place = device_key(past), device = state.launches.get(place) || new Map();
    state.launches.set(place, device);
    for (const launch of past.launches) {
      const row = `${past.model}\n${past.version}\n${past.partition}\n${launch.lane}`;
      device.set(`${row}\n${launch.batch}\n${launch.segments[0]}\n${launch.begin_ns}`, { ...launch, row, model: past.model, version: past.version, partition: past.partition, policy: past.policy });
    }
    for (const [key, launch] of device) if (timeline.now_ns - launch.end_ns > 1e9 * PAST_S) device.delete(key);
  }
  state.clock = timeline.now_ns;
  state.rules = timeline.rules;
  state.backends = timeline.backends || [];
}

// A device, which a cluster knows by its backend, and its name for people.
const device_key = ({ backend, device }) => (backend ? `${backend}-${device}` : String(device));
const device_name = (key) => (/^\d+$/.test(key) ? "Device " + key : key.replace(/-(\d+)$/, ", device $1"));
const devices_of = (live) => live.device_busy_s.map((_, place) => device_key(live.device_names?.[place] || { device: place }));

// How exact the times of the backends' launches are, in one clock.
function clocks() {
  const errors = state.backends.filter((its) => its.error_ns !== null).map((its) => its.error_ns / 1e6), names = (its) => its.map((one) => one.backend).join(", ");
  const unknown = state.backends.filter((its) => its.error_ns === null), cut = state.backends.filter((its) => !its.complete);
  return (errors.length ? `; times of backends are right to ${milliseconds(Math.max(...errors))}` : "") + (unknown.length ? `; the clock of ${names(unknown)} is not known yet` : "") + (cut.length ? `; the earliest launches of ${names(cut)} are missing` : "");
}

// -- drawing

function element(tag, text, more = {}) {
  const made = Object.assign(document.createElement(tag), more);
  if (text !== undefined) made.textContent = text;
  return made;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function tile(title, value, kind = "") {
  const box = element("div");
  box.append(element("dt", title), element("dd", value, { className: kind + (value.length > 14 ? " long" : "") }));
  return box;
}

function draw_tiles(live) {
  const now = live.models.map((model) => [model, between(model, 10)]).filter(([, lately]) => lately);
  const seconds = now.length ? now[0][1].seconds : 1;
  const offered = sum(now.map(([, lately]) => lately.offered)), in_time = sum(now.map(([, lately]) => lately.in_time));
  const shares = [10, 300, 3600].map((span) => attainment(live.models, span));
  const worst = live.models.map((model) => [attainment([model], 300), model]).filter(([share]) => share !== null).sort((a, b) => a[0] - b[0])[0];
  const burn = shares[2] === null ? null : (1 - shares[2]) / (1 - OBJECTIVE);
  const ready = live.models.filter((model) => model.state === "READY").length;
  $("tiles").replaceChildren(
    tile("In time now (10 s)", percent(shares[0]), grade(shares[0])), tile("In time, 5 minutes", percent(shares[1]), grade(shares[1])),
    tile("In time, 1 hour", percent(shares[2]), grade(shares[2])),
    tile("Burn rate, 1 hour (objective 99%)", burn === null ? "no requests" : fixed(burn, 2), burn === null ? "" : burn <= 1 ? "good" : burn <= 6 ? "warn" : "bad"),
    tile("Offered", per_s(offered / seconds)), tile("Goodput", per_s(in_time / seconds)),
    tile("Worst model, 5 minutes", worst ? `${name_of(worst[1])} ${percent(worst[0])}` : "no requests", worst ? grade(worst[0]) : ""),
    tile("Models in service", `${ready} of ${live.models.length}`, ready === live.models.length ? "good" : "bad"),
  );
}

// A chart that keeps its place and takes new data. `lines`: label, color, and whether it is dashed (true) or
// has points alone ("points").
function chart(where, id, title, lines, data, unit, options = {}) {
  let known = state.charts.get(id);
  const shape = JSON.stringify([lines, matchMedia("(prefers-color-scheme: dark)").matches]);
  if (known && (known.shape !== shape || !known.box.isConnected)) {
    known.plot.destroy();
    known.box.remove();
    known = null;
  }
  if (!known) {
    const box = element("div", undefined, { className: "chart" });
    box.append(element("h3", title), element("div"), element("p", options.note || ""));
    where.append(box);
    const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
    const plot = new uPlot({
      width: Math.max(200, box.clientWidth - 24), height: 190, legend: { live: true }, cursor: { drag: { x: false, y: false } },
      scales: { x: { time: !options.numbers, ...(options.x || {}) }, y: { range: (_, low, high) => [0, options.most || Math.max(high * 1.1, options.least || 1e-9)] } },
      axes: [{ ...axis, values: options.ticks }, { ...axis, size: 62, values: (_, splits) => splits.map(unit) }],
      series: [{ label: options.x_label || "time" }, ...lines.map(([label, color, dashed]) => ({
        label, stroke: color, width: 2, dash: dashed === true ? [6, 4] : undefined, spanGaps: true,
        points: dashed === "points" ? { show: true, size: 11, fill: color, stroke: style("--ground") } : { show: false }, value: (_, value) => (value === null || value === undefined ? "" : unit(value)),
        ...(options.bars ? { paths: uPlot.paths.bars({ size: [0.8, 60] }), fill: color } : {}),
      }))],
    }, data, box.children[1]);
    state.charts.set(id, (known = { plot, box, shape }));
    new ResizeObserver(() => plot.setSize({ width: Math.max(200, box.clientWidth - 24), height: 190 })).observe(box);
  }
  known.plot.setData(data);
}

// Rates over time: what `measure` gives for each pair of neighbouring samples.
function over_time(measure) {
  const times = [], values = [];
  for (let place = 1; place < state.samples.length; place++) {
    const [before, now] = [state.samples[place - 1], state.samples[place]];
    times.push(now.wall_ms / 1000);
    values.push(measure(before, now, (now.wall_ms - before.wall_ms) / 1000));
  }
  return [times, ...(values[0] || []).map((_, line) => values.map((row) => row[line]))];
}

const total = (sample, figure) => sum(sample.models.filter((model) => !model.ensemble || !sample.models.some((other) => !other.ensemble)).map(figure));

function draw_overall(live) {
  if (state.samples.length < 3) return;
  const rates = over_time((before, now, seconds) => {
    const in_time = Math.max(0, total(now, (model) => model.in_time) - total(before, (model) => model.in_time)) / seconds;
    const missed = Math.max(0, total(now, missed_of) - total(before, missed_of)) / seconds;
    return [in_time + missed, in_time, missed];
  });
  chart($("overall"), "rates", "Requests a second", [["offered", style("--quiet"), true], ["in time", style("--good")], ["missed", style("--bad")]], rates, (value) => fixed(value, value < 10 ? 1 : 0), { least: 1 });
  // Devices of a cluster come and go.
  const names = devices_of(live), of = (sample) => new Map(devices_of(sample).map((name, place) => [name, sample.device_busy_s[place]]));
  const busy = over_time((before, now, seconds) => {
    const [then, its] = [of(before), of(now)];
    return names.map((name) => (its.has(name) && then.has(name) ? Math.min(1, Math.max(0, its.get(name) - then.get(name)) / seconds) : null));
  });
  const lines = names.map((name, place) => [device_name(name).replace(/^D/, "d"), COLORS[place % COLORS.length]]);
  if (lines.length) chart($("overall"), "busy", "Busy share of the devices", lines, busy, (value) => fixed(100 * value, 0) + "%", { most: 1 });
}

// -- the timeline of devices

function rows_of(device) {
  const rows = [...new Set([...device.values()].map((launch) => launch.row))].sort();
  return new Map(rows.map((row, place) => [row, place]));
}

function draw_timelines() {
  const span = Number($("span").value), end = state.clock - 1e9 * state.back_s, begin = end - 1e9 * span;
  state.boxes = [];
  const devices = [...state.launches].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  if (!devices.length) {
    $("timelines").replaceChildren(element("p", "No model has run in the last minute."));
    return;
  }
  const models = [...new Set(devices.flatMap(([, device]) => [...device.values()].map((launch) => launch.model)))].sort();
  $("legend").replaceChildren(...models.map((model) => {
    const entry = element("li");
    const mark = element("i");
    mark.style.background = color_of(model);
    const ran = sum(devices.map(([, device]) => sum([...device.values()].filter((launch) => launch.model === model).map((launch) => Math.max(0, Math.min(end, launch.end_ns) - Math.max(begin, launch.begin_ns))))));
    entry.append(mark, `${model} ${fixed((100 * ran) / (end - begin) / devices.length, 0)}%`);
    entry.title = "The part of the shown time in which its launches ran, on average over the devices";
    return entry;
  }));
  const boxes = devices.map(([number, device]) => {
    const rows = rows_of(device);
    const id = "device-" + number;
    const box = $(id) || element("div", undefined, { className: "device", id });
    if (!box.children.length) {
      const canvas = element("canvas");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-describedby", "launch");
      canvas.tabIndex = 0;
      box.append(element("h3", device_name(number)), canvas);
      canvas.addEventListener("pointermove", point);
      canvas.addEventListener("pointerdown", point);
      canvas.addEventListener("keydown", step_to_launch);
    }
    return [box, number, device, rows];
  });
  if ([...$("timelines").children].map((box) => box.id).join() !== boxes.map(([box]) => box.id).join()) $("timelines").replaceChildren(...boxes.map(([box]) => box));
  for (const [box, number, device, rows] of boxes) draw_device(box.querySelector("canvas"), number, device, rows, begin, end);
  $("shown").textContent = (state.back_s ? `until ${fixed(state.back_s, 1)} s ago` : "until now") + clocks();
}

function draw_device(canvas, number, device, rows, begin, end) {
  const width = canvas.clientWidth, height = Math.max(1, rows.size) * 22 + 20, scale = devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif";
  const x = (ns) => ((ns - begin) / (end - begin)) * width;
  pen.strokeStyle = style("--line");
  for (const [name, row] of rows) {
    const [model, version, partition, lane] = name.split("\n");
    pen.fillStyle = style("--quiet");
    pen.fillText(`${model}${version === "1" ? "" : " " + version}, lane ${lane}${partition === "0" ? "" : ", partition " + partition}`, 4, row * 22 + 15);
    pen.beginPath();
    pen.moveTo(0, row * 22 + 21.5);
    pen.lineTo(width, row * 22 + 21.5);
    pen.stroke();
  }
  let shown = 0, busy = 0;
  for (const launch of device.values()) {
    if (launch.end_ns < begin || launch.begin_ns > end) continue;
    shown++;
    const left = x(launch.begin_ns), wide = Math.max(1, x(launch.end_ns) - left), top = rows.get(launch.row) * 22 + 2;
    busy += Math.min(end, launch.end_ns) - Math.max(begin, launch.begin_ns);
    pen.fillStyle = color_of(launch.model);
    pen.fillRect(left, top, wide, 18);
    if (wide > 4) {
      pen.strokeStyle = style("--ground");
      pen.strokeRect(left + 0.5, top + 0.5, wide - 1, 17);
    }
    const label = String(launch.rows);
    if (wide > pen.measureText(label).width + 6) {
      pen.fillStyle = "#fff";
      pen.fillText(label, left + 4, top + 13);
    }
    state.boxes.push({ canvas, left, top, right: left + Math.max(wide, 3), launch });
  }
  const pointed = state.boxes.find((box) => box.canvas === canvas && same_launch(box.launch, state.pointed));
  if (pointed) draw_pointed(pen, pointed, x, height);
  pen.fillStyle = style("--quiet");
  const seconds = (end - begin) / 1e9;
  for (let place = 0; place <= 4; place++) {
    const text = place === 4 ? (state.back_s ? `-${fixed(state.back_s, 1)} s` : "now") : `-${fixed(seconds * (1 - place / 4) + state.back_s, seconds < 2 ? 2 : 1)} s`;
    const at = (width * place) / 4;
    pen.textAlign = place === 0 ? "left" : place === 4 ? "right" : "center";
    pen.fillText(text, at, height - 4);
  }
  pen.textAlign = "left";
  canvas.setAttribute("aria-label", `${device_name(number)}: ${shown} launches on ${rows.size} lanes in ${seconds} s`);
}

const same_launch = (one, other) => other && one.row === other.row && one.batch === other.batch && one.begin_ns === other.begin_ns;

// The outline of the launch that is pointed at, and its earliest deadline on the axis of time.
function draw_pointed(pen, { left, top, right, launch }, x, height) {
  pen.strokeStyle = style("--text");
  pen.lineWidth = 2;
  pen.strokeRect(left - 1, top - 1, right - left + 2, 20);
  pen.lineWidth = 1;
  if (!launch.deadline_ns) return;
  const at = x(launch.deadline_ns), late = launch.end_ns > launch.deadline_ns;
  pen.strokeStyle = pen.fillStyle = style(late ? "--bad" : "--good");
  pen.setLineDash([4, 3]);
  pen.beginPath();
  pen.moveTo(at, 0);
  pen.lineTo(at, height - 16);
  pen.moveTo(right, top + 9);
  pen.lineTo(at, top + 9);
  pen.stroke();
  pen.setLineDash([]);
  pen.beginPath();
  pen.moveTo(at - 5, 0);
  pen.lineTo(at + 5, 0);
  pen.lineTo(at, 8);
  pen.fill();
}

function show_launch(launch) {
  state.pointed = launch;
  $("launch").textContent = describe(launch);
  draw_timelines();
}

// The arrow keys up and down go from launch to launch of a device that has the focus.
function step_to_launch(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !["ArrowUp", "ArrowDown"].includes(event.key)) return;
  event.preventDefault();
  if (!state.paused) pause();
  const shown = state.boxes.filter((box) => box.canvas === event.currentTarget).map((box) => box.launch).sort((a, b) => a.begin_ns - b.begin_ns || a.batch - b.batch);
  const place = shown.findIndex((launch) => same_launch(launch, state.pointed));
  const next = place < 0 ? shown.length - 1 : place + (event.key === "ArrowDown" ? 1 : -1);
  if (shown[next]) show_launch(shown[next]);
}

function point(event) {
  const box = event.currentTarget.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const found = state.boxes.find((one) => one.canvas === event.currentTarget && x >= one.left - 1 && x <= one.right + 1 && y >= one.top && y <= one.top + 18);
  if (found && !same_launch(found.launch, state.pointed)) show_launch(found.launch);
}

// A client's text on one line. Characters that break a line, or change the order of the others, are shown by their numbers.
const plain = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (character) => `\\u{${character.codePointAt(0).toString(16)}}`);

// A request by its number in the decision log, and by the client's id if it has one.
const named = (number, id) => (id ? `r${number} (${plain(id)})` : "r" + number);

function describe(launch) {
  const took = (launch.end_ns - launch.begin_ns) / 1e6, ago = (state.clock - launch.end_ns) / 1e9;
  const padding = launch.computed_rows > launch.rows ? ` (${launch.computed_rows} were computed)` : "";
  const steps = (launch.steps || []).map((step) => `step ${step.step} of ${step.pipeline} #${step.request}`).join(", ");
  const ran = `${launch.model} version ${launch.version}, lane ${launch.lane}, policy ${launch.policy}: batch ${launch.granted ?? launch.batch} of ${launch.rows} item${launch.rows === 1 ? "" : "s"}${padding} ran for ${milliseconds(took)} and ended ${fixed(Math.max(0, ago), 2)} s ago${steps ? "; " + steps : ""}.`;
  const more = launch.members - launch.requests.length;
  const requests = `Request${launch.members === 1 ? "" : "s"} ${launch.requests.map((number, place) => named(number, launch.ids?.[place])).join(", ")}${more > 0 ? ` and ${more} more` : ""}.`;
  return [ran, why_then(launch), deadline_of(launch), requests].filter(Boolean).join(" ");
}

// Why the batch left when it did, by the rule that the scheduler named.
function why_then({ left, granted, policy, begin_ns }) {
  if (!left) return granted === undefined ? `The device policy ${policy} made the batch.` : "The scheduler of another process let the batch leave.";
  const waited = left.rule === "device" && left.window_ns ? ` (since ${milliseconds(Math.max(0, begin_ns - left.window_ns) / 1e6)} before it began)` : "";
  const behind = left.behind ? ` ${left.behind} items stayed in the queue.` : "";
  return `It left then because ${state.rules[left.rule] || left.rule}${waited}.${behind}`;
}

function deadline_of({ deadline_ns, end_ns }) {
  if (!deadline_ns) return "None of its requests has a deadline.";
  const left = (deadline_ns - end_ns) / 1e6;
  return `It ended ${milliseconds(Math.abs(left))} ${left < 0 ? "after" : "before"} its earliest deadline.`;
}

// -- models

function draw_table(live) {
  const heads = ["Model", "State", "SLO", "In time", "Requests", "p50", "p99", "Mean batch", "Waiting", "Missed, and why"];
  if (!$("table").tHead.rows.length) {
    const row = $("table").tHead.insertRow();
    row.append(...heads.map((head, place) => element("th", head, { scope: "col", className: place === heads.length - 1 ? "text" : "" })));
    $("table").tHead.parentElement.setAttribute("aria-label", "Models, over the last 10 s");
  }
  const rows = live.models.map((model) => {
    const row = element("tr"), lately = between(model, 10), share = lately && lately.offered ? lately.in_time / lately.offered : null;
    const name = element("td"), button = element("button", name_of(model) + (model.ensemble ? " (ensemble)" : ""), { type: "button" });
    button.addEventListener("click", () => choose(key_of(model)));
    name.append(button);
    const launches = lately ? sum(lately.batches) : 0;
    const batch = launches && !model.ensemble ? fixed(sum(lately.batches.map((count, place) => count * middle(live.batch_bounds, place))) / launches, 1) : "";
    const time = (q) => (lately ? milliseconds(quantile(lately.latency, live.latency_bounds_ms, q)) : "");
    const reasons = lately ? Object.entries(lately.reasons).filter(([, count]) => count).sort((a, b) => b[1] - a[1]).map(([reason, count]) => `${count} ${reason}`).join(", ") : "";
    const ready = model.state === "READY";
    row.append(
      name, element("td", model.state.toLowerCase() + (model.rollout ? `, ${model.rollout}` : ""), { className: ready ? "good" : "bad", title: model.reason || "" }),
      element("td", model.slo_ms === null ? "none" : milliseconds(model.slo_ms)), element("td", share === null ? "" : percent(share), { className: grade(share) }),
      element("td", lately ? per_s(lately.offered / lately.seconds) : ""), element("td", time(0.5)), element("td", time(0.99)), element("td", batch),
      element("td", live.device_busy_s.length ? String(model.waiting) : ""), element("td", ready ? reasons : model.reason || "", { className: "text" }),
    );
    if (state.chosen === key_of(model)) row.className = "chosen";
    return row;
  });
  // The focus stays where it was.
  const place = [...$("table").tBodies[0].querySelectorAll("button")].indexOf(document.activeElement);
  $("table").tBodies[0].replaceChildren(...rows);
  if (place >= 0) $("table").tBodies[0].querySelectorAll("button")[place]?.focus();
}

// The bounds of sizes are powers of two: sizes of a part are taken for their middle.
const middle = (bounds, place) => (place === 0 ? 1 : place >= bounds.length ? bounds.at(-1) : place === 1 ? 2 : (bounds[place - 1] + 1 + bounds[place]) / 2);

function choose(key) {
  state.chosen = state.chosen === key ? null : key;
  state.missed = null;
  for (const id of [...state.charts.keys()].filter((id) => id.startsWith("model-"))) {
    state.charts.get(id).plot.destroy();
    state.charts.delete(id);
  }
  $("model").replaceChildren();
  draw();
  if (!state.chosen) return;
  $("model").focus();
  look_at_missed(state.samples.at(-1).by_key.get(key)).then(draw);
}

function draw_model(live) {
  const model = live.by_key.get(state.chosen);
  if (!model || state.samples.length < 3) return;
  if (!$("model").children.length) $("model").append(element("h3", name_of(model)), element("p"), element("div", undefined, { className: "charts" }), element("div", undefined, { className: "wide", id: "missed", tabIndex: 0 }));
  const [, about, charts] = $("model").children;
  draw_missed();
  about.textContent = `Policy ${model.policy || "none"}, at most ${model.max_batch} items in a batch, ${model.slo_ms === null ? "no SLO" : "SLO " + milliseconds(model.slo_ms)}.`;
  const [blue, orange] = COLORS;
  const pair = (before, now) => [before.by_key.get(state.chosen), now.by_key.get(state.chosen)];
  const latencies = over_time((before, now) => {
    const [then, its] = pair(before, now);
    const parts = its ? its.latency.map((count, place) => Math.max(0, count - (then ? then.latency[place] : 0))) : [];
    return [quantile(parts, live.latency_bounds_ms, 0.5), quantile(parts, live.latency_bounds_ms, 0.99), model.slo_ms];
  });
  const lines = [["p50", blue], ["p99", orange], ["SLO", style("--bad"), true]];
  chart(charts, "model-latency", "Time from arrival to result", lines, latencies, milliseconds, { note: "Of requests that got a result, by the parts of the server's histogram." });
  const reasons = Object.keys(REASONS).filter((reason) => count_of(model, reason));
  if (reasons.length) {
    const stacked = over_time((before, now, seconds) => {
      const [then, its] = pair(before, now);
      let all = 0;
      return reasons.map((reason) => (all += Math.max(0, count_of(its, reason) - count_of(then, reason)) / seconds));
    });
    const names = reasons.map((reason, place) => [reason, COLORS[(place + 3) % COLORS.length]]);
    chart(charts, "model-missed", "Not in time, each second, one reason on the other", names, stacked, (value) => fixed(value, 1), { note: reasons.map((reason) => `${reason}: ${REASONS[reason]}`).join("; ") + ".", least: 1 });
  }
  if (!model.ensemble) {
    const lately = between(model, 60);
    const shown = lately ? lately.batches : model.batches, places = shown.map((_, place) => place);
    const name = (place) => (place >= live.batch_bounds.length ? ">" + live.batch_bounds.at(-1) : place < 2 ? String(live.batch_bounds[place]) : `${live.batch_bounds[place - 1] + 1}-${live.batch_bounds[place]}`);
    chart(charts, "model-batches", "Launches by size, last minute", [["launches", blue]], [places, shown], (value) => fixed(value, 0), { numbers: true, bars: true, ticks: (_, splits) => splits.map((place) => (Number.isInteger(place) ? name(place) : "")), x: { range: [-0.6, places.length - 0.4] }, x_label: "size (part)", note: `The largest batch has ${model.max_batch} items.`, least: 1 });
    const sizes = model.profile.map(([size]) => size), at_load = new Map(model.profile_at_load);
    chart(charts, "model-profile", "Time of a batch by its size", [["as refined", blue], ["at load", orange, true]], [sizes, model.profile.map(([, ms]) => ms), sizes.map((size) => at_load.get(size) ?? null)], milliseconds, { numbers: true, x_label: "items", note: (model.slowdown === null ? "" : `At the sizes that ran, a batch takes ${fixed(model.slowdown, 2)} times as long as when the model was loaded. `) + "The scheduler plans with the refined times." });
  }
}

// The last requests of the chosen model that missed. Ids are the clients' text: they become text nodes.
function draw_missed() {
  const told = state.missed, where = $("missed");
  if (!told) return;
  const shape = JSON.stringify(told);
  if (where.dataset.shape === shape) return;
  where.dataset.shape = shape;
  const title = element("h3", "The last requests that missed");
  if (!told.requests.length) {
    where.replaceChildren(title, element("p", told.error ? `They are not known: ${told.error}` : "None was late, dropped, refused or failed since the model was loaded."));
    return;
  }
  const of = (left) => (left === null ? "none" : `${milliseconds(Math.abs(left))} ${left < 0 ? "late" : "left"}`);
  const table = table_of("The last requests that missed", ["-request", "ended", "took", "deadline", "-reason", "-why"], told.requests.map((request) => [
    plain(request.id || "") || request.trace || (request.number === undefined ? "no id" : "r" + request.number), new Date(request.ended_ms).toLocaleTimeString(), milliseconds(request.took_ms), of(request.left_ms), request.reason, request.why,
  ]));
  told.requests.forEach((request, place) => {
    const { cells } = table.tBodies[0].rows[place];
    if (request.trace) cells[0].title = "trace " + request.trace;
    if (request.left_ms !== null && request.left_ms < 0) cells[3].className = "bad";
    cells[4].title = REASONS[request.reason] || "";
    if (request.command) cells[5].append(element("br"), element("code", request.command, { title: "Add the folder of --decision-log, unless it is `decisions`" }));
  });
  where.replaceChildren(title, table);
}

// -- pipelines and tenants

// A table with a caption. `heads`: names; names that begin with "-" are of texts.
function table_of(label, heads, rows) {
  const table = element("table"), [thead, tbody] = [element("thead"), element("tbody")], head = element("tr");
  table.setAttribute("aria-label", label);
  const is_text = heads.map((name) => name.startsWith("-"));
  head.append(...heads.map((name, place) => element("th", name.replace(/^-/, ""), { scope: "col", className: is_text[place] ? "text" : "" })));
  thead.append(head);
  for (const cells of rows) {
    const row = element("tr");
    row.append(...cells.map((cell, place) => element("td", cell, { className: is_text[place] ? "text" : "" })));
    tbody.append(row);
  }
  table.append(thead, tbody);
  return table;
}

// What a step did in the last minute.
function step_lately(model, place) {
  const now = state.samples.at(-1), from = state.samples.find((sample) => now.wall_ms - sample.wall_ms <= 60500);
  const step = model.steps[place], before = from && from !== now ? from.by_key.get(key_of(model))?.steps?.[place] : undefined;
  const less = (figure) => Math.max(0, step[figure] - (before ? before[figure] : 0));
  return Object.fromEntries(["done", "waited_s", "ran_s", "dropped", "failed"].map((figure) => [figure, less(figure)]));
}

function draw_pipelines(live) {
  const pipelines = live.models.filter((model) => model.steps);
  $("pipelines").hidden = !pipelines.length;
  $("pipelines-body").replaceChildren(...pipelines.map((model) => {
    const lately = model.steps.map((_, place) => step_lately(model, place));
    const times = lately.map((step) => (step.done ? (1000 * (step.waited_s + step.ran_s)) / step.done : 0)), all = sum(times) || 1;
    const box = element("div", undefined, { className: "device" }), bar = element("div", undefined, { className: "parts" });
    const wide = element("div", undefined, { className: "wide" });
    model.steps.forEach((step, place) => {
      const part = element("span", `${place} ${step.model}`, { title: `step ${place}, ${step.model}: ${milliseconds(times[place])} of ${milliseconds(all)}` });
      part.style.flexGrow = times[place];
      part.style.background = color_of(step.model);
      if (times[place]) bar.append(part);
    });
    const budget = (step) => `${fixed(100 * step.share, 0)}%${model.slo_ms === null ? "" : " = " + milliseconds(step.share * model.slo_ms)}`;
    const mean = (step, figure) => (step.done ? milliseconds((1000 * step[figure]) / step.done) : "");
    wide.append(table_of(`Steps of ${name_of(model)}, last minute`, ["-step", "-model", "share of the budget", "mean wait", "mean run", "share of the time", "done", "dropped", "failed"], model.steps.map((step, place) => [
      String(place), step.model, budget(step), mean(lately[place], "waited_s"), mean(lately[place], "ran_s"), lately[place].done ? fixed((100 * times[place]) / all, 0) + "%" : "",
      String(lately[place].done), String(lately[place].dropped), String(lately[place].failed),
    ])));
    box.append(element("h3", name_of(model)), element("p", `${model.slo_ms === null ? "No SLO" : "SLO " + milliseconds(model.slo_ms)}. Where the time of its requests went in the last minute:`), bar, wide);
    return box;
  }));
}

function draw_tenants(live) {
  const tenants = live.tenants || [];
  $("tenants").hidden = !tenants.length;
  if (!tenants.length) return;
  const now = state.samples.at(-1), from = state.samples.find((sample) => now.wall_ms - sample.wall_ms <= 60500);
  const seconds = Math.max(1e-3, (now.wall_ms - from.wall_ms) / 1000), devices = live.device_busy_s.length || 1;
  const rows = tenants.map((tenant) => {
    const before = from === now ? tenant : (from.tenants || []).find((other) => other.tenant === tenant.tenant);
    const less = (figure) => Math.max(0, tenant[figure] - (before ? before[figure] : 0));
    const percents = (share) => fixed(100 * share, 1) + "%";
    const use = percents(less("device_s") / seconds / devices);
    // A cluster keeps no shares.
    if (live.in_cluster) return [tenant.tenant, use, per_s(less("within") / seconds)];
    return [tenant.tenant, percents(tenant.share), tenant.quota === null ? "none" : percents(tenant.quota), use, per_s(less("within") / seconds), per_s(less("beyond") / seconds), String(less("refused"))];
  });
  const heads = live.in_cluster ? ["-tenant", "use of the devices", "requests"] : ["-tenant", "share", "quota", "use of the devices", "within its share", "beyond", "refused"];
  $("tenants-body").replaceChildren(table_of("Tenants, last minute", heads, rows));
}

// -- what if

const asked_factor = (id) => 2 ** Number($(id).value);
const times = (factor) => `${factor >= 10 ? fixed(factor, 0) : fixed(factor, 2)}×`;

function tell_asked() {
  for (const name of ["rate", "slo"]) $("told-" + name).textContent = times(asked_factor("asked-" + name));
  const devices = $("asked-devices");
  $("told-devices").textContent = devices.dataset.is_set ? devices.value : "as now";
}

function asked_path() {
  const devices = $("asked-devices"), query = new URLSearchParams({ rate: fixed(asked_factor("asked-rate"), 4), slo: fixed(asked_factor("asked-slo"), 4) });
  if (devices.dataset.is_set) query.set("devices", devices.value);
  if ($("asked-policy").value) query.set("policy", $("asked-policy").value);
  return "/v2/what-if?" + query;
}

async function ask_what_if() {
  clearTimeout(state.asking);
  const turn = (state.asked = (state.asked || 0) + 1);
  $("what-if-status").className = "";
  $("what-if-status").textContent = "asking …";
  try {
    const told = await ask(asked_path());
    if (turn === state.asked) draw_what_if(told);
  } catch (error) {
    if (turn !== state.asked) return;
    $("what-if-status").className = "bad";
    $("what-if-status").textContent = error.message;
  }
}

function draw_what_if(told) {
  state.what_if = told;
  const devices = $("asked-devices"), most = Math.max(8, 4 * told.present_devices, told.devices);
  if (Number(devices.max) < most) devices.max = String(most);
  if (!devices.dataset.is_set) devices.value = String(told.present_devices);
  if ($("asked-policy").options.length === 1) $("asked-policy").append(...told.policies.map((name) => element("option", name, { value: name })));
  const is_here = told.slo === 1 && told.devices === told.present_devices && told.policy === "as served";
  const point = told.curve.find((point) => point.rate === told.rate) || told.curve[0], here = told.curve.find((point) => point.rate === 1);
  const rates = [...new Set([...told.curve.map((point) => point.rate), 1])].sort((a, b) => a - b);
  const at = (rate, figure) => told.curve.find((point) => point.rate === rate)?.[figure] ?? null;
  const data = [rates, rates.map((rate) => at(rate, "attainment")), rates.map((rate) => at(rate, "worst")), rates.map((rate) => (rate === told.rate ? point.attainment : null)), rates.map((rate) => (rate === 1 ? told.measured : null))];
  const lines = [["all requests", COLORS[0]], ["worst model", COLORS[1], true], ["asked", style("--bad"), "points"], ["you are here (measured)", style("--good"), "points"]];
  const note = `${told.requests} requests of ${fixed(told.span_s, 1)} s, replayed in ${fixed(told.took_ms, 0)} ms${told.complete ? "" : "; the time was too short for all rates"}. ${told.notes.join(" ")}`;
  chart($("what-if-body"), "what-if", "Share of requests in time, over the rate", lines, data, (value) => fixed(100 * value, 0) + "%", { numbers: true, most: 1.02, x_label: "rate", ticks: (_, splits) => splits.map(times), note });
  $("what-if-body").querySelector("p").textContent = note;
  const setting = `${times(told.rate)} the rate (${per_s(point.offered)}), ${told.devices} device${told.devices === 1 ? "" : "s"}, SLO ${times(told.slo)}, policy ${told.policy}`;
  $("what-if-status").textContent = `With ${setting}: ${percent(point.attainment)} in time, worst ${point.worst_model} ${percent(point.worst)}, devices ${fixed(100 * point.busy, 0)}% busy.` +
    (is_here && here && told.measured !== null ? ` These requests, measured: ${percent(told.measured)}; simulated: ${percent(here.attainment)}.` : "") +
    (told.one_device_fewer ? ` With one device fewer: ${percent(told.one_device_fewer.attainment)}, worst ${told.one_device_fewer.worst_model} ${percent(told.one_device_fewer.worst)}.` : "");
}

// -- the cluster

async function draw_cluster() {
  const where = $("cluster-body"), live = state.samples.at(-1);
  state.cluster_ms = Date.now();
  if (live && !live.in_cluster) {
    where.replaceChildren(element("p", "This server is in no cluster."));
    return;
  }
  try {
    const cluster = await ask("/v2/cluster");
    where.replaceChildren(
      element("p", `This process is a ${cluster.role} (${cluster.name}) in epoch ${cluster.epoch}. ${cluster.leads ? "It leads." : cluster.leader === undefined ? "It knows no leader." : `Scheduler ${cluster.leader} leads.`}`),
    );
    // A scheduler has no page about its paths.
    show_parts({ "/docs": cluster.role !== "scheduler" });
    const us = (value) => (value === undefined ? "" : milliseconds(value / 1000)), more = [];
    if (live?.processes?.length) more.push(table_of("Processes whose counts are above", ["-role", "-name", "-counts"], live.processes.map((its) => [its.role, its.name, its.state === "answers" ? "now" : `those of its last answer: it is ${its.state}`])));
    if (cluster.peers.length) more.push(table_of("Connected processes", ["-role", "-name", "-address", "-large tensors go by", "round trip"], cluster.peers.map((peer) => [
      peer.role, peer.name, peer.address || "none: it dials", peer.transport.replace("_", " "), us(peer.round_trip_us),
    ])));
    if (cluster.sub_clusters?.length) more.push(table_of("Sub-clusters", ["-sub-cluster", "-models", "-backends"], cluster.sub_clusters.map((sub, place) => [
      String(place), sub.models.join(", "), sub.backends.map((backend) => backend.name + (backend.missing.length ? ` (lacks ${backend.missing.join(", ")})` : "")).join(", "),
    ])));
    if (cluster.budgets?.length) more.push(table_of("Network budgets", ["-model", "-backends", "a batch", "an item", "the reply"], cluster.budgets.map((budget) => [
      `${budget.model} ${budget.version}`, budget.backends.join(", "), us(budget.control_us), us(budget.data_us), us(budget.reply_us),
    ])));
    where.append(...more.flatMap((table) => {
      const wide = element("div", undefined, { className: "wide" });
      wide.append(table);
      return [element("h3", table.getAttribute("aria-label")), wide];
    }));
  } catch (error) {
    where.replaceChildren(element("p", `The cluster's state is not known: ${error.message}`));
  }
}

// -- the page

// Shows the parts of the page that this process has figures for, and the links to them.
function show_parts(parts) {
  for (const [part, is_there] of Object.entries(parts)) {
    if ($(part)) $(part).hidden = !is_there;
    for (const link of document.querySelectorAll(`nav a[href="#${part}"], nav a[href="${part}"]`)) link.hidden = !is_there;
  }
}

function draw() {
  const live = state.samples.at(-1);
  if (!live) return;
  $("server").textContent = `${live.server} ${live.version}`;
  draw_tiles(live);
  draw_overall(live);
  const has_devices = live.device_busy_s.length > 0;
  show_parts({ overview: true, models: true, devices: has_devices, "what-if": has_devices && !live.in_cluster });
  $("absent").textContent = (live.processes || []).filter((its) => its.state !== "answers").map((its) => `${its.name} is ${its.state}: its last counts stand.`).join(" ");
  if (has_devices) draw_timelines();
  draw_table(live);
  if (state.chosen) draw_model(live);
  draw_pipelines(live);
  draw_tenants(live);
}

async function turn() {
  if (!state.paused && !document.hidden) {
    try {
      await look();
      $("status").textContent = `as of ${new Date(state.samples.at(-1).wall_ms).toLocaleTimeString()}`;
      $("status").className = "";
      draw();
      if (Date.now() - state.cluster_ms > CLUSTER_MS) draw_cluster();
    } catch (error) {
      $("status").textContent = `no figures: ${error.message}`;
      $("status").className = "bad";
      if (!state.samples.length && $("login").hidden && Date.now() - state.cluster_ms > CLUSTER_MS) draw_cluster();
    }
  }
  setTimeout(turn, EVERY_MS);
}

function pause() {
  state.paused = !state.paused;
  if (!state.paused) state.back_s = 0;
  $("pause").setAttribute("aria-pressed", String(state.paused));
  $("pause").textContent = state.paused ? "Go on" : "Pause";
  $("status").textContent = state.paused ? "paused" : "";
}

function scroll(steps) {
  if (!state.paused) pause();
  const span = Number($("span").value);
  state.back_s = Math.min(Math.max(0, state.back_s + (steps * span) / 2), PAST_S - span / 2);
  draw_timelines();
}

addEventListener("DOMContentLoaded", () => {
  $("pause").addEventListener("click", pause);
  $("span").addEventListener("change", draw_timelines);
  $("earlier").addEventListener("click", () => scroll(1));
  $("later").addEventListener("click", () => scroll(-1));
  addEventListener("resize", () => state.clock && draw_timelines());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.what_if && draw_what_if(state.what_if));
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "BUTTON"].includes(event.target.tagName)) return;
    if (event.key === " ") event.preventDefault(), pause();
    if (event.key === "ArrowLeft") scroll(1);
    if (event.key === "ArrowRight") scroll(-1);
  });
  $("asked").addEventListener("input", (event) => {
    if (event.target.id === "asked-devices") event.target.dataset.is_set = "true";
    tell_asked();
    clearTimeout(state.asking);
    state.asking = setTimeout(ask_what_if, 400);
  });
  $("asked").addEventListener("submit", (event) => {
    event.preventDefault();
    ask_what_if();
  });
  $("asked").addEventListener("reset", () => {
    delete $("asked-devices").dataset.is_set;
    setTimeout(() => {
      tell_asked();
      ask_what_if();
    });
  });
  $("login").addEventListener("submit", (event) => {
    event.preventDefault();
    state.key = $("key").value.trim();
    sessionStorage.setItem("key", state.key);
    turn_now();
  });
  const turn_now = () => look().then(draw, (error) => ($("status").textContent = error.message));
  turn();
  setInterval(() => state.paused || document.hidden || draw_cluster(), 5 * EVERY_MS);
});
