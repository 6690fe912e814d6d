// What every page has: a look every few seconds while somebody sees it, and how the server is.

import { byId } from "./dom.js";

const SECONDS = 5; // from the end of one look at the server to the next

export function showHealth(className, sentence) {
  byId("health").className = `badge ${className}`;
  byId("health").textContent = sentence;
}

export function notice(sentence) {
  byId("notice").hidden = !sentence;
  byId("notice").textContent = sentence;
}

// Calls `look(stop)`, an AbortSignal, again and again. Returns what looks at once.
export function looking(look) {
  let timer = 0;
  let current = null; // an AbortController while a look at the server goes on

  function stop() {
    clearTimeout(timer);
    current?.abort();
    current = null;
  }

  async function refresh() {
    stop();
    if (document.hidden) return;
    const mine = (current = new AbortController());
    try {
      await look(mine.signal);
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error.status) notice(error.message);
      else showHealth("bad", "no answer");
    }
    if (current === mine) timer = setTimeout(refresh, SECONDS * 1000);
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : refresh()));
  return refresh;
}
