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
