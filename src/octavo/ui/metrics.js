// Reads the Prometheus text of /metrics and makes the points of the charts from two readings.

const GAUGES = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"];
const COUNTERS = ["vllm:generation_tokens_total", "vllm:prompt_tokens_total"];
const TTFT = "vllm:time_to_first_token_seconds";
const WANTED = new Set([...GAUGES, ...COUNTERS, `${TTFT}_sum`, `${TTFT}_count`, `${TTFT}_bucket`]);

/** The wanted samples, those of several engines or models added up; buckets as a map from bound to count. */
export function readMetrics(text) {
  const values = { buckets: new Map() };
  for (const line of text.split("\n")) {
    const name = /^[\w:]+/.exec(line)?.[0];
    if (!WANTED.has(name)) continue;
    const value = Number(/ (\S+)(?: \d+)?$/.exec(line)?.[1]);
    if (name.endsWith("_bucket")) {
      const bound = Number(/[{,]le="([^"]+)"/.exec(line)?.[1].replace("+Inf", "Infinity"));
      values.buckets.set(bound, (values.buckets.get(bound) ?? 0) + value);
    } else {
      values[name] = (values[name] ?? 0) + value;
    }
  }
  return values;
}

/** A quantile of what came into a histogram between two readings, interpolated within its bucket as Prometheus does. */
export function quantile(before, after, share) {
  const counts = [...after].sort((a, b) => a[0] - b[0]).map(([bound, count]) => [bound, count - (before.get(bound) ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let low = 0;
  let seen = 0;
  for (const [bound, count] of counts) {
    if (count >= share * total) {
      return bound === Infinity ? low : low + ((bound - low) * (share * total - seen)) / (count - seen);
    }
    low = bound;
    seen = count;
  }
  return low;
}

/** What the charts show for the time between two readings; null where nothing is known. */
export function points(before, after, elapsed) {
  const change = (name) => after[name] - before[name];
  // A counter that went back belongs to a server that was started again.
  const rate = (name) => (change(name) >= 0 ? change(name) / elapsed : null);
  const requests = change(`${TTFT}_count`);
  const known = (value) => (Number.isFinite(value) ? value : null);
  return {
    generated: known(rate(COUNTERS[0])),
    prompt: known(rate(COUNTERS[1])),
    ttftMean: requests > 0 ? change(`${TTFT}_sum`) / requests : null,
    ttftHigh: requests > 0 ? quantile(before.buckets, after.buckets, 0.95) : null,
    running: known(after[GAUGES[0]]),
    waiting: known(after[GAUGES[1]]),
    cache: known(after[GAUGES[2]] * 100),
  };
}
