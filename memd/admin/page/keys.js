// Keys for lists, and the dialog that tells them. Rule: nothing is reached by these keys alone; they are short ways.

const ITEMS = "main :is(.rows, .log, .candidates, .talks, .exchanges) > :is(li:not(.day), details)";
const FOCUSABLE = "summary, a[href], button, input";
const STEPS = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 };

/** `search` goes to the search. */
export function listenToKeys(search) {
  const help = document.getElementById("help");
  document.getElementById("keys").addEventListener("click", () => help.showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]") || isTyping(event.target)) return;
    const acts = { "/": search, "?": () => help.showModal(), x: () => select(event.target), ...moves(event) };
    if (!Object.hasOwn(acts, event.key) || acts[event.key]() === false) return;
    event.preventDefault();
  });
}

function isTyping(target) {
  return target.matches("textarea, select, input:not([type=checkbox], [type=radio])");
}

function moves(event) {
  return Object.fromEntries(Object.entries(STEPS).map(([key, step]) => [key, () => move(event.target, step, key.startsWith("Arrow"))]));
}

/** Focus what is next in the list. An arrow does so only within one: elsewhere it scrolls. */
function move(from, step, isArrow) {
  const items = [...document.querySelectorAll(ITEMS)].filter((item) => item.checkVisibility());
  const place = items.findLastIndex((item) => item.contains(from));
  if (!items.length || (isArrow && place < 0)) return false;
  const next = items[place < 0 ? (step > 0 ? 0 : items.length - 1) : place + step];
  const target = next?.querySelector(FOCUSABLE);
  target?.focus();
  target?.scrollIntoView({ block: "nearest" });
  return Boolean(target);
}

function select(from) {
  const box = from.closest("li")?.querySelector("input[type=checkbox]");
  box?.click();
  return Boolean(box);
}
