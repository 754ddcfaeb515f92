// What an empty view says: where clients find memd.

import { hasToken } from "./api.js";
import { announce, el } from "./dom.js";

/** `words`: what there is nothing of. `modelUrl`: the address of models, without a path; null where memd does not answer. */
export function welcome({ modelUrl }, words) {
  const base = modelUrl ?? "http://127.0.0.1:8765";
  const copy = (text) => Boolean(navigator.clipboard) && el("button", { type: "button", click: async () => {
    await navigator.clipboard.writeText(text);
    announce("Copied.");
  } }, "Copy");
  const place = (name, text) => el("div", {}, el("dt", {}, name), el("dd", {}, el("code", {}, text), copy(text)));
  return el("section", { class: "card welcome", "aria-label": "How to begin" }, el("p", {}, words),
    el("p", {}, "Point a client at memd and say something: it appears here at once. The base URL to use:"),
    el("dl", {}, place("OpenAI clients", `${base}/v1`), place("Anthropic and Ollama clients", base)),
    el("p", {}, "Or try it from a shell:"),
    el("pre", { class: "text", tabindex: "0" }, `curl ${base}/v1/chat/completions -H 'Content-Type: application/json'${hasToken() ? " \\\n  -H 'Authorization: Bearer YOUR-TOKEN'" : ""} \\\n  -d '{"messages": [{"role": "user", "content": "Remember: the key is under the blue bicycle."}]}'`));
}
