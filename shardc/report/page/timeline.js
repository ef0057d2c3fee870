// Draw when each rank computes and communicates. Times are nanoseconds.
"use strict";

const ROW = 26, LEFT = 118;
const FILL = { F: "var(--forward)", FB: "var(--pair)", FF: "var(--pair)", B: "var(--backward)", I: "var(--inputs)", W: "var(--weights)" };
const NAME = { F: "forward", FB: "forward beside backward", FF: "forward beside forward", B: "backward", I: "gradients of inputs", W: "gradients of weights" };
const PART = { forward: "var(--forward)", backward: "var(--backward)", "forward and backward": "var(--pair)" };
const view = { zoom: 1, open: new Set([0]), run: null };

function timelinePanel() {
  const t = D.timeline;
  if (!t) return el("p", { class: "hint" }, "This program is not compiled: it has no step.");
  const several_ = t.rows.length > 1;
  const tools = el("div", { class: "bar-of-tools" },
    el("b", {}, `${seconds(t.end / 1e9)} a step on ${F.device}`),
    F.schedule ? el("span", { class: "soft" }, `${F.schedule}: ${several(F.stages, "stage")}, ${several(F.microbatches, "microbatch", "microbatches")}; bubble ${percent(t.bubble)}: ranks wait for other stages`) : el("span", { class: "soft" }, several(F.microbatches, "microbatch", "microbatches")),
    el("span", { class: "group", role: "group", "aria-label": "Size" }, [["−", 1 / 1.6, "smaller (−)"], ["fit", 0, "all of the step (0)"], ["+", 1.6, "larger (+)"]].map(([text, by, about]) => el("button", { type: "button", title: about, "aria-label": about, onclick: () => zoomTimeline(by) }, text))));
  const measured = el("label", { class: "file", title: "a trace that `shardc run --trace STEP` wrote: its ranges are drawn below the rank's row" }, view.run ? view.run.said || `${view.run.name}: ${seconds(view.run.end / 1e9)} from its first range to its last, ${percent(view.run.end / t.end)} of the predicted step` : "lay a run over it …",
    el("input", { type: "file", accept: ".json,application/json", onchange: (e) => layRun(e.target.files[0]) }));
  const kinds = Object.keys(NAME).filter((k) => t.rows.some((r) => r.slots.some((s) => s[0] === k)));
  const legend = el("div", { class: "legend" }, kinds.map((k) => mark(FILL[k], NAME[k])), mark("var(--other)", `other: ${[...new Set(t.rows.flatMap((r) => r.tail.map(([name]) => name)))].join(", ")}`), F.axis ? mark("var(--sunk)", "bubble") : "", mark("var(--hidden)", "a collective, hidden"), mark("var(--exposed)", "waited for"));
  const scroll = el("div", { class: "scroll", id: "times", tabindex: "0", role: "group", "aria-label": "Timeline of a step; the table below says the same in words" });
  const words = t.rows.map((r) => [rankName(r), r.stages.join(", "), several(r.slots.length, "action"), number(percent(r.bubble)), Object.entries(r.waits).map(([axes, ns]) => `${axes} ${seconds(ns / 1e9)}`).join(", ") || "none"]);
  const about = several_ ? "Each row is one rank of a stage; a click on its name shows what its communicators send. Ranks along the other axes do the same at the same time." : "All ranks do the same at the same time.";
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
  const ns = (us) => Math.round((us - ranges[0].ts) * 1e3), sends = events.filter(isSend);
  // backward's ranges begin with the context that forward passes to it, and end when a stage's first op runs again
  const firsts = new Set(D.after.filter((o, i) => !o.input && o.op !== "receive" && D.after.findIndex((b) => b.stage === o.stage && !b.input && b.op !== "receive") === i).map((o) => [o.name, o.module].filter(Boolean).join(" ")));
  let backward = false;
  const found = ranges.map((e) => [e.name, ns(e.ts), ns(e.ts + e.dur), backward = e.name === "step_context" || (backward && !firsts.has(e.name))]);
  const end = Math.max(...[...ranges, ...sends].map((e) => ns(e.ts + e.dur)));
  return { name, rank: (trace.distributedInfo || {}).rank || 0, end, ranges: found, sends: sends.map((e) => [e.name, ns(e.ts), ns(e.ts + e.dur)]) };
}

/** Draw the rows of a measured run below its rank: return the parts, and the next row's y. */
function runRows(X, y, wide) {
  const parts = [];
  const rows = [["measured", view.run.ranges.map(([name, begin, end, backward]) => [name, begin, end, backward ? FILL.B : FILL.F])], ["… sends", view.run.sends.map((s) => [...s, "var(--unknown)"])]];
  for (const [label, bars] of rows.filter(([, some]) => some.length)) {
    parts.push(svg("text", { class: "soft", x: 14, y: y + 13 }, label), track(X(0), y, wide, 16));
    for (const [name, begin, end, fill] of bars) {
      const module = moduleAt.get(shownPath(name.split(" ")[1] || ""));
      parts.push(thing(bar(X, y, begin, end, fill, `measured: ${name}\n${seconds((end - begin) / 1e9)} from ${seconds(begin / 1e9)}`, 16), module.path ? `t${module.i}` : ""));
    }
    y += 20;
  }
  return [parts, y];
}

/** Draw the timeline. wide: its width in pixels. */
function timelinePicture(wide) {
  const t = D.timeline;
  const end = Math.max(t.end, view.run ? view.run.end : 0) || 1, mine = view.run && Math.max(t.rows.findIndex((r) => r.rank === view.run.rank), 0);
  const scale = (wide - LEFT - 16) / end;
  const X = (ns) => LEFT + ns * scale;
  const parts = [];
  let y = 8;
  t.rows.forEach((r, at) => {
    const open = view.open.has(at);
    const label = svg("g", { class: "box", role: "button", "aria-expanded": String(open), "aria-label": `${rankName(r)}, stage ${r.stages.join(", ")}: ${open ? "hide" : "show"} its streams` },
      svg("rect", { class: "shape", x: 4, y, width: LEFT - 12, height: ROW - 4, rx: 4 }),
      svg("text", { x: 10, y: y + 15 }, `${open ? "▾" : "▸"} ${rankName(r)}`), svg("text", { class: "soft", x: LEFT - 14, y: y + 15, "text-anchor": "end" }, F.axis ? `stage ${r.stages.join(",")}` : ""));
    acts(label, () => { if (open) view.open.delete(at); else view.open.add(at); fillTimeline(); });  // page.js
    parts.push(label, track(X(0), y, wide, ROW - 4, F.axis ? `bubble: ${rankName(r)} waits for other stages ${percent(r.bubble)} of the step` : null));
    r.slots.forEach((s) => parts.push(...slot(s, r, X, y)));
    r.tail.forEach(([name, begin, end]) => parts.push(bar(X, y, begin, end, "var(--other)", `${name}: ${seconds((end - begin) / 1e9)}`)));
    y += ROW;
    if (at === mine) {
      const [rows, below_] = runRows(X, y, wide);
      parts.push(...rows);
      y = below_;
    }
    if (!open) return;
    parts.push(svg("text", { class: "soft", x: 14, y: y + 13 }, "computing"), track(X(0), y, wide, 16));
    merged(r.computing.map(([part, begin, end]) => ({ begin, end, fill: PART[part] || "var(--other)", text: `${part}: computing for ${seconds((end - begin) / 1e9)}` })), scale).forEach((b) => parts.push(bar(X, y, b.begin, b.end, b.fill, b.text, 16)));
    y += 20;
    for (const [axes, spans] of Object.entries(r.streams)) {
      parts.push(svg("text", { class: "soft", x: 14, y: y + 13 }, axes), track(X(0), y, wide, 16));
      spans.forEach(([begin, end, exposed, message, direction, kind]) => {
        const text = `${kind} over ${axes}, ${direction}\n${seconds((end - begin) / 1e9)}, of which the rank waits ${seconds(exposed / 1e9)}${message >= 0 ? `\n${D.messages[message].cause}` : ""}`;
        const hidden = Math.max(end - exposed, begin);
        for (const [from, to, fill] of [[begin, hidden, "var(--hidden)"], [hidden, end, "var(--exposed)"]]) {
          if ((to - from) * scale < 0.15 && to - from < end - begin) continue;
          const shape = bar(X, y, from, to, fill, text, 16);
          if (message >= 0) thing(shape, `m${message}`, D.messages[message].lines).on.push(["click", () => pick(`m${message}`)]);
          parts.push(shape);
        }
      });
      y += 20;
    }
    if (r.left_out) { parts.push(svg("text", { class: "soft", x: LEFT, y: y + 12 }, `${r.left_out.toLocaleString("en")} more collectives of this rank are not drawn`)); y += 18; }
    y += 8;
  });
  const times = ticks(end, Math.max(3, Math.round(wide / 130)));
  const [unit, by] = times.at(-1) >= 1e9 ? ["s", 1e9] : times.at(-1) >= 1e6 ? ["ms", 1e6] : ["µs", 1e3];
  return svg("svg", { width: wide, height: y + 24, role: "presentation" },
    times.map((ns) => svg("line", { class: "grid", x1: X(ns), x2: X(ns), y1: 2, y2: y })), parts,
    times.map((ns) => svg("text", { class: "soft", x: X(ns), y: y + 14, "text-anchor": "middle" }, `${Number((ns / by).toPrecision(6))} ${unit}`)));
}

function track(x, y, wide, high = ROW - 4, text = null) {
  return svg("rect", { class: "track", x, y, width: Math.max(wide - x - 12, 0), height: high, "data-tip": text });
}

function bar(X, y, begin, end, fill, text, high = ROW - 4) {
  const shape = svg("rect", { class: "bar-item shape", x: X(begin), y, width: Math.max(X(end) - X(begin), 0.6), height: high, "data-tip": text });
  return sized(shape, { fill });
}

function slot([kind, microbatch, begin, end, stage, ...back], r, X, y) {
  const wide = X(end) - X(begin);
  // a pair: a forward together with the backward, or the forward, of another microbatch
  const those = back.length ? [["F", stage, microbatch], [kind[1], ...back]] : [[kind, stage, microbatch]];
  const name = those.map(([k, s, m]) => (r.stages.length > 1 ? `${s}${k}${m}` : `${k}${m}`)).join("+");
  const about = those.map(([k, s, m]) => `${NAME[k]} of microbatch ${m}${F.axis ? `, stage ${s}` : ""}`).join(" beside ");
  const text = `${about}\n${seconds((end - begin) / 1e9)} from ${seconds(begin / 1e9)}`;
  const shape = bar(X, y, begin, end, FILL[kind], text);
  shape.attributes.width = String(Math.max(wide - 0.7, 0.6));
  if (r.stages.length > 1) shape.style.opacity = String(1 - 0.4 * r.stages.indexOf(stage) / r.stages.length);
  if (D.stage_lines.length) thing(shape, "s", D.stage_lines);
  const label = [name, kind].find((n) => n.length * 7 < wide);
  return label ? [shape, svg("text", { class: "dark", x: (X(begin) + X(end)) / 2, y: y + 15, "text-anchor": "middle", "pointer-events": "none" }, label)] : [shape];
}

/** Merge neighbours of one colour that are too close to distinguish. */
function merged(bars, scale) {
  const out = [];
  for (const b of bars) {
    const last = out[out.length - 1];
    if (last && last.fill === b.fill && (b.begin - last.end) * scale < 0.5) last.end = b.end;
    else out.push({ ...b });
  }
  return out;
}
