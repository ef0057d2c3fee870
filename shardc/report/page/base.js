// Define what all panels share: the data, facts about it, and which things highlight each other.
"use strict";

const D = JSON.parse(typeof document === "undefined" ? DATA : document.getElementById("data").textContent);
const F = D.facts;
const state = { tab: "overview", module: "", picked: null, graph: "after" };

// --- things: all that can be selected

/** Name things: "m3" is message 3. Restore the values that the data leaves out, as they are empty. */
function things(kind, list, empty = {}) {
  list.forEach((t, i) => Object.assign(t, { ...empty, ...t, x: kind + i }));
  return list;
}

const OP = { uses: [], params: [], module: "", type: "" };
const THINGS = {
  m: things("m", D.messages, { axes: [], lines: [], ways: [], params: [], title: "", module: "", home: "" }),
  w: things("w", D.weights, { split: [], lines: [], reduce: [], aliases: [] }),
  r: things("r", D.rows),
  o: things("o", D.after, OP),
  b: things("b", D.before, OP),
  t: things("t", D.modules, { path: "", layers: "", stages: {} }),
  l: things("l", ["", ...D.spec.lines].map((text, i) => ({ text, line: i, lines: [i] }))),
};
const thingOf = (x) => (THINGS[x[0]] || [])[Number(x.slice(1))];

// Modules know their children, weights and messages; the module of a message's box is its home.
const moduleAt = new Map(D.modules.map((m) => [m.path, Object.assign(m, { children: [], weights: [], messages: [] })]));
D.modules.forEach((m) => m.parent >= 0 && D.modules[m.parent].children.push(m));
for (const w of D.weights) {
  w.over = w.split.map(([axis]) => axis).join("+");
  D.modules[w.module].weights.push(w);
}
for (const o of D.after) {
  const message = D.messages[o.message];
  if (message) Object.assign(message, { op: o, home: shownPath(o.module) });
  o.lines = unique([...(message ? message.lines : []), ...o.params.flatMap((p) => D.weights[p].lines)]);
}
for (const m of D.messages) {
  const total = (key) => sum(m.ways.map((w) => w[key] || 0));
  Object.assign(m, { count: total("count"), bytes: total("bytes"), seconds: total("seconds"), exposed: total("exposed") });
  m.timed = m.ways.some((w) => typeof w.seconds === "number");
  // whether a rank waits for it: "e" exposed (over 1 % of its time), "h" hidden, "u" unknown
  m.exposure = !m.timed ? "u" : m.exposed > 0.01 * m.seconds ? "e" : "h";
  m.kinds = unique(m.ways.map((w) => w.kind));
  m.over = m.axes.join("+");
  m.called = `${m.kinds.join(", ") || "no message"} over ${m.over}`;
  if (!m.buckets) moduleAt.get(m.home).messages.push(m);
}

// --- facts

/** Return in words how much of a message's time the rank waits. */
function exposedText(m) {
  if (!m.timed) return m.ways.length ? "waits: see the timeline" : "sends nothing";
  const all = seconds(m.seconds);
  return m.exposure === "h" ? `hidden, ${all}` : m.exposed > 0.99 * m.seconds ? `exposed, ${all}` : `exposed ${seconds(m.exposed)} of ${all}`;
}

/** Return exposedText, with the number of collectives in a step: the bytes beside it are of one. */
const exposedOfAll = (m) => `${exposedText(m)}${m.timed && m.count > 1 ? ` for all ${m.count.toLocaleString("en")}` : ""}`;

const axisSizes = Object.fromEntries(F.mesh);
const splits = unique(D.weights.map((w) => w.over).filter(Boolean)).sort();

/** Return the colour class of weights that are split over these axes. */
const splitClass = (axes) => (splits.includes(axes) ? `s${splits.indexOf(axes) % 5}` : "");

/** Return the path of the nearest module around a name; for a layer that is not shown, that of the equal one. */
function shownPath(path) {
  let found = "";
  for (const part of path.split(".").filter(Boolean)) {
    const equal = (list) => list.children.find((m) => m.layers && within(m.layers, Number(part)));
    const module = moduleAt.get(found ? `${found}.${part}` : part) || (/^\d+$/.test(part) && equal(moduleAt.get(found)));
    if (!module) break;
    found = module.path;
  }
  return found;
}

/** Return whether a number is in ranges such as "0-3,7". */
function within(ranges, number) {
  return ranges.split(",").some((range) => {
    const [first, last = first] = range.split("-").map(Number);
    return first <= number && number <= last;
  });
}

function below(module) {
  return [module, ...module.children.flatMap(below)];
}

/** Return a module's name, with all layers that it represents: model.layers.{0-79}.mlp. */
function titleOf(m) {
  if (!m.path) return F.model;
  const around = D.modules[m.parent];
  const own = m.path.slice(around.path ? around.path.length + 1 : 0);
  return (around.path ? `${titleOf(around)}.` : "") + (m.layers ? own.replace(/\d+$/, `{${m.layers}}`) : own);
}

/** Return a weight's name, in the same form. */
function weightTitle(w) {
  const module = D.modules[w.module];
  return module.path && w.name.startsWith(module.path) ? titleOf(module) + w.name.slice(module.path.length) : w.name;
}

/** Find modules of layers that are not shown by typed words, such as "layers.37", "layer 37" or "37 down_proj".
 *  Each comes with the module that it equals. */
function equalModules(words) {
  const typed = /^(.*?)[.\s]*\b(\d+)((?:[.\s].*)?)$/.exec(words.toLowerCase());
  if (!typed) return [];
  const [, head, number, rest] = typed, tail = rest.split(/[.\s]+/).filter(Boolean);
  const isList = (list) => ["", "s"].some((s) => `.${list.path.toLowerCase()}`.endsWith(head ? `.${head}${s}` : ""));
  return D.modules.filter((m) => m.layers && within(m.layers, Number(number)) && isList(D.modules[m.parent])).flatMap((layer) => {
    const begin = layer.path.replace(/\d+$/, number);
    return below(layer).map((m) => ({ text: begin + m.path.slice(layer.path.length), begin, module: m }));
  }).filter(({ text, begin }) => !moduleAt.has(text) && tail.every((part) => text.slice(begin.length).toLowerCase().includes(part)));
}

// --- highlights
//
// A thing on the page has the lines of the spec that caused it (data-l), and its message, weight or module (data-x).
// Pointing at a line highlights all that it caused; pointing at a thing highlights its lines, and the same thing elsewhere.

const linesOf = (x) => (thingOf(x) || {}).lines || [];

/** Return the things that a line caused, by their lists in the data. */
function causedBy(line) {
  const lists = ["messages", "weights", "regions", "inputs", "activations", "rows"];
  const caused = lists.map((name) => [name, D[name].filter((t) => t.lines.includes(line))]);
  return { ...Object.fromEntries(caused), stages: D.stage_lines.includes(line) };
}

function selectorOf(x) {
  if (x[0] === "l") return `[data-l~="${x.slice(1)}"], [data-x="${x}"]`;
  return [`[data-x="${x}"]`, `[data-with~="${x}"]`, ...linesOf(x).map((line) => `[data-x="l${line}"]`)].join(", ");
}
