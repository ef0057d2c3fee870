// Draw the graph of a module, before and after the passes. Ops are boxes, inner modules are frames. A collective is a
// coloured line from the producer of its operand to the users of its result, with a label in the middle.
"use strict";

const MOST = 70;       // with more boxes, each inner module becomes one box
const FEWEST_OPS = 2;  // a module with at least so many ops and no collective, such as a norm, is one box
const MOST_APART = 3;  // a module with at most so many ops and a collective keeps a box for each op
const WIDEST = 46;     // characters in a line of a box
const LINE = 15;       // pixels between lines of text
const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const TONE = { e: "var(--exposed)", h: "var(--hidden)", u: "var(--unknown)" };

function graphPanel() {
  const module = moduleAt.get(state.module) || D.modules[0];
  const crumbs = [];
  for (let m = module; m; m = m.parent >= 0 ? D.modules[m.parent] : null) crumbs.unshift(m);
  const which = state.graph === "both" ? ["before", "after"] : [state.graph];
  const tools = el("div", { class: "bar-of-tools" },
    el("nav", { class: "path", "aria-label": "The modules around" }, crumbs.map((m, i) => [i ? el("span", { class: "soft" }, "›") : "",
      m === module ? el("b", {}, m.layers ? `${m.layers} (${m.count} equal)` : m.path ? m.label : F.model)
        : el("button", { type: "button", class: "link", onclick: () => openModule(m.path) }, m.layers ? m.layers : m.path ? m.label : F.model)])),
    el("span", { class: "group", role: "group", "aria-label": "Which graph" }, [["before", "one device", "before the passes: the model as one device runs it"], ["after", "one rank", "after the passes: what a rank runs"], ["both", "both", "side by side"]].map(([key, text, about]) =>
      el("button", { type: "button", title: about, "aria-pressed": String(state.graph === key), onclick: () => { state.graph = key; redraw(); remember(); } }, text))),
    el("span", { class: "group", role: "group", "aria-label": "Size" }, [["−", 0.8, "smaller (−)"], ["fit", 0, "fit the width (0)"], ["+", 1.25, "larger (+)"]].map(([text, by, about]) =>
      el("button", { type: "button", title: about, "aria-label": about, onclick: () => scaleGraph(by) }, text))));
  const legend = el("div", { class: "legend" },
    ...["e", "h", "u"].filter((kind) => D.messages.some((m) => exposure(m) === kind)).map((kind) => mark(TONE[kind], { e: "collective that is waited for", h: "collective hidden behind computing", u: "between stages, or of unknown time" }[kind])),
    D.messages.some(onlyBackward) ? el("span", {}, "- - only in backward") : "",
    ...splits.map((axes, i) => mark(`var(--split${i % 5})`, `weights split over ${axes}`)));
  return el("div", { class: "bench" }, tools, legend, el("div", { class: `sheets ${which.length > 1 ? "both" : ""}` }, which.map((key) => sheet(key, module))));
}

const onlyBackward = (m) => !m.buckets && ways(m).every((w) => w.direction === "backward");

function sheet(key, module) {
  const said = { before: "one device: the model's graph", after: `one rank: ${F.axis ? "the stages, one after the other" : "what every rank runs"}` }[key];
  const ops = D[key];
  if (!ops.length) return el("div", { class: "sheet" }, el("p", {}, said), el("p", { class: "hint" }, "This program is not compiled: there is nothing after the passes."));
  const found = units(ops, module, key);
  const drawing = found.list.length ? graphPicture(found, key) : null;
  const head = `${said}${drawing ? `, ${several(found.list.length, "box", "boxes")}` : ""}`;
  return el("div", { class: "sheet" }, el("p", {}, head),
    drawing ? el("div", { class: "scroll", id: `sheet-${key}`, tabindex: "0", role: "group", "aria-label": `${said}. Tab goes from box to box, arrows along the lines, Enter selects, o opens a module.` }, drawing)
      : el("p", { class: "hint" }, "No op runs in this module here: after the passes, or in this layer, it is empty."));
}

// --- boxes

/** Return the boxes of a module: {list, all}. A box is {ops, title, lines, kind, uses}. typed: with types of results instead of times. */
function units(ops, module, key, typed = false) {
  const inside = (path) => module.path === "" || path === module.path || path.startsWith(`${module.path}.`);
  // inputs are boxes only in the graph of the whole model
  const mine = ops.map((o, i) => i).filter((i) => inside(ops[i].module || "") && !(ops[i].input && module.path));
  let of = grouped(ops, mine, module, (path) => path);
  if (new Set(of.values()).size > MOST || mine.some((i) => ops[i].op === "layers")) of = grouped(ops, mine, module, (path) => childOf(module, path));
  const list = [];
  const byKey = new Map();
  mine.forEach((i) => {
    const name = of.get(i);
    if (!byKey.has(name)) {
      byKey.set(name, { ops: [], at: list.length, uses: new Set(), users: new Set(), ghosts: [] });
      list.push(byKey.get(name));
    }
    byKey.get(name).ops.push(i);
  });
  const unitOf = new Map(mine.map((i) => [i, byKey.get(of.get(i))]));
  const ghosts = new Map();
  mine.forEach((i) => (ops[i].uses || []).forEach((u) => {
    const user = unitOf.get(i), maker = unitOf.get(u) || ghost(ops, u, ghosts);
    if (maker !== user) { user.uses.add(maker); maker.users.add(user); }
  }));
  const next = new Map();
  ops.forEach((o, i) => unitOf.has(i) || (o.uses || []).forEach((u) => {
    if (!unitOf.has(u)) return;
    const name = o.op === "layers" ? o.like : o.module || "";
    if (!next.has(name) && next.size < 4) next.set(name, { ops: [], to: i, uses: new Set(), users: new Set(), about: `to ${outside(o, module)}`, kind: "ghost" });
    if (next.has(name)) { next.get(name).uses.add(unitOf.get(u)); unitOf.get(u).users.add(next.get(name)); }
  }));
  for (const unit of list) {
    describe(unit, ops, module, key);
    if (typed && unit.type && unit.kind !== "ghost") unit.lines.push(`→ ${unit.type}`);
    else if (unit.kind === "message") unit.lines.push(exposedOfAll(D.messages[unit.messages[0]]));
  }
  for (const given of ghosts.values()) describeGhost(given, ops, module);
  for (const given of next.values()) { given.title = given.about; given.lines = []; }
  return { list, all: [...ghosts.values(), ...list, ...next.values()], ops, module };
}

/** Group ops into boxes: {number of op: name of its box}. at: returns the module that is the box of a module's ops. */
function grouped(ops, mine, module, at) {
  const members = new Map();
  for (const i of mine) {
    const o = ops[i], path = o.module || "";
    const alone = o.op === "layers" || o.op === "receive" || o.input || path === module.path;
    const name = alone ? `op ${i}` : `${at(path)} of stage ${o.stage}`;
    members.set(name, [...(members.get(name) || []), i]);
  }
  const of = new Map();
  for (const [name, those] of members) {
    const sends = those.some((i) => ops[i].message !== undefined);
    const oneModule = new Set(those.map((i) => ops[i].module)).size === 1;
    const apart = those.length < FEWEST_OPS || (sends && (oneModule || those.length <= MOST_APART));
    those.forEach((i) => of.set(i, apart ? `op ${i}` : name));
  }
  return of;
}

const isLayer = (m) => Boolean(m.layers) || /^\d+$/.test(m.label || "");
const holdsLayers = (m) => m.children.some((c) => isLayer(c) || holdsLayers(c));

/** Return the inner module that is the box of a path: a direct child, or a child of the list of layers. */
function childOf(module, path) {
  let box = module;
  while (box.path !== path) {
    const child = box.children.find((c) => path === c.path || path.startsWith(`${c.path}.`));
    if (!child) break;
    box = child;
    if (isLayer(box) || !holdsLayers(box)) break;
  }
  return box.path;
}

function ghost(ops, i, ghosts) {
  const o = ops[i];
  const name = o.input ? `input ${o.name}` : `module ${o.module || o.op} ${o.message !== undefined ? i : ""}`;
  if (!ghosts.has(name)) ghosts.set(name, { ops: [], from: i, uses: new Set(), users: new Set(), kind: "ghost" });
  return ghosts.get(name);
}

function describeGhost(given, ops, module) {
  const o = ops[given.from];
  given.title = o.input ? o.name : `from ${outside(o, module)}`;
  given.lines = [];
}

/** Return the name of an op outside of a module: its module, or, in a module around this one, its op. */
function outside(o, module) {
  if (o.op === "layers") return `layers ${o.layers}`;
  const path = o.module || "";
  const around = path === "" || module.path.startsWith(`${path}.`);
  return around ? o.op : shortened(path, module.path);
}

/** Return a module's name within another, without the common part. */
function shortened(path, around) {
  const parts = path.split("."), outer = around.split(".");
  while (parts.length > 1 && outer.length && parts[0] === outer[0]) { parts.shift(); outer.shift(); }
  return parts.join(".");
}

function describe(unit, ops, module, key) {
  const first = ops[unit.ops[0]], last = ops[unit.ops[unit.ops.length - 1]];
  const own = (path) => shortened(path, module.path);
  const weightText = (w) => `${w.name.split(".").pop()} ${key === "before" ? w.plain : w.type}`;
  const messages = unit.ops.map((i) => ops[i].message).filter((m) => m !== undefined);
  const weights = [...new Set(unit.ops.flatMap((i) => ops[i].params || []))].map((p) => D.weights[p]);
  unit.messages = messages;
  unit.weights = weights;
  unit.type = last.type || "";
  unit.kind = "op";
  unit.path = first.module || "";
  if (unit.ops.length === 1 && first.message !== undefined) {
    const m = D.messages[first.message];
    unit.kind = "message";
    unit.exposure = exposure(m);
    unit.back = onlyBackward(m);
    unit.title = `${kindOf(m)} over ${axesOf(m)}`;
    const biggest = Math.max(0, ...ways(m).map((w) => w.bytes));
    unit.lines = [`${size(biggest)}${unit.back ? ", in backward" : ways(m).some((w) => w.direction === "backward") ? ", and in backward" : ""}`];
    return;
  }
  if (first.op === "layers") {
    const like = moduleAt.get(first.like);
    unit.kind = "module";
    unit.opens = first.like;
    unit.title = `layers ${first.layers}`;
    unit.lines = [`as ${first.like}`, ...(key === "after" ? chipsOf(below(like).flatMap((m) => m.messages)) : [])];
    if (key === "after") unit.split = [...new Set(below(like).flatMap((m) => m.weights).map(weightAxes).filter(Boolean))][0];
    return;
  }
  const name = own(first.module || "");
  const box = moduleAt.get(unit.path);
  if (unit.ops.length === 1) {
    const path = first.module === module.path ? "" : name;
    unit.title = first.input ? first.name : path ? `${path}: ${first.op}` : first.op;
    unit.lines = weights.slice(0, 3).map(weightText);
    if (first.input) unit.kind = "ghost";
  } else {
    const paths = [...new Set(unit.ops.map((i) => ops[i].module || ""))];
    const common = paths.reduce(prefix);
    unit.path = common;
    unit.opens = moduleAt.has(common) && common !== module.path ? common : undefined;
    unit.title = own(common) || "ops";
    const names = [...new Set(unit.ops.map((i) => ops[i].op))];
    unit.lines = [`${unit.ops.length} ops: ${names.slice(0, 3).join(", ")}${names.length > 3 ? ", …" : ""}`];
    if (box && paths.length === 1) unit.lines.push(...weights.slice(0, 2).map(weightText));
    unit.lines.push(...chipsOf(messages.map((m) => D.messages[m])));
    unit.kind = "module";
  }
  unit.split = key === "after" ? [...new Set(weights.map(weightAxes).filter(Boolean))][0] : undefined;
}

/** Return a line for each axis with the collectives in a closed box. */
function chipsOf(messages) {
  const byAxes = new Map();
  messages.forEach((m) => byAxes.set(axesOf(m), [...(byAxes.get(axesOf(m)) || []), m]));
  return [...byAxes].map(([axes, those]) => ({ text: `⇄ ${several(those.length, "collective")} over ${axes}${those.some((m) => exposure(m) === "e") ? ", waited for" : those.every((m) => exposure(m) === "h") ? ", hidden" : ""}`, kind: those.some((m) => exposure(m) === "e") ? "e" : those.every((m) => exposure(m) === "h") ? "h" : "u" }));
}

function prefix(a, b) {
  const x = a.split("."), y = b.split(".");
  let i = 0;
  while (i < x.length && x[i] === y[i]) i += 1;
  return x.slice(0, i).join(".");
}

// --- layout: dagre, in layers from top to bottom

const clipped = (text) => (text.length > WIDEST ? `${text.slice(0, WIDEST - 1)}…` : text);

function layout(found) {
  const g = new dagre.graphlib.Graph({ compound: true, multigraph: false });
  g.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 26, marginx: 14, marginy: 14 });
  g.setDefaultEdgeLabel(() => ({}));
  found.all.forEach((unit, i) => {
    unit.id = `u${i}`;
    unit.text = [unit.title, ...unit.lines].map((line) => (typeof line === "string" ? { text: clipped(line) } : { ...line, text: clipped(line.text) }));
    const font = (i, line) => (i === 0 || unit.kind === "message" || line.kind ? `600 12px ${FONT}` : "10.5px ui-monospace, monospace");
    unit.w = (unit.kind === "message" ? 32 : 20) + Math.max(...unit.text.map((line, i) => textWidth(line.text, font(i, line))));
    unit.h = 10 + LINE * unit.text.length;
    g.setNode(unit.id, { width: unit.w, height: unit.h });
  });
  frames(found, g);
  found.all.forEach((unit) => unit.uses.forEach((maker) => g.setEdge(maker.id, unit.id)));
  dagre.layout(g);
  return g;
}

/** Add a frame around the boxes of each module that has several. */
function frames(found, g) {
  const inner = new Map();
  for (const unit of found.list) {
    if (unit.kind === "ghost") continue;
    for (let m = moduleAt.get(unit.path); m && m.path !== found.module.path && m.parent >= 0; m = D.modules[m.parent]) {
      inner.set(m.path, [...(inner.get(m.path) || []), unit]);
    }
  }
  const kept = new Set([...inner].filter(([path, those]) => those.length > 1 && those.length < found.list.length && moduleAt.get(path).children.length > 0 && path !== found.module.path).map(([path]) => path));
  const nearest = (m) => { while (m && !kept.has(m.path)) m = m.parent >= 0 ? D.modules[m.parent] : null; return m; };
  kept.forEach((path) => g.setNode(`f${path}`, { frame: path }));
  kept.forEach((path) => {
    const outer = nearest(D.modules[moduleAt.get(path).parent]);
    if (outer && outer.path !== path) g.setParent(`f${path}`, `f${outer.path}`);
  });
  for (const unit of found.list) {
    const m = unit.kind === "ghost" ? null : nearest(moduleAt.get(unit.path));
    if (m) g.setParent(unit.id, `f${m.path}`);
  }
}

// --- drawing

function graphPicture(found, key) {
  let g;
  try {
    g = layout(found);
  } catch (error) {  // dagre cannot lay out some frames: try without them
    g = layout({ ...found, list: [] });
  }
  const place = new Map(found.all.map((unit) => [unit, g.node(unit.id)]));
  const frame = (name) => {
    const { x, y, width, height } = g.node(name);
    return [svg("rect", { class: "frame", x: x - width / 2, y: y - height / 2, width, height, rx: 6 }), svg("text", { class: "soft", x: x - width / 2 + 6, y: y - height / 2 + 13 }, shortened(name.slice(1), found.module.path))];
  };
  const head = (kind) => svg("marker", { id: `head-${key}${kind}`, class: `head ${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, svg("path", { d: "M0,0L8,4L0,8Z" }));
  const across = found.list.filter((unit) => unit.kind !== "ghost").map((unit) => place.get(unit).x).sort((a, b) => a - b);
  const ends = g.edges().flatMap((edge) => g.edge(edge).points.map((p) => p.x));  // dagre's width counts boxes only
  const left = Math.floor(Math.min(0, ...ends.map((x) => x - 4))), width = Math.ceil(Math.max(g.graph().width, ...ends.map((x) => x + 4))) - left, height = Math.ceil(g.graph().height);
  return svg("svg", { width, height, viewBox: `${left} 0 ${width} ${height}`, role: "group", "data-width": width, "data-height": height, "data-middle": (across[across.length >> 1] || width / 2) - left },
    g.nodes().filter((name) => name.startsWith("f")).map(frame), svg("defs", {}, ["", "e", "h", "u"].map(head)),
    g.edges().map((edge) => wire(found.all[Number(edge.v.slice(1))], found.all[Number(edge.w.slice(1))], g.edge(edge).points, key)),
    found.all.map((unit) => boxOf(unit, place, key, found)));
}

function wire(from, to, points, key) {
  const message = from.kind === "message" ? from : to.kind === "message" ? to : null;
  const line = svg("path", { class: `wire ${message ? message.exposure : ""} ${message && message.back ? "back" : ""}`, d: curve(points), "marker-end": `url(#head-${key}${message ? message.exposure : ""})`,
    "data-tip": `${from.title} → ${to.title}\n${from.type || ""}`, onclick: message ? () => pick(`m${message.messages[0]}`) : null });
  return message ? thing(line, `m${message.messages[0]}`, D.messages[message.messages[0]].lines) : line;
}

function boxOf(unit, place, key, found) {
  const at = place.get(unit);
  const kind = unit.kind === "message" ? `message ${unit.exposure}` : `${unit.kind} ${splitClass(unit.split || "")}`;
  const first = unit.ops[0];
  const x = unit.kind === "message" ? `m${unit.messages[0]}` : unit.kind === "ghost" && first === undefined ? null
    : unit.opens !== undefined ? `t${moduleAt.get(unit.opens).i}` : `${key === "after" ? "o" : "b"}${first}`;
  const open = () => {
    const o = found.ops[unit.from !== undefined ? unit.from : unit.to];
    if (unit.opens !== undefined) openModule(unit.opens);
    else if (unit.kind === "ghost" && o && !o.input) openModule(o.op === "layers" ? o.like : o.module || "");
  };
  const idOf = (other) => `${key}-${other.id}`;
  const group = svg("g", { class: `box ${kind}`, id: idOf(unit), role: "button", transform: `translate(${at.x - unit.w / 2} ${at.y - unit.h / 2})`, "aria-label": [unit.title, ...unit.text.slice(1).map((l) => l.text), unit.type].join(", "),
    "data-with": [...(unit.messages || []).map((m) => `m${m}`), ...(unit.weights || []).map((w) => `w${w.i}`)].join(" "),
    "data-tip": unit.type ? [unit.title, unit.type, unit.opens !== undefined ? "double click, or o: open it" : ""].filter(Boolean).join("\n") : null,
    ondblclick: open,
    onkeydown: (e) => {
      const to = e.key === "ArrowDown" ? [...unit.users] : e.key === "ArrowUp" ? [...unit.uses] : neighbours(unit, place, { ArrowRight: 1, ArrowLeft: -1 }[e.key]);
      if (e.key === "o") open();
      else if (to.length) byId(idOf(to[0])).focus();
      else return;
      e.preventDefault();
      e.stopPropagation();
    } },
    svg("rect", { class: "shape", width: unit.w, height: unit.h, rx: unit.kind === "message" ? unit.h / 2 : 4 }),
    unit.text.map((line, i) => sized(svg("text", {
      x: unit.w / 2, y: 17 + LINE * i, "text-anchor": "middle", "font-weight": i ? null : "600",
      class: line.text.startsWith("→") ? "type" : unit.kind === "message" ? (i === 2 ? "strong" : "") : line.kind ? "strong" : i ? "type" : "",
    }, line.text), line.kind ? { fill: TONE[line.kind] } : {})));
  const lines = [...new Set([...(unit.messages || []).flatMap((m) => D.messages[m].lines || []), ...(unit.weights || []).flatMap((w) => w.lines || [])])];
  if (x) thing(group, x, key === "after" || unit.kind !== "message" ? lines : []);
  return acts(group, () => (x ? pick(x) : open()));
}

/** Return the boxes to the right (way 1) or left (-1) in about the same row, the nearest first; none for undefined. */
function neighbours(unit, place, way) {
  const here = place.get(unit), away = (u) => (place.get(u).x - here.x) * way;
  return [...place.keys()].filter((u) => u !== unit && Math.abs(place.get(u).y - here.y) < 40 && away(u) > 0).sort((a, b) => away(a) - away(b));
}

/** Return a smooth path through the points: quadratic curves between the middles. */
function curve(points) {
  if (points.length < 3) return `M${points.map((p) => `${p.x},${p.y}`).join("L")}`;
  let d = `M${points[0].x},${points[0].y}`;
  for (let i = 1; i < points.length - 1; i += 1) {
    const end = i === points.length - 2 ? points[i + 1] : { x: (points[i].x + points[i + 1].x) / 2, y: (points[i].y + points[i + 1].y) / 2 };
    d += `Q${points[i].x},${points[i].y} ${end.x},${end.y}`;
  }
  return d;
}
