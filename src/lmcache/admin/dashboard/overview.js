// The tiles on top, and a card for each tier.

import { element, fillBar, text } from "./dom.js";
import { bytes, bytesPerSecond, count, duration, percent, plural, rate, words } from "./format.js";

export function tile(name, value, detail, className = "") {
  return element("div", { className: `tile ${className}` }, text("tile-name", name), text("tile-value", value), text("quiet", detail));
}

export function tiles(view, status) {
  const requested = view.total("lookup_requested_tokens_total");
  const hit = view.total("lookup_hit_tokens_total");
  const lookups = view.total("lookups_total");
  const seconds = view.seconds;
  const silent = status.instances.filter((instance) => instance.silent).length;
  const quantile = (share) => view.quantile("call_seconds", share, { method: "lookup" }).overall;
  const each = (value) => (seconds ? value / seconds : null);
  return [
    tile("Hit rate", percent(requested ? hit / requested : null), `of ${count(requested)} tokens`),
    tile("Prefill saved", duration(view.total("prefill_saved_seconds_total")),
      `${duration(view.latest("prefill_saved_seconds_total") ?? 0)} since the start`),
    tile("Lookups", rate(each(lookups)), `${count(lookups)} in ${duration(seconds)}`),
    tile("Lookup latency", duration(quantile(0.5)), `99 %: ${duration(quantile(0.99))}`),
    tile("Given to engines", bytesPerSecond(each(view.total("tier_hit_bytes_total"))),
      `${bytes(view.total("tier_hit_bytes_total"))} in ${duration(seconds)}`),
    tile("Engines", count(status.instances.length),
      silent ? `${silent} silent` : plural(status.sessions, "session"), silent ? "bad" : ""),
  ];
}

const fact = (name, value) => element("div", {}, element("dt", {}, name), element("dd", {}, value));

function tierCard(name, kind, badge, share, used, facts, more = []) {
  return element("article", { className: "card tier" },
    element("div", { className: "card-title" }, element("h3", {}, name), text("quiet", kind), badge),
    fillBar(share, used, share > 0.97 ? "full" : ""),
    element("p", { className: "used" }, used),
    element("dl", { className: "facts" }, ...facts.map(([title, value]) => fact(title, value))),
    more.length
      ? element("details", {}, element("summary", {}, "More"),
        element("dl", { className: "facts" }, ...more.map(([title, value]) => fact(title, value))))
      : null);
}

const badge = (className, label) => text(`badge ${className}`, label);

// Of how full a tier is; without a limit only what it holds.
function fill(used, capacity) {
  return capacity ? [used / capacity, `${bytes(used)} of ${bytes(capacity)} · ${percent(used / capacity)}`] : [0, `${bytes(used)} · no limit`];
}

function health(adapter) {
  if (adapter.loads_suspended && adapter.stores_suspended) return badge("bad", "suspended after faults");
  if (adapter.loads_suspended) return badge("bad", "loads suspended");
  if (adapter.stores_suspended) return badge("bad", "stores suspended");
  if (adapter.full) return badge("warn", "backend full");
  return adapter.inventory_complete ? badge("good", "healthy") : badge("warn", "listing what is there");
}

// Figures of an adapter that have no place of their own on its card.
const PLACED = new Set(["name", "type", "serde", "objects", "used_bytes", "capacity_bytes", "inventory_complete", "full",
  "loads_suspended", "stores_suspended", "loads_in_flight", "stores_in_flight"]);

// An adapter knows the order of its objects, not their times. While it is full, what it has over what leaves in a second
// is how long its objects stay.
function stay(adapter, evicted, seconds) {
  return evicted ? `≈ ${duration((adapter.objects * seconds) / evicted)}` : "–";
}

function adapterCard(adapter, view) {
  const labels = { l2_name: adapter.name };
  const evicted = view.total("l2_evicted_objects_total", labels);
  const [share, used] = fill(adapter.used_bytes, adapter.capacity_bytes);
  const kind = adapter.serde && adapter.serde !== "none" ? `${adapter.type} · ${adapter.serde}` : adapter.type;
  const more = Object.entries(adapter).filter(([name]) => !PLACED.has(name))
    .map(([name, value]) => [words(name.replace(/_bytes$/, "")), name.endsWith("_bytes") ? bytes(value) : String(value)]);
  return tierCard(adapter.name, kind, health(adapter), share, used, [
    ["Objects", count(adapter.objects)],
    ["Under way", `${plural(adapter.loads_in_flight, "load")}, ${plural(adapter.stores_in_flight, "store")}`],
    ["Waiting to be stored", count(view.latest("l2_store_queue_depth", labels) ?? 0)],
    ["Age when evicted", stay(adapter, evicted, view.seconds)],
    ["Evicted", count(evicted)],
  ], more);
}

export function tiers(view, status) {
  const { l1, l2 } = status;
  const age = view.latest("l1_eviction_age_seconds");
  const [share, used] = fill(l1.used_bytes, l1.capacity_bytes);
  const l1Card = tierCard("L1", "shared memory", l1.quarantined_bytes ? badge("warn", `${bytes(l1.quarantined_bytes)} in quarantine`) : null,
    share, used, [
      ["Objects", count(l1.objects)],
      ["Leased", count(l1.leased_objects)],
      ["Age when evicted", l1.evicted_objects && age ? duration(age) : "–"],
      ["Evicted", count(view.total("l1_evicted_chunks_total"))],
    ], [
      ["Evicted since the start", count(l1.evicted_objects)],
      ["Largest free range", bytes(l1.largest_free_bytes)],
      ["Stores without room", count(l1.allocation_failures)],
      ["Memory of the index", bytes(l1.index_bytes)],
    ]);
  return [l1Card, ...l2.adapters.map((adapter) => adapterCard(adapter, view))];
}
