// Draw when each rank computes and communicates. Times are nanoseconds.
"use strict";

const ROW = 26, LEFT = 118;
/** The kinds of actions: name, colour. */
const ACTIONS = {
  F: ["forward", "var(--forward)"], FB: ["forward beside backward", "var(--pair)"], FF: ["forward beside forward", "var(--pair)"],
  B: ["backward", "var(--backward)"], I: ["gradients of inputs", "var(--inputs)"], W: ["gradients of weights", "var(--weights)"],
};
const PART = { forward: "var(--forward)", backward: "var(--backward)", "forward and backward": "var(--pair)" };
const view = { zoom: 1, open: new Set([0]), run: null };
const time = (ns) => seconds(ns / 1e9);

function timelinePanel() {
  const t = D.timeline, run = view.run;
  if (!t) return el("p", { class: "hint" }, "This program is not compiled: it has no step.");
  const batches = several(F.microbatches, "microbatch", "microbatches");
  const tools = el("div", { class: "bar-of-tools" },
    el("b", {}, `${time(t.end)} a step on ${F.device}`),
    el("span", { class: "soft" }, F.schedule ? `${F.schedule}: ${several(F.stages, "stage")}, ${batches}; bubble ${percent(t.bubble)}: ranks wait for other stages` : batches),
    sizes((by) => zoomTimeline(by), 1.6, "all of the step"));
  const measured = el("label", { class: "file", title: "a trace that `shardc run --trace STEP` wrote: its ranges are drawn below the rank's row" }, run ? run.said || `${run.name}: ${time(run.end)} from its first range to its last, ${percent(run.end / t.end)} of the predicted step` : "lay a run over it …",
    el("input", { type: "file", accept: ".json,application/json", onchange: (e) => layRun(e.target.files[0]) }));
  const kinds = Object.keys(ACTIONS).filter((k) => t.rows.some((r) => r.slots.some((s) => s[0] === k)));
  const legend = el("div", { class: "legend" }, kinds.map((k) => mark(ACTIONS[k][1], ACTIONS[k][0])), mark("var(--other)", `other: ${unique(t.rows.flatMap((r) => r.tail.map(([name]) => name))).join(", ")}`), F.axis ? mark("var(--sunk)", "bubble") : "", mark("var(--hidden)", "a collective, hidden"), mark("var(--exposed)", "waited for"));
  const scroll = el("div", { class: "scroll", id: "times", tabindex: "0", role: "group", "aria-label": "Timeline of a step; the table below says the same in words" });
  const words = t.rows.map((r) => [rankName(r), r.stages.join(", "), several(r.slots.length, "action"), number(percent(r.bubble)), Object.entries(r.waits).map(([axes, ns]) => `${axes} ${time(ns)}`).join(", ") || "none"]);
  const about = t.rows.length > 1 ? "Each row is one rank of a stage; a click on its name shows what its communicators send. Ranks along the other axes do the same at the same time." : "All ranks do the same at the same time.";
  return el("div", { class: "bench" }, tools, measured, legend, el("p", { class: "hint" }, about), scroll,
    el("details", {}, el("summary", {}, "the same as a table"), table(["rank", "stages", "computes or sends", "idle for stages", "waits for collectives"], words)));
}

const rankName = (r) => (F.axis ? `${F.axis}=${r.at}` : "every rank");

/** Read a step from a trace of torch.profiler: {rank, end, ranges: [name, begin, end, backward], sends: [name, begin, end]}.
 *  Times start at the first range. Each node of a program is a range, "linear_1 h.0.fc"; on a GPU, a range of GPU time. */
function runOf(trace, name) {
  const events = (trace.traceEvents || []).filter((e) => e.ph === "X" && e.dur > 0);
  const isSend = (e) => /^(gloo|nccl):/.test(e.name) || (e.cat === "kernel" && /nccl/i.test(e.name));
  const of = (cat) => events.filter((e) => e.cat === cat && !isSend(e) && !e.name.startsWith("ProfilerStep")).sort((a, b) => a.ts - b.ts);
  const ranges = of("gpu_user_annotation").length ? of("gpu_user_annotation") : of("user_annotation");
  if (!ranges.length) return { name, said: `${name} has no ranges of a step: write it with \`shardc run --trace STEP\``, end: 0, ranges: [], sends: [] };
  const bar = (e) => [e.name, ...[e.ts, e.ts + e.dur].map((us) => Math.round((us - ranges[0].ts) * 1e3))], sends = events.filter(isSend).map(bar);
  // backward's ranges begin with the context that forward passes to it, and end when a stage's first op runs again
  const stages = groupBy(D.after.filter((o) => !o.input && o.op !== "receive"), (o) => o.stage);
  const firsts = [...stages.values()].map(([o]) => [o.name, o.module].filter(Boolean).join(" "));
  let backward = false;
  const found = ranges.map((e) => [...bar(e), backward = e.name === "step_context" || (backward && !firsts.includes(e.name))]);
  return { name, rank: (trace.distributedInfo || {}).rank || 0, end: Math.max(...[...found, ...sends].map((b) => b[2])), ranges: found, sends };
}

/** Draw the timeline. wide: its width in pixels. */
function timelinePicture(wide) {
  const t = D.timeline, run = view.run;
  const end = Math.max(t.end, run ? run.end : 0) || 1, mine = run && Math.max(t.rows.findIndex((r) => r.rank === run.rank), 0);
  const scale = (wide - LEFT - 16) / end;
  const X = (ns) => LEFT + ns * scale;
  const parts = [];
  let y = 8;
  const track = (high, tip = null) => svg("rect", { class: "track", x: X(0), y, width: Math.max(wide - X(0) - 12, 0), height: high, "data-tip": tip });
  const span = (begin, end, fill, tip, high = ROW - 4, less = 0) => sized(svg("rect", { class: "bar-item shape", x: X(begin), y, width: Math.max(X(end) - X(begin) - less, 0.6), height: high, "data-tip": tip }), { fill });
  const lane = (name, spans) => {  // a thin row
    parts.push(label(14, y + 13, name), track(16), ...spans);
    y += 20;
  };
  const slot = (r, [kind, microbatch, begin, end, stage, ...back]) => {
    // a pair: a forward together with the backward, or the forward, of another microbatch
    const those = back.length ? [["F", stage, microbatch], [kind[1], ...back]] : [[kind, stage, microbatch]];
    const name = those.map(([k, s, m]) => (r.stages.length > 1 ? `${s}${k}${m}` : `${k}${m}`)).join("+");
    const about = those.map(([k, s, m]) => `${ACTIONS[k][0]} of microbatch ${m}${F.axis ? `, stage ${s}` : ""}`).join(" beside ");
    const shape = span(begin, end, ACTIONS[kind][1], `${about}\n${time(end - begin)} from ${time(begin)}`, ROW - 4, 0.7);
    if (r.stages.length > 1) shape.style.opacity = String(1 - 0.4 * r.stages.indexOf(stage) / r.stages.length);
    if (D.stage_lines.length) thing(shape, { x: "s", lines: D.stage_lines });
    const text = [name, kind].find((n) => n.length * 7 < X(end) - X(begin));
    return text ? [shape, svg("text", { class: "dark", x: (X(begin) + X(end)) / 2, y: y + 15, "text-anchor": "middle", "pointer-events": "none" }, text)] : [shape];
  };
  const measured = ([name, begin, end, fill]) => {
    const module = moduleAt.get(shownPath(name.split(" ")[1] || ""));
    return thing(span(begin, end, fill, `measured: ${name}\n${time(end - begin)} from ${time(begin)}`, 16), module.path ? { x: module.x } : {});
  };
  const sent = (axes, [begin, end, exposed, number, direction, kind]) => {
    const message = D.messages[number], hidden = Math.max(end - exposed, begin);
    const tip = `${kind} over ${axes}, ${direction}\n${time(end - begin)}, of which the rank waits ${time(exposed)}${message ? `\n${message.cause}` : ""}`;
    return [[begin, hidden, "var(--hidden)"], [hidden, end, "var(--exposed)"]].filter(([from, to]) => (to - from) * scale >= 0.15 || to - from >= end - begin).map(([from, to, fill]) => {
      const shape = span(from, to, fill, tip, 16);
      if (message) thing(shape, message).on.push(["click", () => pick(message.x)]);
      return shape;
    });
  };
  t.rows.forEach((r, at) => {
    const open = view.open.has(at);
    const head = svg("g", { class: "box", role: "button", "aria-expanded": String(open), "aria-label": `${rankName(r)}, stage ${r.stages.join(", ")}: ${open ? "hide" : "show"} its streams` },
      svg("rect", { class: "shape", x: 4, y, width: LEFT - 12, height: ROW - 4, rx: 4 }),
      svg("text", { x: 10, y: y + 15 }, `${open ? "▾" : "▸"} ${rankName(r)}`), label(LEFT - 14, y + 15, F.axis ? `stage ${r.stages.join(",")}` : "", { "text-anchor": "end" }));
    acts(head, () => { if (open) view.open.delete(at); else view.open.add(at); fillTimeline(); });  // page.js
    parts.push(head, track(ROW - 4, F.axis ? `bubble: ${rankName(r)} waits for other stages ${percent(r.bubble)} of the step` : null));
    parts.push(...r.slots.flatMap((s) => slot(r, s)), ...r.tail.map(([name, begin, end]) => span(begin, end, "var(--other)", `${name}: ${time(end - begin)}`)));
    y += ROW;
    if (at === mine && run.ranges.length) lane("measured", run.ranges.map(([name, begin, end, backward]) => measured([name, begin, end, ACTIONS[backward ? "B" : "F"][1]])));
    if (at === mine && run.sends.length) lane("… sends", run.sends.map((s) => measured([...s, "var(--unknown)"])));
    if (!open) return;
    lane("computing", merged(r.computing, scale).map(([part, begin, end]) => span(begin, end, PART[part] || "var(--other)", `${part}: computing for ${time(end - begin)}`, 16)));
    for (const [axes, spans] of Object.entries(r.streams)) lane(axes, spans.flatMap((s) => sent(axes, s)));
    if (r.left_out) { parts.push(label(LEFT, y + 12, `${r.left_out.toLocaleString("en")} more collectives of this rank are not drawn`)); y += 18; }
    y += 8;
  });
  const times = ticks(end, Math.max(3, Math.round(wide / 130)));
  const [unit, by] = times.at(-1) >= 1e9 ? ["s", 1e9] : times.at(-1) >= 1e6 ? ["ms", 1e6] : ["µs", 1e3];
  return svg("svg", { width: wide, height: y + 24, role: "presentation" },
    times.map((ns) => line(X(ns), X(ns), 2, y)), parts,
    times.map((ns) => label(X(ns), y + 14, `${Number((ns / by).toPrecision(6))} ${unit}`, { "text-anchor": "middle" })));
}

/** Merge neighbours of one colour that are too close to distinguish. */
function merged(spans, scale) {
  const out = [];
  for (const [part, begin, end] of spans) {
    const last = out.at(-1);
    if (last && (PART[last[0]] || "") === (PART[part] || "") && (begin - last[2]) * scale < 0.5) last[2] = end;
    else out.push([part, begin, end]);
  }
  return out;
}
