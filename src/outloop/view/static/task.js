// Attempts at one task, a column for each policy version: what the policy came to do differently.

import * as api from "./api.js";
import { COLORS, lineChart } from "./charts.js";
import { announce, h, replace } from "./dom.js";
import { fate, number, plain } from "./format.js";
import { link } from "./route.js";
import { body, bubble, messages } from "./transcript.js";

const name = (version) => (version === null ? "no version" : `version ${version}`);

function attempt(run, one) {
  const rest = one.num_chars - one.num_shared - one.differs.length;
  return h("li", {},
    h("div", { class: "head" }, h("a", { href: link(run, "episode", one.episode_id), title: one.episode_id }, one.reward === null ? "no reward" : number(one.reward)),
      one.purpose === "eval" && h("span", { class: "badge" }, "eval"), h("span", { class: `badge ${one.fate}` }, fate(one)), one.outcome !== "completed" && h("span", { class: "badge lost" }, one.outcome || "open"),
      h("small", {}, `${number(one.num_turns)} ${one.num_turns === 1 ? "turn" : "turns"}, ${number(one.num_output_tokens)} tokens`)),
    h("div", { class: "text" },
      one.num_shared > 0 && h("span", { class: "same", title: `${number(one.num_shared)} characters as before` }, one.num_shared > one.shared_end.length ? "…" : "", plain(one.shared_end)),
      one.differs ? h("span", { class: "differs" }, body(one.differs)) : h("small", { class: "alike" }, one.num_chars ? "the same text" : "no text"),
      rest > 0 && h("small", {}, ` … ${number(rest)} more characters`)));
}

export async function show(main, { run, id, query }) {
  const before = query.get("before");
  const found = await api.task(run, id, before);
  const shown = found.versions.filter((one) => found.shown.includes(one.version));
  const at = found.versions.indexOf(shown[0]);
  const last = found.versions.indexOf(shown[shown.length - 1]);
  const total = found.versions.reduce((sum, one) => sum + one.number, 0);
  const points = found.versions.filter((one) => one.version !== null && one.mean_reward !== null).map((one) => ({ step: one.version, value: one.mean_reward, error: 0 }));
  const of = (version) => found.attempts.filter((one) => one.max_version === version);
  const pages = [
    at > 0 && h("a", { class: "chip", href: link(run, "task", id, { before: shown[0].version ?? "" }) }, `← ${number(at)} older`),
    last < found.versions.length - 1 && h("a", { class: "chip", href: link(run, "task", id) }, "newest →"),
  ];
  replace(main, h("h1", {}, "Task ", h("code", {}, plain(id))),
    h("p", { class: "count" }, `${number(total)} ${total === 1 ? "attempt" : "attempts"} by ${number(found.versions.length)} ${found.versions.length === 1 ? "version" : "versions"} · `, h("a", { href: link(run, "episodes", "", { task: id, sort: "version" }) }, "as a list"),
      ". What an attempt shares with the last one of the version before is dim."),
    h("div", { class: "taskhead" }, found.prompt !== null && h("div", { class: "asked" }, messages(found.prompt, "context").map((m) => bubble(m.role, m.text))),
      points.length > 1 && lineChart({ title: "Reward of this task", note: "mean of its attempts", floor: 0, axis: "version", series: [{ name: "reward", color: COLORS[0], points }] })),
    pages.some(Boolean) && h("nav", { class: "shortcuts", "aria-label": "Versions" }, pages),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Attempts by version" }, h("table", { class: "side versions" },
      h("thead", {}, h("tr", {}, shown.map((one) => h("th", { scope: "col" }, name(one.version), h("b", {}, one.mean_reward === null ? "–" : number(one.mean_reward)), h("small", {}, `${one.number > of(one.version).length ? `${of(one.version).length} of ` : ""}${number(one.number)} ${one.number === 1 ? "attempt" : "attempts"}`))))),
      h("tbody", {}, h("tr", {}, shown.map((one) => h("td", {}, h("ol", { class: "attempts" }, of(one.version).map((each) => attempt(run, each))))))))));
  announce(`${total} attempts by ${found.versions.length} versions`);
  return null;
}
