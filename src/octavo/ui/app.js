// Starts the page: the playground, the charts and what the head line says of the server.

import { request } from "./api.js";
import { Chart } from "./chart.js";
import { points, readMetrics } from "./metrics.js";
import { startPlayground } from "./playground.js";

const PERIOD = 2000; // milliseconds between two readings

const $ = (id) => document.getElementById(id);
const rounded = (value) => (value < 9.95 ? Number(value.toFixed(1)) : Math.round(value)).toLocaleString("en");
const duration = (value) => (value < 0.9995 ? `${Math.round(value * 1000)} ms` : `${Number(value.toPrecision(3))} s`);

const area = $("charts");
const throughput = new Chart(area, {
  id: "chart-throughput",
  title: "Throughput",
  series: ["generated", "prompt"],
  format: (value) => `${rounded(value)} tok/s`,
  least: 10,
});
const ttft = new Chart(area, {
  id: "chart-ttft",
  title: "Time to first token, mean",
  series: ["mean", "p95"],
  format: duration,
  least: 0.1,
  bridged: true,
});
const requests = new Chart(area, {
  id: "chart-requests",
  title: "Requests running",
  series: ["running", "queued"],
  format: (value) => String(Math.round(value)),
  least: 5,
});
const cache = new Chart(area, {
  id: "chart-cache",
  title: "KV cache in use",
  series: ["used"],
  format: (value) => `${rounded(value)} %`,
  least: 10,
});

let before = null; // the last reading: [time in seconds, values]
let timer = 0;

function setHealth(state, text) {
  const shown = $("health");
  if (shown.textContent !== text) shown.textContent = text;
  shown.dataset.state = state;
}

async function readHealth() {
  try {
    const response = await fetch("/health", { cache: "no-store" });
    if (response.ok) setHealth("well", "ready");
    else setHealth("ill", "engine not available");
  } catch {
    setHealth("ill", "server not reachable");
  }
}

async function poll() {
  clearTimeout(timer);
  if (!document.hidden) {
    readHealth();
    try {
      const values = readMetrics(await (await request("/metrics")).text());
      const now = performance.now() / 1000;
      if (before) {
        const point = points(before[1], values, now - before[0]);
        throughput.push(now, [point.generated, point.prompt]);
        ttft.push(now, [point.ttftMean, point.ttftHigh]);
        requests.push(now, [point.running, point.waiting]);
        cache.push(now, [point.cache]);
      }
      before = [now, values];
      area.dataset.state = "live";
    } catch (error) {
      before = null; // a rate over a time without readings would be wrong
      area.dataset.state = error.status === 401 ? "locked" : "lost";
    }
  } else {
    before = null;
  }
  clearTimeout(timer);
  timer = setTimeout(poll, PERIOD);
}

async function readModels() {
  const select = $("model");
  try {
    const { data } = await (await request("/v1/models")).json();
    select.replaceChildren(...data.map(({ id }) => new Option(id, id)));
    const length = data[0]?.max_model_len;
    const context = length ? `, context ${length.toLocaleString("en")}` : "";
    $("model-line").textContent = data.length ? data[0].id + context : "";
    document.title = data.length ? `octavo: ${data[0].id}` : "octavo";
  } catch (error) {
    $("model-line").textContent = error.status === 401 ? "An API key is needed: give it under Settings." : "";
    if (error.status === 401) $("settings").open = true;
  }
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
startPlayground(() => {
  readModels();
  poll();
});
readModels();
poll();
