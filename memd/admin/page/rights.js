// Who asks: the name, the rights and the topics of the token. Rule: it decides nothing, the daemon does; what that would
// refuse is not offered. Without tokens everybody is the owner, from whom nothing is hidden.

import { get, hasToken, otherToken } from "./api.js";
import { el, facts } from "./dom.js";

let me = { name: "owner", topics: ["*"], rights: ["read", "write", "correct", "admin"] };

/** Ask the daemon; whether somebody else asks than before, or may do something else. */
export async function learnRights() {
  const before = JSON.stringify(me);
  me = await get("/memd/me");
  return JSON.stringify(me) !== before;
}

/** Whether the token has a right in a topic; without one, in any at all. */
export function may(right, topicId = null) {
  return me.rights.includes(right) && (topicId === null || me.topics.some((pattern) => matches(pattern, topicId)));
}

/** Whether it has a right in every topic, which what concerns the whole daemon asks for. */
export function mayEverywhere(right) {
  return may(right) && me.topics.includes("*");
}

/** What it may do, in words. */
export function rightsInWords() {
  return `${me.rights.join(", ")} in ${me.topics.includes("*") ? "all topics" : me.topics.join(", ")}`;
}

/** Where the topic is named in which something is written: a list of those that there can be, or a field where there are patterns. */
export function topicField(wished) {
  const names = me.topics.filter((one) => !one.includes("*"));
  if (names.length === me.topics.length) return el("select", { name: "topic" }, names.map((one) => el("option", { selected: one === wished }, one)));
  const value = [wished, "default", ...names].find((one) => one && may("write", one)) ?? "";
  const check = () => field.setCustomValidity(!field.value || may("write", field.value) ? "" : `This token may write in ${me.topics.join(", ")} alone.`);
  const field = el("input", { name: "topic", required: true, maxlength: 128, value, placeholder: me.topics.join(", "), autocomplete: "off", input: check });
  return field;
}

/** The button with the name of the token, where there are tokens, and what it tells. */
export function drawIdentity() {
  const button = document.getElementById("who");
  const dialog = document.getElementById("me");
  button.hidden = !hasToken();
  button.textContent = me.name;
  button.ariaLabel = `Your token: ${me.name}`;
  button.onclick = () => {
    dialog.querySelector("h2").textContent = `Your token: ${me.name}`;
    dialog.querySelector("div").replaceChildren(facts({ "It may": me.rights.join(", "), "In the topics": me.topics.includes("*") ? "all" : me.topics.join(", ") }));
    dialog.showModal();
  };
  dialog.onclose = () => dialog.querySelector("div").replaceChildren();
  dialog.querySelector("[name=other]").onclick = otherToken;
}

function matches(pattern, topicId) {
  return new RegExp(`^${pattern.replaceAll(".", "\\.").replaceAll("*", ".*")}$`).test(topicId);
}
