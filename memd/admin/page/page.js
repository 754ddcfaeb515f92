// The frame of the page: which view is shown, for which topic, what is live. Rule: a view fills `main` and may return a
// function that takes events; one that was left gets no more of them.

import { get, listen } from "./api.js";
import { bytes, count, el, number, problem } from "./dom.js";
import { show as chunk } from "./chunk.js";
import { show as note } from "./note.js";
import { show as search } from "./search.js";
import { show as timeline } from "./timeline.js";
import { show as topicList } from "./topics.js";
import { show as turns } from "./turns.js";

const HEALTH_MS = 20_000;
const THEMES = { system: "light dark", light: "light", dark: "dark" };

const main = document.getElementById("main");
const chosen = document.getElementById("topic");
const themes = document.getElementById("theme");
let topics = [];
let health = null;
let isLive = false;
let shown = 0; // counts navigations: an answer that comes late must not replace a newer view
let takesEvents = null;
let missed = []; // events that came while a view was being filled
const waiting = []; // events that nobody was told of yet
let isTaking = false;

async function navigate(moved = true) {
  const mine = (shown += 1);
  takesEvents = null;
  missed = [];
  const [path, asked] = location.hash.slice(2).split("?");
  const [name, ...names] = path.split("/").map(decodeURIComponent);
  const topic = chosen.value;
  const again = () => navigate(false);
  const context = { topic, topics: () => topics, query: new URLSearchParams(asked), choose, again };
  const views = {
    turns: (into) => turns(into, { ...context, id: names[0] }),
    timeline: (into) => timeline(into, context),
    search: (into) => search(into, context),
    note: (into) => note(into, context),
    topics: (into) => topicList(into, context),
    chunk: (into) => chunk(into, { topic: names[0], id: names[1] }),
  };
  const view = Object.hasOwn(views, name) ? name : "turns";
  for (const link of document.querySelectorAll("nav a")) {
    link.removeAttribute("aria-current");
    if (link.hash === `#/${view}`) link.setAttribute("aria-current", "page");
  }
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · memd`;
  const into = el("div", { class: `view ${view}` });
  main.setAttribute("aria-busy", "true");
  main.replaceChildren(into);
  if (moved) main.focus({ preventScroll: true });
  try {
    const handler = await views[view](into);
    if (mine === shown) {
      takesEvents = handler ?? null;
      for (const [event, data] of missed.splice(0)) tell(event, data);
    }
  } catch (error) {
    into.replaceChildren(problem(error), el("button", { type: "button", click: () => navigate() }, "Try again"));
  }
  if (mine === shown) main.removeAttribute("aria-busy");
}

function choose(topicId) {
  if (![...chosen.options].some((option) => option.value === topicId)) chosen.append(el("option", { value: topicId }, topicId));
  chosen.value = topicId;
  sessionStorage.setItem("memd.topic", topicId);
}

async function refresh() {
  try {
    [health, { topics }] = await Promise.all([get("/memd/health"), get("/memd/topics")]);
    const known = new Set([...chosen.options].map((option) => option.value));
    chosen.append(...topics.filter((one) => !known.has(one.topic_id)).map((one) => el("option", { value: one.topic_id }, one.topic_id)));
  } catch {
    health = null;
  }
  drawHealth();
}

function drawHealth() {
  const item = (name, good, words) => el("li", { class: good ? "good" : "bad" }, el("b", {}, name), ` ${words}`);
  const upstream = health?.upstream;
  const size = topics.reduce((sum, topic) => sum + topic.log_bytes, 0);
  const items = health
    ? [item("Store", health.status === "ok", `${health.status}, ${count(topics.length, "topic")}, ${bytes(size)}`),
      item("Model", upstream.reachable, upstream.window ? `window of ${number(upstream.window)} tokens` : "window unknown: nothing leaves the prompt; set upstream.window"),
      item("Upstream", upstream.reachable, `${upstream.url} ${upstream.reachable ? "answers" : "does not answer"}`)]
    : [item("memd", false, "does not answer")];
  document.getElementById("health").replaceChildren(...items, item("Events", isLive, isLive ? "live" : "reconnecting …"));
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
  themes.textContent = `Theme: ${theme}`;
  localStorage.setItem("memd.theme", theme);
}

let theme = Object.hasOwn(THEMES, localStorage.getItem("memd.theme") ?? "") ? localStorage.getItem("memd.theme") : "system";
setTheme(theme);
themes.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme((theme = names[(names.indexOf(theme) + 1) % names.length]));
});
chosen.addEventListener("change", () => {
  sessionStorage.setItem("memd.topic", chosen.value);
  navigate(false);
});
window.addEventListener("hashchange", () => navigate());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the view
  main.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) return;
  event.preventDefault();
  location.hash = "#/search";
  setTimeout(() => document.querySelector("input[type=search]")?.focus());
});

await refresh();
choose(sessionStorage.getItem("memd.topic") ?? "");
setInterval(() => document.hidden || refresh(), HEALTH_MS);
listen(take, (live) => {
  isLive = live;
  drawHealth();
  if (!shown || (live && takesEvents)) navigate(false); // after the stream has begun, so that nothing falls in between
});
