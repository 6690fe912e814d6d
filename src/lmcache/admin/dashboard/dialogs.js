// Questions before something is changed, and the admin token.

import { ask, setToken, token } from "./api.js";
import { byId, button, element, toast } from "./dom.js";

const CHANGE_SECONDS = 75; // the server gives up a little before

// Asks in a dialog. `fields`: inputs with a name, or labels around them. The values by name, or null when it was left.
export function question({ title, sentence, fields = [], action, danger = false }) {
  const dialog = byId("dialog").cloneNode(); // its own: the event of the last one's end may come after this opens
  const { promise, resolve } = Promise.withResolvers();
  let values = null;
  const confirm = element("button", { className: danger ? "danger filled" : "primary" }, action);
  const form = element("form", {}, element("h2", { id: "dialog-title" }, title), sentence ? element("p", {}, sentence) : null,
    ...fields, element("div", { className: "actions" }, button("Cancel", () => dialog.close(), ""), confirm));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const inputs = [...form.elements].filter((input) => input.name);
    values = Object.fromEntries(inputs.map((input) => [input.name, input.type === "checkbox" ? input.checked : input.value]));
    dialog.close();
  });
  dialog.addEventListener("close", () => resolve(values), { once: true });
  dialog.append(form);
  byId("dialog").replaceWith(dialog);
  dialog.showModal();
  return promise;
}

export const field = (label, input) => element("label", {}, label, input);
export const checkbox = (name, label) => element("label", { className: "check" }, element("input", { type: "checkbox", name }), label);

// Asks the server to change something and says what came of it. What it answered, or null.
export async function change(method, path, body, told) {
  try {
    const answer = await ask(method, path, { body, seconds: CHANGE_SECONDS });
    toast(told(answer));
    return answer;
  } catch (error) {
    toast(error.name === "TimeoutError" ? "The server has not answered yet; it may still do this." : error.message, "bad");
    return null;
  }
}

export async function askForToken(changed) {
  const input = element("input", { type: "password", name: "token", autocomplete: "off", value: token() });
  const given = await question({
    title: "Admin token",
    sentence: "From another host the server wants the token in its --admin-token-file for keys, salts and changes. It is kept in this tab until it is closed.",
    fields: [field("Token", input)],
    action: "Use it",
  });
  if (given === null) return;
  const entered = given.token.trim();
  if (!/^[\x20-\x7e]*$/.test(entered)) {
    toast("A token is one line of ASCII.", "bad");
    return;
  }
  setToken(entered);
  showToken();
  changed();
}

export function showToken() {
  byId("token").textContent = token() ? "Token set" : "Token";
}
