// Speaks memd's API. Rule: every request goes through `ask`, which shows the token; nothing goes to another origin.

const TOKEN_KEY = "memd.token";
const SILENCE_MS_MAX = 40_000; // the daemon says `: ping` every 15 s
const RETRY_MS_MAX = 15_000;

let asking = null; // one dialog, however many requests were refused

/** An answer that is not what was asked for; the message is memd's own. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function get(path, query = {}, options = {}) {
  return (await ask(address(path, query), options)).json();
}

export async function post(path, body) {
  const headers = { "Content-Type": "application/json" }; // the daemon refuses what a form of another page could send
  return (await ask(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

/** The answer itself, for what is no JSON. */
export function fetched(path) {
  return ask(path);
}

export function hasToken() {
  return sessionStorage.getItem(TOKEN_KEY) !== null;
}

/** Events for as long as the page is seen: `onEvent(name, data)`, `onState(isLive)`. */
export async function listen(onEvent, onState) {
  for (let failures = 0; ; failures += 1) {
    await seen();
    try {
      await follow((name, data) => {
        failures = 0;
        onEvent(name, data);
      }, onState);
    } catch (error) {
      if (error instanceof Refused && error.status === 404) return;
    }
    onState(false);
    if (!document.hidden) await pause(Math.min(RETRY_MS_MAX, 500 * 2 ** Math.min(failures, 10)));
  }
}

async function follow(onEvent, onState) {
  // EventSource cannot send the token, so the stream is read by hand. A browser allows six connections to a host: a tab
  // that nobody looks at gives its own back.
  const stop = new AbortController();
  const hidden = () => document.hidden && stop.abort();
  let watchdog = 0;
  const alive = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(() => stop.abort(), SILENCE_MS_MAX);
  };
  document.addEventListener("visibilitychange", hidden);
  try {
    const answer = await ask("/memd/events", { signal: stop.signal });
    onState(true);
    alive();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part; !(part = await reader.read()).done; ) {
      alive();
      const events = (rest + part.value).split(/\r?\n\r?\n/);
      rest = events.pop();
      for (const event of events) tell(event, onEvent);
    }
  } finally {
    clearTimeout(watchdog);
    document.removeEventListener("visibilitychange", hidden);
  }
}

function tell(event, onEvent) {
  const fields = { event: "message", data: "" };
  for (const text of event.split(/\r?\n/)) {
    const found = /^(event|data): ?(.*)$/.exec(text);
    if (found) fields[found[1]] = found[1] === "data" ? fields.data + found[2] : found[2];
  }
  if (fields.data) onEvent(fields.event, JSON.parse(fields.data));
}

async function ask(path, options = {}) {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN_KEY);
    const headers = { ...options.headers, ...(token ? { "X-Memory-Token": token } : {}) };
    let answer;
    try {
      answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused(0, "memd does not answer. Is it still running? The page tries again automatically.");
    }
    if (answer.ok) return answer;
    if (answer.status !== 401) throw new Refused(answer.status, await reason(answer));
    if (sessionStorage.getItem(TOKEN_KEY) !== token) continue; // another one was given meanwhile
    asking ??= askToken(token !== null).finally(() => (asking = null));
    await asking;
  }
}

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `memd answered ${answer.status}`;
  }
}

function askToken(wasWrong) {
  const dialog = document.getElementById("token");
  const form = dialog.querySelector("form");
  if (wasWrong) document.getElementById("token-why").textContent = "This token is wrong, or it was taken back. If you have no other, ask who gave it to you; the owner's is the setting auth.token.";
  return new Promise((resolve) => {
    dialog.addEventListener("cancel", (event) => event.preventDefault()); // there is nothing to see without it
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(TOKEN_KEY, form.token.value.trim());
      form.reset();
      dialog.close();
      resolve();
    };
    dialog.showModal();
  });
}

function address(path, query) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

function seen() {
  return new Promise((resolve) => {
    const check = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", check);
      resolve();
    };
    document.addEventListener("visibilitychange", check);
    check();
  });
}

function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
