// Search for objects, where a prompt is, pins, and what removes objects.

import { ask } from "./api.js";
import { change, checkbox, field, question } from "./dialogs.js";
import { button, byId, element, forget, show, table, text, toast } from "./dom.js";
import { bytes, count, duration, plural, saltName, shortKey, tierName } from "./format.js";

const PAGE = 1000;
const PAGES = 20; // that a search looks at before it asks whether to go on
const SHOWN = 100;
const OWNER = "dashboard";

// ---- search ---------------------------------------------------------------------------------------------------------
let search = null; // { query, entries, token, runs }

async function searchOn() {
  const of = search;
  if (of.runs) return;
  of.runs = true;
  try {
    await takePages(of);
  } finally {
    of.runs = false;
  }
  if (of === search) showFound();
}

async function takePages(of) {
  for (let page = 0; page < PAGES && of.entries.length < SHOWN; page += 1) {
    const parameters = new URLSearchParams({ ...of.query, page_size: PAGE, page_token: of.token });
    const answer = await ask("GET", `cache/objects?${parameters}`);
    of.entries.push(...answer.entries);
    of.token = answer.next_page_token;
    if (!of.token || of !== search) break;
  }
}

const guarded = (work) => work().catch((error) => toast(error.message, "bad"));

function begin(form) {
  const { key, tier, model } = Object.fromEntries(new FormData(form));
  const where = ["all", "l1", "l2"].includes(tier) ? { tier } : { adapter: tier };
  search = { query: { ...where, key: key.trim().toLowerCase(), model_name: model.trim() }, entries: [], token: "", runs: false };
  guarded(searchOn);
}

const chosenKeys = () => [...new Set([...byId("found").querySelectorAll("tbody input:checked")].map((input) => input.value))];

const FOUND_COLUMNS = [
  {
    title: "",
    className: "tick",
    cell: (entry) => element("input", { type: "checkbox", value: entry.key, "aria-label": `Choose ${shortKey(entry.key)}`, on: { change: showChosen } }),
  },
  { title: "Object", cell: (entry) => element("code", { title: entry.key }, shortKey(entry.key)) },
  { title: "Tier", className: "long", cell: (entry) => tierName(entry.tier) },
  { title: "Model", className: "long wide", cell: (entry) => entry.model_name || "–" },
  { title: "Salt", className: "long wide", cell: (entry) => saltName(entry.cache_salt) },
  { title: "Rank", className: "number wide", cell: (entry) => `${entry.rank} of ${entry.world_size}` },
  { title: "Size", className: "number", cell: (entry) => bytes(entry.size_bytes) },
];

function showFound() {
  const { entries, token } = search;
  const shown = entries.slice(0, SHOWN);
  const said = token || entries.length > SHOWN ? `The first ${plural(shown.length, "copy").replace("copys", "copies")}` : `${count(shown.length)} ${shown.length === 1 ? "copy" : "copies"}`;
  const all = button("Choose all", () => {
    for (const input of byId("found").querySelectorAll("tbody input")) input.checked = true;
    showChosen();
  });
  const actions = element("div", { className: "toolbar" }, text("quiet", said), all,
    button("Pin", pinChosen, "small chosen"), button("Delete", deleteChosen, "small danger chosen"),
    token && shown.length < SHOWN ? button("Search on", () => guarded(searchOn)) : null);
  const nothing = token ? "Nothing found yet." : "There is no such object.";
  byId("found").replaceChildren(...(shown.length || token ? [actions] : []),
    element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Objects found" }, table(FOUND_COLUMNS, shown, nothing)));
  showChosen();
}

function showChosen() {
  const chosen = chosenKeys().length;
  for (const act of byId("found").querySelectorAll(".chosen")) act.disabled = !chosen;
}

async function deleteChosen() {
  const keys = chosenKeys();
  const given = await question({
    title: `Delete ${plural(keys.length, "object")}?`,
    sentence: "From all tiers. What an engine reads at this moment stays, and so does what is pinned.",
    fields: [checkbox("force", "pinned ones, too")],
    action: "Delete",
    danger: true,
  });
  if (given === null) return;
  const told = (answer) => `${plural(answer.deleted, "object")} deleted, ${count(answer.skipped)} left out.`;
  if (await change("DELETE", "cache/objects", { keys, tier: "all", force: given.force }, told)) begin(byId("search"));
}

async function pinChosen() {
  const keys = chosenKeys();
  const hours = element("input", { name: "hours", type: "number", min: 0.1, max: 168, step: "any", value: 1, required: true });
  const owner = element("input", { name: "owner", maxLength: 512, value: OWNER, required: true });
  const given = await question({
    title: `Pin ${plural(keys.length, "object")}?`,
    sentence: "Pinned copies are not evicted until the pin ends.",
    fields: [field("For how many hours", hours), field("Owner", owner)],
    action: "Pin",
  });
  if (given === null) return;
  const told = (answer) => `${plural(answer.objects, "object")} pinned for ${duration(answer.remaining_seconds)}.`;
  await change("POST", "cache/pins", { keys, owner: given.owner, ttl_seconds: Number(given.hours) * 3600 }, told);
  await guarded(() => showPins());
}

// ---- prompts --------------------------------------------------------------------------------------------------------
async function lookUp(form) {
  const { model, salt, prompt } = Object.fromEntries(new FormData(form));
  const isTokens = /^[\s\d,[\]]+$/.test(prompt);
  const given = isTokens ? { tokens: prompt.match(/\d+/g)?.map(Number) ?? [] } : { text: prompt };
  const answer = await ask("POST", "cache/lookup", { body: { model_name: model, cache_salt: salt, ...given } });
  const marks = answer.chunks.map(({ hash, tiers }) =>
    element("i", { className: `chunk ${tiers.includes("l1") ? "in-l1" : tiers.length ? "in-l2" : ""}`, title: `${hash}: ${tiers.join(", ") || "nowhere"}` }));
  const said = answer.chunks.length
    ? `${answer.prefix_chunks} of ${plural(answer.chunks.length, "chunk")} from the first on (${answer.chunk_tokens} tokens each)`
    : `Shorter than a chunk of ${answer.chunk_tokens} tokens.`;
  const partials = answer.partial_chunks.map(({ tokens, tiers }) =>
    element("p", {}, `And a partial chunk of ${plural(tokens, "token")} behind them: ${tiers.join(", ")}`));
  byId("chunks").replaceChildren(element("p", {}, said), ...partials, element("div", { className: "chunks" }, ...marks));
}

// ---- pins and clear -------------------------------------------------------------------------------------------------
async function endPin(pin) {
  const sentence = `${plural(pin.objects, "object")} of ${pin.owner} may be evicted then.`;
  if (await question({ title: "End this pin?", sentence, action: "End it", danger: true }) === null) return;
  await change("DELETE", "cache/pins", { pin_id: pin.pin_id }, (answer) => `${plural(answer.objects, "object")} released.`);
  await guarded(() => showPins());
}

const PIN_COLUMNS = [
  { title: "Owner", className: "long", cell: (pin) => pin.owner },
  { title: "Objects", className: "number", cell: (pin) => count(pin.objects) },
  { title: "Ends in", className: "number", cell: (pin) => duration(pin.remaining_seconds) },
  { title: "", className: "number", cell: (pin) => button("End", () => endPin(pin)) },
];

export async function showPins(stop) {
  let pins;
  try {
    ({ pins } = await ask("GET", "cache/pins", { stop }));
  } catch (refusal) {
    if (!(refusal.status >= 400)) throw refusal;
    show(byId("pins"), refusal.message, (sentence) => element("p", { className: "quiet empty" }, sentence));
    return;
  }
  forget(byId("pins"));
  show(byId("pins"), pins, () => table(PIN_COLUMNS, pins, "Nothing is pinned."));
}

async function clear() {
  const tier = element("select", { name: "tier" }, ...[["l1", "L1"], ["l2", "L2"], ["all", "all tiers"]]
    .map(([value, label]) => element("option", { value }, label)));
  const given = await question({
    title: "Clear a tier?",
    sentence: "Every object in it is removed for good. What an engine reads at this moment stays, and so does what is pinned.",
    fields: [field("Tier", tier), checkbox("force", "pinned ones, too")],
    action: "Clear",
    danger: true,
  });
  if (given === null) return;
  await change("POST", "cache/clear", given, (answer) => `${plural(answer.objects, "object")} removed, ${bytes(answer.bytes)}.`);
}

export function bindObjects() {
  byId("clear").addEventListener("click", clear);
  for (const [id, work] of [["search", begin], ["prompt", (form) => guarded(() => lookUp(form))]]) {
    byId(id).addEventListener("submit", (event) => {
      event.preventDefault();
      work(event.target);
    });
  }
}

// What the forms offer.
export function offer(status) {
  const names = status.l2.adapters.map((adapter) => adapter.name);
  const choices = [["all", "all"], ["l1", "L1"], ...(names.length > 1 ? [["l2", "L2"]] : []), ...names.map((name) => [name, name])];
  show(byId("search").elements.tier, choices, () => choices.map(([value, label]) => element("option", { value }, label)));
  const models = [...new Set(status.instances.map((instance) => instance.model_name).filter(Boolean))];
  show(byId("model-names"), models, () => models.map((model) => element("option", { value: model })));
}
