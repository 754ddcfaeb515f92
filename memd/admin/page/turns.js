// Turns as they happen: the question, the block that memory put in front of it, and the cost.

import { get } from "./api.js";
import { candidates, ranked } from "./candidates.js";
import { bars, meter } from "./charts.js";
import { announce, badge, chunkLink, conversationLink, count, details, el, facts, hashOf, line, ms, number, plain, problem, said, when, whose } from "./dom.js";
import { welcome } from "./welcome.js";

const SHOWN_MAX = 200; // turns in the list; older ones on request
const CHARTED = 60;
const STEP_CHARACTERS = 60; // of the question, which its turn has in full

/** The list; `id` opens that turn. The returned function takes events. */
export async function show(main, context) {
  const { id, topic, query, topics } = context;
  const withSteps = query.get("steps") === "1"; // whether the later steps of tool loops have rows of their own
  const asking = { topic, limit: 50, steps: Number(withSteps) };
  const toggle = () => (location.hash = hashOf("turns", { topic, steps: withSteps ? null : 1 }));
  const steps = el("div", { class: "buttons" }, el("button", { type: "button", click: toggle }, withSteps ? "Hide tool steps" : "Show tool steps"));
  const [told, remembering] = await Promise.all([get("/memd/turns", asking), remembered(topic, topics())]);
  let { turns } = told;
  const charts = el("div", { class: "charts" });
  const figures = el("details", { class: "why" }, el("summary", {}, "Times and tokens of these turns"), charts);
  const list = el("ol", { class: "rows", "aria-label": "Turns, newest first" });
  const older = el("button", { type: "button", click: () => more().catch((error) => older.after(problem(error))) }, "Older turns");
  const draw = () => {
    charts.replaceChildren(...drawn(turns.slice(0, CHARTED).reverse()));
    older.hidden = turns.length < 50;
    if (turns.length) empty.remove();
    figures.hidden = turns.length === 0;
    steps.hidden = !withSteps && !turns.some((turn) => turn.steps);
  };
  const empty = welcome(context, "No turn yet.");
  const more = async () => {
    const next = (await get("/memd/turns", { ...asking, before: turns.at(-1).turn_id })).turns;
    turns.push(...next);
    list.append(...next.map((turn) => row(turn)));
    older.hidden = next.length < 50;
  };
  if (id && !turns.some((turn) => turn.turn_id === id)) turns.unshift(await get(`/memd/turns/${encodeURIComponent(id)}`));
  list.append(...turns.map((turn) => row(turn, turn.turn_id === id)));
  main.replaceChildren(el("h1", {}, "Turns"), ...remembering, figures, steps, empty, list, older);
  draw();
  return (name, turn) => {
    if (name !== "turn" || (topic && turn.topic_id !== topic)) return null;
    const own = turn.is_step && !withSteps && turns.find((one) => !one.is_step && one.topic_id === turn.topic_id && one.asked === turn.asked);
    if (own) {
      if (turn.at <= (own.steps_until ?? 0)) return null; // it came while the list was asked for, and is counted there
      own.steps = (own.steps ?? 0) + 1;
      list.querySelector(`[data-turn="${CSS.escape(own.turn_id)}"] .steps`).textContent = count(own.steps, "tool step");
      return draw();
    }
    turns = [turn, ...turns.filter((other) => other.turn_id !== turn.turn_id)].slice(0, SHOWN_MAX);
    list.querySelector(`[data-turn="${CSS.escape(turn.turn_id)}"]`)?.remove();
    const arrived = row(turn);
    arrived.classList.add("new");
    list.prepend(arrived);
    while (list.children.length > SHOWN_MAX) list.lastChild.remove();
    announce(`New turn: ${asked(turn).slice(0, 200)}. ${count(turn.shown.length, "chunk")} in the prompt.`);
    return draw();
  };
}

/** A question to memory, and how much was remembered today; nothing where nothing is remembered. */
async function remembered(topic, topics) {
  if (topic && !topics.some((one) => one.topic_id === topic)) return [];
  const { days } = await get("/memd/days", { topic });
  if (!days.length) return [];
  const today = days.find((one) => one.day === new Date().toLocaleDateString("en-CA")); // as 2026-11-28
  const all = days.reduce((sum, one) => sum + one.chunks, 0);
  const words = today ? el("a", { href: hashOf("search", { from: today.day, topic }) }, `${count(today.chunks, "piece")} of today`) : "nothing of today yet";
  const asks = (event) => {
    event.preventDefault();
    location.hash = hashOf("search", { q: form.q.value, topic });
  };
  const form = el("form", { role: "search", class: "fields", submit: asks },
    el("label", { class: "wide" }, "Ask memory", el("input", { type: "search", name: "q", maxlength: 100000, autocomplete: "off" })), el("button", { class: "main" }, "Ask"));
  return [form, el("p", { class: "remark" }, "memd remembers ", words, `, ${number(all)} in all.`)];
}

/** Milliseconds that memory took: to find what is meant, to search for it, and the rest. */
function spent({ timings_ms: { embed = 0, search = 0, memory = 0 } }) {
  return [embed, search, Math.max(0, memory - embed - search)];
}

function total(values) {
  return values.reduce((sum, value) => sum + value, 0);
}

function drawn(turns) {
  const label = (turn) => asked(turn).slice(0, 80);
  const read = (turn) => [turn.cached_tokens ?? 0, Math.max(0, (turn.prompt_tokens ?? turn.forwarded_tokens) - (turn.cached_tokens ?? 0))];
  return [
    bars("Memory took", turns.map(spent),
      { unit: "ms", parts: ["the question", "the search", "all else"], label: (place) => `${ms(total(spent(turns[place])))} · ${label(turns[place])}` }),
    bars("Prompt", turns.map(read),
      { unit: "tokens", parts: ["cached", "new"], label: (place) => `${read(turns[place]).map(number).join(" + ")} · ${label(turns[place])}` }),
  ];
}

function row(turn, open = false) {
  const body = el("div", { class: "inside" });
  const fill = async () => {
    if (!box.open || body.hasChildNodes()) return;
    body.append(el("p", { class: "empty" }, "Loading …"));
    try {
      body.replaceChildren(...opened(await get(`/memd/turns/${encodeURIComponent(turn.turn_id)}`)));
    } catch (error) {
      body.replaceChildren(problem(error));
    }
  };
  const box = el("details", { open, toggle: fill },
    el("summary", {},
      el("span", {}, el("span", { class: "question", dir: "auto" }, line(turn.is_step ? `${asked(turn).slice(0, STEP_CHARACTERS)} …` : asked(turn))),
        Boolean(turn.reply) && el("span", { class: "answered", dir: "auto" }, line(turn.reply))),
      el("span", { class: "meta" },
        when(turn.at), el("span", {}, turn.topic_id), whose(turn),
        failure(turn) && badge(failure(turn), "bad"), !["none", "injected", "off"].includes(turn.status) && badge(STATUS_WORDS[turn.status] ?? turn.status, kind(turn.status), turn.status), turn.mode !== "full" && badge(`memory ${turn.mode}`),
        el("span", {}, shownWords(turn)),
        el("span", { class: "steps" }, turn.steps ? count(turn.steps, "tool step") : ""), turn.is_step && badge("tool step"), turn.is_retry && badge("retry"), turn.interrupted && badge("interrupted", "bad"),
        turn.signals.map(signalBadge),
        el("span", {}, `${number(turn.block_tokens)} tokens`), el("span", {}, ms(total(spent(turn)))))),
    body);
  fill();
  return el("li", { "data-turn": turn.turn_id }, box);
}

/** What `X-Memory-Status` means, where it is more than that something was found or not. */
const STATUS_WORDS = {
  "token-required": "without a token, so without memory", "bad-memory-in": "what was told to memory was not understood",
  "bad-topic": "no name of a topic", "bad-mode": "no mode of memory", "degraded:embedding": "found by words alone", "degraded:store": "memory could not be read or written whole",
  "degraded:disk-full": "the disk is full", "degraded:template": "the model's template took no memory", "degraded:timeout": "memory took too long", "degraded:unreadable": "memd could not read the request",
};

/** Why a turn has no answer; nothing of one that has. */
function failure({ http_status: status }) {
  return status !== 200 && (status === null ? "no answer" : `the model server answered ${status}`);
}

/** How many chunks the model saw: those that were new in this turn, and those that stood there from earlier ones. */
function shownWords(turn) {
  const fresh = turn.injected ?? turn.candidates.filter((one) => one.verdict === "injected").length;
  const stood = Math.max(0, turn.shown.length - fresh);
  const isKept = turn.mode === "full" && turn.status === "none" && turn.http_status === 200;
  if (!fresh && !stood) return isKept ? "kept; nothing in memory has to do with it" : "nothing from memory";
  return `${fresh} from memory${stood ? ` + ${number(stood)} of earlier turns` : ""}`;
}

/** Of what is normal in a large memory, and of what went wrong. */
function signalBadge({ type, chunk_id, fill_ratio }) {
  const fill = `What memory has about it would take ${Math.round(100 * fill_ratio)} % of the room for it (injection.budget_tokens).`;
  if (type === "context_overflow") return badge("more in memory than has room", "", fill);
  if (type === "context_pressure") return badge("memory's room nearly full", "", fill);
  return badge(`${String(type).replaceAll("_", " ")}${chunk_id ? `: ${chunk_id}` : ""}`, "bad");
}

function asked(turn) {
  return turn.asked || turn.question || turn.note || "(no message from the user)";
}

function kind(status) {
  return status.startsWith("degraded") || status.startsWith("bad") ? "bad" : "";
}

function opened(turn) {
  const taken = turn.candidates.filter((one) => one.verdict === "injected");
  const left = turn.candidates.filter((one) => one.verdict !== "injected");
  const answer = el("div", { "aria-live": "polite" });
  const again = el("button", { type: "button", click: () => replay(turn, answer).catch((error) => answer.replaceChildren(problem(error))) }, "Ask memory again now");
  return [
    turn.conversation && el("p", {}, conversationLink(turn.topic_id, turn.conversation, "The whole conversation")),
    el("h2", {}, "Asked"), said(asked(turn)),
    el("h2", {}, "Answered"), turn.reply ? said(turn.reply) : el("p", { class: "empty" }, turn.calls?.length ? `It called ${turn.calls.join(", ")}.` : "No reply is known."),
    turn.question && turn.question !== turn.asked && [el("h2", {}, "The question to memory"), said(turn.question)],
    turn.note && el("p", { class: "remark" }, plain(turn.note)),
    facts({
      Model: turn.model, Failed: failure(turn),
      "Memory in the prompt": `${number(turn.memory_tokens)} tokens`,
      "Shown to the model": turn.shown.length > 0 && el("span", { class: "ids" }, turn.shown.map((id) => chunkLink(turn.topic_id, id))),
      "Not in the prompt": turn.left_out > 0 && count(turn.left_out, "message"), "Replaced by a line": turn.replaced > 0 && count(turn.replaced, "result"),
      Prompt: turn.prompt_tokens !== null && `${number(turn.prompt_tokens)} tokens, ${number(turn.cached_tokens)} cached`,
      Reply: turn.completion_tokens !== null && `${number(turn.completion_tokens)} tokens`,
      Signals: turn.signals.length > 0 && turn.signals.map(signalBadge),
    }),
    details(facts({
      API: turn.api, Mode: turn.mode, HTTP: turn.http_status, Placement: turn.placement, Related: turn.related.join(", "),
      Block: `${number(turn.block_tokens)} of ${number(turn.room_tokens ?? turn.budget_tokens)} tokens`, Forwarded: `${number(turn.forwarded_tokens)} tokens`,
      "Left for this turn": turn.freed_tokens > 0 && `${number(turn.freed_tokens)} tokens`,
      Candidates: number(turn.candidates.length), Corrections: turn.corrections.map((one) => JSON.stringify(one)).join(" "),
    }), timings(turn.timings_ms)),
    el("h2", {}, `New in this turn (${taken.length})`), candidates(taken, { beginnings: beginnings(turn.block ?? "") }),
    left.length > 0 && [el("h2", {}, `Left out, and why (${left.length})`), candidates(left)],
    el("h2", {}, "As the model saw it"), turn.block ? said(turn.block, "pre") : el("p", { class: "empty" }, "This turn has no block of its own."),
    turn.question && [el("h2", {}, "The same question now"), again, answer],
  ].flat().filter(Boolean);
}

/** Id → the first line of a memory in a block. */
function beginnings(block) {
  return new Map([...block.matchAll(/^\[mem:([0-9a-f]+)\] (.*)$/gm)].map((found) => [found[1], found[2]]));
}

function timings(timings_ms) {
  const all = Object.entries(timings_ms).filter(([, value]) => value !== null);
  const longest = Math.max(1e-9, ...all.map(([, value]) => value));
  return el("dl", { class: "timings" }, all.map(([name, value]) => el("div", {}, el("dt", {}, name.replaceAll("_", " ")),
    el("dd", {}, meter([value / longest], ms(value)), el("span", {}, ms(value))))));
}

async function replay(turn, answer) {
  const { now, gained, lost, kept } = await get(`/memd/turns/${encodeURIComponent(turn.turn_id)}/replay`);
  const of = new Map([...turn.candidates, ...now.chunks].map((one) => [one.id, one.topic_id]));
  const ids = (list) => (list.length ? el("span", { class: "ids" }, list.map((id) => chunkLink(of.get(id) ?? turn.topic_id, id))) : "none");
  const same = gained.length + lost.length === 0;
  answer.replaceChildren(
    el("p", {}, same ? "Nothing would change." : `${count(gained.length, "chunk")} more, ${number(lost.length)} fewer, ${number(kept.length)} the same.`),
    facts({ "＋ gained": ids(gained), "− lost": ids(lost), "= kept": ids(kept) }), candidates(ranked(now)));
}
