// The table of figures, where uPlot is not installed.
// Names come from engines and tenants: they only ever become text.
const element = (tag, text) => { const made = document.createElement(tag); made.textContent = text; return made; };
const shown = (key, value) => {
  if (typeof value !== "number") return value === null ? "-" : String(value);
  if (key.endsWith("bytes")) {
    const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return `${value.toFixed(unit ? 1 : 0)} ${units[unit]}`;
  }
  return Number.isInteger(value) ? value.toLocaleString() : value.toFixed(3);
};
const section = (title, value, into) => {
  const plain = Object.entries(value).filter(([, item]) => item === null || typeof item !== "object");
  if (plain.length) {
    into.append(element("h2", title));
    const table = into.appendChild(document.createElement("table"));
    for (const [key, item] of plain) {
      const row = table.insertRow();
      row.append(element("td", key.replaceAll("_", " ")), element("td", shown(key, item)));
    }
  }
  for (const [key, item] of Object.entries(value)) {
    if (item === null || typeof item !== "object") continue;
    const name = `${title} ${key.replaceAll("_", " ")}`;
    if (!Array.isArray(item)) section(name, item, into);
    else if (!item.length) into.append(element("h2", `${name}: none`));
    else if (typeof item[0] === "object") item.forEach((one, index) => section(`${name} ${index}`, one, into));
    else into.append(element("h2", `${name}: ${item.join(", ")}`));
  }
};
const refresh = async () => {
  const health = document.getElementById("health");
  try {
    const answer = await (await fetch("healthcheck")).json();
    health.textContent = answer.status === "healthy" ? "healthy" : answer.reason;
    health.className = answer.status === "healthy" ? "good" : "bad";
    const made = document.createElement("main");
    made.id = "figures";
    section("Server", await (await fetch("status")).json(), made);
    document.getElementById("figures").replaceWith(made);
  } catch (error) {
    health.textContent = "no answer";
    health.className = "bad";
  }
  setTimeout(refresh, 2000);
};
refresh();
