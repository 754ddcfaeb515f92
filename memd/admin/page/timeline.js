// The live conversations, when things were said, then everything that was ever written to the log, newest first.

import { get } from "./api.js";
import { meter } from "./charts.js";
import { badge, chunkLink, count, day, el, hashOf, line, number, origin, problem, said, warning, when } from "./dom.js";

const PAGE = 50;
const OPEN_AT_FIRST = 2; // conversations
const SPANS_MAX = 14; // more days than these are shown as months; earlier ones on request
const BUFFERS_MAX = 20; // topics whose buffers are asked for when none is chosen

export async function show(main, { topic, topics, again }) {
  const live = el("div", { class: "columns" });
  const list = el("ol", { class: "log", "aria-label": "Log entries, newest first" });
  const older = el("button", { type: "button", click: () => page(next).catch((error) => older.after(problem(error))) }, "Older entries");
  const fresh = el("button", { type: "button", class: "main", hidden: true, click: again }, "");
  let next = null;
  let added = 0;
  const page = async (before) => {
    const answer = await get("/memd/log", { topic, before, limit: PAGE });
    list.append(...answer.events.map(entry));
    next = answer.next;
    older.hidden = next === null;
  };
  const buffers = async () => {
    const asked = topic ? [topic] : topics().filter((one) => one.conversations).map((one) => one.topic_id).slice(0, BUFFERS_MAX);
    const open = new Set([...live.querySelectorAll("details[open]")].map((box) => box.dataset.key));
    const found = await Promise.all(asked.map(async (id) => (await get("/memd/buffer", { topic: id })).conversations.map((one) => [id, one])));
    const newest = found.flat().sort((a, b) => b[1].last_at - a[1].last_at);
    if (!live.hasChildNodes()) newest.slice(0, OPEN_AT_FIRST).forEach(([id, one]) => open.add(`${id}/${one.conversation}`));
    live.replaceChildren(...newest.map(([id, one]) => conversation(id, one, open)));
    if (!newest.length) live.append(el("p", { class: "empty" }, "No conversation is in the buffer."));
  };
  const [{ days }] = await Promise.all([get("/memd/days", { topic }), buffers(), page(null)]);
  main.replaceChildren(...[el("h1", {}, "Timeline"), topic && el("p", {}, el("a", { href: hashOf("read", { topic }) }, "Read the topic from its beginning")),
    el("section", { "aria-labelledby": "live" }, el("h2", { id: "live" }, "Live conversations"), live),
    days.length > 0 && el("section", { "aria-labelledby": "days" }, el("h2", { id: "days" }, "When it was said"), spans(days, topic)),
    el("section", { "aria-labelledby": "log" }, el("h2", { id: "log" }, "The log"), fresh,
      list.children.length ? list : el("p", { class: "empty" }, "Nothing is stored yet: turns are stored when their conversation rests, or when the window needs their room."), older)].filter(Boolean));
  return (name, data) => {
    if (topic && data.topic_id !== topic) return null;
    added += name === "stored" ? data.chunks : name === "corrected" ? data.canonical_ids.length : 0;
    fresh.hidden = added === 0; // what somebody reads does not move under their eyes
    fresh.textContent = `Show ${count(added, "newer entry", "newer entries")}`;
    return buffers();
  };
}

/** How much was said on which day, or in which month, latest first; each leads to what was said then. */
function spans(days, topic) {
  const length = days.length > SPANS_MAX ? "2026-11".length : "2026-11-03".length;
  const sums = new Map();
  for (const one of days) sums.set(one.day.slice(0, length), (sums.get(one.day.slice(0, length)) ?? 0) + one.chunks);
  const most = Math.max(...sums.values());
  const rows = [...sums].reverse().map(([span, chunks]) => {
    const [year, month, date] = span.split("-").map(Number);
    const to = date ? span : `${span}-${String(new Date(year, month, 0).getDate()).padStart(2, "0")}`;
    const first = new Date(year, month - 1, date || 1);
    const name = date ? day(first.getTime() * 1000) : first.toLocaleDateString("en-GB", { month: "long", year: "numeric" });
    return el("li", {}, el("a", { href: hashOf("search", { from: date ? span : `${span}-01`, to, topic }) }, name),
      meter([chunks / most], count(chunks, "chunk")), el("span", {}, number(chunks)));
  });
  const list = el("ol", { class: "spans", "aria-label": "When it was said, latest first" }, rows.slice(0, SPANS_MAX));
  const rest = rows.slice(SPANS_MAX);
  const all = el("button", { type: "button", hidden: !rest.length, click: () => (list.append(...rest), all.remove()) }, "Earlier");
  return [list, all];
}

function conversation(topicId, told, open) {
  const key = `${topicId}/${told.conversation}`;
  return el("details", { class: "card", "data-key": key, open: open.has(key) },
    el("summary", {}, el("b", {}, `${topicId} · conversation `, el("code", {}, told.conversation.slice(0, 8))),
      el("span", { class: "meta" }, when(told.last_at), el("span", {}, `${number(told.tokens)} tokens`),
        el("span", {}, `${number(told.in_prompt)} in the prompt`), told.replaced > 0 && el("span", {}, `${number(told.replaced)} of them as a line`),
        el("span", {}, `${number(told.stored)} stored`), el("span", {}, `${number(told.left_out)} left out`))),
    el("ol", { class: "messages", tabindex: "0", "aria-label": "Its latest messages" }, told.latest.map((message) =>
      el("li", { class: message.left_out ? "left-out" : "" },
        el("p", { class: "meta" }, el("b", {}, message.role), el("span", {}, `${number(message.tokens)} tokens`),
          message.left_out ? badge("left out") : message.line ? badge("a line in its place", "on") : badge("in the prompt", "on"), message.stored && badge("stored")),
        el("p", { class: "text", dir: "auto" }, line(message.text)),
        message.line && el("p", { class: "text", dir: "auto" }, line(message.line))))));
}

/** One entry of the log. */
export function entry(event) {
  return el("li", { class: event.live ? "" : "left-out" },
    el("p", { class: "meta" }, when(event.at), badge(event.event, event.event === "told" ? "" : "on"), chunkLink(event.topic_id, event.id),
      day(event.said_at) !== day(event.at) && el("span", {}, "said ", when(event.said_at)),
      el("span", {}, event.topic_id), origin(event), warning(event.instructs), event.multiplier !== 1 && el("span", {}, `× ${number(event.multiplier)}`), event.takes_out && badge("taken out")),
    event.reason && el("p", { class: "reason" }, "because: ", el("q", { dir: "auto" }, line(event.reason))),
    event.content && said(event.content));
}
