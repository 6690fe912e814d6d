// The page of a coordinator: how much its directory knows, and its servers.

import { ask } from "./api.js";
import { askForToken, showToken } from "./dialogs.js";
import { byId } from "./dom.js";
import { bindFleet, showFleet } from "./fleet.js";
import { bytes, count } from "./format.js";
import { tile } from "./overview.js";
import { looking, notice, showHealth } from "./page.js";

function tiles(stats) {
  return [
    tile("Objects", count(stats.keys), "in the directory"),
    tile("Copies", count(stats.placements), "on all servers and tiers"),
    tile("Memory", bytes(stats.memory_bytes), "of the directory"),
    tile("Batches", count(stats.batches_applied), `${count(stats.batches_duplicate)} came twice`),
    tile("Gaps", count(stats.gaps), "in what servers told"),
    tile("Resyncs", count(stats.resyncs), "to their end"),
  ];
}

async function look(stop) {
  const { status } = await ask("GET", "healthz", { stop });
  showHealth("good", status);
  await showFleet(stop);
  byId("tiles").replaceChildren(...tiles(await ask("GET", "directory/stats", { stop })));
  notice("");
}

const refresh = looking(look);
byId("token").addEventListener("click", () => askForToken(refresh));
bindFleet();
showToken();
refresh();
