// The chunks that a question would get, and why; now, or as of a time. Without a question: the chunks of a choice.

import { get } from "./api.js";
import { candidates, ranked } from "./candidates.js";
import { announce, badge, chunkLink, count, day, el, hashOf, line, number, problem, said, warning, when, whose } from "./dom.js";
import { outButton, selection } from "./selection.js";

const PAGE = 500; // sorted by when they were said; the daemon tells them by when they were stored
const FILTERS = ["from", "to", "role", "kind", "source", "as_of"]; // a field called "contains" would hide form.contains()
const TYPING_MS = 300; // a pause in typing
const OFFERED_MAX = 500;
const ROLES = ["user", "assistant", "tool", "system"];
const KINDS = ["turn", "note", "document"];

export async function show(main, { topic, query, again }) {
  const answer = el("div", { class: "answer" });
  const field = (name) => query.get(name) ?? "";
  const dated = (label, name) => el("label", {}, label, el("input", { type: "date", name, value: field(name) }));
  const one = (label, name, values) => el("label", {}, label, el("select", { name }, el("option", { value: "" }, "any"),
    values.map((value) => el("option", { selected: value === field(name) }, value))));
  const sources = el("datalist", { id: "known-sources" });
  const form = el("form", { role: "search", class: "fields", submit: (event) => (event.preventDefault(), ask(true)), input: () => later() },
    el("label", { class: "wide" }, "Question (by meaning and by words)", el("input", { type: "search", name: "q", value: field("q"), maxlength: 100000, autocomplete: "off" })),
    el("label", { class: "middle" }, "With the words (exactly so)", el("input", { name: "words", value: field("words"), autocomplete: "off" })),
    el("button", { class: "main" }, "Search"),
    el("details", { class: "wide", open: FILTERS.some(field) || matchMedia("(min-width: 46rem)").matches }, el("summary", {}, "Only what was said …"),
      el("div", { class: "fields" }, dated("From day", "from"), dated("To day", "to"), one("By", "role", ROLES), one("Kind", "kind", KINDS),
        el("label", {}, "Source", el("input", { name: "source", value: field("source"), list: "known-sources", autocomplete: "off", focus: () => offer(sources, topic) }), sources),
        el("label", {}, "As of (now, if empty)", el("input", { type: "datetime-local", name: "as_of", step: 1, value: field("as_of") })))));
  let typed = 0;
  let isSettled = false; // what the address says was meant so: what is typed next has another address
  let asked = null; // what is under way; a newer question ends it
  const later = () => {
    clearTimeout(typed);
    typed = setTimeout(() => main.isConnected && ask(), TYPING_MS);
  };
  const ask = async (isSubmitted = false) => {
    clearTimeout(typed);
    asked?.abort();
    const own = (asked = new AbortController());
    const given = Object.fromEntries([...new FormData(form)].filter(([, value]) => value));
    const hash = hashOf("search", { ...given, topic });
    if (hash !== location.hash) {
      history[isSettled ? "pushState" : "replaceState"](null, "", hash); // "back" leads to what was searched before
      isSettled = false;
    }
    isSettled ||= isSubmitted;
    if (!Object.keys(given).length) return answer.replaceChildren(el("p", { class: "empty" }, "Ask something, or choose what was said when, by whom or with which words. Results come as you type."));
    const { q, as_of, words, ...rest } = given;
    const choice = { ...rest, topic, contains: words }; // days are the daemon's, as those of the timeline
    answer.setAttribute("aria-busy", "true");
    try {
      const then = as_of && new Date(as_of).getTime() * 1000; // the browser's time zone, as it was typed
      const options = { signal: own.signal };
      answer.replaceChildren(...(q ? found(await get("/memd/search", { ...choice, q, as_of: then }, options)) : await chosen(choice, again, options)));
    } catch (error) {
      if (error.name !== "AbortError") answer.replaceChildren(problem(error));
    }
    if (own === asked) answer.removeAttribute("aria-busy");
    return null;
  };
  main.replaceChildren(el("h1", {}, "Search"), form, answer);
  await ask(true);
}

/** Name the sources that there are, when somebody is about to type one. */
async function offer(list, topic) {
  if (list.children.length) return;
  const limit = OFFERED_MAX;
  const [{ documents }, { conversations }, { chunks }] = await Promise.all([
    get("/memd/documents", { topic }), get("/memd/conversations", { topic, limit }), get("/memd/chunks", { topic, kind: "note", limit })]);
  const names = new Set([...documents, ...conversations, ...chunks].map((one) => one.source).filter(Boolean));
  list.replaceChildren(...[...names].slice(0, OFFERED_MAX).map((value) => el("option", { value })));
}

function found(told) {
  const injected = told.chunks.filter((one) => one.verdict === "injected").length;
  const words = `${count(injected, "chunk")}, ${number(told.tokens)} of ${number(told.budget_tokens)} tokens, would be shown to the model; ${number(told.chunks.length - injected)} more candidates.`;
  announce(words);
  return [
    el("p", {}, words, told.as_of && [" As of ", when(told.as_of), "."]),
    told.note && el("p", { class: "remark" }, told.note),
    candidates(ranked(told), { open: true }),
  ].filter(Boolean);
}

/** The chunks of a choice under the days on which they were said, latest first. */
async function chosen(choice, again, options) {
  const list = el("ol", { class: "log", "aria-label": "Chunks, latest first" });
  const selected = selection(list, again);
  let next = null;
  let last = "";
  const page = async () => {
    const told = await get("/memd/chunks", { ...choice, before: next, limit: PAGE }, options);
    for (const chunk of told.chunks.sort((a, b) => b.said_at - a.said_at)) {
      if (day(chunk.said_at) !== last) list.append(el("li", { class: "day" }, el("h2", {}, (last = day(chunk.said_at)))));
      list.append(el("li", {}, el("p", { class: "meta" }, selected.box(chunk), when(chunk.said_at), chunkLink(chunk.topic_id, chunk.id), el("span", {}, chunk.topic_id),
        chunk.kind !== "turn" && badge(chunk.kind), chunk.source && el("a", { href: hashOf("search", { source: chunk.source, topic: chunk.topic_id }) }, line(chunk.source, 80)), whose(chunk), warning(chunk.instructs), outButton(chunk)), said(chunk.content)));
    }
    next = told.next;
    more.hidden = next === null;
    announce(count(list.querySelectorAll("li:not(.day)").length, "chunk"));
  };
  const more = el("button", { type: "button", click: () => page().catch((error) => more.after(problem(error))) }, "More");
  await page();
  return list.children.length ? [selected.bar, list, more] : [el("p", { class: "empty" }, "Nothing that is stored is like that.")];
}
