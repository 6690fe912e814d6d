// Figures as people read them. Null and NaN are a dash.

const missing = (value) => value === null || value === undefined || !Number.isFinite(value);
const digits = (value) => (value >= 100 ? 0 : value >= 10 ? 1 : 2);
const scaled = (value, step, units) => {
  let unit = 0;
  while (Math.abs(value) >= step && unit < units.length - 1) { value /= step; unit += 1; }
  return [value, units[unit], unit];
};

export function bytes(value) {
  if (missing(value)) return "–";
  const [number, unit, step] = scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
  return `${number.toFixed(step ? digits(number) : 0)} ${unit}`;
}
export const bytesPerSecond = (value) => (missing(value) ? "–" : `${bytes(value)}/s`);

export function count(value) {
  if (missing(value)) return "–";
  if (Math.abs(value) < 10000) return Math.round(value).toLocaleString("en");
  const [number, unit] = scaled(value, 1000, ["", "k", "M", "G", "T"]);
  return `${number.toFixed(digits(number))} ${unit}`;
}

export const plural = (value, noun) => `${count(value)} ${noun}${Math.round(value) === 1 ? "" : "s"}`;

export function rate(value) {
  if (missing(value)) return "–";
  return `${value >= 1000 || value === 0 ? count(value) : value.toFixed(digits(value))}/s`;
}
export const perMinute = (value) => (missing(value) ? "–" : `${value >= 100 || value === 0 ? count(value) : value.toFixed(1)}/min`);

export function percent(share) {
  if (missing(share)) return "–";
  return share > 0 && share < 0.001 ? "< 0.1 %" : `${(share * 100).toFixed(share >= 0.9995 || share === 0 ? 0 : 1)} %`;
}

export function duration(seconds) {
  if (missing(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(digits(seconds * 1e3))} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export const ago = (seconds) => `${seconds < 120 ? `${Math.round(seconds)} s` : duration(seconds)} ago`;
export const saltName = (salt) => salt || "default";
export const tierName = (tier) => (tier === "l1" || tier === "l2" ? tier.toUpperCase() : tier);
export const words = (name) => name.replaceAll("_", " ");
export const shortKey = (key) => {
  const [space, hash] = key.split("/");
  return `${space.slice(0, 6)}…/${hash.slice(0, 12)}…`;
};
