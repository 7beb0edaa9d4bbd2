// Every token of an episode: which were sampled, by which version, how likely, and which train.

import * as api from "./api.js";
import { announce, h, replace } from "./dom.js";
import { number, plain, short, visible } from "./format.js";
import { tabs } from "./episode.js";
import { rewrite } from "./route.js";

const CHUNK = 1500, SHOWN_OF_PROMPT = 240;
const MODES = [
  ["logprob", "behavior logprob", "how likely the sampled token was: the darker, the less"],
  ["gap", "logprob gap", "policy − behavior, where the trainer recorded it"],
  ["version", "policy version", "the version that sampled it"],
  ["mask", "mask", "which tokens train, and why others do not"],
  ["advantage", "advantage", "the advantage that the update gave it"],
];

function mix(color, share) {
  return `color-mix(in srgb, ${color} ${Math.round(Math.max(0, Math.min(1, share)) * 70)}%, transparent)`;
}

function columns(turn) {
  const length = turn.output_ids.length, version = new Array(length).fill(null), trained = new Array(length).fill(false);
  for (let i = 0; i < turn.version_spans.length; i += 3) for (let t = turn.version_spans[i + 1]; t < turn.version_spans[i + 2]; t += 1) version[t] = turn.version_spans[i];
  for (let i = 0; i < turn.loss_spans.length; i += 2) for (let t = turn.loss_spans[i]; t < turn.loss_spans[i + 1]; t += 1) trained[t] = true;
  return { version, trained };
}

function describe(turn, tokens, texts) {
  const { version, trained } = columns(turn);
  const prompt = turn.prompt_ids.map((id, i) => ({ id, text: texts[id] ?? "", isPrompt: true, turn: turn.turn_index, position: i }));
  const output = turn.output_ids.map((id, i) => ({
    id, text: texts[id] ?? "", turn: turn.turn_index, position: i, version: version[i], trained: trained[i],
    logprob: turn.behavior_logprobs ? turn.behavior_logprobs[i] : null, policy: turn.policy_logprobs ? turn.policy_logprobs[i] : null,
    advantage: turn.advantages ? turn.advantages[i] : null, reason: trained[i] ? "" : turn.mask_reason || "not trainable",
  }));
  return { prompt, output };
}

function tint(token, mode, known) {
  if (token.isPrompt) return "";
  if (mode === "logprob") return token.logprob === null ? "" : mix("var(--hot)", -token.logprob / 4);
  if (mode === "gap") return token.policy === null ? "" : mix(token.policy >= token.logprob ? "var(--good)" : "var(--hot)", Math.abs(token.policy - token.logprob) / known.gap);
  if (mode === "version") return token.version === null ? "" : mix(["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)"][known.versions.indexOf(token.version) % 6], 0.6);
  if (mode === "mask") return mix(token.trained ? "var(--good)" : "var(--hot)", 0.5);
  return token.advantage === null ? "" : mix(token.advantage >= 0 ? "var(--good)" : "var(--hot)", Math.abs(token.advantage) / known.advantage);
}

function shownText(text) {
  return text === "" ? "∅" : visible(text).replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

function legend(mode, known) {
  if (mode === "version") return known.versions.map((one, i) => h("span", { class: "key" }, h("i", { style: { background: mix(`var(--c${(i % 6) + 1})`, 0.6) } }), `version ${one}`));
  if (mode === "mask") return [h("span", { class: "key" }, h("i", { style: { background: mix("var(--good)", 0.5) } }), "trainable"), h("span", { class: "key" }, h("i", { style: { background: mix("var(--hot)", 0.5) } }), "not trainable")];
  if (mode === "logprob") return [0, -1, -2, -4].map((one) => h("span", { class: "key" }, h("i", { style: { background: mix("var(--hot)", -one / 4) } }), String(one)));
  if (mode === "gap" && !known.hasPolicy) return [h("span", {}, "The trainer recorded no logprobs of its own for this episode.")];
  if (mode === "advantage" && !known.hasAdvantage) return [h("span", {}, "The trainer recorded no advantages for this episode: it was not trained, or not recorded.")];
  return [h("span", { class: "key" }, h("i", { style: { background: mix("var(--good)", 1) } }), "above zero"), h("span", { class: "key" }, h("i", { style: { background: mix("var(--hot)", 1) } }), "below zero")];
}

export async function show(main, { run, id, query }) {
  const [one, found] = await Promise.all([api.episode(run, id), api.tokens(run, id)]);
  const turns = found.turns.map((turn) => describe(turn, one, found.texts));
  const outputs = turns.flatMap((turn) => turn.output);
  const gaps = outputs.filter((t) => t.policy !== null).map((t) => Math.abs(t.policy - t.logprob));
  const known = {
    versions: [...new Set(outputs.map((t) => t.version).filter((v) => v !== null))].sort((a, b) => a - b),
    gap: Math.max(1e-6, ...gaps.slice(0, 100000)), advantage: Math.max(1e-6, ...outputs.slice(0, 100000).map((t) => Math.abs(t.advantage || 0))),
    hasPolicy: gaps.length > 0, hasAdvantage: outputs.some((t) => t.advantage !== null),
  };
  let mode = MODES.some(([name]) => name === query.get("by")) ? query.get("by") : "logprob";
  let chosen = null;
  const detail = h("aside", { class: "detail", "aria-label": "The token" });
  const bar = h("div", { class: "toolbar modes", role: "group", "aria-label": "Color by" });
  const keys = h("div", { class: "keys" });
  const spans = new Map();

  const paint = () => {
    for (const [span, token] of spans) span.style.background = tint(token, mode, known);
    replace(bar, MODES.map(([name, label, note], i) => h("button", { id: `by-${name}`, title: `${note} (${i + 1})`, "aria-pressed": mode === name, onclick: () => choose(name) }, label)));
    replace(keys, legend(mode, known));
  };
  const choose = (name) => {
    mode = name;
    const given = new URLSearchParams(query);
    given.set("by", name);
    rewrite(`${location.hash.split("?")[0]}?${given}`);
    paint();
  };
  const select = (span) => {
    chosen?.classList.remove("chosen");
    chosen = span;
    span.classList.add("chosen");
    const token = spans.get(span);
    const line = (label, value) => h("div", {}, h("dt", {}, label), h("dd", {}, value));
    replace(detail, h("pre", { class: "big" }, shownText(token.text)), h("dl", {}, line("id", token.id), line("turn", `${token.turn}, ${token.isPrompt ? "prompt" : "output"} ${token.position}`),
      !token.isPrompt && [line("behavior logprob", `${number(token.logprob, 4)}${token.logprob === null ? "" : ` (p ${number(Math.exp(token.logprob), 4)})`}`),
        line("policy logprob", token.policy === null ? "not recorded" : number(token.policy, 4)), token.policy !== null && line("gap", number(token.policy - token.logprob, 5)),
        line("policy version", token.version ?? "–"), line("trainable", token.trained ? "yes" : `no: ${plain(token.reason)}`), line("advantage", token.advantage === null ? "not recorded" : number(token.advantage, 4))],
      token.isPrompt && line("", "given, not sampled")));
    announce(`${shownText(token.text)}, id ${token.id}`);
  };
  const make = (token) => {
    const span = h("span", { class: token.isPrompt ? "tok given" : token.trained ? "tok" : "tok masked" }, shownText(token.text));
    spans.set(span, token);
    span.style.background = tint(token, mode, known);
    return span;
  };
  const strip = (tokens, limit) => {
    const box = h("div", { class: "tokens" });
    let at = 0;
    const more = h("button", { class: "more" });
    const grow = (count) => {
      more.remove();
      box.append(...tokens.slice(at, at + count).flatMap((token) => (token.text.includes("\n") ? [make(token), document.createElement("wbr")] : [make(token)])));
      at += count;
      if (at < tokens.length) { more.textContent = `${number(tokens.length - at)} more tokens`; box.append(more); }
    };
    more.addEventListener("click", () => grow(CHUNK));
    grow(limit);
    return box;
  };
  const blocks = turns.map((turn, i) => h("article", { class: "turn", id: `turn-${i}` }, h("header", {}, h("b", {}, `turn ${i}`), h("span", {}, `${number(turn.prompt.length)} given, ${number(turn.output.length)} sampled`), h("span", { class: "badge" }, found.turns[i].finish_reason)),
    strip(turn.prompt, SHOWN_OF_PROMPT), strip(turn.output, CHUNK)));
  const area = h("div", {
    class: "area", tabindex: 0, role: "application", "aria-label": "Tokens: arrows move, 1 to 5 choose the color",
    onclick: (event) => { const span = event.target.closest(".tok"); if (span) select(span); },
    onkeydown: (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 12, ArrowUp: -12 }[event.key];
      if (by) {
        event.preventDefault();
        const all = [...area.querySelectorAll(".tok")];
        const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(chosen) + by))];
        if (next) { select(next); next.scrollIntoView({ block: "nearest" }); }
      } else if (MODES[Number(event.key) - 1]) choose(MODES[Number(event.key) - 1][0]);
    },
  }, blocks);
  replace(main, h("h1", {}, "Tokens of ", h("code", { title: id }, short(id))), tabs(run, id, one.group_id, one.task_id, "tokens"), bar, keys, h("div", { class: "split" }, area, detail));
  paint();
  const first = area.querySelector(".tok:not(.given)") || area.querySelector(".tok");
  if (first) select(first);
  const wanted = query.get("turn");
  if (wanted) document.getElementById(`turn-${wanted}`)?.scrollIntoView({ block: "start" });
  return null;
}
