// The chunks that a question would get, and why; now, or as of a time. Without a question: the chunks of a choice.

import { get } from "./api.js";
import { candidates } from "./candidates.js";
import { announce, badge, chunkLink, count, day, el, number, problem, said, when } from "./dom.js";

const PAGE = 500; // sorted by when they were said; the daemon tells them by when they were stored
const CHOICE = ["from", "to", "role", "kind", "words"]; // a field called "contains" would hide form.contains()
const ROLES = ["user", "assistant", "tool", "system"];
const KINDS = ["turn", "note", "document"];

export async function show(main, { topic, query }) {
  const answer = el("div");
  const field = (name) => query.get(name) ?? "";
  const dated = (label, name) => el("label", {}, label, el("input", { type: "date", name, value: field(name) }));
  const one = (label, name, values) => el("label", {}, label, el("select", { name }, el("option", { value: "" }, "any"),
    values.map((value) => el("option", { selected: value === field(name) }, value))));
  const form = el("form", { role: "search", class: "fields", submit: (event) => (event.preventDefault(), ask()) },
    el("label", { class: "wide" }, "Question", el("input", { type: "search", name: "q", value: field("q"), maxlength: 100000 })),
    el("label", {}, "As of (now, if empty)", el("input", { type: "datetime-local", name: "as_of", step: 1, value: field("as_of") })),
    el("button", { class: "main" }, "Search"),
    el("details", { class: "wide", open: CHOICE.some(field) }, el("summary", {}, "Only what was said …"),
      el("div", { class: "fields" }, dated("From day", "from"), dated("To day", "to"), one("By", "role", ROLES), one("Kind", "kind", KINDS),
        el("label", {}, "With the words", el("input", { name: "words", value: field("words"), autocomplete: "off" })))));
  const ask = async () => {
    const given = Object.fromEntries([...new FormData(form)].filter(([, value]) => value));
    history.replaceState(null, "", `#/search?${new URLSearchParams(given)}`);
    if (!Object.keys(given).length) return answer.replaceChildren(el("p", { class: "empty" }, "Ask something, or choose what was said when, by whom or with which words."));
    answer.replaceChildren(el("p", { class: "empty" }, "Searching …"));
    const { q, as_of, from, to, words, ...rest } = given;
    const choice = { ...rest, topic, contains: words, from: from && midnight(from, 0), to: to && midnight(to, 1) };
    try {
      const then = as_of && new Date(as_of).getTime() * 1000; // the browser's time zone, as it was typed
      answer.replaceChildren(...(q ? found(await get("/memd/search", { ...choice, q, as_of: then })) : await chosen(choice)));
    } catch (error) {
      answer.replaceChildren(problem(error));
    }
    return null;
  };
  main.replaceChildren(el("h1", {}, "Search"), form, answer);
  await ask();
}

/** The beginning of a day so many days later, in microseconds, in the browser's time zone. */
function midnight(date, later) {
  const [year, month, number_] = date.split("-").map(Number);
  return new Date(year, month - 1, number_ + later).getTime() * 1000;
}

function found(told) {
  const injected = told.chunks.filter((one) => one.verdict === "injected").length;
  const words = `${count(injected, "chunk")}, ${number(told.tokens)} of ${number(told.budget_tokens)} tokens, would be injected; ${number(told.chunks.length - injected)} more candidates.`;
  announce(words);
  return [
    el("p", {}, words, told.as_of && [" As of ", when(told.as_of), "."]),
    told.note && el("p", { class: "problem" }, told.note),
    candidates(told.chunks, { open: true }),
  ].filter(Boolean);
}

/** The chunks of a choice under the days on which they were said, latest first. */
async function chosen(choice) {
  const list = el("ol", { class: "log", "aria-label": "Chunks, latest first" });
  let next = null;
  let last = "";
  const page = async () => {
    const told = await get("/memd/chunks", { ...choice, before: next, limit: PAGE });
    for (const chunk of told.chunks.sort((a, b) => b.said_at - a.said_at)) {
      if (day(chunk.said_at) !== last) list.append(el("li", { class: "day" }, el("h2", {}, (last = day(chunk.said_at)))));
      list.append(el("li", {}, el("p", { class: "meta" }, when(chunk.said_at), chunkLink(chunk.topic_id, chunk.id), el("span", {}, chunk.topic_id),
        chunk.kind !== "turn" && badge(chunk.kind), chunk.source && el("span", {}, chunk.source)), said(chunk.content)));
    }
    next = told.next;
    more.hidden = next === null;
    announce(count(list.querySelectorAll("li:not(.day)").length, "chunk"));
  };
  const more = el("button", { type: "button", click: () => page().catch((error) => more.after(problem(error))) }, "More");
  await page();
  return list.children.length ? [list, more] : [el("p", { class: "empty" }, "Nothing that is stored is like that.")];
}
