// Puts down a note: something to remember that was said in no chat.

import { post } from "./api.js";
import { announce, chunkLink, el, problem } from "./dom.js";
import { may, topicField } from "./rights.js";

export async function show(main, { topic }) {
  const result = el("div", { tabindex: "-1", class: "outcome" });
  const field = (name, label, more = {}) => el("label", {}, label, el("input", { name, autocomplete: "off", ...more }));
  const form = el("form", { class: "fields", "aria-label": "A note", submit: (event) => (event.preventDefault(), remember()) },
    el("label", { class: "wide" }, "What is to be remembered", el("textarea", { name: "content", rows: 6, required: true, dir: "auto", maxlength: 1000000 })),
    field("title", "Title", { maxlength: 200 }), field("tags", "Tags, with commas between them"), field("source", "Where it is from", { maxlength: 1000 }),
    el("label", {}, "Topic", topicField(topic)),
    el("button", { class: "main" }, "Remember"));
  const remember = async () => {
    const given = Object.fromEntries(new FormData(form));
    const tags = given.tags.split(",").map((tag) => tag.trim()).filter(Boolean);
    try {
      const { topic_id, notes: [taken] } = await post("/memd/notes", { topic_id: given.topic, notes: [{ content: given.content, title: given.title, tags, source: given.source }] });
      const words = taken.duplicate ? "It is remembered already: " : "Remembered: ";
      if (!taken.duplicate) form.content.value = "";
      result.replaceChildren(el("p", {}, words, taken.chunk_ids.map((id) => [may("read", topic_id) ? chunkLink(topic_id, id) : el("code", {}, id), " "])));
      announce(words);
      result.focus();
    } catch (error) {
      result.replaceChildren(problem(error));
    }
  };
  main.replaceChildren(el("h1", {}, "A note"), form, result);
}
