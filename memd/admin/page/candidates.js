// A chunk that memory considered: its score, the parts of the score, and the verdict.

import { get } from "./api.js";
import { meter } from "./charts.js";
import { badge, chunkLink, day, el, line, number, origin, problem, said, warning, when } from "./dom.js";
import { outButton } from "./selection.js";

/** The candidates of a search in one list, best first. They come as they fill the budget, near copies last. */
export function ranked({ chunks, is_reranked: isReranked }) {
  const isShown = (one) => one.verdict === "injected";
  return isReranked ? chunks : chunks.toSorted((a, b) => isShown(b) - isShown(a) || b.score - a.score);
}

/** A list of candidates; those of a search bring their text, those of a turn fetch it when they are opened.
 *
 * `beginnings`: id → what is shown of a closed one that has not brought its text. */
export function candidates(found, { open = false, beginnings = new Map() } = {}) {
  return el("div", { class: "candidates" }, found.map((one) =>
    candidate(one, { open: open && one.verdict === "injected", beginning: beginnings.get(one.id) ?? one.id })));
}

function candidate(found, { open, beginning }) {
  const injected = found.verdict === "injected";
  const body = el("div", { class: "inside" });
  const fill = () => {
    if (!box.open || body.hasChildNodes()) return;
    const why = equation(found);
    body.append(place(found), why);
    if (found.content !== undefined) why.before(said(found.content));
    else chunkText(found).then((text) => why.before(said(text)), (error) => why.before(problem(error)));
  };
  const box = el("details", { class: injected ? "candidate" : "candidate out", open, toggle: fill },
    el("summary", {},
      meter([found.meaning, found.words, found.feedback + found.neighbours].map((part) => part * found.multiplier * found.echo * (found.time ?? 1)), `score ${found.score.toFixed(3)}`),
      el("span", { class: "score" }, found.score.toFixed(3)),
      injected ? badge("shown to the model", "on") : badge(found.verdict), badge("taken out", "bad"),
      el("span", { class: "preview" }, warning(found.instructs), found.instructs?.length > 0 && " ", Boolean(found.said_at) && `${day(found.said_at)} · `, line(found.content ?? beginning))),
    body);
  fill();
  return box;
}

function place(found) {
  return el("p", { class: "meta" }, chunkLink(found.topic_id, found.id), el("span", {}, found.topic_id),
    Boolean(found.said_at) && when(found.said_at), origin(found), warning(found.instructs), el("span", {}, `${number(found.tokens)} tokens`), outButton(found));
}

function equation(found) {
  const part = (value) => value.toFixed(3);
  return el("details", { class: "why" }, el("summary", {}, "Why this score"),
    el("p", { class: "meta" },
      el("span", {}, `score ${part(found.score)} = (meaning ${part(found.meaning)} + words ${part(found.words)} + `
        + `feedback ${part(found.feedback)} + neighbours ${part(found.neighbours)}) × ${number(found.multiplier)}${found.echo === 1 ? "" : ` × ${part(found.echo)} as the model's words`}${(found.time ?? 1) === 1 ? "" : ` × ${number(found.time)} for its time`}`),
      el("span", {}, `cosine ${part(found.cosine)}`)));
}

async function chunkText({ topic_id: topic, uuid }) {
  const { versions } = await get(`/memd/chunks/${encodeURIComponent(uuid)}`, { topic });
  return versions.at(-1).content;
}
