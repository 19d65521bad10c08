// A small line chart in SVG over the last two minutes, with its present value in words.

const SVG = "http://www.w3.org/2000/svg";
const WINDOW = 120; // seconds shown
const GAP = 7; // seconds between two samples above which nothing is known of the time between them
const PLOT = { top: 16, bottom: 18, right: 6 };

function svg(tag, attributes = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** The least round number that is not below a value. */
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export class Chart {
  /**
   * `series`: names of one or two lines; `format`: a value as text with its unit; `least`: the smallest top of the
   * scale; `bridged`: whether a line goes on over times without a value.
   */
  constructor(parent, { id, title, series, format, least, bridged = false }) {
    this.series = series;
    this.format = format;
    this.least = least;
    this.bridged = bridged;
    this.title = title;
    this.samples = []; // [time in seconds, value of each series or null]
    this.hovered = null;

    const figure = document.createElement("figure");
    figure.className = "chart";
    figure.id = id;
    const caption = document.createElement("figcaption");
    const name = document.createElement("span");
    name.className = "chart-title";
    name.textContent = title;
    this.value = document.createElement("span");
    this.value.className = "chart-value";
    this.detail = document.createElement("span");
    this.detail.className = "chart-detail";
    caption.append(name, this.value, this.detail);
    this.svg = svg("svg", { role: "img" });
    figure.append(caption, this.svg);
    parent.append(figure);

    this.svg.addEventListener("pointermove", (event) => this.hover(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.hover(null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.describe();
  }

  push(time, values) {
    this.samples.push([time, ...values]);
    while (this.samples[0][0] < time - WINDOW) this.samples.shift();
    this.describe();
    this.draw();
  }

  hover(x) {
    if (x === null || !this.samples.length) {
      this.hovered = null;
    } else {
      const end = this.samples.at(-1)[0];
      const time = end - (1 - x / (this.svg.clientWidth - PLOT.right)) * WINDOW;
      const nearest = (best, sample) => (Math.abs(sample[0] - time) < Math.abs(best[0] - time) ? sample : best);
      this.hovered = this.samples.reduce(nearest);
    }
    this.describe();
    this.draw();
  }

  /** The value in words: the one pointed at, else the latest that is known. */
  describe() {
    const latest = this.samples.at(-1);
    const known = this.samples.filter((sample) => sample[1] !== null);
    const shown = this.hovered ?? (this.bridged ? known.at(-1) : latest);
    const text = (value) => (value === null || value === undefined ? "–" : this.format(value));
    this.value.textContent = text(shown?.[1]);
    const more = this.series.slice(1).map((name, index) => `${name} ${text(shown?.[index + 2])}`);
    if (this.hovered) more.push(`${Math.round(latest[0] - this.hovered[0])} s ago`);
    this.detail.textContent = more.join(", ");
    const highest = known.length ? `, highest ${this.format(Math.max(...known.map((sample) => sample[1])))}` : "";
    const words = [`${this.title}: ${this.series[0]} ${text(shown?.[1])}`, ...more].join(", ");
    this.svg.setAttribute("aria-label", words + highest);
  }

  draw() {
    const width = this.svg.clientWidth;
    const height = this.svg.clientHeight;
    if (!width || !height) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const values = this.samples.flatMap((sample) => sample.slice(1)).filter((value) => value !== null);
    const top = Math.max(this.least, niceAbove(Math.max(...values, this.least)));
    const end = this.samples.at(-1)?.[0] ?? 0;
    const floor = height - PLOT.bottom;
    const x = (time) => ((time - end) / WINDOW + 1) * (width - PLOT.right);
    const y = (value) => floor - (value / top) * (floor - PLOT.top);

    const marks = [
      svg("line", { class: "grid", x1: 0, x2: width, y1: PLOT.top, y2: PLOT.top }),
      svg("line", { class: "axis", x1: 0, x2: width, y1: floor, y2: floor }),
      svg("text", { class: "tick", x: 0, y: PLOT.top - 4 }, this.format(top)),
      svg("text", { class: "tick", x: 0, y: height - 4 }, "2 min ago"),
      svg("text", { class: "tick end", x: width, y: height - 4 }, "now"),
    ];
    for (let index = this.series.length; index >= 1; index -= 1) {
      marks.push(...this.line(index, x, y, floor));
    }
    if (this.hovered) {
      const at = x(this.hovered[0]);
      marks.push(svg("line", { class: "cursor", x1: at, x2: at, y1: PLOT.top, y2: floor }));
    }
    this.svg.replaceChildren(...marks);
  }

  /** The marks of one series: an area under the first, a line, and a dot at its end. */
  line(index, x, y, floor) {
    const runs = [];
    let run = [];
    let before = 0;
    for (const sample of this.samples) {
      if (!this.bridged && sample[0] - before > GAP) run = [];
      before = sample[0];
      if (sample[index] !== null) {
        if (!run.length) runs.push(run);
        run.push([x(sample[0]).toFixed(1), y(sample[index]).toFixed(1)]);
      } else if (!this.bridged) {
        run = [];
      }
    }
    const marks = [];
    for (const points of runs) {
      const path = points.map((point) => point.join(",")).join("L");
      if (index === 1) {
        marks.push(svg("path", { class: "area", d: `M${points[0][0]},${floor}L${path}L${points.at(-1)[0]},${floor}Z` }));
      }
      marks.push(svg("path", { class: `line line-${index}`, d: `M${path}` }));
    }
    const last = runs.at(-1)?.at(-1);
    if (last) marks.push(svg("circle", { class: `dot dot-${index}`, cx: last[0], cy: last[1], r: index === 1 ? 3 : 2 }));
    return marks;
  }
}
