// The frame of the page: which view is shown, for which topic, what is live. Rule: the address (its hash) says what is
// shown, the topic included. A view fills `main` and may return a function that takes events; one that was left gets no
// more of them.

import { get, listen, otherToken, whenOtherToken } from "./api.js";
import { bytes, count, el, hashOf, number, problem } from "./dom.js";
import { listenToKeys } from "./keys.js";
import { show as chunk } from "./chunk.js";
import { show as conversations, showOne as conversation } from "./conversations.js";
import { show as figures } from "./figures.js";
import { show as note } from "./note.js";
import { show as read } from "./read.js";
import { drawIdentity, learnRights, may, rightsInWords } from "./rights.js";
import { show as search } from "./search.js";
import { show as sources, showDocument } from "./sources.js";
import { show as timeline } from "./timeline.js";
import { show as topicList } from "./topics.js";
import { show as turns } from "./turns.js";

const HEALTH_MS = 20_000;
const NARROWED = ["turns", "conversations", "timeline", "search", "figures", "topics", "sources", "note", "read"]; // by the topic of the address
const NEEDED = { note: "write" }; // any other view reads
const THEMES = { system: "light dark", light: "light", dark: "dark" };

const main = document.getElementById("main");
const chosen = document.getElementById("topic");
const themes = document.getElementById("theme");
let topics = [];
let health = null;
let refusal = null; // why there is no health
let isLive = false;
let isFollowing = false;
let shown = 0; // counts navigations: an answer that comes late must not replace a newer view
let takesEvents = null;
let missed = []; // events that came while a view was being filled
const waiting = []; // events that nobody was told of yet
let isTaking = false;

const VIEWS = {
  turns: (into, context) => turns(into, { ...context, id: context.names[0] }),
  conversations,
  conversation: (into, context) => conversation(into, { ...context, topic: context.names[0], id: context.names[1] }),
  read,
  timeline,
  search,
  figures,
  note,
  topics: topicList,
  sources,
  document: (into, { names }) => showDocument(into, { topic: names[0], source: names[1] }),
  chunk: (into, { names }) => chunk(into, { topic: names[0], id: names[1] }),
};

async function navigate(moved = true) {
  const mine = (shown += 1);
  takesEvents = null;
  missed = [];
  const [path, asked] = location.hash.slice(2).split("?");
  const [name, ...names] = path.split("/").map(decodeURIComponent);
  const query = new URLSearchParams(asked);
  const view = Object.hasOwn(VIEWS, name) ? name : may("read") ? "turns" : "note";
  if (query.has("topic") || (NARROWED.includes(view) && !names.length)) choose(query.get("topic") ?? "");
  for (const link of document.querySelectorAll("nav a")) {
    const own = link.hash.slice(2).split("?")[0];
    link.hidden = !may(NEEDED[own] ?? "read");
    link.href = hashOf(own, { topic: chosen.value });
    link.removeAttribute("aria-current");
    if (own === view || `${view}s` === own) link.setAttribute("aria-current", "page");
  }
  const own = document.querySelector("nav [aria-current]");
  if (own) own.parentElement.scrollLeft = own.offsetLeft - own.parentElement.offsetLeft - own.offsetWidth; // on a phone the menu is one line
  const context = { topic: chosen.value, names, query, topics: () => topics, modelUrl: health?.model_url, again: () => navigate(false) };
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · memd`;
  const into = el("div", { class: `view ${view}` });
  const open = moved ? [] : [...main.querySelectorAll("details[open] > summary")].map((one) => one.textContent); // stay open when it is drawn anew
  main.setAttribute("aria-busy", "true");
  main.replaceChildren(into);
  if (moved) main.focus({ preventScroll: true });
  try {
    const needed = NEEDED[view] ?? "read";
    const handler = may(needed) ? await VIEWS[view](into, context) : into.replaceChildren(el("h1", {}, "Not with this token"),
      el("p", { class: "empty" }, `It may ${rightsInWords()}. This view needs the right to ${needed}.`), el("button", { type: "button", click: otherToken }, "Use another token"));
    if (mine === shown) {
      for (const one of into.querySelectorAll("summary")) one.parentElement.open ||= open.includes(one.textContent);
      takesEvents = handler ?? null;
      for (const [event, data] of missed.splice(0)) tell(event, data);
    }
  } catch (error) {
    into.replaceChildren(el("h1", {}, "This cannot be shown"), problem(error), el("button", { type: "button", click: () => navigate() }, "Try again"));
  }
  if (mine === shown) main.removeAttribute("aria-busy");
}

function choose(topicId) {
  if (![...chosen.options].some((option) => option.value === topicId)) chosen.append(el("option", { value: topicId }, topicId));
  chosen.value = topicId;
}

/** The same view for another topic: an address of its own. */
function narrow() {
  const [path, asked] = location.hash.slice(2).split("?");
  const query = Object.fromEntries(new URLSearchParams(asked));
  const [name, ...names] = path.split("/");
  location.hash = hashOf(!NARROWED.includes(name) || names.length ? "turns" : name, { ...query, topic: chosen.value });
}

/** Look at the health, the topics and the rights of the token; where those are others than before, all is drawn anew. */
async function refresh() {
  let areOther = false;
  try {
    [areOther, health] = await Promise.all([learnRights(), get("/memd/health")]);
    topics = may("read") ? (await get("/memd/topics")).topics : [];
    if (areOther) chosen.replaceChildren(...[...chosen.options].filter(({ value }) => !value || topics.some((one) => one.topic_id === value)));
    const known = new Set([...chosen.options].map((option) => option.value));
    chosen.append(...topics.filter((one) => !known.has(one.topic_id)).map((one) => el("option", { value: one.topic_id }, one.topic_id)));
  } catch (error) {
    [health, refusal] = [null, error];
  }
  chosen.parentElement.hidden = !may("read");
  drawIdentity();
  drawHealth();
  if (!areOther || !shown) return;
  follow();
  navigate(false);
}

/** Follow the events, if the token may read them. */
function follow() {
  if (isFollowing || !may("read")) return;
  isFollowing = true;
  listen(take, (live) => {
    isLive = live;
    drawHealth();
    if (!shown || (live && takesEvents)) navigate(false); // after the stream has begun, so that nothing falls in between
  }).then(() => (isFollowing = false));
}

function drawHealth() {
  const item = (name, good, words) => el("li", { class: good ? "good" : "bad" }, el("b", {}, name), el("span", {}, ` ${words}`));
  const upstream = health?.upstream;
  const size = topics.reduce((sum, topic) => sum + topic.log_bytes, 0);
  const items = health
    ? [item("Store", health.status === "ok", may("read") ? `${health.status}, ${count(topics.length, "topic")}, ${bytes(size)}` : health.status),
      item("Model", upstream.reachable, upstream.window ? `window of ${number(upstream.window)} tokens` : "window unknown: nothing leaves the prompt; set upstream.window"),
      ...health.upstreams.map((one) => item("Upstream", one.reachable, `${one.url} ${one.reachable ? "answers" : "does not answer"}${
        health.upstreams.length > 1 ? `, ${number(one.in_flight)} in flight${one.reason && `; left out: ${one.reason}`}` : ""}`))]
    : [item("memd", false, refusal?.status ? refusal.message.replace(/^memd: /, "") : "does not answer")];
  const events = may("read") ? [item("Events", isLive, isLive ? "live" : "reconnecting …")] : [];
  document.getElementById("health").replaceChildren(...items, ...events);
}

/** Events in the order in which they came; one look at the topics serves all that came meanwhile. */
async function take(event, value) {
  waiting.push([event, value]);
  if (isTaking) return;
  isTaking = true;
  try {
    while (waiting.length) {
      const now = waiting.splice(0);
      const isNews = ([name, data]) => name !== "turn" || !topics.some((topic) => topic.topic_id === data.topic_id);
      if (now.some(isNews)) await refresh();
      if (main.hasAttribute("aria-busy")) missed.push(...now);
      else for (const one of now) tell(...one);
    }
  } finally {
    isTaking = false;
  }
}

async function tell(name, data) {
  try {
    await takesEvents?.(name, data);
  } catch (error) {
    main.prepend(problem(error));
  }
}

function setTheme(theme) {
  document.documentElement.style.colorScheme = THEMES[theme];
  themes.lastElementChild.textContent = theme;
  themes.ariaLabel = `Theme: ${theme}`;
  localStorage.setItem("memd.theme", theme);
}

let theme = Object.hasOwn(THEMES, localStorage.getItem("memd.theme") ?? "") ? localStorage.getItem("memd.theme") : "system";
setTheme(theme);
themes.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme((theme = names[(names.indexOf(theme) + 1) % names.length]));
});
chosen.addEventListener("change", narrow);
window.addEventListener("hashchange", () => navigate());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the view
  main.focus();
});
listenToKeys(() => {
  const field = () => document.querySelector(".view.search input[type=search]");
  if (!field()) {
    history.pushState(null, "", hashOf("search", { topic: chosen.value })); // no event: the next key is typed into the field
    navigate();
  }
  field()?.focus();
});

await refresh();
whenOtherToken(refresh);
setInterval(() => document.hidden || refresh(), HEALTH_MS);
follow();
if (!isFollowing) navigate(false);
