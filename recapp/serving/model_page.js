"use strict";
// Reads /metrics once a second and draws the last two minutes; sends the rows of the text field.
const SECONDS = 120;
const WINDOW = 5;      // seconds that a quantile is of
const LINES = 24;      // of rows to try, unless one row has more
const model = document.body.dataset.model;
const of = id => document.getElementById(id);
const base = "/v2/models/" + encodeURIComponent(model);
const samples = [];    // {at, requests, refused, rows, batches, buckets}
const drawn = [];      // {at, p50, p99, rate, rows}

// ---- what the server has counted

function parsed(text) {
  const found = { requests: 0, refused: 0, rows: 0, batches: 0, memory: 0, version: "",
    buckets: new Map() };
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const at = line.lastIndexOf(" ");
    const name = line.slice(0, at), value = Number(line.slice(at + 1));
    if (name.startsWith("recapp_requests_total")) {
      found.requests += name.includes('code="200"') ? value : 0;
      found.refused += /code="[45]/.test(name) && !name.includes('code="499"') ? value : 0;
    } else if (name === "recapp_batch_rows_sum") found.rows = value;
    else if (name === "recapp_batch_rows_count") found.batches = value;
    else if (name === "process_resident_memory_bytes") found.memory = value;
    else if (name.startsWith("recapp_model_info"))
      found.version = (/version="([^"]*)"/.exec(name) || ["", ""])[1];
    else if (name.startsWith("recapp_request_seconds_bucket")) {
      const bound = Number(/le="([^"]*)"/.exec(name)[1].replace("+Inf", "Infinity"));
      found.buckets.set(bound, (found.buckets.get(bound) || 0) + value);
    }
  }
  return found;
}

function quantile(share, now, before) {
  const bounds = [...now.buckets.keys()].sort((a, b) => a - b);
  const counts = bounds.map(b => now.buckets.get(b) - (before.buckets.get(b) || 0));
  const total = counts.length ? counts[counts.length - 1] : 0;
  if (!total) return null;
  const wanted = share * total;
  const at = counts.findIndex(count => count >= wanted);
  const low = at ? bounds[at - 1] : 0, under = at ? counts[at - 1] : 0;
  if (bounds[at] === Infinity) return low * 1e3;
  return 1e3 * (low + (bounds[at] - low) * (wanted - under) / (counts[at] - under));
}

async function look() {
  try {
    const answer = await fetch("/metrics", { cache: "no-store" });
    const ready = await fetch("/v2/health/ready", { cache: "no-store" });
    const now = parsed(await answer.text());
    now.at = performance.now() / 1e3;
    if (samples.length && now.requests < samples[samples.length - 1].requests) samples.length = 0;
    samples.push(now);
    while (samples.length > WINDOW + 1) samples.shift();
    state(ready.ok ? "ready" : "ending", ready.ok);
    of("version").textContent = now.version;
    if (samples.length > 1) show(now, samples[samples.length - 2], samples[0]);
  } catch {
    state("no answer from the server", false);
    samples.length = 0;
  }
  document.documentElement.dataset.looked = Number(document.documentElement.dataset.looked || 0) + 1;
  setTimeout(look, 1000);
}

function state(text, good) {
  of("state").textContent = text;
  document.querySelector(".state").className = "state " + (good ? "good" : "bad");
}

const short = value => value === null ? "–" : value >= 100 ? Math.round(value).toLocaleString("en")
  : value >= 10 ? value.toFixed(1) : value.toFixed(2).replace(/^0\.00$/, "0");

function show(now, last, first) {
  const seconds = now.at - last.at;
  const point = { at: now.at, p50: quantile(.5, now, first), p99: quantile(.99, now, first),
    rate: (now.requests - last.requests) / seconds, rows: (now.rows - last.rows) / seconds };
  drawn.push(point);
  while (drawn.length && drawn[0].at < now.at - SECONDS) drawn.shift();
  const batches = now.batches - first.batches;
  of("rate").textContent = short(point.rate);
  of("p50").textContent = point.p50 === null ? "–" : short(point.p50) + " ms";
  of("p99").textContent = point.p99 === null ? "–" : short(point.p99) + " ms";
  of("batch").textContent = batches ? short((now.rows - first.rows) / batches) : "–";
  of("total").textContent = now.requests.toLocaleString("en");
  of("refused").textContent = short((now.refused - last.refused) / seconds);
  of("memory").textContent = Math.round(now.memory / 1e6).toLocaleString("en") + " MB";
  draw();
}

// ---- pictures

function element(kind, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function ticks(most) {
  const power = 10 ** Math.floor(Math.log10(most || 1));
  const step = [.2, .5, 1, 2, 5, 10].map(m => m * power).find(s => most / s <= 4.5);
  const found = [];
  for (let value = 0; value < most + step * .999; value += step) found.push(value);
  return found;
}

function chart(svg, lines) {
  const width = svg.clientWidth, height = svg.clientHeight;
  const left = 44, right = 70, top = 10, bottom = 24;
  const now = drawn.length ? drawn[drawn.length - 1].at : 0;
  const values = lines.flatMap(line => drawn.map(p => p[line.key]).filter(v => v !== null));
  const marks = ticks(Math.max(0, ...values) || 1);
  const most = marks[marks.length - 1];
  const x = at => left + (width - left - right) * (1 - (now - at) / SECONDS);
  const y = value => height - bottom - (height - top - bottom) * value / most;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  for (const mark of values.length ? marks : [0]) {
    svg.append(element("line",
      { class: "grid", x1: left, x2: width - right, y1: y(mark), y2: y(mark) }));
    svg.append(element("text", { x: left - 6, y: y(mark) + 4, "text-anchor": "end" },
      Number(mark.toPrecision(3)).toLocaleString("en")));
  }
  for (const [ago, text] of [[SECONDS, "2 min ago"], [SECONDS / 2, "1 min"], [0, "now"]])
    svg.append(element("text", { x: x(now - ago), y: height - 6,
      "text-anchor": ago === SECONDS ? "start" : ago ? "middle" : "end" }, text));
  if (!values.length)
    svg.append(element("text", { x: (left + width - right) / 2, y: height / 2,
      "text-anchor": "middle" }, performance.now() < SECONDS * 1e3
      ? "no request was answered since this page was opened"
      : "no request was answered in the last two minutes"));
  const ends = [];
  for (const line of lines) {
    let path = "", pen = "M";
    for (const point of drawn) {
      if (point[line.key] === null) { pen = "M"; continue; }
      path += `${pen}${x(point.at).toFixed(1)} ${y(point[line.key]).toFixed(1)}`;
      pen = "L";
      line.end = point;
    }
    svg.append(element("path", { class: line.kind, d: path }));
    if (line.end) ends.push([y(line.end[line.key]), line]);
  }
  ends.sort((a, b) => a[0] - b[0]);
  if (ends.length > 1 && ends[1][0] - ends[0][0] < 15) ends[1][0] = ends[0][0] + 15;
  for (const [at, line] of ends)
    svg.append(element("text", { class: line.kind, x: width - right + 6, y: at + 4 }, line.name));
}

function draw() {
  chart(of("latency"), [{ key: "p50", kind: "first", name: "median" },
    { key: "p99", kind: "second", name: "99 %" }]);
  chart(of("throughput"), [{ key: "rate", kind: "first", name: "requests" },
    { key: "rows", kind: "second", name: "rows" }]);
}

// ---- a request to try

async function example() {
  const answer = await fetch(base + "/example");
  const { rows, made_up } = await answer.json();
  const shown = rows.map(written);
  while (shown.length > 1 && shown.join("\n").split("\n").length > LINES) shown.pop();
  const box = of("rows");
  box.value = '{"rows": [\n' + shown.join(",\n") + "\n]}";
  box.style.height = "0";
  box.style.height = `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`;
  of("origin").textContent = made_up
    ? "This row is made up: the data of the training are not here." : "";
}

function written(row) {
  const lines = [" "];
  for (const [number, [name, value]] of Object.entries(row).entries()) {
    const pair = `${JSON.stringify(name)}: ${JSON.stringify(value)}`;
    if (lines[lines.length - 1].length + pair.length > 40) lines.push("  ");
    lines[lines.length - 1] += (number ? " " : "{") + pair + ",";
  }
  return lines.join("\n").slice(0, -1) + "}";
}

async function send() {
  of("send").disabled = true;
  const start = performance.now();
  try {
    const answer = await fetch(base + "/infer_rows", { method: "POST", body: of("rows").value,
      headers: { "content-type": "application/json" } });
    const took = performance.now() - start;
    const said = await answer.json();
    if (answer.ok) scored(said, took, answer.headers.get("server-timing"));
    else failed(`${answer.status}: ${said.error}`);
  } catch (error) {
    failed(String(error));
  }
  of("send").disabled = false;
}

function failed(text) {
  of("said").textContent = text;
  of("said").className = "failed";
  of("scores").hidden = of("timing").hidden = true;
}

function scored(said, took, timing) {
  of("said").className = "quiet";
  const columns = Array.isArray(said.scores) ? { score: said.scores } : said.scores;
  const count = Object.values(columns)[0].length;
  of("said").textContent = `${count} row${count > 1 ? "s" : ""} in `
    + `${short(took)} ms, by version ${said.model_version}`;
  const heads = Object.keys(columns).flatMap(name => [name, ""]);
  of("scores").tHead.replaceChildren(cells("th", ["row", ...heads]));
  of("scores").tBodies[0].replaceChildren(...[...Array(Math.min(count, 50)).keys()].map(number =>
    cells("td", [number, ...Object.values(columns).flatMap(scores => {
      const bar = document.createElement("meter");
      bar.value = scores[number];
      return [scores[number].toFixed(5), bar];
    })])));
  of("scores").hidden = of("timing").hidden = false;
  steps(took, timing || "");
}

function cells(kind, values) {
  const row = document.createElement("tr");
  for (const value of values) row.appendChild(document.createElement(kind)).append(value);
  return row;
}

function steps(took, timing) {
  const given = Object.fromEntries(timing.split(", ").map(part => part.split(";dur=")));
  const read = name => Number(given[name] || 0);
  const parts = [["waited", read("queue")], ["read", read("read")], ["model", read("model")]];
  const server = Math.max(0, read("total") - read("queue") - read("read") - read("model"));
  parts.push(["written", server], ["network and browser", Math.max(0, took - read("total"))]);
  const whole = parts.reduce((sum, part) => sum + part[1], 0) || 1;
  const table = document.createElement("table");
  for (const [name, ms] of parts) {
    const row = table.insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = short(ms) + " ms";
    const bar = document.createElement("meter");
    bar.value = ms / whole;
    row.insertCell().append(bar);
  }
  table.id = "steps";
  of("timing").replaceChildren(table);
}

of("send").addEventListener("click", send);
of("reset").addEventListener("click", example);
addEventListener("resize", draw);
draw();
example();
look();
