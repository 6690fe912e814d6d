// The last hour of samples, and what is computed from them. A value of a list belongs to the time at the same place.

const KEPT_SECONDS = 3600;
const POINTS = 90; // of a view at most: what is between samples that are left out is in the increase to the next

const plus = (a, b) => (a === null ? b : b === null ? a : a + b);
const add = (lists, length) =>
  lists.reduce((sum, list) => sum.map((value, at) => plus(value, list[at])), Array(length).fill(null));
export const total = (list) => list.reduce((sum, value) => sum + (value ?? 0), 0);
export const ratio = (parts, wholes) => parts.map((part, at) => (wholes[at] ? (part ?? 0) / wholes[at] : null));
export const scale = (list, factor) => list.map((value) => (value === null ? null : value * factor));

// Increases of a counter from sample to sample. One that began again has begun at 0; so has one that appeared.
function increases(values) {
  return values.map((value, at) => {
    if (at === 0 || value === null) return null;
    const before = values[at - 1] ?? 0;
    return value < before ? value : value - before;
  });
}

export class History {
  constructor() {
    this.times = [];
    this.series = new Map();
  }

  get last() {
    return this.times.at(-1) ?? 0;
  }

  // Takes what the server has beyond `last`; all of it where its clock was set back.
  merge(excerpt) {
    if (excerpt.times.length && excerpt.times[0] <= this.last) this.clear();
    const known = this.times.length;
    this.times.push(...excerpt.times);
    const nothing = Array(excerpt.times.length).fill(null);
    const given = new Map(excerpt.series.map((series, column) =>
      [JSON.stringify([series.name, series.labels]), { ...series, values: excerpt.samples.map((row) => row[column] ?? null) }]));
    for (const [key, series] of given) {
      if (!this.series.has(key)) this.series.set(key, { ...series, values: Array(known).fill(null) });
    }
    for (const [key, series] of this.series) series.values.push(...(given.get(key)?.values ?? nothing));
    this.#drop(this.times.findIndex((time) => time >= this.last - KEPT_SECONDS));
  }

  #drop(oldest) {
    if (oldest <= 0) return;
    this.times.splice(0, oldest);
    for (const [key, series] of this.series) {
      series.values.splice(0, oldest);
      if (series.values.every((value) => value === null)) this.series.delete(key);
    }
  }

  clear() {
    this.times = [];
    this.series.clear();
  }

  view(seconds) {
    const first = Math.max(0, this.times.findIndex((time) => time >= this.last - seconds));
    const step = Math.ceil((this.times.length - first) / POINTS);
    const places = this.times.map((_, at) => at).filter((at) => at >= first && (this.times.length - 1 - at) % step === 0);
    return new View(this, places);
  }
}

// Samples at some places of the history. `labels` in its methods: those that a series must have; exactly none for {}.
export class View {
  constructor(history, places) {
    this.times = places.map((at) => history.times[at]);
    this.#all = [...history.series.values()];
    this.#places = places;
  }

  #all;
  #places;

  #matching(name, labels) {
    return this.#all.filter((series) => series.name === name
      && (Object.keys(labels).length ? Object.entries(labels).every(([key, value]) => series.labels[key] === value)
        : !("model_name" in series.labels || "cache_salt" in series.labels)));
  }

  #at(values) {
    return this.#places.map((at) => values[at]);
  }

  // Values of a label that a series has.
  labelValues(name, label) {
    const found = this.#all.filter((series) => series.name === name && label in series.labels).map((series) => series.labels[label]);
    return [...new Set(found)];
  }

  gauge(name, labels = {}) {
    return add(this.#matching(name, labels).map((series) => this.#at(series.values)), this.times.length);
  }

  // Of a counter, from sample to sample; `null` at the first.
  increase(name, labels = {}) {
    const lists = this.#matching(name, labels).map((series) => increases(this.#at(series.values)));
    return add(lists, this.times.length);
  }

  perSecond(name, labels = {}) {
    return this.increase(name, labels).map((value, at) =>
      (value === null ? null : value / Math.max(1, this.times[at] - this.times[at - 1])));
  }

  total(name, labels = {}) {
    return total(this.increase(name, labels));
  }

  latest(name, labels = {}) {
    return this.gauge(name, labels).at(-1) ?? null;
  }

  get seconds() {
    return this.times.length > 1 ? this.times.at(-1) - this.times[0] : 0;
  }

  // Quantiles of a histogram for each sample, and over all of them at the end: straight lines within a bucket.
  quantile(name, share, labels = {}) {
    const bounds = this.labelValues(`${name}_bucket`, "le").sort((a, b) => upper(a) - upper(b));
    const buckets = bounds.map((le) => this.increase(`${name}_bucket`, { ...labels, le }));
    const limits = bounds.map(upper);
    const at = this.times.map((_, index) => quantileOf(limits, buckets.map((bucket) => bucket[index] ?? 0), share));
    return { values: at, overall: quantileOf(limits, buckets.map(total), share) };
  }
}

const upper = (le) => (le === "+Inf" ? Infinity : Number(le));

function quantileOf(limits, counts, share) {
  const wanted = (counts.at(-1) ?? 0) * share;
  if (!wanted) return null;
  const at = counts.findIndex((value) => value >= wanted);
  const low = at ? limits[at - 1] : 0;
  if (limits[at] === Infinity) return low;
  const before = at ? counts[at - 1] : 0;
  return low + ((limits[at] - low) * (wanted - before)) / (counts[at] - before);
}
