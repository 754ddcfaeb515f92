// Folders whose files are remembered, files that are handed over here, and one document with its chunks in order.

import { get, post } from "./api.js";
import { announce, badge, bytes, chunkLink, count, el, line, number, plain, problem, said, when } from "./dom.js";
import { may, mayEverywhere, topicField } from "./rights.js";

const PAGE = 100;
const FILE_BYTES_MAX = 20_000_000; // base64 of it fits into what the route takes
const POLL_MS = 700;

export async function show(main, { topic, again }) {
  const outcome = el("div", { tabindex: "-1", class: "outcome" });
  const told = await get("/memd/sources", { topic });
  const act = (work) => async () => {
    try {
      const words = await work();
      await again();
      announce(words);
    } catch (error) {
      outcome.replaceChildren(problem(error));
      outcome.focus();
    }
  };
  const look = act(async () => (await post("/memd/index", {}), "memd looks at the sources."));
  const remove = (one) => act(async () => {
    const { taken_out } = await post("/memd/documents/remove", { topic_id: one.topic_id, sources: [one.name], below: true });
    return `${one.name}: ${count(taken_out, "chunk")} taken out.`;
  });
  main.replaceChildren(...[el("h1", {}, "Sources"), may("write") && dropZone(topic, outcome, again), outcome,
    el("h2", {}, "Folders of config.yaml"),
    ...(told.sources.length ? [el("ol", { class: "rows configured", "aria-label": "Folders of config.yaml" }, told.sources.map(configured)), mayEverywhere("admin") && el("button", { type: "button", click: look }, "Look at them now")]
      : [el("p", { class: "empty" }, "None. Folders in ", el("code", {}, "sources:"), " of config.yaml are read by themselves, and again when they change.")]),
    el("h2", {}, "Remembered documents"),
    told.known.length ? el("ol", { class: "rows", "aria-label": "Remembered documents" }, told.known.map((one) => known(one, told.sources, remove(one))))
      : el("p", { class: "empty" }, "Nothing yet.", may("write") && [" Drop a file above, or run ", el("code", {}, "memd add PATH"), "."])].filter(Boolean));
  const poll = async () => { // only how far it is: what is known may be thousands of documents
    if (!main.isConnected) return;
    const { sources } = await get("/memd/index");
    main.querySelector("ol.configured")?.replaceChildren(...sources.filter((one) => !topic || one.topic_id === topic).map(configured));
    if (sources.some(isUnderWay)) setTimeout(poll, POLL_MS);
  };
  if (told.sources.some(isUnderWay)) setTimeout(poll, POLL_MS);
  return (name) => (name === "source" ? again() : null);
}

function isUnderWay(one) {
  return one.state === "looking" || one.state === "waiting";
}

/** A folder of the settings, and how it stands. */
function configured(one) {
  const words = { waiting: "waiting", looking: `${number(one.done)} of ${number(one.files)} files`, fine: "up to date", failed: "cannot be read" };
  return el("li", { class: "source" },
    el("p", { class: "meta" }, badge(words[one.state], one.state === "failed" ? "bad" : "on"), el("b", { dir: "auto" }, plain(one.path)), el("span", {}, `topic ${one.topic_id}`)),
    el("p", { class: "meta" }, one.looked_at && el("span", {}, "looked at ", when(one.looked_at)), el("span", {}, count(one.files, "file")),
      el("span", {}, `${count(one.written, "chunk")} new, ${number(one.taken_out)} taken out`), el("span", {}, one.is_watched ? "watched" : "not watched: looked at now and then")),
    one.error && problem({ message: one.error }),
    one.problem_count > 0 && el("details", {}, el("summary", {}, `${count(one.problem_count, "file")} left out`),
      el("ul", {}, one.problems.map((each) => el("li", {}, el("b", { dir: "auto" }, line(each.source)), ": ", plain(each.reason))))));
}

/** Documents of one folder or file: how many, and one by one when that is opened. */
function known(one, sources, remove) {
  const list = el("ul", {});
  const open = async () => {
    if (list.children.length) return;
    try {
      const { documents } = await get("/memd/documents", { topic: one.topic_id });
      const own = documents.filter(({ source }) => source === one.name || source.startsWith(`${one.name}/`));
      list.replaceChildren(...own.map((each) => el("li", {}, documentLink(one.topic_id, each.source), ` ${count(each.chunks, "chunk")}, `, when(each.at))));
    } catch (error) {
      list.replaceChildren(el("li", {}, problem(error)));
    }
  };
  const isOfSettings = sources.some((source) => source.topic_id === one.topic_id && source.name === one.name);
  const sure = el("button", { type: "button", hidden: true, click: remove }, `Take out ${count(one.chunks, "chunk")}`);
  const ask = el("button", { type: "button", click: () => ((sure.hidden = false), (ask.hidden = true), sure.focus()) }, "Remove …");
  return el("li", { class: "source" },
    el("details", { toggle: open }, el("summary", {}, el("b", { dir: "auto" }, line(one.name))), list),
    el("div", { class: "meta" }, el("span", {}, `topic ${one.topic_id}`), el("span", {}, `${count(one.documents, "document")}, ${count(one.chunks, "chunk")}`), el("span", {}, "changed ", when(one.at)),
      isOfSettings ? badge("of the settings") : may("write", one.topic_id) && [ask, sure]));
}

function documentLink(topicId, source) {
  return el("a", { href: `#/document/${encodeURIComponent(topicId)}/${encodeURIComponent(source)}`, dir: "auto" }, line(source));
}

/** Where files are dropped, or chosen. */
function dropZone(topic, outcome, again) {
  const where = topicField(topic);
  const files = el("input", { type: "file", multiple: true, change: () => take([...files.files]) });
  const take = async (given) => {
    if (!where.reportValidity()) return;
    const done = [];
    for (const file of given) {
      outcome.replaceChildren(el("p", {}, `Reading ${file.name} …`));
      try {
        if (file.size > FILE_BYTES_MAX) throw new Error(`it has ${bytes(file.size)}, and a file may have ${bytes(FILE_BYTES_MAX)} here; use memd add`);
        const { written, source } = await post("/memd/documents", { topic_id: where.value, file: { name: file.name, content: await base64(file) } });
        done.push(el("p", {}, documentLink(where.value, source), written ? ` is remembered: ${count(written, "new chunk")}.` : " is remembered already."));
      } catch (error) {
        done.push(problem({ message: `${file.name}: ${error.message.replace(/^memd: /, "")}` }));
      }
    }
    await again();
    const shown = document.querySelector(".sources .outcome");
    shown?.replaceChildren(...done);
    shown?.focus();
    announce(`${count(done.length, "file")} read.`);
  };
  const zone = el("form", { class: "fields drop", "aria-label": "Files to remember", submit: (event) => event.preventDefault(),
    dragover: (event) => (event.preventDefault(), zone.classList.add("over")), dragleave: () => zone.classList.remove("over"),
    drop: (event) => (event.preventDefault(), zone.classList.remove("over"), take([...event.dataTransfer.files])) },
    el("label", { class: "wide" }, "Drop files here, or choose them", files), el("label", {}, "Topic", where), el("a", { href: "#/note" }, "Write a note instead"));
  return zone;
}

function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Error("the browser cannot read it"));
    reader.readAsDataURL(file);
  });
}

/** One document: its chunks under their headings and pages, in its order. */
export async function showDocument(main, { topic, source }) {
  const list = el("ol", { class: "log", "aria-label": "Chunks, in the document's order" });
  const words = el("p", { class: "meta" });
  let last = "";
  const page = async () => {
    const told = await get("/memd/documents/chunks", { topic, source, skip: list.querySelectorAll("li:not(.day)").length, limit: PAGE });
    for (const one of told.chunks) {
      const place = [one.heading.join(" > "), one.page ? `page ${one.page}` : "", one.sheet ? `sheet ${one.sheet}` : ""].filter(Boolean).join(", ");
      if (place !== last) list.append(el("li", { class: "day" }, el("h2", { dir: "auto" }, plain((last = place)))));
      list.append(el("li", {}, said(one.content), el("p", { class: "meta" }, chunkLink(topic, one.id))));
    }
    words.replaceChildren(el("span", {}, `topic ${topic}`), el("span", {}, count(told.of, "chunk")));
    more.hidden = list.querySelectorAll("li:not(.day)").length >= told.of;
  };
  const more = el("button", { type: "button", click: () => page().catch((error) => more.after(problem(error))) }, "More");
  await page();
  main.replaceChildren(el("h1", { dir: "auto" }, plain(source)), words, list, more);
}
