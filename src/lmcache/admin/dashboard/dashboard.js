// The page: asks the server every few seconds while somebody looks at it, and shows what it said.

import { ask } from "./api.js";
import { Chart } from "./charts.js";
import { askForToken, showToken } from "./dialogs.js";
import { byId, segments } from "./dom.js";
import { bindFleet, showFleet } from "./fleet.js";
import { duration } from "./format.js";
import { GRAPHS } from "./graphs.js";
import { History } from "./history.js";
import { showEngines, showTenants } from "./lists.js";
import { bindObjects, offer, showPins } from "./objects.js";
import { tiers, tiles } from "./overview.js";
import { looking, notice, showHealth } from "./page.js";
import { bindQuotas, showQuotas } from "./quotas.js";

const WINDOWS = [["300", "5 min"], ["1200", "20 min"], ["3600", "1 h"]];

const history = new History();
const charts = GRAPHS.map((description) => new Chart(description));
let windowSeconds = 1200;
let status = null;

function draw() {
  if (status === null) return;
  const view = history.view(windowSeconds);
  byId("server").textContent = `${status.version} · up ${duration(status.uptime_seconds)}`;
  byId("tiles").replaceChildren(...tiles(view, status));
  keepOpen(byId("tiers"), tiers(view, status));
  for (const chart of charts) chart.update(view);
  showTenants(view);
  showEngines(status.instances);
  offer(status);
}

// New cards in place of the old ones, with the details open that were.
function keepOpen(node, cards) {
  const open = [...node.children].map((card) => Boolean(card.querySelector("details")?.open));
  cards.forEach((card, at) => {
    const details = card.querySelector("details");
    if (details) details.open = Boolean(open[at]);
  });
  node.replaceChildren(...cards);
}

async function readHistory(stop) {
  try {
    history.merge(await ask("GET", `metrics/history?since=${history.last}`, { stop }));
    notice("");
  } catch (refusal) {
    if (refusal.status !== 404) throw refusal;
    notice(`There are no charts. ${refusal.message}`);
  }
}

async function look(stop) {
  const health = await ask("GET", "healthcheck", { stop, expected: 503 });
  showHealth(health.status === "healthy" ? "good" : "bad", health.reason ?? health.status);
  [status] = await Promise.all([ask("GET", "status", { stop }), readHistory(stop)]);
  draw();
  byId("fleet-section").hidden = !("joined" in status.fleet);
  const others = byId("fleet-section").hidden ? null : showFleet(stop);
  await Promise.all([showQuotas(stop, refresh), showPins(stop), others]);
}

const refresh = looking(look);

function tokenChanged() {
  history.clear(); // its salts were digests, or are
  refresh();
}

byId("charts").append(...charts.map((chart) => chart.card));
segments(byId("window"), "window", WINDOWS, String(windowSeconds), (choice) => {
  windowSeconds = Number(choice);
  draw();
});
byId("token").addEventListener("click", () => askForToken(tokenChanged));
byId("engine-filter").addEventListener("input", () => showEngines(status.instances));
bindFleet();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.redraw()));
bindQuotas(refresh);
bindObjects();
showToken();
refresh();
