// Which charts there are, and what their lines are computed from.

import { bytesPerSecond, duration, percent, perMinute, rate, saltName, tierName, words } from "./format.js";
import { ratio, scale, total } from "./history.js";

const always = () => true;
const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power);
const SHOWN = 6; // lines of a chart whose number is not known beforehand

// Tiers have a color each, in all charts: L1 the first, adapters the others in their order.
const adapters = (view) => view.labelValues("l2_usage_bytes", "l2_name");
const colored = (lines, from = 1) => lines.map((line, at) => ({ ...line, color: ((at + from - 1) % 8) + 1 }));
const largest = (lines) => lines.filter((line) => total(line.values) > 0)
  .sort((a, b) => total(b.values) - total(a.values)).slice(0, SHOWN);

function hitRate(view, by) {
  const requested = view.increase("lookup_requested_tokens_total");
  if (by === "tier") {
    return colored([
      { name: "L1", values: ratio(view.increase("lookup_hit_l1_tokens_total"), requested) },
      { name: "L2", values: ratio(view.increase("lookup_hit_l2_tokens_total"), requested) },
    ]);
  }
  const lines = view.labelValues("lookup_requested_tokens_total", by).map((value) => ({
    name: by === "cache_salt" ? saltName(value) : value,
    asked: view.total("lookup_requested_tokens_total", { [by]: value }),
    values: ratio(view.increase("lookup_hit_tokens_total", { [by]: value }), view.increase("lookup_requested_tokens_total", { [by]: value })),
  }));
  return colored(lines.filter((line) => line.asked).sort((a, b) => b.asked - a.asked).slice(0, SHOWN));
}

const saved = (view) => colored(view.labelValues("prefill_saved_seconds_total", "tier")
  .map((tier) => ({ name: tierName(tier), values: view.perSecond("prefill_saved_seconds_total", { tier }) })));

const throughput = (view) => [
  { name: "engines from L1", values: view.perSecond("tier_hit_bytes_total", { tier: "l1" }), color: 1 },
  ...colored(adapters(view).flatMap((l2_name) => [
    { name: `from ${l2_name}`, values: view.perSecond("l2_loaded_bytes_total", { l2_name }) },
    { name: `to ${l2_name}`, values: view.perSecond("l2_stored_bytes_total", { l2_name }) },
  ]).filter((line) => total(line.values) > 0).slice(0, 7), 2),
];

const latency = (view) => [
  { name: "lookup, median", values: view.quantile("call_seconds", 0.5, { method: "lookup" }).values, color: 1 },
  { name: "lookup, 99 %", values: view.quantile("call_seconds", 0.99, { method: "lookup" }).values, color: 2 },
  { name: "L2 load, 99 %", values: view.quantile("l2_load_seconds", 0.99).values, color: 3 },
  { name: "L2 store, 99 %", values: view.quantile("l2_store_seconds", 0.99).values, color: 4 },
].filter((line) => line.values.some((value) => value !== null));

const evictions = (view) => [
  { name: "L1", values: view.perSecond("l1_evicted_chunks_total"), color: 1 },
  ...colored(adapters(view).map((l2_name) => ({
    name: l2_name, values: view.perSecond("l2_evicted_objects_total", { l2_name }),
  })), 2).filter((line) => total(line.values) > 0),
];

const misses = (view) => colored(largest(view.labelValues("misses_total", "reason").map((reason) => ({
  name: words(reason), values: scale(view.perSecond("misses_total", { reason }), 60),
}))), 3);

export const GRAPHS = [
  {
    title: "Hit rate",
    note: "share of the tokens asked for",
    unit: percent,
    top: 1,
    stacked: (by) => by === "tier",
    choices: [["tier", "Tier"], ["model_name", "Model"], ["cache_salt", "Salt"]],
    lines: hitRate,
  },
  { title: "Prefill time saved", note: "seconds saved each second", unit: (value) => `${duration(value)}/s`, stacked: always, lines: saved },
  { title: "Throughput", note: "payload between tiers", unit: bytesPerSecond, steps: BINARY, lines: throughput },
  { title: "Latency", note: "logarithmic", unit: duration, logarithmic: true, lines: latency },
  { title: "Misses by reason", note: "requests", unit: perMinute, stacked: always, lines: misses },
  { title: "Evictions", note: "objects", unit: rate, lines: evictions },
];
