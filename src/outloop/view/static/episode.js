// One episode: what was asked and answered, by branch, and how it was scored.

import * as api from "./api.js";
import { h, replace } from "./dom.js";
import { fate, number, plain, seconds, short, time } from "./format.js";
import { link } from "./route.js";
import { bubble, clipped, messages, part, textOf, trainedTokens, tree, versions } from "./transcript.js";

export function facts(run, one) {
  const cell = (label, ...value) => h("div", {}, h("dt", {}, label), h("dd", {}, value));
  return h("dl", { class: "facts" },
    cell("reward", h("b", {}, one.reward === null ? "none" : number(one.reward)), Object.entries(one.reward_components).map(([name, value]) => h("span", { class: "badge" }, `${plain(name)} ${number(value)}`))),
    cell("outcome", one.outcome || "never closed", one.failure_kind ? ` (${one.failure_kind})` : ""),
    cell("fate", h("span", { class: `badge ${one.fate}` }, fate(one)), one.trained_version !== null ? ` in version ${one.trained_version}` : ""),
    cell("task", h("a", { href: link(run, "task", one.task_id), title: `${one.task_id}: across versions` }, plain(short(one.task_id)))),
    one.group_id && cell("group", h("a", { href: link(run, "group", one.group_id) }, `${one.group_id}, attempt ${one.attempt}`)),
    one.eval_name && cell("evaluation", one.eval_name),
    cell("sampled by", one.min_version === null ? "–" : one.min_version === one.max_version ? `version ${one.max_version}` : `versions ${one.min_version}–${one.max_version}`),
    cell("tokens", `${number(one.num_output_tokens)} generated, ${number(one.num_trained_tokens)} trainable, ${number(one.num_tokens)} in all`),
    cell("time", one.closed_at ? `${seconds(one.closed_at - one.opened_at)}, ${time(one.closed_at)}` : time(one.ended_at)),
    Object.entries(one.metadata).map(([name, value]) => cell(plain(name), plain(value))));
}

function why(node, turns, nodes) {
  const { turn } = node;
  if (["root", "extension"].includes(turn.branch_cause) || turn.turn_index === 0) return null;
  const before = nodes.find((one) => one.turn === turns[turn.turn_index - 1]);
  if (!before) return null;
  const asked = textOf(node.path.slice(0, -1)) + turn.prompt_text;
  const [shared, expected, given] = part(textOf(before.path), asked);
  return h("details", { class: "why" }, h("summary", {}, `new branch: ${turn.branch_cause}`),
    h("p", {}, "The request does not go on from what was recorded. They part after:"), h("pre", {}, plain(shared)),
    h("div", { class: "two" }, h("div", {}, h("small", {}, "recorded"), h("pre", {}, plain(expected) || "(its end)")), h("div", {}, h("small", {}, "requested"), h("pre", {}, plain(given) || "(its end)"))));
}

function turnBlock(run, one, node, nodes, raw) {
  const { turn, depth } = node;
  const own = one.reward_turns[turn.turn_id] ?? one.reward_branches[turn.turn_id];
  const trained = trainedTokens(turn);
  return h("article", { class: "turn", style: { "--depth": depth }, id: `turn-${turn.turn_index}`, tabindex: -1 },
    h("header", {}, h("b", {}, `turn ${turn.turn_index}`), h("span", { class: "badge" }, turn.finish_reason), h("span", { class: "badge" }, `version ${versions(turn).join(", ") || "–"}`),
      turn.choice_index ? h("span", { class: "badge" }, `choice ${turn.choice_index}`) : null,
      h("span", {}, `${number(turn.num_prompt_tokens)} + ${number(turn.num_output_tokens)} tokens`), turn.mean_logprob !== null && h("span", {}, `mean logprob ${number(turn.mean_logprob)}`),
      trained < turn.num_output_tokens ? h("span", { class: "badge dropped" }, `${number(turn.num_output_tokens - trained)} not trainable${turn.mask_reason ? `: ${plain(turn.mask_reason)}` : ""}`) : null,
      own !== undefined && h("span", { class: "badge" }, `reward ${number(own)}`), h("span", {}, seconds(turn.finished_at - turn.started_at)),
      h("a", { href: `${link(run, "tokens", one.episode_id)}?turn=${turn.turn_index}` }, "tokens")),
    why(node, one.turns, nodes),
    raw ? [h("pre", { class: "raw prompt" }, clipped(turn.prompt_text, plain)), h("pre", { class: "raw output" }, clipped(turn.output_text, plain))]
      : [messages(turn.prompt_text, "context").map((m) => bubble(m.role, m.text)), bubble("policy", messages(turn.output_text, "policy").map((m) => m.text).join(""))]);
}

// What the router refused, where it refused something.
function refused(one) {
  const { counts = {}, last = "" } = one.refusals ? JSON.parse(one.refusals) : {};
  const codes = Object.entries(counts).map(([code, count]) => `${count} ${code}`);
  return codes.length ? `${codes.join(", ")}; the last: ${plain(last)}` : "";
}

export function tabs(run, id, groupId, taskId, now) {
  const tab = (name, view, target) => h("a", { href: link(run, view, target), "aria-current": now === view ? "page" : null }, name);
  return h("nav", { class: "tabs", "aria-label": "Views of the episode" }, tab("conversation", "episode", id), tab("tokens", "tokens", id), groupId && tab("its group", "group", groupId), taskId && tab("its task by version", "task", taskId));
}

export async function show(main, { run, id, query }) {
  const one = await api.episode(run, id);
  let raw = query.get("raw") === "1";
  const nodes = tree(one.turns);
  const draw = () => {
    const siblings = one.group.length > 1 && h("nav", { class: "siblings", "aria-label": "Attempts of the group" }, "attempts", one.group.map((other) =>
      h("a", { class: other.episode_id === id ? "chip on" : "chip", href: link(run, "episode", other.episode_id), "aria-current": other.episode_id === id ? "true" : null }, `${other.attempt}: ${other.reward === null ? other.fate : number(other.reward)}`)));
    replace(main, h("h1", {}, "Episode ", h("code", { title: one.episode_id }, short(one.episode_id))), tabs(run, id, one.group_id, one.task_id, "episode"), facts(run, one), siblings,
      one.error && h("section", { class: "card error" }, h("h3", {}, "Error"), h("pre", {}, plain(one.error))),
      refused(one) && h("section", { class: "card error" }, h("h3", {}, "Refused model calls"), h("pre", {}, refused(one))),
      h("div", { class: "toolbar" }, h("label", {}, h("input", { type: "checkbox", id: "raw", checked: raw, onchange: (event) => { raw = event.target.checked; draw(); } }), " text as the server saw it"),
        one.num_branches > 1 && h("span", {}, `${one.num_branches} branches`), one.resumes && h("span", {}, `resumes ${short(one.resumes)}`)),
      nodes.length ? h("div", { class: "turns" }, nodes.map((node) => turnBlock(run, one, node, nodes, raw))) : h("p", { class: "empty" }, "The episode has no turn."),
      one.output && h("section", { class: "card" }, h("h3", {}, "What the agent program wrote last"), h("pre", {}, plain(one.output))));
    const wanted = query.get("turn");
    if (wanted !== null) document.getElementById(`turn-${wanted}`)?.scrollIntoView({ block: "start" });
  };
  draw();
  return null;
}
