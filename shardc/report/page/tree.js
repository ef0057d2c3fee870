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

function rowOf(module, depth, open) {
  const inside = open ? [module] : below(module);  // a closed row also counts what it hides
  const messages = inside.flatMap((m) => m.messages), weights = inside.flatMap((m) => m.weights);
  const chips = [...new Set(weights.map(weightAxes).filter(Boolean))].map((axes) => el("span", { class: `chip ${splitClass(axes)}`, "data-tip": `weights split over ${axes}` }, axes));
  for (const kind of ["e", "h", "u"]) {
    const some = messages.filter((m) => exposure(m) === kind);
    if (some.length) chips.push(el("span", { class: `chip ${kind}`, "data-tip": some.slice(0, 8).map((m) => `${kindOf(m)} over ${axesOf(m)}: ${exposedText(m)}`).join("\n") }, `⇄${some.length}`));
  }
  const turn = module.children.length ? (open ? "▾" : "▸") : "";
  const row = el("div", {
    "data-with": [...messages.map((m) => `m${m.i}`), ...weights.map((w) => `w${w.i}`)].join(" "), onclick: () => openModule(module.path), onkeydown: (e) => treeKey(e, module, open),
    class: "row", role: "treeitem", tabindex: state.module === module.path ? "0" : "-1", "aria-level": String(depth + 1),
    "aria-expanded": module.children.length ? String(open) : null, "aria-selected": String(state.module === module.path), "data-path": module.path,
  },
    el("span", { class: "turn", "aria-hidden": "true", onclick: (e) => { e.stopPropagation(); turnRow(module); } }, turn),
    el("span", { class: "label", title: titleOf(module) }, module.layers ? module.layers : module.path ? module.label : F.model),
    module.layers ? el("span", { class: "times", "data-tip": `${module.count} equal layers, shown once` }, `×${module.count}`) : "",
    el("span", { class: "chips" }, chips));
  sized(row, { "padding-left": `${4 + depth * 13}px` });
  const lines = [...new Set([...messages, ...weights].flatMap((t) => t.lines || []))];
  thing(row, `t${module.i}`, lines);
  return row;
}

/** Open the modules around one, so that its row is shown. */
function unfold(path) {
  let module = moduleAt.get(path);
  while (module && module.parent >= 0) {
    module = D.modules[module.parent];
    opened.add(module.path);
  }
}
