// Line charts with bands, and stacked bars over steps, as SVG of our own.

import { announce, h, s } from "./dom.js";
import { number } from "./format.js";

const WIDTH = 420, HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 24;
export const COLORS = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)"];

function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

function frame(low, high, first, last) {
  const x = (step) => LEFT + ((step - first) / (last - first || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
  const lines = ticks(low, high, 4).map((value) => s("g", {},
    s("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value), class: "grid" }),
    s("text", { x: LEFT - 6, y: y(value) + 3.5, class: "tick end" }, number(value))));
  const steps = ticks(first, last, 5).filter(Number.isInteger).map((step) =>
    s("text", { x: x(step), y: HEIGHT - 7, class: "tick middle" }, number(step)));
  return { x, y, axes: [...lines, ...steps] };
}

function path(points, x, y) {
  let drawn = "", open = false;
  for (const { step, value } of points) {
    if (value === null || value === undefined) { open = false; continue; }
    drawn += `${open ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    open = true;
  }
  return drawn;
}

function band(points, x, y) {
  const known = points.filter((one) => one.value !== null && one.value !== undefined && one.error);
  if (known.length < 2) return "";
  const up = known.map((one) => `${x(one.step).toFixed(1)} ${y(one.value + one.error).toFixed(1)}`);
  const down = known.map((one) => `${x(one.step).toFixed(1)} ${y(one.value - one.error).toFixed(1)}`).reverse();
  return `M${up.join("L")}L${down.join("L")}Z`;
}

// series: [{name, color, dashed, points: [{step, value, error}]}]; `note` says what the band is.
export function lineChart({ title, note = "", series, floor = null, ceiling = null, format = number, axis = "step" }) {
  const shown = series.filter((one) => one.points.some((p) => p.value !== null && p.value !== undefined));
  if (!shown.length) return null;
  const all = shown.flatMap((one) => one.points).filter((p) => p.value !== null && p.value !== undefined);
  const steps = all.map((p) => p.step);
  let low = Math.min(...all.map((p) => p.value - (p.error || 0))), high = Math.max(...all.map((p) => p.value + (p.error || 0)));
  if (floor !== null) low = Math.min(low, floor);
  if (ceiling !== null) high = Math.max(high, ceiling);
  if (low === high) { low -= Math.abs(low) / 2 || 0.5; high += Math.abs(high) / 2 || 0.5; }
  const { x, y, axes } = frame(low, high, Math.min(...steps), Math.max(...steps));
  const drawn = shown.map((one) => [
    s("path", { d: band(one.points, x, y), fill: one.color, class: "band" }),
    s("path", { d: path(one.points, x, y), stroke: one.color, class: one.dashed ? "line dashed" : "line" }),
    one.points.length < 12 ? one.points.filter((p) => p.value !== null).map((p) => s("circle", { cx: x(p.step), cy: y(p.value), r: 2.6, fill: one.color })) : [],
  ]);
  const at = (step) => shown.map((one) => ({ name: one.name, color: one.color, point: one.points.find((p) => p.step === step) })).filter((one) => one.point && one.point.value !== null && one.point.value !== undefined);
  const last = Math.max(...steps);
  const summary = `${title}. ${shown.map((one) => { const known = one.points.filter((p) => p.value !== null && p.value !== undefined); return `${one.name}: from ${format(known[0].value)} to ${format(known[known.length - 1].value)}`; }).join("; ")}, ${axis}s ${Math.min(...steps)} to ${last}.`;
  return card(title, note, shown, { x, axes, drawn, steps: [...new Set(steps)].sort((a, b) => a - b), at, y, format, summary, axis });
}

// parts: [{name, color, points}]: bars of what each step consists of.
export function stackedChart({ title, note = "", parts, format = number }) {
  const steps = parts[0].points.map((p) => p.step);
  if (!steps.length) return null;
  const totals = steps.map((_, i) => parts.reduce((sum, one) => sum + (one.points[i].value || 0), 0));
  const { x, y, axes } = frame(0, Math.max(...totals, 1e-9), steps[0] - 0.5, steps[steps.length - 1] + 0.5);
  const width = Math.max(0.6, (x(steps[0] + 1) - x(steps[0])) * 0.86);
  const drawn = steps.map((step, i) => {
    let base = 0;
    return parts.map((one) => {
      const value = one.points[i].value || 0, top = y(base + value), bottom = y(base);
      base += value;
      return s("rect", { x: x(step) - width / 2, y: top, width, height: Math.max(0, bottom - top), fill: one.color });
    });
  });
  const at = (step) => parts.map((one) => ({ name: one.name, color: one.color, point: one.points[steps.indexOf(step)] }));
  const summary = `${title}. Last step: ${at(steps[steps.length - 1]).map((one) => `${one.name} ${format(one.point.value)}`).join(", ")}.`;
  return card(title, note, parts, { x, axes, drawn, steps, at, y: null, format, summary });
}

function card(title, note, series, { x, y, axes, drawn, steps, at, format, summary, axis = "step" }) {
  const cursor = s("g", { class: "cursor" });
  const tip = h("output", { class: "tip" });
  let index = steps.length - 1;
  const show = (where) => {
    index = Math.max(0, Math.min(steps.length - 1, where));
    const step = steps[index], values = at(step);
    cursor.replaceChildren(s("line", { x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM, class: "rule" }),
      ...(y ? values.map((one) => s("circle", { cx: x(step), cy: y(one.point.value), r: 3.4, fill: one.color, class: "dot" })) : []));
    tip.replaceChildren(h("b", {}, `${axis} ${step}`), ...values.map((one) => h("span", {}, h("i", { style: { background: one.color } }),
      `${one.name} ${format(one.point.value)}${one.point.error ? ` ± ${format(one.point.error)}` : ""}`)));
    tip.classList.add("shown");
  };
  const hide = () => { cursor.replaceChildren(); tip.classList.remove("shown"); };
  const nearest = (event) => {
    const box = picture.getBoundingClientRect(), where = ((event.clientX - box.left) / box.width) * WIDTH;
    return steps.reduce((best, step, i) => (Math.abs(x(step) - where) < Math.abs(x(steps[best]) - where) ? i : best), 0);
  };
  const picture = s("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": summary,
    onpointermove: (event) => show(nearest(event)), onpointerleave: hide, onblur: hide,
    onkeydown: (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (!move) return;
      event.preventDefault();
      event.stopPropagation();
      show(index + move);
      announce(tip.textContent);
    },
  }, axes, drawn, cursor);
  return h("section", { class: "card chart" }, h("header", {}, h("h3", {}, title), note && h("small", {}, note)), picture,
    h("div", { class: "legend" }, (series.length > 1 || !y) && series.map((one) => h("span", {}, h("i", { class: one.dashed ? "dashed" : "", style: { background: one.color } }), one.name))), tip);
}
