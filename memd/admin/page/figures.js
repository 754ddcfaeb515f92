// Figures over time: tokens, the time that memory took, what it found, and the size of the log.

import { get } from "./api.js";
import { overTime } from "./charts.js";
import { bytes, count, day, el, hashOf, ms, number, when } from "./dom.js";
import { welcome } from "./welcome.js";

const SPANS = { "24 hours": 1, "7 days": 7, "30 days": 30, "all": null };
const LENGTHS = ["auto", "hour", "day", "week"];
const DAY_MS = 86_400_000;

export async function show(main, context) {
  const { topic, query } = context;
  const span = Object.hasOwn(SPANS, query.get("span") ?? "") ? query.get("span") : "all";
  const by = LENGTHS.includes(query.get("by")) ? query.get("by") : "auto";
  const from = SPANS[span] && (Date.now() - SPANS[span] * DAY_MS) * 1000;
  const told = await get("/memd/figures", { topic, by, from });
  const chosen = (label, name, values, value) => el("label", {}, label, el("select", { name, change: (event) => {
    location.hash = hashOf("figures", { topic, span, by, [name]: event.target.value });
  } }, values.map((one) => el("option", { value: one, selected: one === value }, one))));
  const sum = (of) => told.periods.reduce((total, period) => total + of(period), 0);
  const words = `${count(sum((one) => one.requests), "request")}, ${number(sum((one) => one.prompt_tokens))} prompt tokens, `
    + `${number(sum((one) => one.completion_tokens))} tokens of replies, ${number(sum((one) => one.stored))} entries stored.`;
  main.replaceChildren(el("h1", {}, "Figures"),
    el("form", { class: "fields", "aria-label": "Which figures", submit: (event) => event.preventDefault() }, chosen("Of the last", "span", Object.keys(SPANS), span), chosen("By", "by", LENGTHS, by)),
    ...(told.periods.length ? [el("p", {}, words), el("div", { class: "charts wide" }, charts(told)), reach(told)] : [welcome(context, "Nothing happened in this time.")]));
}

function reach({ since }) {
  return el("p", { class: "empty" }, since ? ["Requests are known since ", when(since), ", as far back as the receipts reach; the log is known from its beginning."] : "There are no receipts, so requests are unknown (receipts.enabled).");
}

function charts({ by, periods }) {
  const time = (at, isLong) => (by === "hour" ? hour(at, isLong, periods.length > 24) : isLong ? `${by === "week" ? "week of " : ""}${day(at)}` : short(at));
  const draw = (title, series, shown, more = {}) => overTime(title, periods, { series, shown, time, ...more });
  const bars = { isStacked: true };
  return [
    draw("Prompt tokens", [{ name: "from the cache", of: (one) => one.cached_tokens }, { name: "read anew", of: (one) => Math.max(0, one.prompt_tokens - one.cached_tokens) }], tokens, bars),
    draw("Tokens of replies", [{ name: "tokens", of: (one) => one.completion_tokens }], tokens, bars),
    draw("Tokens of memory in prompts", [{ name: "tokens", of: (one) => one.memory_tokens }], tokens, bars),
    draw("Time that memory took", [{ name: "median", of: (one) => one.memory_ms }, { name: "19 of 20 were faster than", of: (one) => one.memory_ms_high }], ms),
    draw("Time until the model's first byte", [{ name: "median", of: (one) => one.first_byte_ms }], ms),
    draw("Recall: questions for which memory had something", [{ name: "share", of: (one) => (one.questions ? (100 * one.found) / one.questions : null) }], (value) => `${Math.round(value)} %`, { highest: 100 }),
    draw("Chunks shown for a question", [{ name: "chunks", of: (one) => (one.questions ? one.injected / one.questions : null) }], (value) => `${value.toLocaleString("en-GB", { maximumFractionDigits: 2 })} ${value === 1 ? "chunk" : "chunks"}`),
    draw("Storage: the log", [{ name: "bytes", of: (one) => one.log_bytes }], bytes),
  ];
}

function tokens(value) {
  return `${value.toLocaleString("en-GB", { notation: "compact", maximumFractionDigits: 1 })} tokens`;
}

function hour(at, isLong, isOfDays) {
  const clock = new Date(at / 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  return isLong ? `${day(at)}, ${clock}` : isOfDays ? `${short(at)}, ${clock}` : clock;
}

function short(at) {
  return new Date(at / 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}
