// Files for the user's disk. Rule: what is saved is text; with a token it is fetched with it, since a link shows none.

import { fetched, hasToken } from "./api.js";
import { announce, el, problem } from "./dom.js";

/** Save a text as a file. */
export function save(name, parts, type = "text/plain") {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** A link to a file that memd makes; large ones are streamed to the disk. */
export function exportLink(words, query, name) {
  const path = `/memd/export?${new URLSearchParams(query)}`;
  const fetchIt = async (event) => {
    if (!hasToken()) return;
    event.preventDefault();
    try {
      announce("Exporting …");
      save(name, [await (await fetched(path)).blob()], "application/jsonl");
    } catch (error) {
      event.target.after(problem(error));
    }
  };
  return el("a", { href: path, download: name, click: fetchIt }, words);
}
