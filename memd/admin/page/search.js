// The chunks that a question would get, and why; now, or as of a time.

import { get } from "./api.js";
import { candidates } from "./candidates.js";
import { announce, count, el, number, problem, when } from "./dom.js";

export async function show(main, { topic, query }) {
  const answer = el("div");
  const form = el("form", { role: "search", class: "fields", submit: (event) => (event.preventDefault(), ask()) },
    el("label", { class: "wide" }, "Question", el("input", { type: "search", name: "q", required: true, value: query.get("q") ?? "", maxlength: 100000 })),
    el("label", {}, "As of (now, if empty)", el("input", { type: "datetime-local", name: "as_of", step: 1, value: query.get("as_of") ?? "" })),
    el("button", { class: "main" }, "Search"));
  const ask = async () => {
    const { q, as_of } = Object.fromEntries(new FormData(form));
    history.replaceState(null, "", `#/search?${new URLSearchParams(as_of ? { q, as_of } : { q })}`);
    answer.replaceChildren(el("p", { class: "empty" }, "Searching …"));
    try {
      const then = as_of ? new Date(as_of).getTime() * 1000 : null; // the browser's time zone, as it was typed
      answer.replaceChildren(...found(await get("/memd/search", { q, topic, as_of: then })));
    } catch (error) {
      answer.replaceChildren(problem(error));
    }
  };
  main.replaceChildren(el("h1", {}, "Search"), form, answer);
  if (form.q.value) await ask();
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
