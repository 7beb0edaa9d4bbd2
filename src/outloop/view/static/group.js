// The attempts of a group side by side, turn by turn; what all that came the same way share is dim.

import * as api from "./api.js";
import { h, replace } from "./dom.js";
import { fate, number, plain, short } from "./format.js";
import { link } from "./route.js";
import { body, bubble, messages } from "./transcript.js";

function shared(texts) {
  if (texts.length < 2) return 0;
  let at = 0;
  while (texts.every((text) => at < text.length && text[at] === texts[0][at])) at += 1;
  return at;
}

function cell(turn, common, index) {
  if (!turn) return h("td", { class: "none" });
  const asked = index > 0 && messages(turn.prompt_text, "context").pop();
  return h("td", {}, asked && h("details", {}, h("summary", {}, `${asked.role}: ${plain(asked.text).replace(/<\/?tool_response>/g, "").trim().slice(0, 60)}`), h("pre", {}, plain(asked.text))),
    h("div", { class: "text" }, common > 0 && h("span", { class: "same" }, plain(turn.output_text.slice(0, common))), h("span", { class: "differs" }, body(turn.output_text.slice(common)))));
}

export async function show(main, { run, id }) {
  const attempts = await api.group(run, id);
  const most = Math.max(...attempts.map((one) => one.turns.length));
  const rewards = attempts.map((one) => one.reward).filter((one) => one !== null);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const rows = [];
  // Attempts whose history is the same so far are compared with each other.
  let histories = attempts.map(() => "");
  for (let index = 0; index < most; index += 1) {
    const commons = attempts.map((one, i) => {
      const alike = attempts.filter((other, j) => other.turns[index] && histories[j] === histories[i]).map((other) => other.turns[index].output_text);
      return one.turns[index] ? shared(alike) : 0;
    });
    rows.push(h("tr", {}, h("th", { scope: "row" }, index), attempts.map((one, i) => cell(one.turns[index], commons[i], index))));
    histories = attempts.map((one, i) => histories[i] + (one.turns[index] ? one.turns[index].prompt_text + one.turns[index].output_text : ""));
  }
  const first = attempts[0].turns[0];
  replace(main, h("h1", {}, "Group ", h("code", {}, id)),
    h("p", { class: "count" }, `${attempts.length} attempts at task `, h("a", { href: link(run, "task", attempts[0].task_id) }, plain(short(attempts[0].task_id))), mean === null ? "" : `, mean reward ${number(mean)}`, ". What attempts with the same history share is dim."),
    first && h("div", { class: "asked" }, messages(first.prompt_text, "context").map((m) => bubble(m.role, m.text))),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Attempts side by side" }, h("table", { class: "side" },
      h("thead", {}, h("tr", {}, h("th", {}, "turn"), attempts.map((one) => h("th", { scope: "col" }, h("a", { href: link(run, "episode", one.episode_id) }, `attempt ${one.attempt}`), h("b", {}, one.reward === null ? "no reward" : number(one.reward)),
        mean !== null && one.reward !== null && h("span", { class: one.reward >= mean ? "good" : "bad" }, `${one.reward >= mean ? "+" : "−"}${number(Math.abs(one.reward - mean))}`), h("span", { class: `badge ${one.fate}` }, fate(one)))))),
      h("tbody", {}, rows))));
  return null;
}
