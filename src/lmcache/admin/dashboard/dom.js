// Elements. Names come from engines and tenants: they only ever become text.

export const byId = (id) => document.getElementById(id);

// `properties` are set on the element, with a dash in their name as attributes; `on` has handlers by event.
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  const { on = {}, ...others } = properties;
  for (const [name, value] of Object.entries(others)) {
    if (name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  for (const [event, handler] of Object.entries(on)) made.addEventListener(event, handler);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const text = (className, content) => element("span", { className }, content);

export const dot = (className) => element("i", { className: `dot ${className}`, "aria-hidden": "true" });

export const button = (label, handler, className = "small") =>
  element("button", { type: "button", className, on: { click: handler } }, label);

// A bar that is filled to a share of it, 0 to 1.
export function fillBar(share, label, className = "") {
  const filled = element("div", { className: "filled" });
  filled.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
  return element("div", { className: `fill ${className}`, role: "img", "aria-label": label }, filled);
}

// `columns`: { title, className, cell(row) }. `whenEmpty`: what stands for no rows.
export function table(columns, rows, whenEmpty) {
  if (!rows.length) return element("p", { className: "quiet empty" }, whenEmpty);
  const head = columns.map(({ title, className = "" }) => element("th", { className, scope: "col" }, title));
  const body = rows.map((row) =>
    element("tr", {}, ...columns.map(({ className = "", cell }) => element("td", { className }, cell(row)))));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

// Makes the content of a node again, where what it shows has changed: focus and selection stay otherwise.
const shown = new WeakMap();
export function show(node, value, make) {
  const now = JSON.stringify(value);
  if (shown.get(node) === now) return;
  shown.set(node, now);
  node.replaceChildren(...[make(value)].flat());
}
export const forget = (node) => shown.delete(node);

// One of several choices; `chosen` is called with its value.
export function segments(group, name, choices, value, chosen) {
  for (const [choice, label] of choices) {
    const input = element("input", { type: "radio", name, value: choice, checked: choice === value });
    input.addEventListener("change", () => chosen(choice));
    group.append(element("label", {}, input, element("span", {}, label)));
  }
  return group;
}

export function toast(message, className = "") {
  const shownToast = element("p", { className }, message);
  const all = byId("toasts");
  all.append(shownToast);
  while (all.children.length > 3) all.firstChild.remove();
  setTimeout(() => shownToast.remove(), 8000);
}
