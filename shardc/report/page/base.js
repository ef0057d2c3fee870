// Define what all panels share: the data, facts about it, and which things highlight each other.
"use strict";

const D = JSON.parse(typeof document === "undefined" ? DATA : document.getElementById("data").textContent);
const F = D.facts;

// --- facts about the data

const ways = (m) => m.ways || [];
const exposedOf = (m) => sum(ways(m).map((w) => w.exposed || 0));
const secondsOf = (m) => sum(ways(m).map((w) => w.seconds || 0));
const bytesOf = (m) => sum(ways(m).map((w) => w.bytes * w.count));
const countOf = (m) => sum(ways(m).map((w) => w.count));
const isTimed = (m) => ways(m).some((w) => typeof w.seconds === "number");

/** Return whether a rank waits for a message: "e" exposed (over 1 % of its time), "h" hidden, "u" unknown. */
function exposure(m) {
  if (!isTimed(m)) return "u";
  return exposedOf(m) > 0.01 * secondsOf(m) ? "e" : "h";
}

/** Return in words how much of a message's time the rank waits. */
function exposedText(m) {
  if (!isTimed(m)) return ways(m).length ? "waits: see the timeline" : "sends nothing";
  const all = secondsOf(m), waited = exposedOf(m);
  return exposure(m) === "h" ? `hidden, ${seconds(all)}` : waited > 0.99 * all ? `exposed, ${seconds(all)}` : `exposed ${seconds(waited)} of ${seconds(all)}`;
}

/** Return exposedText, with the number of collectives in a step: the bytes beside it are of one. */
function exposedOfAll(m) {
  return `${exposedText(m)}${isTimed(m) && countOf(m) > 1 ? ` for all ${countOf(m).toLocaleString("en")}` : ""}`;
}

/** Return the kinds of a message's collectives, such as "all_gather, reduce_scatter". */
function kindOf(m) {
  const kinds = [...new Set(ways(m).map((w) => w.kind))];
  return kinds.join(", ") || "no message";
}

function axesOf(m) {
  return (m.axes || []).join("+");
}

const axisSizes = Object.fromEntries(F.mesh);
const splits = [...new Set(D.weights.map((w) => (w.split || []).map((s) => s[0]).join("+")).filter(Boolean))].sort();

/** Return the colour class of weights that are split over these axes. */
function splitClass(axes) {
  const at = splits.indexOf(axes);
  return at < 0 ? "" : `s${at % 5}`;
}

const weightAxes = (w) => (w.split || []).map((s) => s[0]).join("+");

/** Return how a weight is split, by dim and axis: `column` and `row` are words for linear layers only. */
function splitText(w) {
  return (w.split || []).map(([axis, dim]) => `dim ${dim} over ${axis}`).join(", ") || "whole on every rank";
}

// Index the modules by path, with their children, weights and messages.
D.modules.forEach((m, i) => Object.assign(m, { i, path: m.path || "", children: [], weights: [], messages: [] }));
const moduleAt = new Map(D.modules.map((m) => [m.path, m]));
D.modules.forEach((m) => m.parent >= 0 && D.modules[m.parent].children.push(m));
D.weights.forEach((w, i) => { w.i = i; D.modules[w.module || 0].weights.push(w); });
// a message's home is the module of its box; for a message between layers that are not shown, the module around them
D.messages.forEach((m, i) => Object.assign(m, { i, home: shownPath(m.module || "") }));
D.after.forEach((o) => { if (o.message !== undefined) D.messages[o.message].home = shownPath(o.module || ""); });
D.messages.forEach((m) => !m.buckets && moduleAt.get(m.home).messages.push(m));

/** Return the path of the nearest module around a name; for a layer that is not shown, that of the equal one. */
function shownPath(path) {
  const parts = path.split(".");
  let found = "";
  for (const part of parts.filter(Boolean)) {
    const exact = found ? `${found}.${part}` : part;
    const module = moduleAt.get(exact) || (/^\d+$/.test(part) && equalLayer(found, Number(part)));
    if (!module) break;
    found = module.path;
  }
  return found;
}

function equalLayer(list, number) {
  const parent = moduleAt.get(list);
  return parent && parent.children.find((m) => m.layers && within(m.layers, number));
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
  const module = D.modules[w.module || 0];
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

const state = { tab: "overview", module: "", picked: null, graph: "after" };

function linesOfThing(x) {
  const i = Number(x.slice(1));
  if (x[0] === "m") return D.messages[i].lines || [];
  if (x[0] === "w") return D.weights[i].lines || [];
  if (x[0] === "r") return D.rows[i].lines || [];
  if (x[0] === "l") return [i];
  if (x[0] === "o") {
    const op = D.after[i];
    return [...new Set([...(op.message !== undefined ? D.messages[op.message].lines || [] : []), ...(op.params || []).flatMap((p) => D.weights[p].lines || [])])];
  }
  return [];
}

/** Return the things that a line caused. */
function causedBy(line) {
  const has = (t) => (t.lines || []).includes(line);
  return {
    messages: D.messages.filter(has),
    weights: D.weights.filter(has),
    regions: D.regions.filter(has),
    inputs: D.inputs.filter(has),
    activations: D.activations.filter(has),
    rows: D.rows.filter(has),
    stages: D.stage_lines.includes(line),
  };
}

function selectorOf(x) {
  if (x[0] === "l") return `[data-l~="${x.slice(1)}"], [data-x="${x}"]`;
  const lines = linesOfThing(x).map((line) => `[data-x="l${line}"]`);
  return [`[data-x="${x}"]`, `[data-with~="${x}"]`, ...lines].join(", ");
}
