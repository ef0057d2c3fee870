// Draw the tree of modules, with the splits of their weights and their collectives.
"use strict";

const opened = new Set();

function treeRows() {
  if (!opened.size) {
    let module = D.modules[0];
    opened.add(module.path);
    while (module.children.length === 1) { module = module.children[0]; opened.add(module.path); }
    module.children.forEach((c) => c.children.length && D.modules.length < 60 && opened.add(c.path));
    module.children.filter((c) => c.children.some((g) => g.layers)).forEach((c) => opened.add(c.path));
    module.children.flatMap((c) => c.children).filter((c) => c.layers).slice(0, 1).forEach((c) => opened.add(c.path));
  }
  return rowsOf(D.modules[0], 0);
}

function rowsOf(module, depth) {
  const open = opened.has(module.path);
  return [rowOf(module, depth, open), ...(open ? module.children.flatMap((c) => rowsOf(c, depth + 1)) : [])];
}

const labelOf = (module) => module.layers || (module.path ? module.label : F.model);

function rowOf(module, depth, open) {
  const inside = open ? [module] : below(module);  // a closed row also counts what it hides
  const messages = inside.flatMap((m) => m.messages), weights = inside.flatMap((m) => m.weights);
  const chip = (kind, text, tip) => el("span", { class: `chip ${kind}`, "data-tip": tip }, text);
  const axes = unique(weights.map((w) => w.over).filter(Boolean));
  const sent = ["e", "h", "u"].map((kind) => [kind, messages.filter((m) => m.exposure === kind)]).filter(([, some]) => some.length);
  const turn = module.children.length ? (open ? "▾" : "▸") : "";
  const row = el("div", {
    "data-with": [...messages, ...weights].map((t) => t.x).join(" "), onclick: () => openModule(module.path), onkeydown: (e) => treeKey(e, module, open),
    class: "row", role: "treeitem", tabindex: state.module === module.path ? "0" : "-1", "aria-level": String(depth + 1),
    "aria-expanded": module.children.length ? String(open) : null, "aria-selected": String(state.module === module.path), "data-path": module.path,
  },
    el("span", { class: "turn", "aria-hidden": "true", onclick: (e) => { e.stopPropagation(); turnRow(module); } }, turn),
    el("span", { class: "label", title: titleOf(module) }, labelOf(module)),
    module.layers ? el("span", { class: "times", "data-tip": `${module.count} equal layers, shown once` }, `×${module.count}`) : "",
    el("span", { class: "chips" }, axes.map((a) => chip(splitClass(a), a, `weights split over ${a}`)),
      sent.map(([kind, some]) => chip(kind, `⇄${some.length}`, some.slice(0, 8).map((m) => `${m.called}: ${exposedText(m)}`).join("\n")))));
  return thing(sized(row, { "padding-left": `${4 + depth * 13}px` }), { x: module.x, lines: unique([...messages, ...weights].flatMap((t) => t.lines)) });
}

/** Open the modules around one, so that its row is shown. */
function unfold(path) {
  for (let m = moduleAt.get(path); m && m.parent >= 0; m = D.modules[m.parent]) opened.add(D.modules[m.parent].path);
}
