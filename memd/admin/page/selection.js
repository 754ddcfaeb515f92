// Taking out chunks of a list, one with its own button or many at once, and the undo of it. Rule: nothing asks whether
// one is sure; what was taken out can be brought back here, and later on its own page.

import { post } from "./api.js";
import { announce, count, el, problem } from "./dom.js";
import { may } from "./rights.js";

/** `box(chunk)` is the checkbox of a chunk, if the token may take it out, `bar` the buttons; `done` is called when the list has to be drawn again. */
export function selection(list, done) {
  const chosen = new Map();
  const reason = el("input", { maxlength: 2000, autocomplete: "off" });
  const outcome = el("div", { class: "outcome", tabindex: "-1" });
  const take = el("button", { type: "button", class: "main", click: () => act(takeOut) }, "");
  const all = el("button", { type: "button", click: () => boxes().forEach((box) => box.checked || box.click()) }, "Select all shown");
  const none = el("button", { type: "button", click: () => boxes().forEach((box) => box.checked && box.click()) }, "Select none");
  const form = el("form", { class: "fields selection", hidden: true, "aria-label": "Take out what is selected", submit: (event) => event.preventDefault() },
    el("label", { class: "wide" }, "Reason (kept in the log, never interpreted)", reason), el("div", { class: "buttons" }, take, all, none));
  const boxes = () => [...list.querySelectorAll("input[type=checkbox]")];
  const draw = () => {
    form.hidden = chosen.size === 0;
    take.textContent = `Take out ${count(chosen.size, "chunk")}`;
  };
  const act = async (work) => {
    try {
      await work();
    } catch (error) {
      outcome.replaceChildren(problem(error));
    }
    outcome.focus();
  };
  const takeOut = async () => {
    const { entries, failed } = await takenOut([...chosen.values()], reason.value);
    for (const box of boxes().filter((one) => one.checked)) box.closest("li").classList.add("left-out");
    boxes().forEach((box) => box.checked && box.click());
    const undo = el("button", { type: "button", click: () => act(() => bringBack(entries)) }, "Undo");
    const words = `${count(entries.length, "chunk")} taken out.${failed.length ? ` ${failed.length} could not be: they have changed meanwhile.` : ""}`;
    outcome.replaceChildren(el("p", {}, words, " ", undo, " ", el("button", { type: "button", click: done }, "Show the list anew")));
    announce(words);
  };
  const bringBack = async (entries) => {
    await takenBack(entries);
    for (const item of list.querySelectorAll(".left-out")) item.classList.remove("left-out");
    const words = `${count(entries.length, "chunk")} brought back.`;
    outcome.replaceChildren(el("p", {}, words));
    announce(words);
  };
  const box = (chunk) => may("correct", chunk.topic_id) && el("input", { type: "checkbox", "aria-label": `Select chunk ${chunk.id}`, change: (event) => {
    if (event.target.checked) chosen.set(chunk.uuid, chunk);
    else chosen.delete(chunk.uuid);
    draw();
  } });
  return { box, bar: el("div", { class: "selecting" }, form, outcome) };
}

/** The button that takes a chunk out, and then takes that back; none if the token may not. */
export function outButton(chunk) {
  const entries = [];
  const toggle = async () => {
    try {
      if (entries.length) {
        await takenBack(entries.splice(0));
      } else {
        const told = await takenOut([chunk]);
        if (told.failed.length) throw new Error(`memd: ${chunk.id} could not be taken out: it has changed meanwhile`);
        entries.push(...told.entries);
      }
      const isOut = entries.length > 0;
      button.textContent = isOut ? "Take back" : "Take out";
      button.closest("li, details").classList.toggle("left-out", isOut);
      announce(`Chunk ${chunk.id} ${isOut ? "taken out" : "brought back"}.`);
    } catch (error) {
      button.after(problem(error));
    }
  };
  const button = el("button", { type: "button", title: `Chunk ${chunk.id}`, click: toggle }, "Take out");
  return may("correct", chunk.topic_id) && button;
}

/** Take chunks out; the entries that did, for `takenBack`, and the chunks that have changed meanwhile. */
async function takenOut(chunks, reason = "") {
  const entries = [];
  const failed = [];
  for (const [topic_id, some] of Map.groupBy(chunks, (one) => one.topic_id)) {
    const told = await post("/memd/corrections", { topic_id, chunk_ids: some.map((one) => one.uuid), action: "Update", reason });
    entries.push(...told.applied.map((canonical_id) => ({ topic_id, canonical_id })));
    failed.push(...told.failed);
  }
  return { entries, failed };
}

async function takenBack(entries) {
  for (const one of entries) await post("/memd/undo", { ...one, reason: "taken back on the page" });
}
