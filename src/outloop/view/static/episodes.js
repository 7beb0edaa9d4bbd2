// The list of episodes, searched and filtered; all of it is in the address.

import * as api from "./api.js";
import { announce, h, replace } from "./dom.js";
import { fate, number, plain, seconds, short } from "./format.js";
import { link } from "./route.js";
import { messages } from "./transcript.js";

const PAGE = 50;
const WORDS = 48;
const SHORTCUTS = [
  ["newest", {}],
  ["longest that got the lowest reward", { sort: "tokens", max_reward: "0" }],
  ["failed", { outcome: "failed" }],
  ["truncated", { outcome: "truncated" }],
  ["evaluations", { purpose: "eval" }],
  ["dropped", { fate: "dropped" }],
  ["lost", { fate: "lost" }],
];
const SELECTS = {
  purpose: ["", "train", "eval"],
  outcome: ["", "completed", "truncated", "failed", "aborted"],
  fate: ["", "trained", "evaluated", "dropped", "dropped/no_signal", "dropped/stale", "dropped/failed", "dropped/filtered", "dropped/overlong", "lost"],
};
const COLUMNS = [
  ["episode", null], ["task", null], ["asked", null], ["answered", null], ["fate", null], ["outcome", null], ["reward", "reward"], ["turns", "turns"],
  ["tokens", "tokens"], ["version", "version"], ["time", "duration"],
];

function form(query, submit) {
  const field = (name, label, attributes = {}) => h("label", {}, h("span", {}, label), h("input", { name, value: query.get(name) || "", ...attributes }));
  const range = (label, low, high, step) => h("fieldset", {}, h("legend", {}, label),
    h("input", { name: low, type: "number", step, placeholder: "from", "aria-label": `${label} from`, value: query.get(low) || "" }),
    h("input", { name: high, type: "number", step, placeholder: "to", "aria-label": `${label} to`, value: query.get(high) || "" }));
  const select = (name) => h("label", {}, h("span", {}, name), h("select", { name, onchange: () => submit(box) },
    SELECTS[name].map((one) => h("option", { value: one, selected: (query.get(name) || "") === one }, one || "any"))));
  const box = h("form", { class: "filters", role: "search", onsubmit: (event) => { event.preventDefault(); submit(box); } },
    field("text", "text", { type: "search", id: "search", placeholder: "prompts, answers, errors" }), select("purpose"), select("outcome"), select("fate"), field("task", "task"),
    range("reward", "min_reward", "max_reward", "any"), range("version", "min_version", "max_version", 1), range("tokens", "min_tokens", "max_tokens", 1), h("button", {}, "Search"));
  return box;
}

export function rewardCell(value) {
  return h("td", { class: "num reward" }, value === null ? "–" : number(value));
}

// The first words of what the user said last in the first prompt, and of the policy's last answer.
function asked(one) {
  const said = messages(one.asked || "", "context").filter((message) => message.role === "user");
  return said.length ? said[said.length - 1].text : "";
}

const answered = (one) => messages(one.answered || "", "policy").map((message) => message.text).join(" ");

function words(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return h("td", { class: "words", title: plain(line.slice(0, 300)) }, plain(line.slice(0, WORDS)));
}

function row(run, one, query) {
  return h("tr", { tabindex: -1, "data-href": link(run, "episode", one.episode_id) },
    h("td", {}, h("a", { href: link(run, "episode", one.episode_id), title: one.episode_id }, short(one.episode_id)), one.purpose === "eval" ? h("span", { class: "badge" }, "eval") : null),
    h("td", {}, h("a", { href: link(run, "task", one.task_id), title: `${one.task_id}: across versions` }, plain(short(one.task_id)))),
    words(asked(one)), words(answered(one)),
    h("td", {}, h("span", { class: `badge ${one.fate}` }, fate(one))), h("td", { class: one.outcome === "completed" ? "" : "bad" }, one.outcome || "open", one.failure_kind ? ` (${one.failure_kind})` : ""),
    rewardCell(one.reward), h("td", { class: "num" }, one.num_turns, one.num_branches > 1 ? h("span", { class: "badge", title: "branches" }, `${one.num_branches} br`) : null), h("td", { class: "num" }, number(one.num_output_tokens)),
    h("td", { class: "num" }, one.min_version === one.max_version ? number(one.max_version) : `${one.min_version}–${one.max_version}`), h("td", { class: "num" }, one.closed_at ? seconds(one.closed_at - one.opened_at) : "–"));
}

export async function show(main, { run, query }) {
  const asked = Object.fromEntries([...query].filter(([name, value]) => value !== "" && name !== "page"));
  const page = Number(query.get("page") || 0);
  const found = await api.episodes(run, { ...asked, limit: PAGE, offset: page * PAGE });
  const go = (changes) => { location.hash = link(run, "episodes", "", { ...asked, ...changes }); };
  const submit = (box) => {
    const given = Object.fromEntries(new FormData(box));
    location.hash = link(run, "episodes", "", { ...given, sort: asked.sort, descending: asked.descending });
  };
  const sort = asked.sort || "ended", descending = asked.descending !== "false";
  const heads = COLUMNS.map(([label, name]) => h("th", { "aria-sort": name === sort ? (descending ? "descending" : "ascending") : null },
    name ? h("a", { href: link(run, "episodes", "", { ...asked, sort: name, descending: name === sort ? !descending : true }) }, label, name === sort ? (descending ? " ↓" : " ↑") : "") : label));
  const last = Math.max(0, Math.ceil(found.total / PAGE) - 1);
  replace(main, h("h1", { class: "visually-hidden" }, `Episodes of ${run}`), form(query, submit),
    h("nav", { class: "shortcuts", "aria-label": "Shortcuts" }, SHORTCUTS.map(([label, one]) => h("a", { class: "chip", href: link(run, "episodes", "", one) }, label))),
    h("p", { class: "count" }, `${number(found.total)} episodes`, found.mean_reward === null ? "" : `, mean reward ${number(found.mean_reward)}`,
      asked.task ? [" · task ", h("code", {}, plain(asked.task)), " by version"] : ""),
    found.total === 0 ? h("p", { class: "empty" }, "No episode fits.") : h("table", { class: "rows", id: "rows" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, found.episodes.map((one) => row(run, one, query)))),
    last > 0 && h("nav", { class: "pages", "aria-label": "Pages" },
      h("button", { id: "previous", disabled: page === 0, onclick: () => go({ page: page - 1 }) }, "← previous"), h("span", {}, `page ${page + 1} of ${number(last + 1)}`),
      h("button", { id: "next", disabled: page >= last, onclick: () => go({ page: page + 1 }) }, "next →")));
  announce(`${found.total} episodes`);
  return null;
}

// j and k move through the rows, Enter opens one.
export function move(by) {
  const rows = [...document.querySelectorAll("#rows tbody tr")];
  if (!rows.length) return;
  const now = rows.indexOf(document.activeElement.closest("tr"));
  rows[Math.max(0, Math.min(rows.length - 1, now + by))].focus();
}
