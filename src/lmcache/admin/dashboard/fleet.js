// The servers of the fleet, as their coordinator has them.

import { ask } from "./api.js";
import { byId, dot, element, fillBar, forget, show, table, text } from "./dom.js";
import { ago, bytes, count, duration, percent, plural } from "./format.js";

const FILTERED_FROM = 8; // servers
const TOLD = {
  everything: null,
  nothing: ["", "nothing told"],
  gap: ["warn", "events missing"],
  waits: ["warn", "waits to resync"],
  resync: ["warn", "resyncing"],
};

let overview = null;

const badges = (server) => [
  ...(TOLD[server.told] ? [text(`badge ${TOLD[server.told][0]}`, TOLD[server.told][1])] : []),
  ...server.behind.map((decisions) => text("badge warn", `${decisions} behind`)),
];

function name(server) {
  const own = server.instance_id === overview.instance_id ? " (this one)" : "";
  return element("div", { title: server.instance_id }, element("div", { className: "cut" }, server.instance_id + own),
    element("div", { className: "cut quiet" }, server.url.replace("http://", "")), element("div", { className: "badges" }, ...badges(server)));
}

const silence = (server) => server.silent_seconds + overview.age_seconds;
const isSilent = (server) => silence(server) > overview.instance_timeout_seconds / 2;

function heartbeat(server) {
  const title = `gone after ${duration(overview.instance_timeout_seconds)} without one`;
  return element("span", { title }, dot(isSilent(server) ? "bad" : "good"), `${isSilent(server) ? "silent, " : ""}${ago(silence(server))}`);
}

function l1(server) {
  if (!server.l1_capacity_bytes) return bytes(server.l1_used_bytes);
  const share = server.l1_used_bytes / server.l1_capacity_bytes;
  const said = `${bytes(server.l1_used_bytes)} of ${bytes(server.l1_capacity_bytes)}`;
  return element("div", { className: "bar-cell", title: said }, fillBar(share, said, share > 0.97 ? "full" : ""), text("", percent(share)));
}

const COLUMNS = [
  { title: "Server", className: "server", cell: name },
  { title: "Heartbeat", className: "number", cell: heartbeat },
  { title: "L1 used", className: "number l1", cell: l1 },
  { title: "In L1", className: "number", cell: (server) => count(server.l1_objects) },
  { title: "In L2", className: "number wide", cell: (server) => count(server.l2_objects) },
  { title: "Joined", className: "number wide", cell: (server) => ago(server.joined_seconds + overview.age_seconds) },
];

const trouble = (server) => Number(isSilent(server)) + Number(badges(server).length > 0);

function state() {
  const { coordinator, joined, problem, age_seconds: age, servers } = overview;
  const sum = (field) => servers.reduce((total, server) => total + server[field], 0);
  const total = `${bytes(sum("l1_used_bytes"))} of ${bytes(sum("l1_capacity_bytes"))} in L1, ${plural(sum("l1_objects"), "object")}`;
  if (!coordinator) return [total];
  const reached = problem ? ["bad", "coordinator not reached"] : joined ? ["good", "coordinator reached"] : ["warn", "not joined"];
  const told = age ? `as told ${ago(age)}: ${total}` : "";
  return [text(`badge ${reached[0]}`, reached[1]), ` ${coordinator} · `, problem ? `${problem} ${told}` : total];
}

function draw() {
  const { servers } = overview;
  const filter = byId("fleet-filter");
  filter.hidden = servers.length < FILTERED_FROM;
  const wanted = filter.hidden ? "" : filter.value.toLowerCase();
  const shown = servers
    .filter((server) => `${server.instance_id} ${server.url}`.toLowerCase().includes(wanted))
    .sort((a, b) => trouble(b) - trouble(a) || a.instance_id.localeCompare(b.instance_id, undefined, { numeric: true }));
  byId("fleet-count").textContent = wanted ? `${shown.length} of ${servers.length}` : String(servers.length);
  byId("fleet-state").replaceChildren(...state());
  const nothing = servers.length ? "No server has that in its name or address." : "No server has joined.";
  show(byId("fleet"), [shown, overview.age_seconds], () => table(COLUMNS, shown, nothing));
}

// A refusal takes the place of the list.
export async function showFleet(stop) {
  try {
    overview = await ask("GET", "fleet", { stop });
  } catch (refusal) {
    if (!(refusal.status >= 400)) throw refusal;
    overview = null;
    byId("fleet-state").textContent = byId("fleet-count").textContent = "";
    byId("fleet-filter").hidden = true;
    forget(byId("fleet"));
    byId("fleet").replaceChildren(element("p", { className: "quiet empty" }, refusal.message));
    return;
  }
  draw();
}

export function bindFleet() {
  byId("fleet-filter").addEventListener("input", draw);
}
