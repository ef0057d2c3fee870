// Draw the spec, line by line, and the details of the selected thing.
"use strict";

function specLines() {
  const rows = THINGS.l.slice(1).map(({ x, text, line }) => {
    const caused = causedBy(line), sent = caused.messages.length || caused.rows.length, tip = lineTip(caused);
    const any = Object.values(caused).some((c) => c === true || c.length);
    const waits = caused.messages.some((m) => m.exposure === "e");
    const hash = /^\s*#/.test(text) ? 0 : text.search(/\s#/);
    const row = el("div", { class: `line${any ? " cause" : ""}${waits ? " waits" : ""}`, role: "listitem", "data-tip": any ? tip : null },
      el("span", { class: "no" }, String(line)),
      el("span", { class: "dot", "aria-hidden": "true" }, any ? (sent ? "●" : "○") : ""),
      el("span", { class: "what" }, hash < 0 ? text : text.slice(0, hash), hash < 0 ? "" : el("span", { class: "comment" }, text.slice(hash))));
    if (any) {
      row.attributes["aria-label"] = `line ${line}: ${text.trim()}. ${tip}`;
      acts(row, () => pick(x)).on.push(["keydown", keyed({ ArrowDown: (e) => nextLine(e, 1), ArrowUp: (e) => nextLine(e, -1) })]);
    }
    return thing(row, { x });
  });
  return rows.length ? rows : [el("p", { class: "hint" }, "The program has no spec.")];
}

/** Summarize what a line caused. */
function lineTip(c) {
  const waited = sum(c.messages.map((m) => m.exposed));
  const parts = [
    c.messages.length && `${several(sum(c.messages.map((m) => m.count)), "collective")} a step, ${size(sum(c.messages.map((m) => m.bytes)))}`,
    waited > 0 && `${seconds(waited)} exposed`,
    c.weights.length && `splits ${several(sum(c.weights.map((w) => w.count)), "weight")}`,
    c.inputs.length && `splits ${several(c.inputs.length, "input")}`,
    ...c.activations.map((a) => a.text),
    c.regions.length && "regions that are computed again",
    c.stages && several(F.stages, "stage"),
  ].filter(Boolean);
  return parts.join("\n") || (c.rows.length ? `${several(c.rows.length, "row")} of communication` : "");
}

/** Return the details of a thing: its title, then elements. */
function about(x) {
  return { m: ofMessage, w: ofWeight, l: ofLine, r: ofRow, o: ofOp, b: ofOp, t: ofModule }[x[0]](thingOf(x));
}

// --- parts of details

const actions = (...buttons) => el("div", { class: "acts" }, buttons);
/** Return a list with a heading; nothing for an empty list. */
const titled = (title, items, row) => (items.length ? [el("h3", {}, title), el("ul", {}, items.map(row))] : "");
const moduleLink = (path) => link(moduleAt.has(path) ? titleOf(moduleAt.get(path)) : path, () => openModule(path));
/** Return a button that shows a thing in a panel. */
const showIn = (panel, text, x) => button(text, () => { show(panel); reveal(x); });

function lineLinks(lines) {
  return el("span", {}, lines.map((line) => el("div", {}, button(`line ${line}: ${(D.spec.lines[line - 1] || "").trim()}`, () => pick(`l${line}`), { class: "link mono" }))));
}

const modelLine = (o) => (o.line ? el("span", {}, code(o.line), o.code ? [el("br"), code(o.code.trim())] : "") : "");

function messageRow(m) {
  const place = m.home ? `${titleOf(moduleAt.get(m.home))} · ` : "";
  return thing(el("li", { class: "two" }, link(`${m.buckets ? `${m.name}: ` : ""}${m.called}`, () => pick(m.x)), " ", el("span", { class: m.exposure === "e" ? "exposed" : "soft" }, exposedText(m)),
    el("small", {}, `${place}${m.count > 1 ? `${m.count.toLocaleString("en")} a step, ${size(m.bytes)} in all` : `${size(m.bytes)} a step`}`)), m);
}

function weightRow(w) {
  return thing(el("li", {}, link(weightTitle(w), () => pick(w.x)), " ", code(w.type), w.count > 1 ? ` × ${w.count}` : ""), w);
}

/** Return cells with the time of a way or a row, and the exposed part of it. */
function timesOf(w) {
  const text = (s) => (typeof s === "number" ? seconds(s) : "–");
  return [number(text(w.seconds)), number(text(w.exposed), w.exposed > 0.01 * w.seconds ? "exposed" : "")];
}

// --- details

const DOES = {
  all_reduce: "sums what the ranks have; each gets all of the sum",
  reduce_scatter: "sums what the ranks have; each gets its slice of the sum",
  all_gather: "puts the ranks' slices together; each gets all of them",
  all_to_all: "each rank sends a slice to each other one",
  send_recv: "a stage sends what it made to the next one, and gets its gradient",
};

function ofMessage(m) {
  const op = m.buckets ? { params: m.params, stage: m.stage } : m.op || { params: [] }, weights = op.params.map((p) => D.weights[p]);
  const ways = m.ways.map((w) => [w.direction, m.axes.length > 1 && w.axes ? `${w.kind} ${w.axes}` : w.kind, number(w.count.toLocaleString("en")), number(size(w.bytes / w.count)), ...timesOf(w), el("td", { class: "behind" }, w.behind)]);
  return [m.buckets ? `${m.name}: ${m.title}` : m.called,
    el("p", { class: { e: "exposed", h: "hidden", u: "soft" }[m.exposure] }, exposedOfAll(m)),
    list([
      ["cause", m.cause],
      ["does", m.kinds.filter((kind) => DOES[kind]).map((kind) => `${kind}: ${DOES[kind]}`).join(". ")],
      ["spec", m.lines.length ? lineLinks(m.lines) : ""],
      m.before ? ["turns", el("span", {}, code(m.before), el("br"), "into ", code(op.type))] : ["type", op.type ? code(op.type) : ""],
      ["of", m.buckets ? "" : op.op === "receive" ? "between stages" : weights.map((w) => `of the weight ${w.name}`).join(", ")],
      ["module", shownPath(m.module) ? moduleLink(shownPath(m.module)) : ""],
      ["model", modelLine(op)],
      ["buckets", m.layers > 1 ? m.buckets : ""],
      ["alike", m.layers > 1 ? `${m.layers} equal ${m.buckets ? "buckets;" : "layers have it;"} figures are of all` : ""],
      ["stage", F.axis && op.stage >= 0 ? `${op.stage}${m.layers > 1 ? ", the first of them" : ""}` : ""],
      m.implicit ? ["note", "no annotation of the spec implies it"] : null,
    ]),
    actions(m.op ? button("show in the graph", () => { state.graph = "after"; openModule(m.home); pick(m.x); reveal(m.x); }) : "",
      m.timed ? showIn("timeline", "in the timeline", m.x) : "", showIn("text", "in the text", m.x)),
    ways.length ? [el("p", { class: "hint" }, F.axis ? "in a step, of one rank of each stage" : "in a step, of one rank"), table(["", "collective", "#×", "#mean", "#takes", "#exposed", "behind"], ways)] : "",
    m.buckets ? titled("Its weights", weights, weightRow) : ""];
}

function ofWeight(w) {
  const bucket = D.messages.find((m) => m.buckets && w.bucket >= 0 && within(m.buckets, w.bucket));
  return [weightTitle(w),
    list([
      ["type", code(w.type)],
      // by dim and axis: `column` and `row` are words for linear layers only
      ["split", w.split.map(([axis, dim]) => `dim ${dim} over ${axis}`).join(", ") || "whole on every rank"],
      ["spec", lineLinks(w.lines)],
      ["a rank", `${size(w.bytes)} of ${size(w.whole)}`],
      ["layers", w.count > 1 ? `${w.count} equal layers have one` : ""],
      ["gradient", w.frozen ? "none: it is frozen" : w.reduce.length ? `summed over ${w.reduce.join("+")}` : "needs no sum"],
      ["bucket", bucket ? link(bucket.name, () => pick(bucket.x)) : ""],
      ["also called", w.aliases.join(", ")],
    ]),
    actions(button("show in the graph", () => { state.graph = "after"; openModule(D.modules[w.module].path); pick(w.x, { quiet: true }); }))];
}

function ofModule(m) {
  const all = below(m), messages = all.flatMap((c) => c.messages), weights = all.flatMap((c) => c.weights);
  const stages = Object.entries(m.stages).map(([stage, layers]) => `${layers ? `${layers}: ` : ""}stage ${stage}`).join("; ");
  return [titleOf(m),
    list([
      ["layers", m.layers ? `${m.layers}: ${m.count} equal layers, figures are of all` : ""],
      ["stages", F.axis ? stages : ""],
      ["weights", weights.length ? `${size(allOf(weights, "bytes"))} on the ranks that have them, ${size(allOf(weights, "whole"))} on one device` : "none"],
    ]),
    actions(button("open the graph", () => openModule(m.path))), titled("Collectives", messages, messageRow), titled("Weights", weights, weightRow)];
}

function ofLine({ line, text }) {
  const c = causedBy(line);
  return [`line ${line} of ${D.spec.file || "the spec"}`, el("pre", {}, text.trim()), el("p", { class: "soft" }, lineTip(c).replaceAll("\n", "; ")),
    c.stages ? actions(button(`${several(F.stages, "stage")}: the timeline`, () => show("timeline"))) : "",
    titled("Collectives that it causes", c.messages, messageRow),
    titled("Weights that it splits", c.weights, weightRow),
    titled("Inputs that it splits", c.inputs, (i) => el("li", {}, `${i.name} `, code(i.type))),
    titled("Values that it places; what follows cites the weights", c.activations, (a) => el("li", {}, a.text, " ", a.modules.map((path) => [moduleLink(path), " "]))),
    titled("Computed again in backward", c.regions, (r) => el("li", {}, r.text))];
}

function ofRow(r) {
  const time = (s) => (typeof s === "number" ? seconds(s) : "");
  return [`${r.kind} over ${r.axes}, ${r.direction}`,
    list([["cause", r.cause], ["spec", lineLinks(r.lines)], ["a step", `${r.count.toLocaleString("en")} of ${size(r.bytes)} in all`], ["takes", time(r.seconds)], ["exposed", time(r.exposed)], ["behind", r.behind]]),
    titled("Where in the program", r.messages.map((i) => D.messages[i]), messageRow)];
}

function ofOp(o) {
  const after = o.x[0] === "o", other = after && (D.before.find((b) => b.name === o.name) || {}).type;
  if (o.message !== undefined) return ofMessage(D.messages[o.message]);
  if (o.like) return ofModule(moduleAt.get(o.like));
  return [`${o.name} = ${o.op}`,
    list([
      ["type", o.type ? code(o.type) : ""],
      ["one device", other && other !== o.type ? code(other) : ""],
      ["module", o.module ? moduleLink(shownPath(o.module)) : ""],
      ["model", modelLine(o)],
      ["stage", F.axis && o.stage >= 0 ? String(o.stage) : ""],
    ]),
    after ? actions(showIn("text", "in the text", o.x)) : "", titled("Weights", o.params.map((p) => D.weights[p]), weightRow)];
}
