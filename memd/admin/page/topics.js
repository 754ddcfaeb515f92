// Topics and what they take, on disk and in memory.

import { get } from "./api.js";
import { meter } from "./charts.js";
import { bytes, details, el, facts, hashOf, ms, number } from "./dom.js";
import { exportLink } from "./download.js";

export async function show(main, { topics, again }) {
  const [stats, health] = await Promise.all([get("/memd/stats"), get("/memd/health")]);
  const all = topics();
  const largest = Math.max(1, ...all.map((topic) => topic.chunks));
  const table = (label, heads, row) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    el("table", {}, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, all.map((topic) => el("tr", {},
      el("th", { scope: "row" }, el("a", { href: hashOf("timeline", { topic: topic.topic_id }) }, topic.topic_id)), row(topic).map((value) => el("td", {}, value)))))));
  const sizes = (topic) => [[meter([topic.chunks / largest], `${number(topic.chunks)} chunks`), number(topic.chunks)], number(topic.conversations), bytes(topic.log_bytes + topic.derived_bytes),
    [el("a", { href: hashOf("read", { topic: topic.topic_id }) }, "read"), " · ", exportLink("export", { topic: topic.topic_id, live: 1 }, `${topic.topic_id}.jsonl`)]];
  const inside = (topic) => {
    const open = stats.topics[topic.topic_id];
    return [number(topic.entries), bytes(topic.log_bytes), bytes(topic.derived_bytes), number(topic.buffered_tokens), topic.is_open ? "yes" : "no", bytes(open?.memory_bytes), ms(open?.fan_out_ms)];
  };
  main.replaceChildren(...[el("h1", {}, "Topics"),
    facts({ Folder: el("code", {}, health.data_dir), Version: health.version, Topics: number(all.length),
      Chunks: number(all.reduce((sum, topic) => sum + topic.chunks, 0)), "On disk": bytes(all.reduce((sum, topic) => sum + topic.log_bytes + topic.derived_bytes, 0)),
      ...(stats.backup && { Backup: stats.backup.trouble ?? `${Math.round(stats.backup.lag_seconds)} s behind, in ${stats.backup.bucket}` }) }),
    all.length ? table("Topics and their sizes", ["Topic", "Chunks", "Live conversations", "On disk", "Look"], sizes) : el("p", { class: "empty" }, "No topic yet."),
    all.length > 0 && el("p", { class: "meta" }, el("span", {}, exportLink("Export everything, history included", {}, "memd.jsonl"), ": JSON Lines, as ", el("code", {}, "memd export"), " writes them. The export of a topic has its chunks as they are now.")),
    all.length > 0 && details(facts({ "In memory": `${bytes(stats.memory_bytes)} of at most ${bytes(stats.memory_bytes_max)}` }),
      table("Topics inside", ["Topic", "Entries", "Log", "Indexes", "Buffered tokens", "Open", "In memory", "Search"], inside))].filter(Boolean));
  return (name) => (name === "turn" ? null : again());
}
