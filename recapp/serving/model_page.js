"use strict";
// Reads /metrics once a second and shows its rates; sends the rows of the text field.
const WINDOW = 5;      // seconds that a quantile is of
const LINES = 24;      // of rows to try, unless one row has more
const model = document.body.dataset.model;
const of = id => document.getElementById(id);
const base = "/v2/models/" + encodeURIComponent(model);
const samples = [];    // {at, requests, refused, rows, batches, buckets}

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
  const seconds = now.at - last.at, batches = now.batches - first.batches;
  const latency = share => {
    const value = quantile(share, now, first);
    return value === null ? "–" : short(value) + " ms";
  };
  of("rate").textContent = short((now.requests - last.requests) / seconds);
  of("p50").textContent = latency(.5);
  of("p99").textContent = latency(.99);
  of("batch").textContent = batches ? short((now.rows - first.rows) / batches) : "–";
  of("total").textContent = now.requests.toLocaleString("en");
  of("refused").textContent = short((now.refused - last.refused) / seconds);
  of("memory").textContent = Math.round(now.memory / 1e6).toLocaleString("en") + " MB";
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
example();
look();
