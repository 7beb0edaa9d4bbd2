// The frame: which view an address names, keys, and light or dark.

import * as api from "./api.js";
import { h, replace } from "./dom.js";
import * as episode from "./episode.js";
import * as episodes from "./episodes.js";
import * as group from "./group.js";
import * as overview from "./overview.js";
import { link, parse } from "./route.js";
import * as task from "./task.js";
import * as tokens from "./tokens.js";

const VIEWS = { overview, episodes, episode, tokens, group, task };
const LIVE_MS = 3000;
const THEMES = ["system", "light", "dark"];
const KEYS = [["o", "overview"], ["e", "episodes"], ["/", "search"], ["j k", "next and previous episode of the list"], ["Enter", "open it"], ["n p", "next and previous page"], ["u", "back"], ["1–5", "color of tokens"], ["arrows", "move in tokens and charts"], ["t", "light or dark"], ["?", "these keys"]];
const main = document.getElementById("main"), top_ = document.getElementById("top");
let runs = [], timer = 0, number = 0;

function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("outloop-theme", name);
}

function nextTheme() {
  const now = localStorage.getItem("outloop-theme") || "system";
  theme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  header(parse(location.hash));
}

function header({ run, view }) {
  const tab = (name, label) => h("a", { href: link(run, name), "aria-current": view === name ? "page" : null }, label);
  replace(top_, h("a", { class: "brand", href: "#/" }, "outloop"),
    run && (runs.length > 1 ? h("select", { "aria-label": "Run", onchange: (event) => { location.hash = link(event.target.value); } }, runs.map((one) => h("option", { value: one.name, selected: one.name === run }, one.name))) : h("span", { class: "run" }, run)),
    run && h("nav", { "aria-label": "Views" }, tab("overview", "Overview"), tab("episodes", "Episodes")), h("span", { class: "space" }),
    runs.find((one) => one.name === run)?.is_live && h("span", { class: "live" }, "live"),
    h("button", { onclick: nextTheme, title: "light, dark, or as the system (t)" }, h("span", { class: "roomy" }, "theme: "), localStorage.getItem("outloop-theme") || "system"), h("button", { onclick: help, title: "keys (?)", "aria-label": "Keys" }, "?"));
}

function help() {
  const box = h("dialog", { onclose: () => box.remove() }, h("h2", {}, "Keys"), h("dl", { class: "keylist" }, KEYS.map(([key, what]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)))), h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")));
  document.body.append(box);
  box.showModal();
}

async function show() {
  clearTimeout(timer);
  const own = ++number, where = parse(location.hash);
  if (!where.run && runs.length === 1) { location.replace(link(runs[0].name)); return; }
  const view = VIEWS[where.view] || (where.run ? overview : null);
  document.title = [where.id.slice(0, 12), where.view, where.run, "outloop"].filter(Boolean).join(" · ");
  header({ ...where, view: where.view || "overview" });
  main.setAttribute("aria-busy", "true");
  try {
    const again = await (view ? view.show(main, { ...where, runs }) : overview.list(main, { runs }));
    if (own === number && again) repeat(own, again);
  } catch (error) {
    if (own === number) replace(main, h("p", { class: "empty bad", role: "alert" }, error.message));
  } finally {
    if (own === number) { main.removeAttribute("aria-busy"); main.dataset.shown = location.hash; }
  }
  if (!where.query.get("turn")) window.scrollTo(0, 0);
}

// A live run is drawn again, unless somebody is reading a chart.
function repeat(own, again) {
  timer = setTimeout(async () => {
    if (own !== number) return;
    try {
      if (!document.hidden && !main.querySelector(".tip.shown")) await again();
    } finally {
      if (own === number) repeat(own, again);
    }
  }, LIVE_MS);
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) {
    if (event.key === "Escape" && event.target.closest("input")) event.target.blur();
    return;
  }
  const { run } = parse(location.hash);
  const actions = {
    o: () => { location.hash = link(run, "overview"); }, e: () => { location.hash = link(run, "episodes"); }, u: () => history.back(), t: nextTheme, "?": help,
    j: () => episodes.move(1), k: () => episodes.move(-1), n: () => document.getElementById("next")?.click(), p: () => document.getElementById("previous")?.click(),
    Enter: () => { const row = event.target.closest("tr[data-href]"); if (row && event.target === row) location.hash = row.dataset.href; },
    "/": () => { event.preventDefault(); const box = document.getElementById("search"); if (box) box.focus(); else location.hash = link(run, "episodes"); },
  };
  actions[event.key]?.();
}

theme(localStorage.getItem("outloop-theme") || "system");
addEventListener("hashchange", show);
addEventListener("keydown", key);
try {
  runs = await api.runs();
  await show();
} catch (error) {
  replace(main, h("p", { class: "empty bad", role: "alert" }, error.message));
}
