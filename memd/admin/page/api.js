// Speaks memd's API. Rule: every request goes through `ask`, which shows the token; nothing goes to another origin.

const TOKEN_KEY = "memd.token";
const SILENCE_MS_MAX = 40_000; // the daemon says `: ping` every 15 s
const RETRY_MS_MAX = 15_000;

let asking = null; // one dialog, however many requests were refused
let accepted = null; // the token that was right the last time
let onOther = () => {};

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

/** `act` is called when another token was given while the page was open. */
export function whenOtherToken(act) {
  onOther = act;
}

/** Forget the token, and begin anew. */
export function otherToken() {
  sessionStorage.removeItem(TOKEN_KEY);
  location.reload();
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
      if (error instanceof Refused && [403, 404].includes(error.status)) return;
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
    if (answer.status !== 401 && answer.status !== 429) accepted = token;
    if (answer.ok) return answer;
    const words = await reason(answer);
    if (answer.status !== 401 && answer.status !== 429) throw new Refused(answer.status, words);
    if (sessionStorage.getItem(TOKEN_KEY) !== token) continue; // another one was given meanwhile
    asking ??= askToken(token, answer, words).finally(() => (asking = null));
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

/** Ask for a token, in place of one that was refused; of too many wrong ones the next has to wait. */
function askToken(token, answer, words) {
  const dialog = document.getElementById("token");
  const form = dialog.querySelector("form");
  const waitUntil = Date.now() + 1000 * (answer.status === 429 ? Number(answer.headers.get("Retry-After")) : 0);
  const wrong = "This token is wrong, or it was taken back. If you have no other, ask who gave it to you; the owner's is the setting auth.token.";
  const gone = "This token is no longer valid: it was revoked, or exchanged for another. Give another one to go on; what you see and have typed in stays as it is.";
  const title = document.getElementById("token-title");
  if (answer.status === 429) document.getElementById("token-why").textContent = words.replace(/^memd: t/, "T").replace(/;.*/, ".");
  else if (token !== null) document.getElementById("token-why").textContent = token === accepted ? gone : wrong;
  if (token !== null && token === accepted) title.textContent = "This token is no longer valid";
  const button = form.querySelector("button");
  const count = () => {
    const seconds = Math.ceil((waitUntil - Date.now()) / 1000);
    button.disabled = seconds > 0;
    button.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Open";
    if (seconds > 0) setTimeout(count, 250);
  };
  return new Promise((resolve) => {
    dialog.addEventListener("cancel", (event) => event.preventDefault()); // there is nothing to see without it
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(TOKEN_KEY, form.token.value.trim());
      form.reset();
      dialog.close();
      resolve();
      onOther();
    };
    count();
    if (answer.status === 429) form.token.value = token;
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
