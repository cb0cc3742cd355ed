// The page of a mount. Texts only ever become text nodes: names of files may be anything.
"use strict";

const STEP = 5000; // ms between two looks; the process that serves this looks as often
const RANKED = 15000; // ms between two looks at objects
const LEAST = 60; // s that a chart is wide at least
const SHOWN = 50; // namespaces
const SPANS = { hour: 3600, day: 86400 };
const SVG = "http://www.w3.org/2000/svg";
const TIERS = ["ram", "nvme", "s3"];

const $ = (id) => document.getElementById(id);
const state = { span: "hour", order: "hot", space: null, path: null, now: null, asked: 0 };
const kept = {}; // charts' samples, by span and namespace

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// A name as it can be seen: what is no text is escaped. Python gives undecodable bytes as lone
// surrogates from DC80 to DCFF.
function seen(name) {
  return name.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]/gu, (found) => {
    const code = found.codePointAt(0);
    const byte = code >= 0xdc80 && code <= 0xdcff ? code - 0xdc00 : code;
    return byte < 256 ? "\\x" + byte.toString(16).padStart(2, "0") : "\\u" + byte.toString(16);
  });
}

// A name as a part of an address: those bytes are themselves.
function encoded(name) {
  return Array.from(name, (part) => {
    const code = part.codePointAt(0);
    if (code >= 0xdc80 && code <= 0xdcff) return "%" + (code - 0xdc00).toString(16);
    return code >= 0xd800 && code <= 0xdfff ? "%EF%BF%BD" : encodeURIComponent(part);
  }).join("");
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) { bytes /= 1024; at += 1; }
  return (at && bytes < 100 ? bytes.toFixed(1) : bytes.toFixed(0)) + " " + units[at];
}

function number(value) {
  if (value === null || value === undefined) return "–";
  return value !== 0 && Math.abs(value) < 10 && !Number.isInteger(value)
    ? value.toFixed(1) : Math.round(value).toString();
}

const percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %");
const rate = (bytes) => (bytes === null || bytes === undefined ? "–" : size(bytes) + "/s");
const moment = (seconds) => (seconds ? new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : "not known");

function span(seconds) {
  const days = Math.floor(seconds / 86400), hours = Math.floor((seconds % 86400) / 3600);
  const minutes = Math.floor((seconds % 3600) / 60);
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h${minutes ? ` ${minutes} min` : ""}` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
}

// Now

function showNow(now) {
  $("problem").textContent = now.up ? (
    now.detached ? "The mount is detached: its daemon ends after the last close of a file."
      : now.keeper ? "" : "The keeper is dead: the mount ends with its daemon.")
    : "The daemon does not answer at the moment: perhaps another daemon takes over.";
  if (!now.up) return;
  state.now = now;
  $("mountpoint").textContent = seen(now.mountpoint);
  document.title = "kvfs " + seen(now.mountpoint);
  $("facts").textContent = [
    `version ${now.version}`, `up ${span(now.uptime_s)}`, `${now.takeovers} takeovers`,
    `passthrough ${now.passthrough.on ? "on" : "off"}`,
    `${now.objects} objects${now.census_done ? "" : " (still counting)"}`,
    `${now.open_handles} handles`, `${now.writers} writers`, `${now.jobs} jobs`,
  ].join(" · ");
  const times = now.open_times_s.map((time) => (time === null ? "longer" : `<${+(1000 * time).toFixed(2)} ms`));
  $("errors").textContent = "Errors since this daemon began: "
    + Object.entries(now.errors).map(([name, count]) => `${name} ${count}`).join(", ")
    + (times.length ? `. Time of an open: half of them ${times[0]}, 99 % of them ${times[1]}.` : ".");
  showTiers(now.tiers, now.pool);
  showSpaces();
}

async function showEvents() {
  const found = (await ask("/api/events")).events;
  const text = (event) => event.text || Object.entries(event).filter(([name]) => !["time", "kind"].includes(name))
    .map(([name, value]) => `${name} ${value}`).join(", ");
  $("events").hidden = !found.length;
  $("events").tBodies[0].replaceChildren(...found.map((event) =>
    row([moment(event.time), seen(`${event.level || event.kind}${text(event) ? ": " + text(event) : ""}`)], [])));
  $("events-none").textContent = found.length ? "" : "No events yet.";
}

function poolTile(pool) {
  const tile = element("div", undefined, "tile");
  const ill = [pool.up ? "" : pool.asked ? "the index is down" : "the index was not asked yet", pool.full ? "the memory of the index is full" : "", pool.serves ? "" : "serves nobody"].filter(Boolean).join(", ");
  tile.append(element("strong", "pool"), " ", element("span", ill || "healthy", ill ? "bad" : ""));
  tile.append(element("div", `${number(pool.nodes)} live nodes; ${pool.objects} objects of this node, ${size(pool.bytes)}`));
  tile.append(element("div", `${pool.found} objects found, ${number(pool.hits)} hits`));
  tile.append(element("div", `fetched: ${pool.fetched} objects, ${size(pool.fetched_bytes)}; ${pool.failed} failures`));
  tile.append(element("div", `served: ${pool.served} reads, ${size(pool.served_bytes)}`));
  tile.append(element("div", `the index lags ${number(pool.lag_s)} s; ${pool.conflicts} conflicts`));
  return tile;
}

function showTiers(tiers, pool) {
  $("tiers").replaceChildren(...Object.entries(tiers).map(([name, tier]) => {
    const tile = element("div", undefined, "tile");
    tile.append(element("strong", name), " ");
    const ill = tier.state !== "healthy";
    tile.append(element("span", tier.state + (ill ? ` for ${span(tier.state_s)}` : ""), ill ? "bad" : ""));
    if (tier.capacity_bytes) {
      const bar = element("div", undefined, "bar"), full = element("div");
      full.style.width = `${100 * tier.taken}%`;
      bar.append(full);
      tile.append(bar, element("div", `${size(tier.used_bytes)} of ${size(tier.capacity_bytes)} used`));
      tile.append(element("div", `${size(tier.reserved_bytes)} reserved for writers; together ${percent(tier.taken)}`));
    } else {
      tile.append(element("div", size(tier.used_bytes)));
    }
    tile.append(element("div", `${tier.objects} objects, ${tier.hits} hits`));
    if (tier.dirty_objects !== undefined) {
      const waits = tier.dirty_objects ? `, the oldest for ${span(tier.oldest_dirty_s)}` : "";
      tile.append(element("div", `to upload: ${tier.dirty_objects} objects, ${size(tier.dirty_bytes)}${waits}`));
      tile.append(element("div", `${tier.uploads} uploads, ${tier.downloads} downloads, ${tier.failures} failures`));
    }
    return tile;
  }), ...(pool ? [poolTile(pool)] : []));
}

// Charts

const CHARTS = [
  { title: "Used", unit: size, of: TIERS.map((name) => ["used " + name, name]) },
  { title: "Opens a second, by tier of the bytes", unit: number, of: [...TIERS, "pool"].map((name) => ["hits " + name, name]).concat([["misses", "misses"]]) },
  { title: "Bandwidth: bytes of opened files, and written bytes, a second", unit: rate, of: [["opened_bytes", "opened"], ["written_bytes", "written"]] },
  { title: "Hit ratio in RAM and NVMe", unit: percent, most: 1, of: [["ratio", "ratio"]] },
  { title: "Movers, objects a second", unit: number, of: [["demoted", "demoted"], ["promoted", "promoted"], ["dropped", "dropped"], ["sealed", "sealed"]] },
  { title: "Bucket, bytes a second", unit: rate, needs: "used s3", of: [["upload_bytes", "uploaded"], ["hydrated_bytes", "hydrated"]] },
  { title: "Pool, bytes a second", unit: rate, needs: "lag", of: [["fetched_bytes", "fetched"], ["served_bytes", "served"]] },
  { title: "To be uploaded", unit: size, needs: "dirty", of: [["dirty", "dirty"]] },
];
const SPACE_CHARTS = [
  { title: "Bytes", unit: size, of: [["namespace bytes ", "bytes"]] },
  { title: "Opens a second", unit: number, of: [["namespace opens ", "opens"]] },
  { title: "Hit ratio", unit: percent, most: 1, of: [["namespace ratio ", "ratio"]] },
];

function line(times, values, from, to, most) {
  let path = "", pen = false;
  times.forEach((time, at) => {
    const value = values[at];
    if (value === null || value === undefined) { pen = false; return; }
    const x = ((time - from) / (to - from)) * 600, y = 99 - (value / most) * 97;
    // One sample alone is a dot: a line of no length with round ends.
    path += pen ? `L${x.toFixed(1)} ${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}h0.01`;
    pen = true;
  });
  return path;
}

function chart(told, found, most_seconds, suffix) {
  const figure = element("figure"), caption = element("figcaption");
  const shown = told.of.filter(([name]) => found.series[name + suffix]);
  const all = shown.flatMap(([name]) => found.series[name + suffix]).filter((value) => value !== null);
  const peak = all.length ? Math.max(...all) : null;
  const most = told.most || Math.max(1e-9, ...all) * 1.05;
  const to = found.times.length ? found.times[found.times.length - 1] : Date.now() / 1000;
  // As far back as it is known, so that the first minutes are more than a stroke.
  const seconds = Math.min(most_seconds, Math.max(LEAST, found.times.length ? to - found.times[0] : 0));
  caption.append(element("strong", told.title), element("br"));
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", "0 0 600 100");
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("role", "img");
  const said = shown.map(([name, label], at) => {
    const values = found.series[name + suffix], last = values[values.length - 1];
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", "k" + at);
    path.setAttribute("d", line(found.times, values, to - seconds, to, most));
    drawing.append(path);
    const text = `${label} ${told.unit(last)}`;
    caption.append(element("span", text, "key k" + at));
    return text;
  });
  drawing.setAttribute("aria-label", `${told.title}: now ${said.join(", ") || "nothing yet"}; at most ${told.unit(peak)}`);
  const axis = element("div", undefined, "axis");
  axis.append(element("span", `${span(seconds)} ago`), element("span", `peak: ${told.unit(peak)}`), element("span", "now"));
  // Values under the pointer, and a line that shows their time.
  const at = element("div", undefined, "under");
  const mark = document.createElementNS(SVG, "path");
  mark.setAttribute("class", "mark");
  mark.setAttribute("d", "");
  drawing.append(mark);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width;
    const time = to - seconds + place * seconds;
    const nearest = found.times.reduce((best, one, number) => (Math.abs(one - time) < Math.abs(found.times[best] - time) ? number : best), 0);
    const values = shown.map(([name, label]) => `${label} ${told.unit(found.series[name + suffix][nearest])}`);
    at.textContent = found.times.length ? `${moment(found.times[nearest])}: ${values.join(", ")}` : "";
    mark.setAttribute("d", `M${(600 * place).toFixed(1)} 0V100`);
  });
  drawing.addEventListener("pointerleave", () => { at.textContent = ""; mark.setAttribute("d", ""); });
  figure.append(caption, drawing, axis, at);
  return figure;
}

// What is new is asked for only, and added to what is known.
async function samples(space) {
  const key = `${state.span} ${space === null ? "" : "=" + space}`;
  const known = kept[key] || { times: [], series: {} };
  const after = known.times.length ? known.times[known.times.length - 1] : 0;
  const of = space === null ? "" : `&namespace=${encoded(space)}`;
  const fresh = await ask(`/api/history?span=${state.span}&after=${after}${of}`);
  for (const name of new Set([...Object.keys(known.series), ...Object.keys(fresh.series)])) {
    const before = known.series[name] || known.times.map(() => null);
    known.series[name] = before.concat(fresh.series[name] || fresh.times.map(() => null));
  }
  known.times = known.times.concat(fresh.times);
  const first = known.times.findIndex((time) => time >= (known.times[known.times.length - 1] || 0) - SPANS[state.span]);
  if (first > 0) {
    known.times = known.times.slice(first);
    for (const name of Object.keys(known.series)) known.series[name] = known.series[name].slice(first);
  }
  kept[key] = known;
  return known;
}

async function showCharts() {
  const found = await samples(null), seconds = SPANS[state.span];
  const wanted = CHARTS.filter((told) => !told.needs || found.series[told.needs]);
  $("charts").replaceChildren(...wanted.map((told) => chart(told, found, seconds, "")));
  if (state.space !== null) {
    const own = await samples(state.space);
    $("space-charts").replaceChildren(...SPACE_CHARTS.map((told) => chart(told, own, seconds, state.space)));
  }
}

// Namespaces

function row(cells, wide, widest = []) {
  const made = element("tr");
  cells.forEach((cell, at) => {
    const data = element("td", undefined, wide.includes(at) ? "wide" : widest.includes(at) ? "widest" : "");
    data.append(cell);
    made.append(data);
  });
  return made;
}

function link(text, pressed) {
  const made = element("button", seen(text));
  made.type = "button";
  made.addEventListener("click", pressed);
  return made;
}

function showSpaces() {
  const by = $("sort").value, find = $("find").value.toLowerCase();
  const found = state.now.namespaces.filter((one) => seen(one.name).toLowerCase().includes(find));
  const value = (one) => (one[by] === null ? -1 : one[by]);
  found.sort((a, b) => (by === "name" ? (a.name < b.name ? -1 : 1) : value(b) - value(a)));
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.space : undefined;
  $("spaces").tBodies[0].replaceChildren(...found.slice(0, SHOWN).map((one) => {
    const name = link(one.name, () => chooseSpace(one.name));
    name.dataset.space = one.name;
    const cell = element("span");
    cell.append(name);
    if (one.problem) cell.append(element("div", "takes no new objects", "bad"));
    return row([cell, size(one.bytes), size(one.writing), one.quota === null ? "" : percent(one.quota), String(one.objects), number(one.opens),
      rate(one.opened_bytes), rate(one.written_bytes), String(one.misses), percent(one.now), percent(one.ratio),
      // Before there are estimates, their first column shows how many accesses they lack.
      one.sample || percent(one.would_be["1"]), percent(one.would_be["0.5"]), percent(one.would_be["2"]), percent(one.would_be["4"]), one.eviction],
      [2, 4, 5, 8, 11, 15], [6, 7, 12, 13, 14]);
  }));
  if (focused !== undefined) {
    for (const name of $("spaces").querySelectorAll("button")) if (name.dataset.space === focused) name.focus();
  }
  $("spaces-more").textContent = found.length > SHOWN ? `and ${found.length - SHOWN} more: find them by name` : "";
}

function chooseSpace(name) {
  state.space = name;
  remember();
  $("space").hidden = false;
  $("space-name").textContent = seen(name);
  showCharts().catch(unheard);
}

// Objects

async function showObjects() {
  state.asked = Date.now();
  const found = await ask(`/api/objects?order=${state.order}`);
  $("objects").tBodies[0].replaceChildren(...found.objects.map((one) =>
    row([link(one.path, () => showBelow(one.path)), size(one.size), String(one.opens),
      one.tiers.join(" + "), one.dirty ? "yes" : ""], [3, 4])));
  const age = found.age_s === null ? "kvfs collects the objects." : found.order === "hot"
    ? "The objects with the most recent opens; kvfs halves the counts every 10 minutes." : `State of ${span(found.age_s)} ago.`;
  $("objects-age").textContent = age;
}

function owners(pool) {
  if (pool.entry === "unknown") return "the index of the pool does not answer";
  if (pool.entry === "other") return "another object has its name in the pool";
  const nodes = pool.nodes.map((one) => `${seen(one.host)}: ${one.tier}${one.this ? ", this node" : ""}`);
  return (pool.remote ? ["only other nodes:", ...nodes] : nodes).join("\n") || "none in the pool";
}

function life(found) {
  const rows = [["path", seen(found.path) || "(the mount, or without a name)"], ["kind", found.kind]];
  const add = (name, text) => { if (text) rows.push([name, text]); };
  add("namespace", seen(found.namespace.name) + `, eviction ${found.namespace.eviction}`);
  if (found.kind === "file") {
    add("size", `${size(found.size)} (${found.size} bytes)`);
    add("state", `${found.state}, version ${found.version}`);
    add("sealed", moment(found.sealed_at));
    add("last used", moment(found.atime));
    add("xxh3-128", found.digest || "not computed yet");
    add("tiers", Object.entries(found.tiers).map(([name, tier]) =>
      `${name}: ${size(tier.bytes)}${tier.packed ? ", packed by " + tier.packed.codec : ""}${tier.current === false ? ", not the present object" : ""}`).join("\n") || "no tier has it");
    if (found.pool) add("nodes with it", owners(found.pool));
    const due = found.dirty.due ? `, due ${moment(found.dirty.due)}` : "";
    add("to upload", found.dirty.s3 === "yes" ? "yes" + due : found.dirty.s3 === "conflict" ? "no: another object has its name in the bucket" : found.dirty.nvme ? "no; only RAM has it so far" : "no");
    add("open", found.open ? `${found.open.readers} readers, ${found.open.writers} writers in ${found.open.tier}` : "no");
    add("block", ["engine", "model", "block"].filter((name) => found.group[name]).map((name) => `${name} ${seen(String(found.group[name]))}`).join(", "));
    add("its group", found.group.files.map(seen).join("\n"));
    add("block before", found.before.files.map(seen).join("\n") || (found.before.key ? "not here" : ""));
    add("blocks after", found.after.map(seen).join("\n"));
    add("heat", `${found.heat.opens} opens recently, ${found.heat.nvme_opens} on nvme (promotion at ${found.heat.promote_after || "none"})`);
    add("order", found.heat.orders.map((one) => `${one.tier}: ${one.policy}, ${one.goes ? (one.place === null ? "late" : "place " + one.place) : "never goes"} of ${one.of}`).join("\n"));
    add("kept because", found.kept.join("\n"));
    add("cannot be evicted", found.holds.join("\n"));
    add("next step", found.next);
  } else {
    add("holds", `${found.namespace.objects} objects, ${size(found.namespace.bytes)} in its namespace`);
  }
  return rows;
}

async function showLife(path) {
  $("life-problem").textContent = "";
  try {
    const found = await ask(`/api/object?path=${encoded(path)}`);
    $("life").replaceChildren(...life(found).flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
  } catch (error) {
    const why = { 404: "There is no such file on the mount.", 429: "Too many requests at the moment: try again." };
    $("life").replaceChildren();
    $("life-problem").textContent = why[error.message] || "The daemon does not answer at the moment.";
  }
}

async function showBelow(path) {
  state.path = path;
  remember();
  $("path").value = seen(path);
  await showLife(path);
  $("h-life").scrollIntoView();  // it may be below the screen
}

// The view is in the address, so that an operator can send it.
function remember() {
  const view = [["span", state.span], ["order", state.order], ["space", state.space], ["path", state.path]];
  const words = view.filter(([, value]) => value !== null).map(([name, value]) => `${name}=${encodeURIComponent(seen(value))}`);
  history.replaceState(null, "", "#" + words.join("&"));
}

function recall() {
  const view = new URLSearchParams(location.hash.slice(1));
  for (const attribute of ["span", "order"]) {
    const button = [...document.querySelectorAll(`button[data-${attribute}]`)].find((one) => one.dataset[attribute] === view.get(attribute));
    if (button) press(attribute, button);
  }
  if (view.has("space")) chooseSpace(view.get("space"));
  if (view.has("path")) showBelow(view.get("path"));
}

// All of it, again and again

function unheard() {
  $("problem").textContent = "No answer from the mount: perhaps a new daemon takes over, or the mount has ended. The page tries again.";
}

async function look() {
  if (!document.hidden) {
    try {
      showNow(await ask("/api/now"));
      await showCharts();
      if (Date.now() - state.asked >= RANKED) await Promise.all([showObjects(), showEvents()]);
    } catch (error) {
      unheard();
    }
  }
  setTimeout(look, STEP);
}

function press(attribute, button) {
  for (const other of document.querySelectorAll(`button[data-${attribute}]`)) other.setAttribute("aria-pressed", String(other === button));
  state[attribute] = button.dataset[attribute];
}

function choose(attribute, chosen) {
  for (const button of document.querySelectorAll(`button[data-${attribute}]`)) {
    button.addEventListener("click", () => {
      press(attribute, button);
      remember();
      chosen().catch(unheard);
    });
  }
}

choose("span", showCharts);
choose("order", showObjects);
$("sort").addEventListener("change", () => state.now && showSpaces());
$("find").addEventListener("input", () => state.now && showSpaces());
$("ask").addEventListener("submit", (event) => { event.preventDefault(); state.path = $("path").value; remember(); showLife(state.path); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && state.now) showCharts().catch(unheard); });
recall();
look();
