"use strict";
// SPDX-License-Identifier: Apache-2.0
const EVERY_MS = 2000, KEPT = 90, MATRIX_MOST = 24, PAGE_ROWS = 15;
const by = id => document.getElementById(id);

// Names come from workers: they become text, never markup.
function make(tag, text, kind) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}

function button(text, press) {
  const node = make("button", text);
  node.type = "button"; node.addEventListener("click", () => { if (node.getAttribute("aria-disabled") !== "true") press(); });
  return node;
}

// Only what changed is written, so that screen readers are not told the same again.
function write(node, text) { if (node.textContent !== text) node.textContent = text; }

function scaled(value, units, step) {
  let unit = 0;
  while (value >= step && unit < units.length - 1) { value /= step; unit++; }
  const digits = value === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return [value.toFixed(digits), units[unit]];
}
const size = bytes => scaled(bytes, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const rate = bytes => { const [value, unit] = size(bytes); return [value, unit + "/s"]; };
const count = value => value.toLocaleString("en");
const often = value => value.toFixed(value && value < 10 ? 1 : 0);
const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] || 0), 0);
function time(s) {
  if (!s) return "–";
  if (s < 1e-3) return (s * 1e6).toFixed(s < 1e-4 ? 1 : 0) + " µs";
  if (s < 1) return (s * 1e3).toFixed(s < .1 ? 1 : 0) + " ms";
  if (s < 120) return s.toFixed(s < 10 ? 1 : 0) + " s";
  return s < 7200 ? (s / 60).toFixed(0) + " min" : s < 172800 ? (s / 3600).toFixed(0) + " h" : (s / 86400).toFixed(0) + " d";
}

function empty(table, text) {
  const body = make("tbody"), row = make("tr");
  row.append(make("td", text, "empty")); body.append(row); table.replaceChildren(body);
}

// A table with sorting, a filter and pages. Its head and tools stay in place, so that they keep the focus.
// A column is {name, show: row => text or nodes, by: row => value to sort by, kind}. The first one names the row.
class Listing {
  constructor(id, columns, {sort, nothing, trouble}) {
    this.table = by(id); this.columns = columns; this.nothing = nothing; this.trouble = trouble;
    this.sort = columns.findIndex(column => column.name === sort); this.down = true;
    this.rows = []; this.page = 0; this.text = ""; this.onlyTrouble = false;
    const place = this.table.closest(".scroll"), section = place.closest("section"), title = section.querySelector("h2");
    place.tabIndex = 0; place.setAttribute("role", "region"); place.setAttribute("aria-labelledby", title.id);
    this.buildTools(section, title.textContent); this.buildHead(); this.buildPager(place, title.textContent);
    this.body = make("tbody");
  }

  buildTools(section, title) {
    this.tools = make("div", undefined, "tools");
    if (this.trouble) {
      const label = make("label"), box = make("input");
      box.type = "checkbox"; box.addEventListener("change", () => { this.onlyTrouble = box.checked; this.turn(0); });
      label.append(box, "only with trouble"); this.tools.append(label);
    }
    const filter = make("input");
    filter.type = "search"; filter.placeholder = "Filter"; filter.setAttribute("aria-label", `Filter ${title.toLowerCase()}`);
    filter.addEventListener("input", () => { this.text = filter.value.trim().toLowerCase(); this.turn(0); });
    this.tools.append(filter); this.tools.hidden = true; section.querySelector(".head").append(this.tools);
  }

  buildHead() {
    this.head = make("thead"); const line = make("tr");
    this.columns.forEach((column, index) => {
      const cell = make("th", undefined, column.kind === "n" ? "n" : ""); cell.scope = "col";
      cell.append(button(column.name, () => { this.down = this.sort === index ? !this.down : column.kind === "n" || !!column.by; this.sort = index; this.turn(0); }));
      line.append(cell);
    });
    this.head.append(line);
  }

  buildPager(place, title) {
    this.pager = make("nav", undefined, "pager"); this.pager.setAttribute("aria-label", `Pages of ${title.toLowerCase()}`); this.pager.hidden = true;
    this.back = button("Previous", () => this.turn(this.page - 1)); this.next = button("Next", () => this.turn(this.page + 1));
    this.where = make("span", undefined, "soft"); this.where.setAttribute("aria-live", "polite");
    this.pager.append(this.back, this.next, this.where); place.after(this.pager);
  }

  turn(page) { this.page = page; this.draw(); }

  show(rows) { this.rows = rows; this.draw(); }

  shown() {
    const column = this.columns[this.sort], value = column.by || (row => row[column.field]), down = this.down ? -1 : 1;
    const order = (a, b) => { const x = value(a) ?? -1, y = value(b) ?? -1; return typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", {numeric: true}); };
    const kept = this.rows.filter(row => (!this.onlyTrouble || this.trouble(row)) && (!this.text || this.words(row).includes(this.text)));
    return kept.map((row, index) => [row, index]).sort(([a, i], [b, j]) => down * order(a, b) || i - j).map(([row]) => row);
  }

  words(row) { return this.columns.map(column => this.nodes(column, row).map(node => node.textContent ?? node).join(" ")).join(" ").toLowerCase(); }

  nodes(column, row) { return [column.show ? column.show(row) : row[column.field]].flat(); }

  draw() {
    const few = this.rows.length <= PAGE_ROWS;
    this.tools.hidden = few && !this.text && !this.onlyTrouble;
    if (!this.rows.length) { this.pager.hidden = true; empty(this.table, this.nothing); return; }
    const rows = this.shown(), pages = Math.max(1, Math.ceil(rows.length / PAGE_ROWS));
    this.page = Math.min(Math.max(this.page, 0), pages - 1);
    const first = this.page * PAGE_ROWS, part = rows.slice(first, first + PAGE_ROWS);
    [...this.head.rows[0].cells].forEach((cell, index) => {
      if (index === this.sort) cell.setAttribute("aria-sort", this.down ? "descending" : "ascending"); else cell.removeAttribute("aria-sort");
    });
    this.body.replaceChildren(...part.map(row => this.line(row)));
    if (!part.length) { const row = make("tr"), cell = make("td", "Nothing matches.", "empty"); cell.colSpan = this.columns.length; row.append(cell); this.body.append(row); }
    if (this.table.tHead !== this.head) this.table.replaceChildren(this.head, this.body);
    this.pager.hidden = few;
    write(this.where, rows.length ? `${count(first + 1)} to ${count(first + part.length)} of ${count(rows.length)}` : "0");
    this.back.setAttribute("aria-disabled", this.page === 0); this.next.setAttribute("aria-disabled", this.page >= pages - 1);
  }

  line(row) {
    const line = make("tr");
    this.columns.forEach((column, index) => {
      const cell = make(index ? "td" : "th", undefined, column.kind);
      if (!index) cell.scope = "row";
      cell.append(...this.nodes(column, row));
      if (column.kind === "id") cell.title = cell.textContent;
      line.append(cell);
    });
    return line;
  }
}

function card(name, [value, unit], note, alarm) {
  const box = make("div", undefined, alarm ? "card alarm" : "card"), shown = make("div", value, alarm ? "value bad" : "value");
  if (unit) shown.append(" ", make("small", unit));
  box.append(make("div", name, "name"), shown, make("div", note, "note"));
  return box;
}

const history = [];
function spark(values) {
  const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 100 40"); svg.setAttribute("preserveAspectRatio", "none"); svg.setAttribute("aria-hidden", "true");
  const most = Math.max(...values, 1), points = values.map((value, at) => `${(100 * (KEPT - values.length + at) / (KEPT - 1)).toFixed(2)} ${(38 - 35 * value / most).toFixed(2)}`);
  const first = points[0].split(" ")[0], last = points[points.length - 1].split(" ")[0];
  for (const [kind, d] of [["area", `M${first} 40L${points.join("L")}L${last} 40Z`], ["line", `M${points.join("L")}`]]) {
    const path = document.createElementNS(space, "path"); path.setAttribute("class", kind); path.setAttribute("d", d); svg.append(path);
  }
  return svg;
}

function showAbout({about, coordinator}) {
  const rows = [["address", about.address], ["version", about.version], ["store", about.store], ["TLS", about.tls ? "mutual" : "off"], ["up", time(coordinator.uptime_s)]];
  by("about").replaceChildren(...rows.map(([name, value]) => { const row = make("div"); row.append(make("dt", name), make("dd", value)); return row; }));
  by("problem").hidden = !about.problem; write(by("problem"), about.problem ? `Not ready: ${about.problem}` : "");
}

function showCards(data) {
  const c = data.coordinator, received = sum(data.workers, "bytes_per_s"), failing = sum(data.errors, "per_s");
  const stale = sum(data.links, "stale"), leases = data.workers.filter(row => row.leases).map(row => row.leases);
  const failed = new Set(data.errors.filter(row => row.per_s).map(row => row.worker)).size, silent = data.workers.filter(row => row.stale).length;
  history.push(received); if (history.length > KEPT) history.shift();
  const wide = card("Received", rate(received), `${count(Math.round(sum(data.workers, "transfers_per_s")))} transfers/s`);
  wide.classList.add("wide"); wide.append(spark(history));
  by("cards").replaceChildren(
    card("Failing", [often(failing), "/s"], failed ? `at ${count(failed)} worker${failed > 1 ? "s" : ""}` : `${count(stale)} stale reads caught`, failing > 0),
    card("Workers", [count(c.workers)], `${c.draining ? `${count(c.draining)} draining, ` : ""}${count(silent)} silent, ${count(c.lost_workers)} lost since the start`, silent > 0), wide,
    card("Leases", [count(sum(leases, "active_leases"))], `${count(sum(leases, "expired"))} expired, ${count(sum(leases, "fenced_readers"))} fenced`),
    card("Tickets", [count(c.tickets)], `${count(c.waiting_claims)} claims waiting`));
  document.title = `${failing > 0 || silent ? "⚠ " : ""}kvlink ${data.about.address}`;
}

const errors = new Listing("errors", [
  {name: "reason", field: "reason", kind: "id"},
  {name: "now", by: row => row.per_s || row.number / 1e12, show: row => row.per_s ? make("span", `${often(row.per_s)}/s`, "bad") : "–", kind: "n"},
  {name: "since the start", field: "number", show: row => count(row.number), kind: "n"},
  {name: "workers", by: row => row.workers.length, show: row => count(row.workers.length), kind: "n"},
  {name: "most at", show: row => row.workers[0].worker, by: row => row.workers[0].worker, kind: "id"},
], {sort: "now", nothing: "None."});

function showErrors(data) {
  const reasons = new Map();
  for (const row of data.errors) reasons.set(row.reason, [...(reasons.get(row.reason) || []), row]);
  errors.show([...reasons].map(([reason, workers]) => ({reason, per_s: sum(workers, "per_s"), number: sum(workers, "number"),
    workers: workers.sort((a, b) => b.per_s - a.per_s || b.number - a.number)})));
}

// The state of a worker, and how much it matters: what fails now, what is silent, what failed before.
function stateOf(row) {
  if (row.failing) return [3e9 + row.failing, `failing ${often(row.failing)}/s`, "bad"];
  if (row.stale) return [2e9 + row.age_s, `silent for ${time(row.age_s)}`, "warn"];
  if (row.draining) return [2, "draining", "warn"];
  if (row.age_s === null) return [1, "no report here", "soft"];
  return row.failed ? [1e9 + Math.min(row.failed, 9e8), "reporting", "good"] : [0, "reporting", "good"];
}

const workers = new Listing("workers", [
  {name: "worker", field: "worker", kind: "id"},
  {name: "state", by: row => stateOf(row)[0], show: row => make("span", ...stateOf(row).slice(1))},
  {name: "failed", by: row => row.failed, show: row => { const cell = make("span", count(row.failed), row.failed ? "warn" : ""); if (row.reasons) cell.title = row.reasons; return cell; }, kind: "n"},
  {name: "receives", by: row => row.bytes_per_s, show: row => row.bytes_per_s === null ? "" : rate(row.bytes_per_s).join(" "), kind: "n"},
  {name: "transfers/s", by: row => row.transfers_per_s, show: row => row.transfers_per_s === null ? "" : count(Math.round(row.transfers_per_s)), kind: "n"},
  {name: "links", by: row => row.num_links, show: row => row.num_links === null ? "" : count(row.num_links), kind: "n"},
  {name: "pool", by: row => row.pool_bytes, show: row => size(row.pool_bytes).join(" "), kind: "n"},
  {name: "transports", by: row => row.transports.join(" "), show: row => row.transports.map(name => make("span", name, "tag"))},
  {name: "agent", field: "agent"},
], {sort: "state", trouble: row => row.failed || row.stale, nothing: "No worker has joined. Start one with KVLINK_COORDINATOR set to this coordinator's address."});

function showWorkers(data) {
  const reporting = data.workers.filter(row => row.leases).length, total = Math.max(data.coordinator.workers, data.workers.length);
  write(by("workers-note"), reporting < total ? `${count(reporting)} of ${count(total)} report to this coordinator` : "");
  const failures = new Map();
  for (const row of data.errors) failures.set(row.worker, [...(failures.get(row.worker) || []), row]);
  workers.show(data.workers.map(row => {
    const found = failures.get(row.worker) || [];
    return {...row, failing: sum(found, "per_s"), failed: sum(found, "number"), reasons: found.map(each => `${count(each.number)} ${each.reason}`).join("\n")};
  }));
}

const describe = link => `${link.from} → ${link.to} over ${link.transport}: ${count(link.transfers)} transfers, ${size(link.bytes).join(" ")}, ` +
  `p50 ${time(link.p50_s)}, p99 ${time(link.p99_s)}, ${count(link.queued)} queued, ${count(link.failed)} failed (${count(link.stale)} stale)${link.connected ? "" : ", not connected"}`;

const links = new Listing("links", [
  {name: "owner", field: "from", kind: "id"}, {name: "reader", field: "to", kind: "id"}, {name: "transport", field: "transport"},
  {name: "state", by: link => link.failed_per_s ? 2e15 + link.failed_per_s : link.bytes_per_s, show: link => link.failed_per_s ? make("span", `failing ${often(link.failed_per_s)}/s`, "bad") : link.connected ? make("span", "connected", "good") : make("span", "not connected", "soft")},
  {name: "rate", by: link => link.bytes_per_s, show: link => rate(link.bytes_per_s).join(" "), kind: "n"},
  {name: "p50", field: "p50_s", show: link => time(link.p50_s), kind: "n"}, {name: "p99", field: "p99_s", show: link => time(link.p99_s), kind: "n"},
  {name: "failed", field: "failed", show: link => count(link.failed), kind: "n"},
], {sort: "state", trouble: link => link.failed, nothing: ""});

function showLinks(data) {
  const table = by("matrix"), known = data.links.filter(link => link.from !== "(others)");
  const owners = [...new Set(known.map(link => link.from))].sort(), readers = [...new Set(known.map(link => link.to))].sort();
  const many = owners.length > MATRIX_MOST || readers.length > MATRIX_MOST;
  by("matrix-place").hidden = many; by("links-place").hidden = !many; table.className = known.length ? "grid" : "";
  links.show(many ? known : []);
  write(by("links-note"), many ? "failing ones first, then the busiest" : known.length ? "what each reader (row) receives from each owner (column)" : "");
  if (many) return;
  if (!known.length) { empty(table, "No worker has read from another yet, or none has reported here."); return; }
  const most = Math.max(...known.map(link => link.bytes_per_s), 1), cells = new Map();
  for (const link of known) { const key = JSON.stringify([link.to, link.from]); cells.set(key, [...(cells.get(key) || []), link]); }
  const head = make("thead"), body = make("tbody"), top = make("tr");
  top.append(make("td", "reader ↓  owner →", "self soft"));
  for (const owner of owners) { const cell = make("th", owner); cell.scope = "col"; cell.title = owner; top.append(cell); }
  for (const reader of readers) {
    const line = make("tr"), name = make("th", reader); name.scope = "row"; name.title = reader; line.append(name);
    for (const owner of owners) line.append(linkCell(cells.get(JSON.stringify([reader, owner])), most, owner === reader));
    body.append(line);
  }
  head.append(top); table.replaceChildren(head, body);
}

function linkCell(links, most, self) {
  const cell = make("td", undefined, self ? "self" : "");
  if (!links) return cell;
  const bytes = links.reduce((total, link) => total + link.bytes_per_s, 0), failing = sum(links, "failed_per_s");
  const best = links.reduce((a, b) => b.bytes_per_s > a.bytes_per_s || (b.connected && !a.connected) ? b : a);
  cell.append(make("span", bytes ? rate(bytes).join(" ") : "idle"), make("small", best.transport + (best.p99_s ? ` p99 ${time(best.p99_s)}` : "")));
  if (failing) cell.append(make("small", `failing ${often(failing)}/s`, "bad"));
  cell.title = links.map(describe).join("\n");
  if (bytes) { cell.style.background = `color-mix(in srgb, var(--accent) ${Math.round(6 + 24 * Math.sqrt(bytes / most))}%, var(--ground))`; }
  cell.classList.toggle("down", failing > 0 || !links.some(link => link.connected));
  return cell;
}

const seldom = name => row => row[name] ? make("span", count(row[name]), "warn") : "0";
const leases = new Listing("leases", [
  {name: "worker", field: "worker", kind: "id"},
  {name: "active", field: "active_leases", show: row => count(row.active_leases), kind: "n"},
  {name: "oldest", field: "oldest_lease_s", show: row => time(row.active_leases && row.oldest_lease_s), kind: "n"},
  {name: "pinned blocks", by: row => row.pinned_blocks, show: row => meter(row.pinned_blocks, row.pool_blocks)},
  ...["granted", "settled", "aborted"].map(name => ({name, field: name, show: row => count(row[name]), kind: "n"})),
  {name: "expired", by: row => (row.expired + row.fenced_readers) * 1e6 + row.active_leases, show: seldom("expired"), kind: "n"},
  {name: "fenced", field: "fenced_readers", show: seldom("fenced_readers"), kind: "n"},
  {name: "slots", field: "lease_slots", show: row => count(row.lease_slots), kind: "n"},
], {sort: "expired", nothing: "No worker has reported its leases here."});

function meter(part, whole) {
  const bar = make("span", undefined, "bar"), level = make("i");
  level.style.width = `${whole ? Math.min(100, 100 * part / whole) : 0}%`; bar.append(level);
  return [bar, `${count(part)} of ${count(whole)}`];
}

const showLeases = data => leases.show(data.workers.filter(row => row.leases).map(row => ({worker: row.worker, ...row.leases})));

const calls = new Listing("calls", [
  {name: "call", field: "method", kind: "id"},
  {name: "answered", field: "number", show: row => row.number === null ? "" : count(row.number), kind: "n"},
  {name: "p50", field: "p50_s", show: row => time(row.p50_s), kind: "n"}, {name: "p99", field: "p99_s", show: row => time(row.p99_s), kind: "n"},
  {name: "refused", by: row => sum(row.refused, "number"), show: row => row.refused.map(({number, reason}) => `${count(number)} ${reason}`).join(", ") || "–"},
], {sort: "refused", nothing: "None yet."});

function showCalls(data) {
  const refused = new Map();
  for (const row of data.refusals) refused.set(row.method, [...(refused.get(row.method) || []), row]);
  const rows = [...data.calls];
  for (const method of refused.keys()) if (!rows.some(row => row.method === method)) rows.push({method, number: null, p50_s: 0, p99_s: 0});
  calls.show(rows.map(row => ({...row, refused: refused.get(row.method) || []})));
}

let paused = false;
function say(text, kind) { write(by("state"), text); by("state").className = kind; }

async function refresh() {
  if (!paused && !getSelection().isCollapsed) say("paused while text is selected", "paused");
  else if (!paused) {
    try {
      const answer = await fetch("stats.json", {cache: "no-store", signal: AbortSignal.timeout(5000)});
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      const data = await answer.json();
      if (!paused) {
        for (const show of [showAbout, showCards, showErrors, showWorkers, showLinks, showLeases, showCalls]) show(data);
        say("live", "");
      }
    } catch (error) {
      say("the coordinator does not answer", "away");
    }
  }
  setTimeout(refresh, EVERY_MS);
}

by("pause").addEventListener("click", () => {
  paused = !paused;
  by("pause").setAttribute("aria-pressed", paused); if (paused) say("paused", "paused");
});
refresh();
