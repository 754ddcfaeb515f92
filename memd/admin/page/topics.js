// Topics and what they take, on disk and in memory.

import { get } from "./api.js";
import { meter } from "./charts.js";
import { badge, bytes, el, facts, ms, number } from "./dom.js";

export async function show(main, { topics, choose, again }) {
  const [stats, health] = await Promise.all([get("/memd/stats"), get("/memd/health")]);
  const all = topics();
  const largest = Math.max(1, ...all.map((topic) => topic.chunks));
  const row = (topic) => {
    const open = stats.topics[topic.topic_id];
    return el("tr", {},
      el("th", { scope: "row" }, el("a", { href: "#/timeline", click: () => choose(topic.topic_id) }, topic.topic_id), topic.is_open && badge("open", "on")),
      el("td", {}, meter([topic.chunks / largest], `${number(topic.chunks)} chunks`), number(topic.chunks)),
      [number(topic.entries), bytes(topic.log_bytes), bytes(topic.derived_bytes), number(topic.conversations), number(topic.buffered_tokens),
        bytes(open?.memory_bytes), ms(open?.fan_out_ms)].map((value) => el("td", {}, value)));
  };
  const heads = ["Topic", "Chunks", "Entries", "Log", "Indexes", "Conversations", "Buffered tokens", "In memory", "Search"];
  main.replaceChildren(el("h1", {}, "Topics"),
    facts({ Folder: el("code", {}, health.data_dir), Version: health.version, Topics: number(all.length),
      Chunks: number(all.reduce((sum, topic) => sum + topic.chunks, 0)), Log: bytes(all.reduce((sum, topic) => sum + topic.log_bytes, 0)),
      "In memory": `${bytes(stats.memory_bytes)} of at most ${bytes(stats.memory_bytes_max)}` }),
    all.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Topics and their sizes" },
      el("table", {}, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, all.map(row))))
      : el("p", { class: "empty" }, "No topic yet."));
  return (name) => (name === "turn" ? null : again());
}
