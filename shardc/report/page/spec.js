// Draw the spec, line by line, and the details of the selected thing.
"use strict";

function specLines() {
  const rows = D.spec.lines.map((text, i) => {
    const line = i + 1, caused = causedBy(line);
    const any = caused.messages.length + caused.weights.length + caused.regions.length + caused.inputs.length + caused.activations.length + caused.rows.length || caused.stages;
    const waits = caused.messages.some((m) => exposure(m) === "e");
    const hash = /^\s*#/.test(text) ? 0 : text.search(/\s#/);
    const row = el("div", { class: `line${any ? " cause" : ""}${waits ? " waits" : ""}`, role: "listitem", "data-tip": any ? lineTip(caused) : null },
      el("span", { class: "no" }, String(line)),
      el("span", { class: "dot", "aria-hidden": "true" }, any ? (caused.messages.length || caused.rows.length ? "●" : "○") : ""),
      el("span", { class: "what" }, hash < 0 ? text : text.slice(0, hash), hash < 0 ? "" : el("span", { class: "comment" }, text.slice(hash))));
    thing(row, `l${line}`);
    if (any) {
      row.attributes["aria-label"] = `line ${line}: ${text.trim()}. ${lineTip(caused)}`;
      acts(row, () => pick(`l${line}`)).on.push(["keydown", (e) => lineKey(e)]);
    }
    return row;
  });
  return rows.length ? rows : [el("p", { class: "hint" }, "The program has no spec.")];
}

/** Summarize what a line caused. */
function lineTip(c) {
  const parts = [];
  const ran = sum(c.messages.map(countOf));
  if (c.messages.length) parts.push(`${several(ran, "collective")} a step, ${size(sum(c.messages.map(bytesOf)))}`);
  const waited = sum(c.messages.map(exposedOf));
  if (waited > 0) parts.push(`${seconds(waited)} exposed`);
  if (c.weights.length) parts.push(`splits ${several(sum(c.weights.map((w) => w.count || 1)), "weight")}`);
  if (c.inputs.length) parts.push(`splits ${several(c.inputs.length, "input")}`);
  if (c.activations.length) parts.push(c.activations.map((a) => a.text).join("\n"));
  if (c.regions.length) parts.push("regions that are computed again");
  if (c.stages) parts.push(several(F.stages, "stage"));
  if (!parts.length && c.rows.length) parts.push(several(c.rows.length, "row") + " of communication");
  return parts.join("\n");
}

/** Return the details of a thing: its title, then elements. */
function about(x) {
  const i = Number(x.slice(1));
  const of = { m: () => ofMessage(D.messages[i]), w: () => ofWeight(D.weights[i]), l: () => ofLine(i), r: () => ofRow(D.rows[i]), o: () => ofOp(D.after[i], i, "after"), b: () => ofOp(D.before[i], i, "before"), t: () => ofModule(D.modules[i]) };
  return of[x[0]]();
}

function lineLinks(lines) {
  return (lines || []).map((line) => {
    const text = D.spec.lines[line - 1] || "";
    return el("div", {}, el("button", { type: "button", class: "link mono", onclick: () => pick(`l${line}`) }, `line ${line}: ${text.trim()}`));
  });
}

function modelLine(x) {
  return x.line ? [code(x.line), x.code ? [el("br"), code(x.code.trim())] : ""].flat() : "";
}

function ofMessage(m) {
  const op = D.after.findIndex((o) => o.message === m.i);
  const lines = lineLinks(m.lines);
  const path = shownPath(m.module || "");
  const what = m.buckets ? `${m.name}: ${m.title || ""}` : `${kindOf(m)} over ${axesOf(m)}`;
  const bucket = (m.params || []).length ? [el("h3", {}, "Its weights"), weightList(m.params.map((p) => D.weights[p]))] : [];
  return [what,
    el("p", { class: exposure(m) === "e" ? "exposed" : exposure(m) === "h" ? "hidden" : "soft" }, exposedOfAll(m)),
    list([
      ["cause", el("span", {}, m.cause)],
      ["does", does(m)],
      ["spec", lines.length ? el("span", {}, lines) : ""],
      m.before ? ["turns", el("span", {}, code(m.before), el("br"), "into ", code(m.after || ""))] : ["type", m.after ? code(m.after) : ""],
      ["of", m.buckets ? "" : m.title],
      ["module", path ? moduleLink(path) : ""],
      ["model", el("span", {}, modelLine(m))],
      ["buckets", m.layers > 1 ? m.buckets : ""],
      ["alike", m.layers > 1 ? (m.buckets ? `${m.layers} equal buckets; figures are of all` : `${m.layers} equal layers have it; figures are of all`) : ""],
      ["stage", F.axis && m.stage !== undefined && m.stage >= 0 ? `${m.stage}${(m.layers || 1) > 1 ? ", the first of them" : ""}` : ""],
      m.implicit ? ["note", "no annotation of the spec implies it"] : null,
    ]),
    el("div", { class: "acts" },
      op >= 0 ? el("button", { type: "button", onclick: () => { state.graph = "after"; openModule(m.home); pick(tagOf(m)); reveal(tagOf(m)); } }, "show in the graph") : "",
      isTimed(m) && m.i !== undefined ? el("button", { type: "button", onclick: () => { show("timeline"); reveal(tagOf(m)); } }, "in the timeline") : "",
      el("button", { type: "button", onclick: () => { show("text"); reveal(tagOf(m)); } }, "in the text")),
    wayTable(m), ...bucket];
}

const tagOf = (m) => `m${m.i}`;

const DOES = {
  all_reduce: "sums what the ranks have; each gets all of the sum",
  reduce_scatter: "sums what the ranks have; each gets its slice of the sum",
  all_gather: "puts the ranks' slices together; each gets all of them",
  all_to_all: "each rank sends a slice to each other one",
  send_recv: "a stage sends what it made to the next one, and gets its gradient",
};

/** Describe what a message's collectives do, one phrase for each kind. */
function does(m) {
  const kinds = [...new Set(ways(m).map((w) => w.kind))];
  return kinds.filter((kind) => DOES[kind]).map((kind) => `${kind}: ${DOES[kind]}`).join(". ");
}

function wayTable(m) {
  if (!ways(m).length) return "";
  const rows = ways(m).map((w) => [w.direction, m.axes.length > 1 && w.axes ? `${w.kind} ${w.axes}` : w.kind, number(w.count.toLocaleString("en")), number(size(w.bytes)), ...timesOf(w), el("td", { class: "behind" }, w.behind || "")]);
  return [el("p", { class: "hint" }, F.axis ? "in a step, of one rank of each stage" : "in a step, of one rank"), table(["", "collective", "#×", "#each", "#takes", "#exposed", "behind"], rows)];
}

/** Return cells with the time of a way or a row, and the exposed part of it. */
function timesOf(w) {
  const text = (s) => (typeof s === "number" ? seconds(s) : "–");
  return [number(text(w.seconds)), number(text(w.exposed), w.exposed > 0.01 * w.seconds ? "exposed" : "")];
}

function ofWeight(w) {
  const bucket = D.messages.find((m) => m.buckets && w.bucket >= 0 && within(m.buckets, w.bucket));
  return [weightTitle(w),
    list([
      ["type", code(w.type)],
      ["split", splitText(w)],
      ["spec", el("span", {}, lineLinks(w.lines))],
      ["a rank", `${size(w.bytes || 0)} of ${size(w.whole || 0)}`],
      ["layers", (w.count || 1) > 1 ? `${w.count} equal layers have one` : ""],
      ["gradient", w.frozen ? "none: it is frozen" : (w.reduce || []).length ? `summed over ${w.reduce.join("+")}` : "needs no sum"],
      ["bucket", bucket ? el("button", { type: "button", class: "link", onclick: () => pick(tagOf(bucket)) }, bucket.name) : ""],
      ["also called", (w.aliases || []).join(", ")],
    ]),
    el("div", { class: "acts" }, el("button", { type: "button", onclick: () => { state.graph = "after"; openModule(D.modules[w.module || 0].path); pick(`w${w.i}`, { quiet: true }); } }, "show in the graph"))];
}

function ofModule(m) {
  const all = below(m), messages = all.flatMap((c) => c.messages), weights = all.flatMap((c) => c.weights);
  const stages = Object.entries(m.stages || {}).map(([stage, layers]) => `${layers ? `${layers}: ` : ""}stage ${stage}`).join("; ");
  return [titleOf(m),
    list([
      ["layers", m.layers ? `${m.layers}: ${m.count} equal layers, figures are of all` : ""],
      ["stages", F.axis ? stages : ""],
      ["weights", weights.length ? `${size(sum(weights.map((w) => (w.bytes || 0) * (w.count || 1))))} on the ranks that have them, ${size(sum(weights.map((w) => (w.whole || 0) * (w.count || 1))))} on one device` : "none"],
    ]),
    el("div", { class: "acts" }, el("button", { type: "button", onclick: () => openModule(m.path) }, "open the graph")),
    messages.length ? el("h3", {}, "Collectives") : "", messageList(messages),
    weights.length ? el("h3", {}, "Weights") : "", weightList(weights)];
}

function ofLine(line) {
  const c = causedBy(line);
  return [`line ${line} of ${D.spec.file || "the spec"}`, el("pre", {}, (D.spec.lines[line - 1] || "").trim()), el("p", { class: "soft" }, lineTip(c).replaceAll("\n", "; ")),
    c.stages ? el("div", { class: "acts" }, el("button", { type: "button", onclick: () => show("timeline") }, `${several(F.stages, "stage")}: the timeline`)) : "",
    c.messages.length ? el("h3", {}, "Collectives that it causes") : "", messageList(c.messages),
    c.weights.length ? el("h3", {}, "Weights that it splits") : "", weightList(c.weights),
    c.inputs.length ? el("h3", {}, "Inputs that it splits") : "", el("ul", {}, c.inputs.map((i) => el("li", {}, `${i.name} `, code(i.type)))),
    c.activations.length ? el("h3", {}, "Values that it places; what follows cites the weights") : "", el("ul", {}, c.activations.map((a) => el("li", {}, a.text, " ", a.modules.map((path) => [moduleLink(path), " "])))),
    c.regions.length ? el("h3", {}, "Computed again in backward") : "", el("ul", {}, c.regions.map((r) => el("li", {}, r.text)))];
}

function ofRow(r) {
  const messages = r.messages.map((i) => D.messages[i]);
  return [`${r.kind} over ${r.axes}, ${r.direction}`,
    list([
      ["cause", r.cause], ["spec", el("span", {}, lineLinks(r.lines))], ["a step", `${r.count.toLocaleString("en")} of ${size(r.bytes)} in all`],
      ["takes", typeof r.seconds === "number" ? seconds(r.seconds) : ""], ["exposed", typeof r.exposed === "number" ? seconds(r.exposed) : ""], ["behind", r.behind],
    ]), messages.length ? el("h3", {}, "Where in the program") : "", messageList(messages)];
}

function ofOp(o, i, graph) {
  if (o.message !== undefined && graph === "after") return ofMessage(D.messages[o.message]);
  if (o.like) return ofModule(moduleAt.get(o.like));
  const other = graph === "before" ? "" : (D.before.find((b) => b.name === o.name) || {}).type;
  return [`${o.name} = ${o.op}`,
    list([
      ["type", o.type ? code(o.type) : ""],
      ["one device", other && other !== o.type ? code(other) : ""],
      ["module", o.module ? moduleLink(shownPath(o.module)) : ""],
      ["model", el("span", {}, modelLine(o))],
      ["stage", F.axis && o.stage >= 0 ? String(o.stage) : ""],
    ]),
    graph === "after" ? el("div", { class: "acts" }, el("button", { type: "button", onclick: () => { show("text"); reveal(`o${i}`); } }, "in the text")) : "",
    (o.params || []).length ? el("h3", {}, "Weights") : "", weightList((o.params || []).map((p) => D.weights[p]))];
}

function moduleLink(path) {
  return el("button", { type: "button", class: "link", onclick: () => openModule(path) }, moduleAt.has(path) ? titleOf(moduleAt.get(path)) : path);
}

function messageList(messages) {
  return el("ul", {}, messages.map((m) => {
    const button = el("button", { type: "button", class: "link", onclick: () => pick(tagOf(m)) }, `${m.buckets ? `${m.name}: ` : ""}${kindOf(m)} over ${axesOf(m)}`);
    const place = m.home ? `${titleOf(moduleAt.get(m.home))} · ` : "";
    return thing(el("li", { class: "two" }, button, " ", el("span", { class: exposure(m) === "e" ? "exposed" : "soft" }, exposedText(m)), el("small", {}, `${place}${countOf(m) > 1 ? `${countOf(m).toLocaleString("en")} a step, ${size(bytesOf(m))} in all` : `${size(bytesOf(m))} a step`}`)), tagOf(m), m.lines);
  }));
}

function weightList(weights) {
  return el("ul", {}, weights.map((w) => thing(el("li", {}, el("button", { type: "button", class: "link", onclick: () => pick(`w${w.i}`) }, weightTitle(w)), " ", code(w.type), (w.count || 1) > 1 ? ` × ${w.count}` : ""), `w${w.i}`, w.lines)));
}
