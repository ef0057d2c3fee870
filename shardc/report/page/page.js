// Handle panels, search, keys, themes and the address. Runs after all other scripts.
"use strict";

const BESIDE = { tree: "modules", spec: "lines" };  // on a narrow screen these are shown as panels, and moved back afterwards

function giveBack() {
  for (const [home, id] of Object.entries(BESIDE)) {
    const part = byId(id);
    if (part && part.parentElement === byId("panel")) byId(home).append(part);
  }
}

function drawTabs() {
  const go = (key, by) => {
    const shown = Object.keys(TABS).filter((k) => byId(`tab-${k}`).offsetParent);
    const to = shown[(shown.indexOf(key) + by + shown.length) % shown.length];
    show(to);
    byId(`tab-${to}`).focus();
  };
  const tabs = byId("tabs");
  fill(tabs, Object.entries(TABS).map(([key, text], i) => button(text, () => show(key), {
    role: "tab", id: `tab-${key}`, "data-tab": key, "aria-selected": String(key === state.tab), "aria-controls": "panel", tabindex: key === state.tab ? "0" : "-1",
    class: BESIDE[key] ? "narrow" : "", title: BESIDE[key] ? text : `${text} (${i + 1})`, onkeydown: keyed({ ArrowRight: () => go(key, 1), ArrowLeft: () => go(key, -1) }) })));
  const shown = byId(`tab-${state.tab}`);
  tabs.scrollLeft = shown.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - shown.offsetWidth) / 2;
}

function show(tab, { quiet = false } = {}) {
  state.tab = TABS[tab] ? tab : "overview";
  drawTabs();
  redraw();
  if (!quiet) remember();
}

function redraw() {
  giveBack();
  const panel = byId("panel");
  panel.setAttribute("aria-labelledby", `tab-${state.tab}`);
  fill(panel, BESIDE[state.tab] ? byId(BESIDE[state.tab]) : DRAW[state.tab](panel.clientWidth - 34));
  if (state.tab === "graph") ["before", "after"].forEach(fitGraph);
  if (byId("times")) {
    byId("times").addEventListener("wheel", (e) => { if (e.ctrlKey) { e.preventDefault(); zoomTimeline(e.deltaY < 0 ? 1.2 : 1 / 1.2, e); } }, { passive: false });
    fillTimeline();
  }
  panel.scrollTop = 0;
  light(null);
}

/** Scroll to a thing in the panel. */
function reveal(x) {
  const found = document.querySelector(`#panel [data-x="${x}"]`) || document.querySelector(`#panel [data-with~="${x}"]`);
  if (!found) return;
  const drawn = found instanceof SVGElement;
  found.scrollIntoView({ block: "center", inline: drawn ? "center" : "nearest" });
  const beside = drawn ? null : found.closest("#text, .wide");
  if (beside) beside.scrollLeft = 0;  // show the start of the line
  if (found.focus) found.focus({ preventScroll: true });
}

/** Focus the line of the spec that is `by` lines after the one of an event; only lines that cause something count. */
function nextLine(e, by) {
  const lines = [...document.querySelectorAll("#lines .cause")], line = lines[e ? lines.indexOf(e.currentTarget) + by : 0];
  if (line) line.focus();
}

/** Select a thing, or nothing, and show its details. */
function pick(x, { quiet = false } = {}) {
  state.picked = x;
  const box = byId("details");
  box.classList.toggle("empty", !x);
  const close = button("×", () => pick(null), { title: "select nothing (Esc)", "aria-label": "select nothing" });
  const [title, ...parts] = x ? about(x) : [];
  fill(box, x ? [el("div", { class: "title" }, el("h2", {}, title), close), parts] : el("p", { class: "hint" }, "Nothing is selected. Point at a line of the spec to light what it caused, or at anything else to light its line; a click keeps it, and tells here its cause, its bytes, and whether a rank waits for it."));
  box.scrollTop = 0;
  light(null);
  document.body.classList.toggle("selected", Boolean(x));
  if (x && x[0] !== "l") {
    const row = document.querySelector(`#lines [data-x="l${linesOf(x)[0]}"]`);
    if (row) row.scrollIntoView({ block: "nearest" });
  }
  if (!quiet) remember();
}

// --- modules, the graph and the timeline

function drawTree() {
  fill(byId("modules"), treeRows());
  light(null);
}

function openModule(path) {
  state.module = moduleAt.has(path) ? path : shownPath(path);
  unfold(state.module);
  opened.add(state.module);
  drawTree();
  show("graph");
}

function turnRow(module) {
  if (opened.has(module.path)) opened.delete(module.path); else opened.add(module.path);
  drawTree();
  focusRow(module.path);
}

function focusRow(path) {
  const row = document.querySelector(`#modules [data-path="${CSS.escape(path)}"]`);
  if (row) row.focus();
}

function treeKey(e, module, open) {
  const rows = [...document.querySelectorAll("#modules .row")], at = rows.indexOf(e.currentTarget), inner = module.children.length;
  const focus = (row) => (row ? row.focus() : false), openIt = () => openModule(module.path), turn = () => turnRow(module);
  keyed({
    ArrowDown: () => focus(rows[at + 1]), ArrowUp: () => focus(rows[at - 1]), Home: () => focus(rows[0]), End: () => focus(rows.at(-1)), Enter: openIt, " ": openIt,
    ArrowRight: () => (open ? focus(rows[at + 1]) : inner ? turn() : false),
    ArrowLeft: () => (open && inner ? turn() : module.parent >= 0 ? focusRow(D.modules[module.parent].path) : false),
  })(e);
}

const zoom = { before: 1, after: 1 };

function scaleGraph(by) {
  for (const key of ["before", "after"]) {
    if (!by) fitGraph(key);
    else if (byId(`sheet-${key}`)) { zoom[key] = Math.min(Math.max(zoom[key] * by, 0.1), 3); apply(key); }
  }
}

/** Fit a graph to the width, but keep text legible: a wide graph is scrolled. */
function fitGraph(key) {
  const sheet = byId(`sheet-${key}`);
  if (!sheet) return;
  const { width, middle } = sheet.firstChild.dataset;
  zoom[key] = Math.min(1, Math.max(state.graph === "both" ? 0.5 : 0.62, (sheet.clientWidth - 4) / width));
  apply(key);
  sheet.scrollLeft = middle * zoom[key] - sheet.clientWidth / 2;
}

function apply(key) {
  const picture = byId(`sheet-${key}`).firstChild;
  for (const side of ["width", "height"]) picture.setAttribute(side, picture.dataset[side] * zoom[key]);
  picture.style.setProperty("margin", "0 auto");
}

/** Draw a run's trace below the predicted step. */
function layRun(file) {
  return file.text().then((text) => { view.run = runOf(JSON.parse(text), file.name); }).catch((e) => { view.run = { said: `${file.name} is no trace: ${e.message}`, end: 0, ranges: [], sends: [] }; }).then(redraw);
}

const timesWide = () => Math.max((byId("times").clientWidth - 4) * view.zoom, 500);

function fillTimeline() {
  fill(byId("times"), timelinePicture(timesWide()));
  light(null);
}

function zoomTimeline(by, at) {
  const scroll = byId("times");
  const middle = at ? at.clientX - scroll.getBoundingClientRect().left : scroll.clientWidth / 2;
  const share = (scroll.scrollLeft + middle - LEFT) / (scroll.clientWidth * view.zoom);
  view.zoom = by ? Math.min(Math.max(view.zoom * by, 1), 400) : 1;
  fillTimeline();
  scroll.scrollLeft = share * scroll.clientWidth * view.zoom - middle + LEFT;
}

// --- the address: the state of the page can be sent as a link, and "back" works

function remember() {
  const parts = [state.tab, state.tab === "graph" ? `${state.graph}:${state.module}` : "", state.picked || ""];
  const hash = `#${parts.map(encodeURIComponent).join("/").replace(/\/+$/, "")}`;
  if (hash !== location.hash) history.pushState(null, "", hash);
}

function recall() {
  const [tab, module, picked] = location.hash.slice(1).split("/").map((part) => { try { return decodeURIComponent(part); } catch { return ""; } });
  if (module) {
    const at = module.indexOf(":");
    state.graph = ["before", "after", "both"].includes(module.slice(0, at)) ? module.slice(0, at) : "after";
    state.module = shownPath(module.slice(at + 1));
    unfold(state.module);
    drawTree();
  }
  state.picked = (thingOf(picked || "") || { x: null }).x;
  show(tab || "overview", { quiet: true });
  pick(state.picked, { quiet: true });
  if (state.picked && state.tab !== "overview") reveal(state.picked);
}

// --- search

const INDEX = [
  ...D.modules.filter((m) => m.path).map((m) => ({ text: m.path, about: m.layers ? `module; layers ${m.layers} are equal` : "module", act: () => { openModule(m.path); pick(m.x); } })),
  ...D.messages.map((m) => ({ text: `${m.called}${m.buckets ? `, ${m.name}` : ""}`, about: [m.module, m.cause, m.name].filter(Boolean).join(" · "), act: () => pick(m.x) })),
  ...D.weights.map((w) => ({ text: w.name, about: `weight · ${w.type}`, act: () => pick(w.x) })),
  ...THINGS.l.filter((l) => l.text.trim()).map((l) => ({ text: l.text.trim(), about: `line ${l.line} of the spec`, act: () => pick(l.x) })),
  ...D.after.filter((o) => o.message === undefined && !o.like).map((o) => ({ text: o.name, about: `${o.op} in ${o.module || F.model} · ${o.type}`, act: () => { state.graph = "after"; openModule(shownPath(o.module)); pick(o.x); reveal(o.x); } })),
  ...Object.entries(TABS).map(([key, text]) => ({ text, about: "panel", act: () => show(key) })),
];

/** Find entries with all words, best first: text that starts with them, then text that has them, then all others. */
function found(words) {
  const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = INDEX.filter((entry) => { const all = `${entry.text} ${entry.about}`.toLowerCase(); return parts.every((p) => all.includes(p)); });
  const rank = (entry) => { const text = entry.text.toLowerCase(); return text === words.toLowerCase() ? 0 : text.startsWith(parts[0]) ? 1 : parts.every((p) => text.includes(p)) ? 2 : 3; };
  hits.sort((a, b) => rank(a) - rank(b));
  const layers = equalModules(words).map(({ text, module }) => ({ text, about: `equal to ${titleOf(module)}, shown there`, act: () => { openModule(module.path); pick(module.x); } }));
  return [...layers, ...hits].slice(0, 40);
}

function search() {
  const box = byId("search"), results = byId("found");
  let hits = [], at = 0;
  const close = () => { results.hidden = true; box.setAttribute("aria-expanded", "false"); box.removeAttribute("aria-activedescendant"); };
  const mark_ = () => { [...results.children].forEach((li, i) => li.setAttribute("aria-selected", String(i === at))); box.setAttribute("aria-activedescendant", `hit${at}`); if (results.children[at]) results.children[at].scrollIntoView({ block: "nearest" }); };
  const go = (i) => { const hit = hits[i]; if (!hit) return; box.value = ""; close(); box.blur(); hit.act(); };
  box.addEventListener("input", () => {
    hits = box.value.trim() ? found(box.value.trim()) : [];
    at = 0;
    fill(results, hits.length ? hits.map((hit, i) => el("li", { role: "option", id: `hit${i}`, onpointerdown: (e) => { e.preventDefault(); go(i); } }, hit.text, el("small", {}, hit.about))) : el("li", { class: "soft" }, "nothing has all of these words"));
    results.hidden = !box.value.trim();
    box.setAttribute("aria-expanded", String(!results.hidden));
    if (hits.length) mark_();
  });
  const move = (to) => { at = Math.max(Math.min(to, hits.length - 1), 0); mark_(); };
  box.addEventListener("keydown", keyed({ ArrowDown: () => move(at + 1), ArrowUp: () => move(at - 1), Enter: () => go(at), Escape: () => { box.value = ""; close(); box.blur(); } }));
  box.addEventListener("blur", close);
}

// --- keys and themes

const KEYS = [["/", "search"], ["1 … 7", "the panels"], ["Tab, Enter", "go to a thing, select it"], ["arrows", "in the graph along the lines, in the tree, along the memory"], ["o", "in the graph: open the module of a box"], ["+ − 0", "size of the graph or the timeline"], ["u", "the module around"], ["m, s", "to the modules, to the spec; arrows go up and down"], ["Esc", "select nothing"], ["d", "dark or light"], ["?", "this"]];

function help() {
  const box = byId("keys");
  fill(box, el("h2", {}, "Keys"), table([], KEYS.map(([key, about_]) => [el("kbd", {}, key), about_]), { wide: false }), el("h3", {}, "Types and words"), typesHelp(), el("p", {}, button("close", () => box.close())));
  box.showModal();
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

function keys(e) {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches("input") || byId("keys").open) return;
  const shown = Object.keys(TABS).filter((k) => !BESIDE[k]), up = D.modules[(moduleAt.get(state.module) || {}).parent];
  const resize = (by) => () => (state.tab === "graph" ? scaleGraph(by) : state.tab === "timeline" && D.timeline ? zoomTimeline(by) : false);
  keyed({
    "/": () => byId("search").focus(), "?": help, d: theme, m: () => focusRow(state.module), s: () => nextLine(), Escape: () => pick(null),
    u: () => (up ? openModule(up.path) : false), "+": resize(1.25), "=": resize(1.25), "-": resize(0.8), 0: resize(0),
    ...Object.fromEntries(shown.map((tab, i) => [i + 1, () => show(tab)])),
  })(e);
}

byId("model").textContent = F.model;
byId("mesh").textContent = F.mesh.map(([axis, n]) => `${axis}=${n}`).join(" × ") || "one device";
byId("file").textContent = D.spec.file || "as YAML: it was given in Python";
fill(byId("facts"), factButtons());
fill(byId("lines"), specLines());
if (D.spec.use.length) byId("lines").after(made(el("details", {}, el("summary", { class: "soft" }, "what `use` came to"), el("pre", {}, D.spec.use.join("\n")))));
drawTree();
recall();
follow();
search();
byId("theme").addEventListener("click", theme);
byId("help").addEventListener("click", help);
document.addEventListener("keydown", keys);
addEventListener("popstate", recall);
addEventListener("resize", () => { if (["timeline", "memory"].includes(state.tab)) redraw(); });
document.documentElement.dataset.ready = String(Math.round(performance.now()));
