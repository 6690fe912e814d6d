// A card with a chart of lines, or of areas on top of each other, and a legend with the values under the pointer.
/* global uPlot */

import { element, segments, text } from "./dom.js";

const HEIGHT = 190;
const COLORS = 8; // --color-1 and so on, in dashboard.css
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

const decades = (low, high) => {
  const first = Math.floor(Math.log10(low));
  return Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, at) => 10 ** (first + at));
};

// `description`: { title, note, unit(value), steps, stacked(choice), logarithmic, top, choices, lines(view, choice) }. Lines are
// [{ name, values, color }] with at most COLORS of them, and `top` is the least that the scale reaches to, `steps` what its
// marks may be apart.
export class Chart {
  #description;
  #plot = null;
  #drawn = "";
  #lines = [];
  #view = null;
  #choice;

  constructor(description) {
    this.#description = description;
    this.#choice = description.choices?.[0][0];
    const choices = description.choices && segments(
      element("fieldset", { className: "segments" }, element("legend", { className: "hidden" }, "Shown by")),
      `by-${description.title}`, description.choices, this.#choice, (choice) => this.#choose(choice));
    this.note = text("quiet note", description.note);
    this.legend = element("ul", { className: "legend" });
    this.place = element("div", { className: "plot", role: "img", "aria-label": description.title });
    const title = element("div", { className: "card-title" }, element("h3", {}, description.title), choices ?? this.note);
    this.card = element("figure", { className: "card chart" }, title, this.legend, this.place);
    this.empty = element("p", { className: "quiet empty" }, "");
    new ResizeObserver(() => this.#plot?.setSize({ width: this.place.clientWidth, height: HEIGHT })).observe(this.place);
  }

  #choose(choice) {
    this.#choice = choice;
    if (this.#view) this.update(this.#view);
  }

  update(view) {
    this.#view = view;
    this.#lines = this.#description.lines(view, this.#choice).slice(0, COLORS);
    const hasValues = this.#lines.some((line) => line.values.some((value) => value !== null));
    if (!hasValues || view.times.length < 2) {
      this.#discard();
      this.empty.textContent = view.times.length < 2 ? "Figures come every ten seconds." : "Nothing in this time.";
      this.place.replaceChildren(this.empty);
      this.legend.replaceChildren();
      return;
    }
    const drawn = JSON.stringify([this.#choice, this.#lines.map(({ name, color }) => [name, color])]);
    if (drawn !== this.#drawn || !this.#plot) this.#make(drawn);
    this.#plot.setData([view.times, ...this.#stacks()]);
    this.#tell(null);
  }

  // Draws anew in the colors that are in force.
  redraw() {
    this.#discard();
    if (this.#view) this.update(this.#view);
  }

  #discard() {
    this.#plot?.destroy();
    this.#plot = null;
    this.#drawn = "";
  }

  get #isStacked() {
    return Boolean(this.#description.stacked?.(this.#choice));
  }

  // What is drawn: the values, or sums of them from the first line up to each.
  #stacks() {
    const values = this.#lines.map((line) => line.values);
    if (!this.#isStacked) return values;
    return values.map((line, to) => line.map((_, at) => {
      const below = values.slice(0, to + 1).map((list) => list[at]).filter((value) => value !== null);
      return below.length ? below.reduce((sum, value) => sum + value, 0) : null;
    }));
  }

  #make(drawn) {
    this.#discard();
    this.#drawn = drawn;
    this.place.replaceChildren();
    this.#items = this.#lines.map((line) => {
      const mark = element("i");
      mark.style.background = style(`--color-${line.color}`);
      const value = text("value", "");
      return { value, item: element("li", {}, mark, text("name", line.name), value) };
    });
    this.legend.replaceChildren(...this.#items.map(({ item }) => item));
    this.#plot = new uPlot(this.#options(), [[], ...this.#lines.map(() => [])], this.place);
  }

  #items = [];

  #options() {
    const { unit, steps, logarithmic, top = 0 } = this.#description;
    const stacked = this.#isStacked;
    const marks = { ...(steps && { incrs: steps }), ...(logarithmic && { splits: (_, __, low, high) => decades(low, high) }) };
    const axis = { stroke: style("--quiet"), font: "11px Inter, system-ui", ticks: { show: false } };
    const grid = { stroke: style("--grid"), width: 1 };
    const range = (_, low, high) => [0, Math.max(top, (high ?? 0) * 1.08) || 1];
    return {
      width: this.place.clientWidth || 300,
      height: HEIGHT,
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 }, sync: { key: "lmcache" } },
      scales: { x: { time: true }, y: logarithmic ? { distr: 3 } : { range } },
      axes: [
        { ...axis, grid: { show: false }, space: 64, size: 26, values: (_, splits) => splits.map(clock) },
        { ...axis, ...marks, grid, size: 62, space: 36, values: (_, splits) => splits.map((value) => (value === null ? "" : unit(value))) },
      ],
      series: [{}, ...this.#lines.map((line) => ({
        label: line.name,
        stroke: style(`--color-${line.color}`),
        width: 1.5,
        fill: stacked ? `${style(`--color-${line.color}`)}${style("--area")}` : undefined,
        spanGaps: Boolean(logarithmic),
        points: { show: false },
      }))],
      bands: stacked ? this.#lines.slice(1).map((_, at) => ({ series: [at + 2, at + 1] })) : [],
      hooks: { setCursor: [(plot) => this.#tell(plot.cursor.idx)] },
    };
  }

  // The values at one place, else the latest.
  #tell(at) {
    this.#lines.forEach(({ values }, line) => {
      const value = at === null || at === undefined ? values.findLast((each) => each !== null) : values[at];
      this.#items[line].value.textContent = this.#description.unit(value);
    });
    const time = this.#view.times[at ?? -1];
    this.note.textContent = time === undefined ? this.#description.note : clock(time);
  }
}
