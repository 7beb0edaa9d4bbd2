// Turns as messages: a format of roles is taken apart where its marks are there, and is raw text where they are not.

import { h } from "./dom.js";
import { plain } from "./format.js";

const MARKS = [
  { open: /<\|im_start\|>([\w-]+)\n?/g, close: /<\|im_end\|>\n?/ },
  { open: /<\|start_header_id\|>([\w-]+)<\|end_header_id\|>\n*/g, close: /<\|eot_id\|>/ },
];
const SPECIAL = /(<think>[\s\S]*?(?:<\/think>|$)|<tool_call>[\s\S]*?(?:<\/tool_call>|$)|<tool_response>[\s\S]*?(?:<\/tool_response>|$)|<\|[\w.-]+\|>)/;

// [{role, text}]: what stands before the first mark has the role `first`.
export function messages(text, first) {
  const kind = MARKS.find((one) => text.search(one.open) >= 0);
  if (!kind) return text ? [{ role: first, text: strip(text, MARKS.map((one) => one.close)) }] : [];
  const found = [];
  let from = 0, role = first;
  for (const mark of text.matchAll(kind.open)) {
    found.push({ role, text: strip(text.slice(from, mark.index), [kind.close]) });
    role = mark[1];
    from = mark.index + mark[0].length;
  }
  found.push({ role, text: strip(text.slice(from), [kind.close]), isOpening: true });
  return found.map(named).filter((one) => one.text.replace(/<think>\s*<\/think>/, "").trim() !== "");
}

// Formats that give tool results to the policy in the name of the user.
function named(one) {
  return one.role === "user" && /^\s*<tool_response>[\s\S]*<\/tool_response>\s*$/.test(one.text) ? { ...one, role: "tool" } : one;
}

function strip(text, marks) {
  return marks.reduce((one, mark) => one.replace(mark, ""), text);
}

// Text with thoughts, tool calls and special tokens set apart.
export function body(text, role = "policy") {
  if (role === "system") return h("span", {}, plain(text).trim());
  return plain(text).trim().split(SPECIAL).filter((one) => one.trim() !== "").map((one) => {
    if (/^<think>\s*<\/think>$/.test(one)) return null;
    if (one.startsWith("<think>")) return h("details", { class: "think" }, h("summary", {}, "thinking"), h("pre", {}, one));
    if (one.startsWith("<tool_call>")) return h("div", { class: "call" }, h("small", {}, "tool call"), h("pre", {}, pretty(one, "tool_call")));
    if (one.startsWith("<tool_response>")) return h("div", { class: "result" }, h("small", {}, "tool result"), h("pre", {}, pretty(one, "tool_response")));
    if (/^<\|[\w.-]+\|>$/.test(one)) return h("span", { class: "special" }, one);
    return h("span", {}, one);
  });
}

function pretty(text, tag) {
  const inside = text.replace(new RegExp(`^<${tag}>|</${tag}>$`, "g"), "").trim();
  try { return JSON.stringify(JSON.parse(inside), null, 1); } catch { return inside; }
}

const LONG = 400, HUGE = 20000;

// What `render` makes of a text; of a huge one its beginning, and the rest when it is asked for.
export function clipped(text, render) {
  if (text.length <= HUGE) return render(text);
  const box = h("span", {}, render(text.slice(0, HUGE / 2)), h("button", { class: "more", onclick: () => box.replaceChildren(...[render(text)].flat()) }, `${(text.length - HUGE / 2).toLocaleString("en")} more characters`));
  return box;
}

// A message; a long one that nobody sampled is closed at first.
export function bubble(role, text) {
  const name = `message ${role.replace(/[^\w-]/g, "")}`;
  if (role === "policy" || text.length <= LONG) return h("div", { class: name }, h("small", {}, role), h("div", { class: "text" }, clipped(text, (one) => body(one, role))));
  const start = plain(text.slice(0, 1000)).trim().replace(/\s+/g, " ").slice(0, 110);
  return h("details", { class: name }, h("summary", {}, h("small", {}, role), " ", h("span", { class: "start" }, `${start}…`)), h("div", { class: "text" }, clipped(text, (one) => body(one, role))));
}

// The turns of an episode as a tree: [{turn, depth, path}], parents before children, branches deeper.
export function tree(turns) {
  const children = new Map();
  const known = new Set(turns.map((turn) => turn.turn_id));
  for (const turn of turns) {
    const parent = known.has(turn.parent_turn_id) ? turn.parent_turn_id : null;
    children.set(parent, [...(children.get(parent) || []), turn]);
  }
  const found = [];
  const walk = (parent, depth, path) => (children.get(parent) || []).forEach((turn, i) => {
    const at = depth + (i > 0 ? 1 : 0);
    const own = [...path, turn];
    found.push({ turn, depth: at, path: own, isBranch: i > 0 });
    walk(turn.turn_id, at, own);
  });
  walk(null, 0, []);
  return found;
}

export const textOf = (path) => path.map((turn) => turn.prompt_text + turn.output_text).join("");

// Where two texts part: [what both have at the end, the first's own, the second's own].
export function part(one, other, before = 80, after = 160) {
  let at = 0;
  const end = Math.min(one.length, other.length);
  while (at < end && one[at] === other[at]) at += 1;
  return [one.slice(Math.max(0, at - before), at), one.slice(at, at + after), other.slice(at, at + after)];
}

export function versions(turn) {
  const found = [];
  for (let i = 0; i < turn.version_spans.length; i += 3) if (turn.version_spans[i + 2] > turn.version_spans[i + 1]) found.push(turn.version_spans[i]);
  return [...new Set(found)];
}

export function trainedTokens(turn) {
  let sum = 0;
  for (let i = 0; i < turn.loss_spans.length; i += 2) sum += turn.loss_spans[i + 1] - turn.loss_spans[i];
  return sum;
}
