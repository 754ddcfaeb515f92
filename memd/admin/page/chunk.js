// One chunk: what it says, what was said around it, what happened to it, and the buttons to correct it.

import { get, post } from "./api.js";
import { announce, badge, chunkLink, count, details, el, facts, line, number, origin, plain, problem, said, turnLink, warning, when, whose } from "./dom.js";
import { may } from "./rights.js";

const DONE = { Helpful: "Marked as helpful.", Unhelpful: "Marked as unhelpful.", Update: "Updated.", out: "Taken out.", undo: "Undone." };

export async function show(main, { id, topic }, outcome = "") {
  const told = await get(`/memd/chunks/${encodeURIComponent(id)}`, { topic });
  const present = told.versions.at(-1);
  const from = origin({ ...present, author: "" });
  const reason = el("input", { name: "reason", maxlength: 2000, autocomplete: "off" });
  const content = el("textarea", { name: "content", rows: 4, dir: "auto" });
  content.value = present.content;
  const result = el("div", { tabindex: "-1", class: "outcome" }, outcome && el("p", {}, outcome));
  const done = async (what, request) => {
    try {
      const { applied, failed } = await request();
      if (failed?.length) throw new Error(`memd: ${failed.join(", ")} could not be corrected`);
      const words = `${DONE[what]} ${applied.length ? "" : "Nothing had to be changed."}`;
      await show(main, { id: told.uuid, topic: told.topic_id }, words);
      announce(words);
      main.querySelector(".outcome").focus();
    } catch (error) {
      result.replaceChildren(problem(error));
    }
  };
  const correct = (what, more = {}) => () => {
    if (!reason.reportValidity()) return null;
    const correction = { topic_id: told.topic_id, chunk_ids: [told.uuid], action: what === "out" ? "Update" : what, reason: reason.value, ...more };
    return done(what, () => post("/memd/corrections", what === "Update" ? { ...correction, content: content.value } : correction));
  };
  const undo = (canonical_id) => () => done("undo", () => post("/memd/undo", { topic_id: told.topic_id, canonical_id, reason: reason.value }));
  const button = (text, act, kind = "") => el("button", { type: "button", class: kind, click: act }, text);
  main.replaceChildren(...[
    el("h1", {}, "Chunk ", el("code", {}, told.id), " ", told.live ? badge("live", "on") : badge("taken out", "bad"), " ", warning(present.instructs)),
    facts({ Topic: told.topic_id, Said: when(told.versions[0].said_at), Author: present.author && line(present.author), From: from && el("span", {}, from, present.kind === "document" && [" ", el("a", { href: `#/document/${encodeURIComponent(told.topic_id)}/${encodeURIComponent(present.source)}` }, "all of it")]),
      "Replaced by": ids(told.topic_id, told.replaced_by), Replaces: ids(told.topic_id, told.replaces) }),
    said(present.content),
    may("correct", told.topic_id) && el("form", { class: "fields", "aria-label": "Correct this chunk", submit: (event) => event.preventDefault() },
      el("label", { class: "wide" }, "Reason (kept in the log, never interpreted)", reason),
      el("div", { class: "buttons" }, told.live && [button("Helpful", correct("Helpful")), button("Pin", correct("Helpful", { steps: 10 })), button("Unhelpful", correct("Unhelpful")), button("Take out", correct("out"))],
        told.versions.length > 1 && !["told", "re-embedded"].includes(present.event) && button("Undo the last change", undo(present.canonical_id))),
      told.live && el("details", { class: "wide", open: true }, el("summary", {}, "Update its text"),
        el("label", { class: "wide" }, "New text: it takes the place of this one, which stays in the log", content), button("Update", correct("Update"), "main"))),
    result,
    el("h2", {}, "History"),
    el("ol", { class: "log" }, told.versions.map((event, place) => version(event, told.versions[place - 1])).reverse()),
    el("h2", {}, "Said around it"), el("div", { class: "columns" }, neighbour("Before", told.before), neighbour("After", told.after)),
    el("h2", {}, `Shown to the model in ${count(told.turns.length, "turn")}`),
    told.turns.length ? el("p", { class: "ids" }, told.turns.map(turnLink)) : el("p", { class: "empty" }, "In none of the turns that memd still knows."),
    details(facts({ Uuid: el("code", {}, told.uuid), Multiplier: number(present.multiplier),
      Entries: told.versions.map((one) => el("div", {}, el("code", {}, one.canonical_id), ` ${one.event}`)) }))].filter(Boolean));
}

function ids(topicId, list) {
  return list.length ? el("span", { class: "ids" }, list.map((id) => chunkLink(topicId, id.slice(0, 8)))) : null;
}

function version(event, previous) {
  return el("li", {}, el("p", { class: "meta" }, when(event.at), badge(event.event, "on"), whose({ author: event.by }), event.multiplier !== 1 && el("span", {}, `counts × ${number(event.multiplier)}`)),
    event.reason && el("p", { class: "reason" }, "because: ", el("q", { dir: "auto" }, plain(event.reason))),
    previous && previous.content !== event.content && said(event.content));
}

function neighbour(name, event) {
  return el("div", { class: "card" }, el("p", { class: "meta" }, el("b", {}, name), event && [when(event.said_at), chunkLink(event.topic_id, event.id), warning(event.instructs)]),
    event ? el("p", { class: "text", dir: "auto" }, line(event.content, 600)) : el("p", { class: "empty" }, "Nothing."));
}
