// What each part was doing over time: who waited for whom.

import * as api from "./api.js";
import { h, s, replace } from "./dom.js";
import { number, seconds, time } from "./format.js";

const WIDTH = 1200, LEFT = 150, LANE = 44, GAP = 8, TOP = 6, BOTTOM = 22;
const SPANS = [["all", "whole run"], ["3600", "last hour"], ["600", "last 10 minutes"], ["60", "last minute"]];
const SEGMENTS = [["wait_s", "waiting for episodes", "var(--c4)"], ["update_s", "update", "var(--c1)"], ["evaluation_s", "waiting for an evaluation", "var(--c6)"], ["publish_s", "publish", "var(--c2)"]];
const MARKED = { launcher_lost: "var(--hot)", part_restarted: "var(--hot)", part_given_up: "var(--hot)", alarm: "var(--hot)", wrong_weights: "var(--hot)", started: "var(--dim)", stopped: "var(--dim)", finished: "var(--dim)" };

function area(values, x, top, color) {
  const most = Math.max(...values, 1e-9), width = (x(1) - x(0)) / values.length;
  const points = values.map((value, i) => `${(x(0) + i * width).toFixed(1)} ${(top + LANE * (1 - value / most)).toFixed(1)} ${(x(0) + (i + 1) * width).toFixed(1)} ${(top + LANE * (1 - value / most)).toFixed(1)}`);
  return s("polygon", { points: `${x(0)} ${top + LANE} ${points.join(" ")} ${x(1)} ${top + LANE}`, fill: color, opacity: 0.75 });
}

function draw(found, events) {
  const span = found.end - found.begin || 1;
  const x = (share) => LEFT + share * (WIDTH - LEFT - 8), at = (unix) => x(Math.max(0, Math.min(1, (unix - found.begin) / span)));
  const names = [["servers", "turns in flight", "var(--c3)"], ["agents", "episodes open", "var(--c6)"], ["queue", "episodes waiting", "var(--c5)"]];
  const lanes = names.map(([name, note, color], i) => {
    const top = TOP + i * (LANE + GAP), values = found[name];
    return s("g", {}, s("text", { x: LEFT - 8, y: top + LANE / 2 - 2, class: "tick end" }, name), s("text", { x: LEFT - 8, y: top + LANE / 2 + 11, class: "tick end" }, `${note}, ≤ ${number(Math.max(0, ...values), 1)}`),
      s("line", { x1: LEFT, x2: WIDTH - 8, y1: top + LANE, y2: top + LANE, class: "grid" }), values.length ? area(values, x, top, color) : null);
  });
  const top = TOP + names.length * (LANE + GAP), height = top + LANE + BOTTOM;
  const steps = found.steps.map((step) => {
    let from = step.begin;
    return s("g", {}, s("title", {}, `step ${step.step}: ${SEGMENTS.filter(([key]) => step[key]).map(([key, label]) => `${label} ${seconds(step[key])}`).join(", ")}`),
      s("rect", { x: at(step.begin), y: top, width: Math.max(0.5, at(step.end) - at(step.begin)), height: LANE, fill: "var(--muted)", opacity: 0.5 }),
      SEGMENTS.map(([key, , color]) => { const begin = from; from += step[key]; return s("rect", { x: at(begin), y: top, width: Math.max(0, at(from) - at(begin)), height: LANE, fill: color }); }));
  });
  const marks = events.filter((one) => MARKED[one.kind] && one.time >= found.begin && one.time <= found.end).map((one) =>
    s("g", {}, s("title", {}, `${time(one.time)}: ${one.kind.replaceAll("_", " ")} ${one.part || one.name || one.server || ""}`), s("line", { x1: at(one.time), x2: at(one.time), y1: TOP, y2: top + LANE, stroke: MARKED[one.kind], "stroke-width": 1.5, "stroke-dasharray": "3 3" })));
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => s("text", { x: x(share), y: height - 6, class: share === 1 ? "tick end" : share ? "tick middle" : "tick" }, new Date((found.begin + share * span) * 1000).toLocaleTimeString("en-GB")));
  const said = [found.trainer_waited !== null && found.trainer_waited !== undefined && `the trainer waited for episodes ${Math.round(100 * found.trainer_waited)}% of this time`, found.servers_idle !== null && found.servers_idle !== undefined && `the servers were nearly idle ${Math.round(100 * found.servers_idle)}% of it`].filter(Boolean).join("; ");
  return [s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `Who waited for whom. ${said}.` }, lanes, s("text", { x: LEFT - 8, y: top + LANE / 2 + 4, class: "tick end" }, "trainer"), steps, marks, ticks), said];
}

// A card that reads its own data: {element, update}.
export function card(run) {
  const picture = h("div", { class: "picture" }), note = h("small", {}), chips = h("div", { class: "compare" });
  let chosen = "all", known = [];
  const show = async () => {
    const found = await api.lanes(run, chosen === "all" ? "" : chosen);
    const [drawn, said] = draw(found, known);
    replace(picture, drawn);
    note.textContent = said;
    replace(chips, SPANS.map(([value, label]) => h("button", { class: value === chosen ? "chip on" : "chip", "aria-pressed": value === chosen, onclick: () => { chosen = value; show(); } }, label)));
  };
  const element = h("section", { class: "card chart lanes" }, h("header", {}, h("h3", {}, "Who waited for whom"), note), chips, picture,
    h("div", { class: "legend" }, SEGMENTS.map(([, label, color]) => h("span", {}, h("i", { style: { background: color } }), label)), h("span", {}, h("i", { style: { background: "var(--hot)" } }), "restart, alarm")));
  return { element, update: (events) => { known = events; return show(); } };
}
