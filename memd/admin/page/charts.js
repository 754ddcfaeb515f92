// Small drawings. Rule: a drawing is also said in words, for those who do not see it.

import { el, number, svg } from "./dom.js";

const BAR = 6; // units of the view box; the style sheet stretches it
const HEIGHT = 40;

/** A bar per value, oldest first; each value is a list of parts that stand on one another. */
export function bars(title, values, { unit, parts, label }) {
  const sums = values.map((value) => value.reduce((sum, part) => sum + part, 0));
  const highest = Math.max(1e-9, ...sums);
  const columns = values.map((value, place) => {
    let top = HEIGHT;
    const column = value.map((part, kind) => {
      const height = (part / highest) * HEIGHT;
      top -= height;
      return svg("rect", { x: place * BAR, y: top, width: BAR - 1, height, class: `part${kind}` });
    });
    return svg("g", {}, svg("title", {}, label(place)), svg("rect", { x: place * BAR, y: 0, width: BAR, height: HEIGHT, class: "back" }), column);
  });
  const sorted = [...sums].sort((a, b) => a - b);
  const shown = (value) => `${number(value < 10 ? Math.round(value * 10) / 10 : Math.round(value))} ${unit}`;
  const words = sums.length ? `median ${shown(sorted[sums.length >> 1])}, highest ${shown(highest)}` : "no turns yet";
  const box = { viewBox: `0 0 ${Math.max(30, values.length) * BAR} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
  return el("figure", { class: "chart" },
    el("figcaption", {}, el("b", {}, title), ` ${words}`, parts && el("span", { class: "key" }, parts.map(key))),
    svg("svg", { ...box, "aria-label": `${title} of the last ${values.length} turns: ${words}` }, columns));
}

/** A length out of a whole, 0 to 1, made of parts. */
export function meter(parts, words) {
  let left = 0;
  const drawn = parts.map((part, kind) => {
    const width = Math.max(0, Math.min(1 - left, part)) * 100;
    left += width / 100;
    return svg("rect", { x: left * 100 - width, y: 0, width, height: 1, class: `part${kind}` });
  });
  return svg("svg", { class: "meter", viewBox: "0 0 100 1", preserveAspectRatio: "none", role: "img", "aria-label": words }, drawn);
}

function key(name, kind) {
  return el("span", {}, svg("svg", { viewBox: "0 0 8 8", "aria-hidden": "true" }, svg("rect", { width: 8, height: 8, class: `part${kind}` })), name);
}

const AXIS = { left: 76, right: 12, top: 10, bottom: 24, height: 190 }; // pixels
const TICK_PIXELS = 90; // of the time axis: a label needs as many

/** Figures over time, with axes, as wide as there is room.
 *
 * `periods`: each with `at` (microseconds); `series`: `{name, of(period)}`, where null leaves a gap; stacked as bars, or
 * as lines; `shown(value)` is a value with its unit, `time(at, isLong)` a moment as the axis, or a person, reads it. */
export function overTime(title, periods, { series, shown, time, isStacked = false, highest = 0 }) {
  const values = periods.map((period) => series.map(({ of }) => of(period)));
  const known = values.flatMap((row) => (isStacked ? [row.reduce((sum, value) => sum + (value ?? 0), 0)] : row.filter((value) => value !== null)));
  const top = highest || roundUp(Math.max(0, ...known));
  const words = (row) => series.map(({ name }, kind) => `${series.length > 1 ? `${name} ` : ""}${row[kind] === null ? "–" : shown(row[kind])}`).join(", ");
  const latest = values.findLast((row) => row.some((value) => value !== null));
  const spoken = latest ? `${title}, ${time(periods[0].at, true)} to ${time(periods.at(-1).at, true)}. Highest: ${shown(Math.max(0, ...known))}. Latest: ${words(latest)}.` : `${title}: nothing yet.`;
  const picture = svg("svg", { role: "img", "aria-label": spoken, height: AXIS.height });
  const draw = () => {
    const width = Math.max(240, picture.parentElement?.clientWidth - 26 || 0);
    picture.setAttribute("width", width);
    picture.setAttribute("viewBox", `0 0 ${width} ${AXIS.height}`);
    picture.replaceChildren(...drawing(width, { periods, values, series, shown, time, isStacked, top, words }));
  };
  const table = el("details", {}, el("summary", {}, "As a table"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, as a table` },
    el("table", {}, el("thead", {}, el("tr", {}, ["Time", ...series.map(({ name }) => name)].map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, periods.map((period, place) => el("tr", {}, el("th", { scope: "row" }, time(period.at, true)), values[place].map((value) => el("td", {}, value === null ? "–" : shown(value)))))))));
  const figure = el("figure", { class: "chart over-time" },
    el("figcaption", {}, el("b", {}, title), latest && ` ${words(latest)}`, series.length > 1 && el("span", { class: "key" }, series.map(({ name }, kind) => key(name, kind)))), picture, table);
  new ResizeObserver(draw).observe(figure);
  return figure;
}

function drawing(width, { periods, values, series, shown, time, isStacked, top, words }) {
  const inner = { width: width - AXIS.left - AXIS.right, height: AXIS.height - AXIS.top - AXIS.bottom };
  const slot = inner.width / periods.length;
  const x = (place) => AXIS.left + place * slot;
  const y = (value) => AXIS.top + inner.height * (1 - value / (top || 1));
  const levels = [0, 0.25, 0.5, 0.75, 1].map((part) => part * top);
  const grid = levels.map((level) => svg("g", { class: "axis" },
    svg("line", { x1: AXIS.left, x2: width - AXIS.right, y1: y(level), y2: y(level) }),
    svg("text", { x: AXIS.left - 6, y: y(level) + 4, "text-anchor": "end" }, shown(level))));
  const every = Math.max(1, Math.ceil(TICK_PIXELS / slot));
  const ticks = periods.map((period, place) => place % every === 0 && x(place) < width - 50 && svg("g", { class: "axis" },
    svg("line", { x1: x(place), x2: x(place), y1: y(0), y2: y(0) + 4 }),
    svg("text", { x: x(place), y: AXIS.height - 6 }, time(period.at, false))));
  const backs = periods.map((period, place) => svg("g", {}, svg("title", {}, `${time(period.at, true)}: ${words(values[place])}`),
    svg("rect", { x: x(place), y: AXIS.top, width: slot, height: inner.height, class: "back" }),
    isStacked && stack(values[place], x(place), slot, y)));
  const middle = (place) => x(place) + slot / 2;
  const lines = isStacked ? [] : series.map((_, kind) => {
    const own = values.map((row) => row[kind]);
    const alone = own.map((value, place) => value !== null && (own[place - 1] ?? null) === null && (own[place + 1] ?? null) === null && svg("circle", { cx: middle(place), cy: y(value), r: 3, class: `part${kind}` }));
    return [svg("path", { class: `line${kind}`, d: path(own, middle, y) }), alone.filter(Boolean)];
  });
  return [grid, ticks.filter(Boolean), backs, lines].flat(Infinity);
}

function stack(row, left, slot, y) {
  let sum = 0;
  return row.map((value, kind) => {
    const from = sum;
    sum += value ?? 0;
    return svg("rect", { x: left + slot * 0.1, width: slot * 0.8, y: y(sum), height: y(from) - y(sum), class: `part${kind}` });
  });
}

/** A line through what is known, with gaps. */
function path(values, x, y) {
  return values.map((value, place) => {
    if (value === null) return "";
    const isFirst = place === 0 || values[place - 1] === null;
    return isFirst ? `M${x(place)} ${y(value)}` : `L${x(place)} ${y(value)}`;
  }).join("");
}

/** The next of 1, 2, 4, 8, 10 times a power of ten: quarters of it are short numbers. */
function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 8, 10].find((step) => step * power >= value * 0.999) * power;
}
