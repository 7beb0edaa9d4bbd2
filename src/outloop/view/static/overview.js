// How a run went: its curves, what became of its episodes, and what happened to it.

import * as api from "./api.js";
import { COLORS, lineChart, stackedChart } from "./charts.js";
import { h, replace } from "./dom.js";
import { bytes, number, plain, seconds, time } from "./format.js";
import { card as laneCard } from "./lanes.js";
import { link } from "./route.js";

// Rows of training steps: after a resume a step may stand twice, and the later one counts.
function training(rows) {
  const byStep = new Map();
  for (const row of rows) if ("train/loss" in row) byStep.set(row.step, row);
  return [...byStep.values()].sort((a, b) => a.step - b.step);
}

const points = (rows, name, error = () => 0) => rows.filter((row) => row[name] !== undefined).map((row) => ({ step: row.step, value: row[name], error: error(row) }));
const named = (rows, names) => names.map(([label, name], i) => ({ name: label, color: COLORS[i % COLORS.length], points: points(rows, name) }));
const rewardError = (row) => (row["train/episodes"] ? (2 * (row["train/reward_std"] || 0)) / Math.sqrt(row["train/episodes"]) : 0);

function increments(rows, prefix) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((name) => name.startsWith(prefix));
  return names.map((name, i) => {
    let before = 0;
    const found = rows.map((row) => { const value = Math.max(0, (row[name] ?? before) - before); before = row[name] ?? before; return { step: row.step, value }; });
    return { name: name.slice(prefix.length), color: COLORS[i % COLORS.length], points: found };
  }).filter((one) => one.points.some((p) => p.value));
}

// From the steps, where they have them; else from the kept episodes, by policy version.
function componentSeries(rows, steps) {
  const measured = [...new Set(steps.flatMap((row) => Object.keys(row)))].filter((name) => name.startsWith("reward/"));
  if (measured.length) return named(steps, measured.map((name) => [name.slice("reward/".length), name]));
  const names = [...new Set(rows.map((row) => row.name))];
  return names.map((name, i) => ({ name, color: COLORS[i % COLORS.length], points: rows.filter((row) => row.name === name && row.version !== null).map((row) => ({ step: row.version, value: row.mean })) }));
}

// Model calls of each step's episodes that the router refused, by code.
function refusals(rows, of) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((name) => name.startsWith("refused/"));
  return names.length ? stackedChart({ title: `Refused model calls${of}`, note: "by code, of the taken episodes", parts: names.map((name, i) => ({
    name: name.slice("refused/".length), color: COLORS[i % COLORS.length], points: rows.map((row) => ({ step: row.step, value: row[name] ?? 0 })) })) }) : null;
}

// What outloop.Run.record was given.
function ownNumbers(metrics, of) {
  const names = [...new Set(metrics.flatMap((row) => Object.keys(row)))].filter((name) => name.startsWith("user/"));
  return names.length ? lineChart({ title: `Numbers of your own${of}`, note: "outloop.Run.record", series: named(metrics, names.map((name) => [name.slice("user/".length), name])) }) : null;
}

// Which of the last evaluations are of several versions, each.
function mixed(evals) {
  const found = evals.filter((row) => row["eval/mixed_share"]).slice(-4);
  return found.length ? `; mixed: ${found.map((row) => `step ${row.step} is of versions ${row["eval/oldest_version"]} to ${row["eval/newest_version"]}`).join(", ")}` : "";
}

function charts(shown) {
  const [first] = shown;
  const rows = training(first.metrics), evals = first.metrics.filter((row) => "eval/sampled_reward" in row || "eval/greedy_reward" in row);
  const several = shown.length > 1, of = several ? ` of ${first.run.name}` : "";
  const compared = (name, error) => shown.map((one, i) => ({ name: one.run.name, color: COLORS[i % COLORS.length], points: points(training(one.metrics), name, error) }));
  const evaluated = (one, name, se) => points(one.metrics.filter((row) => name in row), name, (row) => 2 * (row[se] || 0));
  const single = (title, name, note, options = {}) => lineChart({ title, note, series: several ? compared(name) : [{ name: title, color: COLORS[0], points: points(rows, name) }], ...options });
  const time_s = [["waiting for groups", "train/wait_s"], ["update", "train/update_s"], ["publish", "publish/duration_s"]];
  const lanes = time_s.map(([label, name], i) => ({ name: label, color: COLORS[[3, 0, 1][i]], points: rows.map((row) => ({ step: row.step, value: row[name] || 0 })) }));
  lanes.push({ name: "other", color: "var(--muted)", points: rows.map((row) => ({ step: row.step, value: Math.max(0, (row["train/step_s"] || 0) - time_s.reduce((sum, [, name]) => sum + (row[name] || 0), 0)) })) });
  return [
    lineChart({ title: "Reward", note: "of the taken episodes, before filters; band: two standard errors", series: several ? compared("train/reward_mean", rewardError) : [{ name: "reward", color: COLORS[0], points: points(rows, "train/reward_mean", rewardError) }] }),
    lineChart({ title: "Held-out reward", note: `evaluations; band: two standard errors${several ? "" : mixed(evals)}`, series: several
      ? shown.map((one, i) => ({ name: one.run.name, color: COLORS[i % COLORS.length], points: evaluated(one, "eval/sampled_reward", "eval/sampled_se") }))
      : [{ name: "sampled", color: COLORS[0], points: points(evals, "eval/sampled_reward", (row) => 2 * (row["eval/sampled_se"] || 0)) }, { name: "greedy", color: COLORS[1], points: points(evals, "eval/greedy_reward", (row) => 2 * (row["eval/greedy_se"] || 0)) }] }),
    lineChart({ title: `Parts of the reward${of}`, note: "means of named components", series: componentSeries(first.components, rows) }),
    single("Groups with signal", "train/groups_with_signal_share", "share of taken groups whose rewards differ", { floor: 0, ceiling: 1 }),
    rows.length && stackedChart({ title: `Where a step's time went${of}`, note: "seconds of the trainer", parts: lanes, format: seconds }),
    single("Tokens per second", "train/tokens_per_s", "batch tokens over the time of the step", { floor: 0 }),
    several ? single("Staleness", "train/staleness_mean", "publishes, mean", { floor: 0 }) : lineChart({ title: "Staleness", note: "publishes between sampling and training", floor: 0, series: named(rows, [["mean", "train/staleness_mean"], ["largest", "train/staleness_max"]]) }),
    single("Logprob gap", "train/logprob_gap_mean", "mean |policy − behavior|, same version", { floor: 0 }),
    single("Entropy", "train/entropy", "nats, at trained tokens", { floor: 0 }),
    several ? single("Length", "train/generated_tokens_mean", "generated tokens of an episode, mean", { floor: 0 }) : lineChart({ title: "Length", note: "generated tokens of an episode", floor: 0, series: named(rows, [["mean", "train/generated_tokens_mean"], ["largest", "train/generated_tokens_max"]]) }),
    several ? single("Truncated", "train/truncated_share", "share of taken episodes", { floor: 0 }) : lineChart({ title: "Truncated and failed", note: "share of taken episodes", floor: 0, series: named(rows, [["truncated", "train/truncated_share"], ["failed", "train/failed_share"]]) }),
    rows.length && increments(rows, "buffer/dropped/").length ? stackedChart({ title: `Groups dropped${of}`, note: "by reason, each step", parts: increments(rows, "buffer/dropped/") }) : null,
    refusals(rows, of),
    several ? single("Importance ratio", "train/ratio_p99", "99th percentile") : lineChart({ title: "Importance ratio", note: "policy / behavior at the first update", series: named(rows, [["1st percentile", "train/ratio_p01"], ["mean", "train/ratio_mean"], ["99th percentile", "train/ratio_p99"]]) }),
    single("Gradient norm", "train/grad_norm", "before clipping", { floor: 0 }),
    single("Loss", "train/loss", ""),
    ownNumbers(first.metrics, of),
  ].filter(Boolean);
}

function tile(label, value, note = "") {
  return h("div", { class: "tile" }, h("small", {}, label), h("b", {}, value), note && h("span", {}, note));
}

function tiles({ run, metrics }) {
  const rows = training(metrics), last = rows[rows.length - 1] || {};
  const best = metrics.filter((row) => "eval/sampled_reward" in row).reduce((best, row) => (!best || row["eval/sampled_reward"] > best["eval/sampled_reward"] ? row : best), null);
  return h("div", { class: "tiles" },
    tile("state", run.is_live ? "live" : "not running", last.time ? `last step ${time(last.time)}` : ""),
    tile("steps", number(run.num_steps), last["train/policy_version"] !== undefined ? `policy version ${last["train/policy_version"]}` : ""),
    tile("reward", number(last["train/reward_mean"]), rows[0] ? `first step ${number(rows[0]["train/reward_mean"])}` : ""),
    best && tile("best held-out", number(best["eval/sampled_reward"]), `at step ${best.step}`),
    tile("seconds a step", seconds(last["train/step_s"]), last["train/wait_s"] !== undefined ? `${seconds(last["train/wait_s"])} of it waiting` : ""),
    tile("episodes kept", number(run.num_episodes), `${bytes(run.num_bytes)}${run.num_removed ? `, ${number(run.num_removed)} removed` : ""}`));
}

function fates({ run, fates }) {
  const total = fates.reduce((sum, row) => sum + row.number, 0);
  if (!total) return null;
  const color = { trained: "var(--c1)", evaluated: "var(--c2)", dropped: "var(--c4)", lost: "var(--c5)" };
  return h("section", { class: "card" }, h("header", {}, h("h3", {}, "What became of the kept episodes")),
    h("table", { class: "plain" }, h("thead", {}, h("tr", {}, ["purpose", "fate", "outcome", "episodes", "mean reward", ""].map((one) => h("th", {}, one)))),
      h("tbody", {}, fates.map((row) => h("tr", {},
        h("td", {}, row.purpose),
        h("td", {}, h("a", { href: link(run.name, "episodes", "", { fate: row.reason ? `${row.fate}/${row.reason}` : row.fate, outcome: row.outcome, purpose: row.purpose }) }, row.reason ? `${row.fate}: ${row.reason}` : row.fate)),
        h("td", {}, row.outcome || "open"), h("td", { class: "num" }, number(row.number)), h("td", { class: "num" }, number(row.reward)),
        h("td", { class: "bar" }, h("i", { style: { width: `${(100 * row.number) / total}%`, background: color[row.fate] } })))))));
}

function events({ events }) {
  if (!events.length) return null;
  return h("section", { class: "card" }, h("header", {}, h("h3", {}, "Events")),
    h("ol", { class: "events" }, events.slice(-40).reverse().map((one) => h("li", { class: one.kind },
      h("time", {}, time(one.time)), h("b", {}, one.kind.replaceAll("_", " ")), one.part || one.name || "", one.exit_code !== undefined ? ` exit code ${one.exit_code}` : "", one.sentence || one.reason ? h("span", { class: "said" }, plain(one.sentence || one.reason)) : ""))));
}

export async function show(main, { run, query, runs }) {
  const others = query.getAll("with").filter((name) => name && name !== run);
  const lanes = laneCard(run);
  const draw = async () => {
    const shown = await Promise.all([run, ...others].map(api.overview));
    const compare = runs.length > 1 && h("div", { class: "compare" }, "compare with", runs.filter((one) => one.name !== run).map((one) => {
      const is = others.includes(one.name);
      const next = is ? others.filter((name) => name !== one.name) : [...others, one.name];
      return h("a", { class: is ? "chip on" : "chip", href: `${link(run)}${next.length ? `?${new URLSearchParams(next.map((name) => ["with", name]))}` : ""}`, "aria-pressed": is }, one.name);
    }));
    const drawn = charts(shown);
    if (drawn.length) await lanes.update(shown[0].events);
    replace(main, h("h1", { class: "visually-hidden" }, `Overview of ${run}`), compare, shown.length === 1 ? tiles(shown[0]) : null,
      drawn.length ? h("div", { class: "grid" }, drawn) : h("p", { class: "empty" }, "No step has been recorded yet."),
      shown.length === 1 && drawn.length > 0 && lanes.element, shown.length === 1 && h("div", { class: "grid wide" }, fates(shown[0]), events(shown[0])));
    return shown[0].run.is_live;
  };
  return (await draw()) ? draw : null;
}

export async function list(main, { runs }) {
  replace(main, h("h1", {}, "Runs"), h("table", { class: "rows" },
    h("thead", {}, h("tr", {}, ["run", "state", "steps", "reward", "episodes kept"].map((one) => h("th", {}, one)))),
    h("tbody", {}, runs.map((one) => h("tr", {}, h("td", {}, h("a", { href: link(one.name) }, one.name)), h("td", {}, one.is_live ? "live" : "not running"),
      h("td", { class: "num" }, number(one.num_steps)), h("td", { class: "num" }, number(one.reward)), h("td", { class: "num" }, number(one.num_episodes)))))));
  return null;
}
