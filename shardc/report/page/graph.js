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
  for (let m = module; m; m = D.modules[m.parent]) crumbs.unshift(m);
  const which = state.graph === "both" ? ["before", "after"] : [state.graph];
  const tools = el("div", { class: "bar-of-tools" },
    el("nav", { class: "path", "aria-label": "The modules around" }, crumbs.map((m, i) => [i ? el("span", { class: "soft" }, "›") : "",
      m === module ? el("b", {}, m.layers ? `${m.layers} (${m.count} equal)` : labelOf(m)) : link(labelOf(m), () => openModule(m.path))])),
    group("Which graph", [["before", "one device", "before the passes: the model as one device runs it"], ["after", "one rank", "after the passes: what a rank runs"], ["both", "both", "side by side"]].map(([key, text, about]) =>
      button(text, () => { state.graph = key; redraw(); remember(); }, { title: about, "aria-pressed": String(state.graph === key) }))),
    sizes((by) => scaleGraph(by), 1.25, "fit the width"));
  const legend = el("div", { class: "legend" },
    Object.entries({ e: "collective that is waited for", h: "collective hidden behind computing", u: "between stages, or of unknown time" }).filter(([kind]) => D.messages.some((m) => m.exposure === kind)).map(([kind, text]) => mark(TONE[kind], text)),
    D.messages.some(onlyBackward) ? el("span", {}, "- - only in backward") : "",
    splits.map((axes, i) => mark(`var(--split${i % 5})`, `weights split over ${axes}`)));
  return el("div", { class: "bench" }, tools, legend, el("div", { class: `sheets ${which.length > 1 ? "both" : ""}` }, which.map((key) => sheet(key, module))));
}

const onlyBackward = (m) => !m.buckets && m.ways.every((w) => w.direction === "backward");

function sheet(key, module) {
  const said = { before: "one device: the model's graph", after: `one rank: ${F.axis ? "the stages, one after the other" : "what every rank runs"}` }[key];
  const found = units(D[key], module, key);
  const boxes = found.list.length, none = D[key].length ? "No op runs in this module here: after the passes, or in this layer, it is empty." : "This program is not compiled: there is nothing after the passes.";
  return el("div", { class: "sheet" }, el("p", {}, `${said}${boxes ? `, ${several(boxes, "box", "boxes")}` : ""}`),
    boxes ? el("div", { class: "scroll", id: `sheet-${key}`, tabindex: "0", role: "group", "aria-label": `${said}. Tab goes from box to box, arrows along the lines, Enter selects, o opens a module.` }, graphPicture(found, key)) : el("p", { class: "hint" }, none));
}

// --- boxes

/** Return the boxes of a module: {list, all}; all: also of ops outside of it. typed: with types of results instead of times.
 *  A box is {ops, title, lines, kind, uses, users}. */
function units(ops, module, key, typed = false) {
  const inside = (path) => module.path === "" || path === module.path || path.startsWith(`${module.path}.`);
  // inputs are boxes only in the graph of the whole model
  const mine = ops.filter((o) => inside(o.module) && !(o.input && module.path));
  let of = grouped(mine, module, (path) => path);
  if (new Set(of.values()).size > MOST || mine.some((o) => o.op === "layers")) of = grouped(mine, module, (path) => childOf(module, path));
  const box = (more) => ({ ops: [], lines: [], messages: [], weights: [], uses: new Set(), users: new Set(), ...more });
  const list = [...groupBy(mine, (o) => of.get(o)).values()].map((those) => box({ ops: those }));
  const unitOf = new Map(list.flatMap((unit) => unit.ops.map((o) => [o, unit])));
  const from = new Map(), to = new Map();
  const ghost = (ghosts, name, of, title) => ghosts.get(name) || ghosts.set(name, box({ kind: "ghost", of, title })).get(name);
  const maker = (o) => unitOf.get(o) || (o.input ? ghost(from, `input ${o.name}`, o, o.name) : ghost(from, `module ${o.module || o.op} ${o.message !== undefined ? o.x : ""}`, o, `from ${outside(o, module)}`));
  const user = (o) => {
    const name = o.op === "layers" ? o.like : o.module;
    return unitOf.get(o) || (to.has(name) || to.size < 4 ? ghost(to, name, o, `to ${outside(o, module)}`) : null);
  };
  for (const o of ops) {
    for (const read of o.uses.map((u) => ops[u]).filter((r) => unitOf.has(o) || unitOf.has(r))) {
      const a = maker(read), b = user(o);
      if (b && a !== b) { b.uses.add(a); a.users.add(b); }
    }
  }
  for (const unit of list) {
    Object.assign(unit, describe(unit, module, key));
    if (typed && unit.type && unit.kind !== "ghost") unit.lines.push(`→ ${unit.type}`);
    else if (unit.kind === "message") unit.lines.push(exposedOfAll(unit.messages[0]));
  }
  return { list, all: [...from.values(), ...list, ...to.values()], module };
}

/** Group ops into boxes: {op: name of its box}. at: returns the module that is the box of a module's ops. */
function grouped(mine, module, at) {
  const alone = (o) => o.op === "layers" || o.op === "receive" || o.input || o.module === module.path;
  const members = groupBy(mine, (o) => (alone(o) ? o.x : `${at(o.module)} of stage ${o.stage}`));
  return new Map([...members].flatMap(([name, those]) => {
    const sends = those.some((o) => o.message !== undefined), oneModule = unique(those.map((o) => o.module)).length === 1;
    const apart = those.length < FEWEST_OPS || (sends && (oneModule || those.length <= MOST_APART));
    return those.map((o) => [o, apart ? o.x : name]);
  }));
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

/** Return the name of an op outside of a module: its module, or, in a module around this one, its op. */
function outside(o, module) {
  if (o.op === "layers") return `layers ${o.layers}`;
  return o.module === "" || module.path.startsWith(`${o.module}.`) ? o.op : shortened(o.module, module.path);
}

/** Return a module's name within another, without the common part. */
function shortened(path, around) {
  const parts = path.split("."), outer = around.split(".");
  while (parts.length > 1 && outer.length && parts[0] === outer[0]) { parts.shift(); outer.shift(); }
  return parts.join(".");
}

/** Return what a box shows and opens. */
function describe({ ops }, module, key) {
  const first = ops[0], after = key === "after", own = (path) => shortened(path, module.path);
  const messages = ops.filter((o) => o.message !== undefined).map((o) => D.messages[o.message]);
  const weights = unique(ops.flatMap((o) => o.params)).map((p) => D.weights[p]);
  const splitOf = (some) => (after ? some.map((w) => w.over).find(Boolean) : undefined);
  const texts = weights.map((w) => `${w.name.split(".").pop()} ${after ? w.type : w.plain}`);
  const unit = { messages, weights, type: ops.at(-1).type, kind: "op", path: first.module };
  if (ops.length === 1 && messages.length) {
    const [m] = messages, back = onlyBackward(m);
    const biggest = size(Math.max(0, ...m.ways.map((w) => w.bytes / w.count)));
    return { ...unit, kind: "message", back, title: m.called, lines: [`${biggest}${back ? ", in backward" : m.ways.some((w) => w.direction === "backward") ? ", and in backward" : ""}`] };
  }
  if (first.op === "layers") {
    const like = below(moduleAt.get(first.like));
    return { ...unit, kind: "module", opens: first.like, title: `layers ${first.layers}`, split: splitOf(like.flatMap((m) => m.weights)),
      lines: [`as ${first.like}`, ...(after ? chipsOf(like.flatMap((m) => m.messages)) : [])] };
  }
  unit.split = splitOf(weights);
  if (ops.length === 1) {
    const title = first.input ? first.name : first.module && first.module !== module.path ? `${own(first.module)}: ${first.op}` : first.op;
    return { ...unit, kind: first.input ? "ghost" : "op", title, lines: texts.slice(0, 3) };
  }
  const path = unique(ops.map((o) => o.module)).reduce(prefix), names = unique(ops.map((o) => o.op));
  const alone = ops.every((o) => o.module === path) && moduleAt.has(path);
  return { ...unit, kind: "module", path, opens: moduleAt.has(path) && path !== module.path ? path : undefined, title: own(path) || "ops",
    lines: [`${ops.length} ops: ${names.slice(0, 3).join(", ")}${names.length > 3 ? ", …" : ""}`, ...(alone ? texts.slice(0, 2) : []), ...chipsOf(messages)] };
}

/** Return a line for each axis with the collectives in a closed box. */
function chipsOf(messages) {
  return [...groupBy(messages, (m) => m.over)].map(([axes, those]) => {
    const kind = those.some((m) => m.exposure === "e") ? "e" : those.every((m) => m.exposure === "h") ? "h" : "u";
    return { kind, text: `⇄ ${several(those.length, "collective")} over ${axes}${{ e: ", waited for", h: ", hidden", u: "" }[kind]}` };
  });
}

function prefix(a, b) {
  const x = a.split("."), y = b.split("."), at = x.findIndex((part, i) => part !== y[i]);
  return (at < 0 ? x : x.slice(0, at)).join(".");
}

// --- layout: dagre, in layers from top to bottom

const clipped = (text) => (text.length > WIDEST ? `${text.slice(0, WIDEST - 1)}…` : text);

function layout(found) {
  const g = new dagre.graphlib.Graph({ compound: true, multigraph: false });
  g.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 26, marginx: 14, marginy: 14 });
  g.setDefaultEdgeLabel(() => ({}));
  found.all.forEach((unit, i) => {
    unit.id = `u${i}`;
    unit.text = [unit.title, ...unit.lines].map((text) => ({ ...(text.text ? text : {}), text: clipped(text.text || text) }));
    const font = (i, text) => (i === 0 || unit.kind === "message" || text.kind ? `600 12px ${FONT}` : "10.5px ui-monospace, monospace");
    unit.w = (unit.kind === "message" ? 32 : 20) + Math.max(...unit.text.map((text, i) => textWidth(text.text, font(i, text))));
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
  const boxes = found.list.filter((unit) => unit.kind !== "ghost");
  const around = (path) => {
    const modules = [];
    for (let m = moduleAt.get(path); m && m.path !== found.module.path && m.parent >= 0; m = D.modules[m.parent]) modules.push(m);
    return modules;
  };
  const inner = groupBy(boxes.flatMap((unit) => around(unit.path)), (m) => m);
  const kept = [...inner.keys()].filter((m) => inner.get(m).length > 1 && inner.get(m).length < found.list.length && m.children.length);
  const frameOf = (modules) => modules.find((m) => kept.includes(m));
  kept.forEach((m) => g.setNode(`f${m.path}`, { frame: m.path }));
  const inside = [...kept.map((m) => [`f${m.path}`, around(m.path).slice(1)]), ...boxes.map((unit) => [unit.id, around(unit.path)])];
  for (const [name, modules] of inside) if (frameOf(modules)) g.setParent(name, `f${frameOf(modules).path}`);
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
    return [svg("rect", { class: "frame", x: x - width / 2, y: y - height / 2, width, height, rx: 6 }), label(x - width / 2 + 6, y - height / 2 + 13, shortened(name.slice(1), found.module.path))];
  };
  const head = (kind) => svg("marker", { id: `head-${key}${kind}`, class: `head ${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, svg("path", { d: "M0,0L8,4L0,8Z" }));
  const across = found.list.filter((unit) => unit.kind !== "ghost").map((unit) => place.get(unit).x).sort((a, b) => a - b);
  const ends = g.edges().flatMap((edge) => g.edge(edge).points.map((p) => p.x));  // dagre's width counts boxes only
  const left = Math.floor(Math.min(0, ...ends.map((x) => x - 4))), width = Math.ceil(Math.max(g.graph().width, ...ends.map((x) => x + 4))) - left, height = Math.ceil(g.graph().height);
  return svg("svg", { width, height, viewBox: `${left} 0 ${width} ${height}`, role: "group", "data-width": width, "data-height": height, "data-middle": (across[across.length >> 1] || width / 2) - left },
    g.nodes().filter((name) => name.startsWith("f")).map(frame), svg("defs", {}, ["", "e", "h", "u"].map(head)),
    g.edges().map((edge) => wire(found.all[Number(edge.v.slice(1))], found.all[Number(edge.w.slice(1))], g.edge(edge).points, key)),
    found.all.map((unit) => boxOf(unit, place, key)));
}

function wire(from, to, points, key) {
  const sends = [from, to].find((unit) => unit.kind === "message"), message = sends && sends.messages[0], tone = message ? message.exposure : "";
  const line = svg("path", { class: `wire ${tone} ${sends && sends.back ? "back" : ""}`, d: curve(points), "marker-end": `url(#head-${key}${tone})`,
    "data-tip": `${from.title} → ${to.title}\n${from.type || ""}`, onclick: message ? () => pick(message.x) : null });
  return message ? thing(line, message) : line;
}

function boxOf(unit, place, key) {
  const at = place.get(unit), { kind, messages, weights, type } = unit, sends = kind === "message";
  const thingOfBox = sends ? messages[0] : unit.opens !== undefined ? moduleAt.get(unit.opens) : unit.ops[0];
  const open = () => {
    if (unit.opens !== undefined) openModule(unit.opens);
    else if (unit.of && !unit.of.input) openModule(unit.of.op === "layers" ? unit.of.like : unit.of.module);
  };
  const idOf = (other) => `${key}-${other.id}`;
  const go = (...to) => (to.length ? byId(idOf(to[0])).focus() : false);
  const box = svg("g", { class: `box ${sends ? `message ${messages[0].exposure}` : `${kind} ${splitClass(unit.split || "")}`}`, id: idOf(unit), role: "button", transform: `translate(${at.x - unit.w / 2} ${at.y - unit.h / 2})`, "aria-label": [unit.title, ...unit.text.slice(1).map((l) => l.text), type].join(", "),
    "data-with": [...messages, ...weights].map((t) => t.x).join(" "),
    "data-tip": type ? [unit.title, type, unit.opens !== undefined ? "double click, or o: open it" : ""].filter(Boolean).join("\n") : null,
    ondblclick: open,
    onkeydown: keyed({ o: open, ArrowDown: () => go(...unit.users), ArrowUp: () => go(...unit.uses), ArrowRight: () => go(...neighbours(unit, place, 1)), ArrowLeft: () => go(...neighbours(unit, place, -1)) }) },
    svg("rect", { class: "shape", width: unit.w, height: unit.h, rx: sends ? unit.h / 2 : 4 }),
    unit.text.map((text, i) => sized(svg("text", {
      x: unit.w / 2, y: 17 + LINE * i, "text-anchor": "middle", "font-weight": i ? null : "600",
      class: text.text.startsWith("→") ? "type" : sends ? (i === 2 ? "strong" : "") : text.kind ? "strong" : i ? "type" : "",
    }, text.text), text.kind ? { fill: TONE[text.kind] } : {})));
  if (thingOfBox) thing(box, { x: thingOfBox.x, lines: unique([...messages, ...weights].flatMap((t) => t.lines)) });
  return acts(box, () => (thingOfBox ? pick(thingOfBox.x) : open()));
}

/** Return the boxes to the right (way 1) or left (-1) in about the same row, the nearest first. */
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
