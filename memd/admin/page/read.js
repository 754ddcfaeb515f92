// The log in the order in which things were said, oldest first: a topic, an imported conversation, or a time.

import { get } from "./api.js";
import { badge, chunkLink, count, day, el, line, origin, problem, said, warning, when } from "./dom.js";
import { outButton, selection } from "./selection.js";

const PAGE = 100;

export async function show(main, { topic, query, again }) {
  const choice = { topic, source: query.get("source"), from: query.get("from"), to: query.get("to") };
  const list = el("ol", { class: "log", "aria-label": "Chunks, oldest first" });
  const words = el("p", { class: "meta" });
  const selected = selection(list, again);
  let shown = 0;
  let last = "";
  const page = async () => {
    const told = await get("/memd/transcript", { ...choice, skip: shown, limit: PAGE });
    for (const one of told.chunks) {
      if (day(one.said_at) !== last) list.append(el("li", { class: "day" }, el("h2", {}, (last = day(one.said_at)))));
      list.append(el("li", {}, el("p", { class: "meta" }, selected.box(one), when(one.said_at), chunkLink(one.topic_id, one.id), !topic && el("span", {}, one.topic_id), origin(one), warning(one.instructs), outButton(one)), said(one.content),
        one.shown.length > 0 && el("p", { class: "meta" }, badge("memory had shown"), el("span", { class: "ids" }, one.shown.map((uuid) => chunkLink(one.topic_id, uuid.slice(0, 8)))))));
    }
    shown += told.chunks.length;
    words.replaceChildren(el("span", {}, count(told.of, "chunk")), el("span", { dir: "auto" }, line(choice.source ?? "")));
    more.hidden = shown >= told.of || !told.chunks.length;
  };
  const more = el("button", { type: "button", click: () => page().catch((error) => more.after(problem(error))) }, "Later");
  await page();
  main.replaceChildren(el("h1", {}, topic ? `The log of ${topic}` : "The log"), words, selected.bar,
    ...(shown ? [list, more] : [el("p", { class: "empty" }, "Nothing that is stored is like that.")]));
}
