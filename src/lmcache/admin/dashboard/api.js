// Requests to the server. The admin token is kept for as long as this tab is open, and nowhere else.

const TOKEN = "lmcache-admin-token";
const SECONDS = 15;

export const token = () => sessionStorage.getItem(TOKEN) ?? "";
export const setToken = (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN));

export class Refusal extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

// The decoded answer; a Refusal with the server's sentence where it says no. `expected`: a status beside 2xx whose
// answer is wanted, too. `seconds`: how long it may take.
export async function ask(method, path, { body, stop, expected, seconds = SECONDS } = {}) {
  const headers = {};
  if (token()) headers.Authorization = `Bearer ${token()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const late = AbortSignal.timeout(seconds * 1000);
  const answer = await fetch(path, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "same-origin",
    signal: stop ? AbortSignal.any([stop, late]) : late,
  });
  const value = await answer.json();
  if (!answer.ok && answer.status !== expected) throw new Refusal(answer.status, value.detail ?? answer.statusText);
  return value;
}
