// Builds what is shown. Rule: text from memory goes in as text nodes only; no function here takes markup.

const SVG = "http://www.w3.org/2000/svg";

// What would reorder or hide text: controls, zero width, bidi marks and overrides, line separators, tags.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|[\u{e0000}-\u{e007f}]/gu;
const CLIPPED_CHARACTERS = 3000; // a text of megabytes would make the page slow; a button shows the rest

/** An element. Functions become listeners; false, null and undefined leave an attribute out. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for the parts of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Text as it was said, with characters that nobody would see made visible. */
export function plain(text) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(UNSEEN)) {
    parts.push(text.slice(from, found.index));
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    parts.push(el("span", { class: "unseen", title: "a character that cannot be seen" }, `U+${code}`));
    from = found.index + found[0].length;
  }
  return [...parts, text.slice(from)];
}

/** A piece of memory, verbatim; a long one is cut until it is asked for. */
export function said(text, tag = "p") {
  const box = el(tag, { class: "text", dir: "auto" }, plain(text.slice(0, CLIPPED_CHARACTERS)));
  if (text.length <= CLIPPED_CHARACTERS) return box;
  const all = () => {
    box.replaceChildren(...plain(text));
    more.remove();
  };
  const more = el("button", { type: "button", click: all }, `Show all ${number(text.length)} characters`);
  return el("div", {}, box, more);
}

/** A line of a text, for lists. */
export function line(text, characters = 240) {
  const flat = text.slice(0, characters * 2).replace(/\s+/g, " ").trim();
  return plain(flat.length > characters || text.length > characters * 2 ? `${flat.slice(0, characters)} …` : flat);
}

export function number(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-GB");
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const unit = Math.min(4, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return `${(value / 1000 ** unit).toFixed(unit && value / 1000 ** unit < 10 ? 1 : 0)} ${["B", "KB", "MB", "GB", "TB"][unit]}`;
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  return value < 10 ? `${value.toFixed(1)} ms` : value < 10_000 ? `${number(Math.round(value))} ms` : `${(value / 1000).toFixed(1)} s`;
}

/** "1 chunk", "2 chunks". */
export function count(value, thing, things = `${thing}s`) {
  return `${number(value)} ${value === 1 ? thing : things}`;
}

/** The day of a moment that is given in microseconds: "Tue, 3 Nov 2026". */
export function day(microseconds) {
  return new Date(microseconds / 1000).toLocaleDateString("en-GB", { weekday: "short", day: "numeric", month: "short", year: "numeric" });
}

/** A moment, given in microseconds: the clock for today, the date before it otherwise. */
export function when(microseconds) {
  const at = new Date(microseconds / 1000);
  const today = at.toDateString() === new Date().toDateString();
  const clock = at.toLocaleTimeString("en-GB");
  const shown = today ? clock : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" })}, ${clock}`;
  return el("time", { datetime: at.toISOString(), title: at.toLocaleString("en-GB") }, shown);
}

/** Whose a chunk is, where there are tokens. */
export function whose({ author }) {
  return author ? el("span", { dir: "auto" }, "by ", line(author)) : null;
}

/** Where a chunk is from, if it was not said in a chat of memd's, and whose it is. */
export function origin(one) {
  const isTurn = (one.kind ?? "turn") === "turn";
  const place = one.page ? `page ${one.page}` : one.sheet ? `sheet ${one.sheet}` : "";
  const words = [one.heading?.join(" > "), one.source, place, ...(one.tags ?? []).map((tag) => `#${tag}`)].filter(Boolean).join(", ");
  const told = [!isTurn && badge(one.kind, "on"), words && el("span", { dir: "auto" }, line(words)), whose(one)].filter(Boolean);
  return told.length ? told : null;
}

const SIGNS = {
  override: "it tells to ignore earlier instructions", persona: "it gives the model a new role or task", addressed: "it speaks to a model", secrecy: "it asks to keep something from the user",
  prompt: "it asks for the system prompt", exfiltration: "it sends what was said to an address", marker: "it has marks that stand around messages in a prompt", hidden: "it has text that nobody sees",
};

/** A mark on a document's or a tool's text that looks like an instruction to a model; `signs` are the daemon's. */
export function warning(signs) {
  const words = (signs ?? []).map((sign) => SIGNS[sign] ?? sign);
  return words.length > 0 && badge("looks like an instruction to a model", "bad", `${words.join("; ")}. The model gets it as a quotation; nothing is kept from it.`);
}

/** The address of a view: its path, and what it is narrowed by. */
export function hashOf(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `#/${path}?${new URLSearchParams(given)}` : `#/${path}`;
}

export function badge(text, kind = "", title = null) {
  return el("span", { class: `badge ${kind}`, title }, text);
}

export function chunkLink(topicId, id) {
  return el("a", { class: "id", href: `#/chunk/${encodeURIComponent(topicId)}/${encodeURIComponent(id)}` }, id);
}

export function turnLink(id) {
  return el("a", { class: "id", href: `#/turns/${encodeURIComponent(id)}` }, id);
}

export function conversationLink(topicId, id, words) {
  return el("a", { href: `#/conversation/${encodeURIComponent(topicId)}/${encodeURIComponent(id)}` }, words);
}

/** Names and values; a value of null is left out. */
export function facts(pairs) {
  const known = Object.entries(pairs).filter(([, value]) => value !== null && value !== undefined && value !== false && value !== "");
  return el("dl", { class: "facts" }, known.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** What only those who know how memd works understand, for whoever opens it. */
export function details(...children) {
  return el("details", { class: "why" }, el("summary", {}, "Details"), children);
}

/** What went wrong, where it went wrong. */
export function problem(error) {
  return el("p", { class: "problem", role: "alert" }, plain(error.message));
}

/** Say it to those who listen to the page. */
export function announce(text) {
  document.getElementById("said").textContent = text;
}
