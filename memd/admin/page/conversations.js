// Conversations by their first words, and one of them from its beginning, with what the model was shown in each turn.

import { get } from "./api.js";
import { save } from "./download.js";
import { badge, chunkLink, conversationLink, count, day, el, hashOf, line, number, plain, problem, said, turnLink, warning, when } from "./dom.js";
import { welcome } from "./welcome.js";

const PAGE = 50;
const SAVED_AT_ONCE = 500;

export async function show(main, context) {
  const { topic, again } = context;
  const list = el("ol", { class: "talks", "aria-label": "Conversations, the one used last first" });
  const more = el("button", { type: "button", click: () => page().catch((error) => more.after(problem(error))) }, "Older conversations");
  const fresh = el("button", { type: "button", class: "main", hidden: true, click: again }, "Show what is new");
  let shown = 0;
  let last = "";
  const page = async () => {
    const told = await get("/memd/conversations", { topic, skip: shown, limit: PAGE });
    for (const one of told.conversations) {
      if (day(one.last_at) !== last) list.append(el("li", { class: "day" }, el("h2", {}, (last = day(one.last_at)))));
      list.append(brief(one));
    }
    shown += told.conversations.length;
    more.hidden = shown >= told.of || !told.conversations.length;
  };
  await page();
  main.replaceChildren(el("h1", {}, "Conversations"), fresh, ...(shown ? [list, more] : [welcome(context, "No conversation yet.")]));
  return (name, data) => {
    if (name === "turn" && (!topic || data.topic_id === topic)) fresh.hidden = false; // what somebody reads does not move
  };
}

function brief(one) {
  const title = [one.title ? line(one.title, 160) : "(no words)"];
  return el("li", {},
    el("p", { class: "title", dir: "auto" }, one.conversation ? conversationLink(one.topic_id, one.conversation, title) : el("a", { href: placeInLog(one) }, title)),
    el("p", { class: "meta" }, when(one.last_at), el("span", {}, one.topic_id), one.turns !== null && el("span", {}, count(one.turns, "turn")),
      one.chunks !== null && el("span", {}, count(one.chunks, "chunk")), one.source && badge("imported"), one.source && el("span", { dir: "auto" }, line(one.source, 60)),
      !one.conversation && !one.source && badge("from the log", "", "The log does not tell conversations apart: this is what was said in the topic without a longer pause.")));
}

function placeInLog(one) {
  const span = one.source ? { source: one.source } : { from: one.began_at, to: one.last_at + 1 };
  return hashOf("read", { topic: one.topic_id, ...span });
}

export async function showOne(main, { id, topic }) {
  const list = el("ol", { class: "exchanges", "aria-label": "Turns, oldest first" });
  const ask = (skip, limit) => get(`/memd/conversations/${encodeURIComponent(id)}`, { topic, skip, limit });
  let shown = 0;
  let last = null;
  const append = (turns) => {
    for (const turn of turns) {
      list.append(exchange(turn, last, topic));
      last = turn;
    }
    shown += turns.length;
  };
  const page = async () => {
    const told = await ask(shown, PAGE);
    append(told.turns);
    more.hidden = shown >= told.of;
    return told;
  };
  const more = el("button", { type: "button", click: () => page().catch((error) => more.after(problem(error))) }, "Later turns");
  const keep = el("button", { type: "button", click: () => saveAll(ask).catch((error) => keep.after(problem(error))) }, "Save as text");
  const told = await page();
  const [first] = told.turns;
  main.replaceChildren(...[el("h1", { dir: "auto" }, line(told.title || "(no words)", 160)),
    el("p", { class: "meta" }, el("span", {}, `topic ${told.topic_id}`), first && when(first.at), el("span", {}, count(told.of, "request")), first && el("span", {}, first.model),
      el("a", { href: hashOf("read", { topic, ...(first && { from: first.at }) }) }, "in the log")),
    !told.is_whole && el("p", { class: "remark" }, "It began earlier than the receipts reach; the log has what was said before."),
    told.branches.length > 0 && el("p", { class: "meta" }, "The same beginning, and then another way: ", told.branches.map((branch, place) => conversationLink(topic, branch, `branch ${place + 1}`))),
    list, el("div", { class: "buttons" }, more, keep)].filter(Boolean));
  return async (name, data) => {
    if (name === "turn" && data.conversation === id && more.hidden) await page();
  };
}

/** One request: what was asked (a later step of a tool loop does not ask again), what memory showed, what was answered. */
function exchange(turn, before, topic) {
  const isSame = turn.is_step && before?.asked.slice(0, 400) === turn.asked.slice(0, 400);
  const memory = turn.block
    ? el("details", { class: "shown" }, el("summary", {}, isSame ? "The model still saw " : "The model was shown ", count(turn.injected, "new chunk"), `, ${number(turn.shown.length)} in the prompt, ${number(turn.memory_tokens)} tokens`, turn.instructing.length > 0 && [" ", warning([`${count(turn.instructing.length, "chunk")}: ${turn.instructing.join(", ")}`])]), said(turn.block, "pre"))
    : el("p", { class: "meta" }, turn.shown.length ? `Nothing new from memory; ${count(turn.shown.length, "chunk")} of earlier turns in the prompt.` : "Nothing from memory.");
  return el("li", { "data-turn": turn.turn_id },
    !isSame && el("div", { class: "speech user" }, el("p", { class: "meta" }, el("b", {}, "user"), when(turn.at), turnLink(turn.turn_id), turn.is_retry && badge("retry")), said(turn.asked || turn.note || "(no message from the user)")),
    !isSame && memory,
    turn.shown.length > 0 && !isSame && el("p", { class: "ids" }, turn.shown.slice(0, 20).map((id) => chunkLink(topic, id))),
    el("div", { class: "speech" }, el("p", { class: "meta" }, el("b", {}, "model"), isSame && [when(turn.at), turnLink(turn.turn_id), badge("tool step")], turn.interrupted && badge("interrupted", "bad"),
      turn.calls.length > 0 && el("span", {}, "calls ", turn.calls.map((name) => [el("code", {}, plain(name)), " "]))),
      turn.reply ? said(turn.reply) : !turn.calls.length && el("p", { class: "empty" }, turn.error ? plain(turn.error) : "No reply is known.")));
}

async function saveAll(ask) {
  const parts = [];
  for (let skip = 0, of = 1; skip < of; ) {
    const told = await ask(skip, SAVED_AT_ONCE);
    if (!skip) parts.push(`${told.title}\ntopic ${told.topic_id}, conversation ${told.conversation}\n`);
    for (const turn of told.turns) {
      const at = new Date(turn.at / 1000).toISOString();
      parts.push(`\n[${at}] user\n${turn.asked}\n${turn.block ? `\n[memory that was shown]\n${turn.block}\n` : ""}\n[${at}] model\n${turn.reply}\n`);
    }
    of = told.of;
    skip += Math.max(1, told.turns.length);
  }
  save("conversation.txt", parts);
}
