// What each cache salt may keep in L1.

import { ask } from "./api.js";
import { change, field, question } from "./dialogs.js";
import { button, byId, element, fillBar, show, table, text } from "./dom.js";
import { bytes, percent } from "./format.js";

const GIB = 2 ** 30;
const path = (salt) => `quota/${encodeURIComponent(salt)}`;
const name = (salt) => (salt === "_default" ? "default" : salt);

async function set(quota, changed) {
  const salt = element("input", { name: "salt", required: true, maxLength: 512, autocomplete: "off", value: quota ? quota.cache_salt : "", readOnly: Boolean(quota) });
  const limit = element("input", { name: "limit", type: "number", min: 0, step: "any", required: true, value: quota?.exists ? quota.limit_gb : "" });
  const given = await question({
    title: quota ? `Quota of ${name(quota.cache_salt)}` : "Set a quota",
    sentence: "Beyond its quota a salt's own objects are evicted first. _default stands for requests without a salt.",
    fields: [field("Salt", salt), field("Limit in GB of 2^30 bytes", limit)],
    action: "Set",
  });
  if (given === null) return;
  const told = (answer) => `${name(answer.cache_salt)} may keep ${bytes(answer.limit_gb * GIB)}.`;
  if (await change("PUT", path(given.salt), { limit_gb: Number(given.limit) }, told)) changed();
}

async function remove(quota, enforced, changed) {
  const title = `Remove the limit of ${name(quota.cache_salt)}?`;
  const sentence = enforced
    ? `A salt without a limit keeps nothing in L1: the ${bytes(quota.current_usage_gb * GIB)} that it has there are evicted.`
    : "What it holds stays: limits are not in force.";
  if (await question({ title, sentence, action: "Remove", danger: true }) === null) return;
  if (await change("DELETE", path(quota.cache_salt), undefined, () => "The limit is removed.")) changed();
}

function columns(enforced, changed) {
  const share = (quota) => (quota.limit_gb ? quota.current_usage_gb / quota.limit_gb : 1);
  return [
    { title: "Salt", className: "long", cell: (quota) => name(quota.cache_salt) },
    { title: "In L1", className: "number", cell: (quota) => bytes(quota.current_usage_gb * GIB) },
    { title: "Limit", className: "number", cell: (quota) => (quota.exists ? bytes(quota.limit_gb * GIB) : enforced ? "none: keeps nothing" : "none") },
    {
      title: "Used",
      className: "number with-bar wide",
      cell: (quota) => (quota.exists
        ? element("div", { className: "bar-cell" }, fillBar(share(quota), percent(share(quota)), share(quota) > 0.97 ? "full" : ""), text("", percent(share(quota))))
        : "–"),
    },
    {
      title: "",
      className: "number",
      cell: (quota) => element("span", { className: "buttons" }, button("Change", () => set(quota, changed)),
        quota.exists ? button("Remove", () => remove(quota, enforced, changed)) : null),
    },
  ];
}

export function bindQuotas(changed) {
  byId("set-quota").addEventListener("click", () => set(null, changed));
}

export async function showQuotas(stop, changed) {
  show(byId("quotas"), await ask("GET", "quota", { stop }), ({ quotas, enforced }) => [
    table(columns(enforced, changed), quotas, "No salt has a limit or holds anything."),
    ...(enforced ? [] : [element("p", { className: "quiet" }, "Limits are not in force: only --eviction-policy IsolatedLRU goes by them.")]),
  ]);
}
