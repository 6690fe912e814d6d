// Engines, and hit rates by model and salt.

import { byId, dot, element, fillBar, show, table, text } from "./dom.js";
import { count, duration, percent, plural, saltName } from "./format.js";

const FILTERED_FROM = 8; // engines
const TENANTS_SHOWN = 12;

function heartbeat(engine) {
  const age = engine.heartbeat_age_seconds;
  if (age === null) return "–";
  const interval = engine.heartbeat_interval_seconds;
  const state = engine.silent ? "bad" : age > 1.5 * interval ? "warn" : "good";
  const title = `one every ${duration(interval)} is expected`;
  return element("span", { title }, dot(state), `${engine.silent ? "silent, " : ""}${Math.round(age)} s ago`);
}

const ENGINE_COLUMNS = [
  { title: "Engine", className: "long", cell: (engine) => engine.instance_id },
  { title: "Model", className: "long", cell: (engine) => engine.model_name ?? "–" },
  { title: "Software", className: "wide long", cell: (engine) => engine.engine ?? "–" },
  { title: "Workers", className: "number wide", cell: (engine) => `${engine.workers.length} of ${engine.ranks ?? "–"}` },
  { title: "Heartbeat", className: "number", cell: heartbeat },
  { title: "Sessions", className: "number", cell: (engine) => count(engine.sessions) },
  { title: "Leases", className: "number wide", cell: (engine) => count(engine.leases) },
  { title: "Payload by", className: "wide", cell: (engine) => [...new Set(engine.transfer.map(({ mode }) => mode))].join(", ") },
];

export function showEngines(instances) {
  const filter = byId("engine-filter");
  filter.hidden = instances.length < FILTERED_FROM;
  const wanted = filter.hidden ? "" : filter.value.toLowerCase();
  const shown = instances
    .filter((engine) => `${engine.instance_id} ${engine.model_name ?? ""}`.toLowerCase().includes(wanted))
    .sort((a, b) => Number(b.silent) - Number(a.silent) || a.instance_id.localeCompare(b.instance_id, undefined, { numeric: true }));
  byId("engine-count").textContent = wanted ? `${shown.length} of ${instances.length}` : String(instances.length);
  const nothing = instances.length ? "No engine has that in its name or model." : "No engine is registered.";
  show(byId("engines"), shown, (engines) => table(ENGINE_COLUMNS, engines, nothing));
}

function tenants(view, title, label, name) {
  const rows = view.labelValues("lookup_requested_tokens_total", label).map((value) => {
    const asked = view.total("lookup_requested_tokens_total", { [label]: value });
    return { value, asked, share: asked ? view.total("lookup_hit_tokens_total", { [label]: value }) / asked : 0 };
  }).filter((row) => row.asked).sort((a, b) => b.asked - a.asked);
  const columns = [
    { title, className: "long", cell: (row) => name(row.value) },
    { title: "Tokens", className: "number", cell: (row) => count(row.asked) },
    {
      title: "Hit rate",
      className: "number with-bar",
      cell: (row) => element("div", { className: "bar-cell" }, fillBar(row.share, percent(row.share)), text("", percent(row.share))),
    },
  ];
  const more = rows.length - TENANTS_SHOWN;
  return [
    table(columns, rows.slice(0, TENANTS_SHOWN), "No lookups in this time."),
    ...(more > 0 ? [element("p", { className: "quiet" }, `and ${plural(more, "other")} with fewer tokens`)] : []),
  ];
}

const otherName = (name) => (name === "_other" ? "all others" : name);

export function showTenants(view) {
  byId("models").replaceChildren(...tenants(view, "Model", "model_name", otherName));
  byId("salts").replaceChildren(...tenants(view, "Salt", "cache_salt", (salt) => otherName(saltName(salt))));
}
