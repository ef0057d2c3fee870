// Draw the overview, communication by axis, the proof, and the program's text.
"use strict";

const TABS = { overview: "Overview", graph: "Graph", timeline: "Timeline", memory: "Memory", comm: "Communication", proof: "Proof", text: "Text", tree: "Modules", spec: "Spec" };
/** The function that draws each panel, called with the width of its pictures in pixels. */
const DRAW = { overview: overviewPanel, graph: graphPanel, timeline: timelinePanel, memory: memoryPanel, comm: commPanel, proof: proofPanel, text: textPanel };

const meshText = () => (F.mesh.length ? F.mesh.map(([axis, n]) => `${axis}=${n}`).join(" × ") : "one device");

function factButtons() {
  const fact = (panel, value, about, kind = "", extra = null) => el("button", { type: "button", onclick: () => show(panel), title: `open: ${TABS[panel]}` }, el("b", { class: kind }, value), extra, el("span", {}, about));
  const facts = [
    fact("overview", several(F.ranks, "rank"), F.axis ? `${several(F.stages, "stage")} over ${F.axis}, ${F.schedule}` : "every rank runs the same"),
    fact("overview", `${count(F.numbers)} parameters`, `${size(F.mine)} on a rank`),
  ];
  if (F.device) {
    facts.push(fact("timeline", `${seconds(F.seconds)} a step`, `on ${F.device}${F.axis ? `; bubble ${percent(F.bubble)}` : ""}`));
    const share = F.peak / F.limit;
    const meter = sized(el("i"), { width: `${Math.min(100 * share, 100)}%` });
    facts.push(fact("memory", `${size(F.peak)} peak`, `${percent(share)} of ${size(F.limit)}: ${F.fits ? "fits" : "does not fit"}`, F.fits ? "" : "bad", el("div", { class: `meter ${F.fits ? "" : "over"}` }, meter)));
    const waited = sum(Object.values(F.exposed));
    facts.push(fact("comm", `${seconds(waited)} exposed`, `${percent(waited / F.seconds || 0)}: of the rank that waits longest for collectives`));
  }
  const p = D.proof;
  facts.push(fact("proof", p ? (p.ok ? "✓ proven" : `✗ ${several(p.gaps.length, "gap")}`) : "not checked", p && p.ok ? "equal to one device" : p ? "not proven equal to one device" : "no proof was asked for", p ? (p.ok ? "good" : "bad") : ""));
  return facts;
}

function overviewPanel() {
  const cards = [];
  cards.push(el("section", {}, el("h2", {}, `Communication of a step, by axis${F.axis ? ", all stages added up" : ""}`), axisBars(true), el("button", { type: "button", class: "link", onclick: () => show("comm") }, "all collectives")));
  if (D.memory) {
    const worstPanel = D.memory.panels.reduce((a, b) => (b.peak > a.peak ? b : a));
    const kinds = Object.entries(worstPanel.kinds);
    cards.push(el("section", {}, el("h2", {}, `Memory at the peak${F.axis ? ` of the fullest, ${placeOf(worstPanel)}` : ""}`), el("div", { class: "bar", role: "img", "aria-label": kinds.map(([k, n]) => `${k} ${size(n)}`).join(", ") },
      kinds.map(([k, n]) => sized(el("i", { "data-tip": `${k} ${size(n)}` }), { background: KINDS[k], width: `${100 * n / worstPanel.peak}%` }))),
    el("div", { class: "legend" }, kinds.map(([k, n]) => mark(KINDS[k], `${k} ${size(n)}`))), el("p", { class: "soft" }, `at ${worstPanel.where}${keptBy(worstPanel) ? `; activations of at most ${several(Number(keptBy(worstPanel)), "microbatch", "microbatches")} are kept` : ""}`)));
  }
  const worst = D.messages.filter(ways_).sort((a, b) => exposedOf(b) - exposedOf(a) || bytesOf(b) - bytesOf(a)).slice(0, 5);
  cards.push(el("section", {}, el("h2", {}, "Collectives that a step waits for longest", F.axis ? ", all stages added up" : ""), worst.length ? messageList(worst) : el("p", { class: "soft" }, "None: ranks send nothing to each other.")));
  cards.push(el("section", {}, el("h2", {}, "How weights are split"), el("div", {}, splitSummary())));
  D.scores.forEach((s) => cards.push(el("section", {}, el("h2", {}, `Attention of ${s.modules.join(", ")}`), el("p", { class: "soft" }, `${s.about}. ${s.work}`), scoresPicture(s))));
  cards.push(el("section", {}, el("h2", {}, "Inputs"), el("ul", {}, D.inputs.map((i) => thing(el("li", {}, `${i.name} `, code(i.type)), "", i.lines)))));
  if (D.regions.length) cards.push(el("section", {}, el("h2", {}, "Computed again in backward"), el("ul", {}, D.regions.map((r) => thing(el("li", {}, r.text), "", r.lines)))));
  if (D.notes.length) cards.push(el("section", {}, el("h2", {}, "Notes of the compiler"), el("ul", {}, D.notes.map((n) => thing(el("li", {}, n.text), "", n.lines)))));
  cards.push(el("section", {}, el("h2", {}, "How to read this page"), typesHelp()));
  return el("div", { class: "cards" }, cards);
}

const ways_ = (m) => ways(m).length > 0;

function typesHelp() {
  const rows = [
    ["bf16[32@dp, 4096]", "32 rows, spread over axis dp; 4096 columns, whole"],
    ["+tp", "a partial sum: the value is the sum over the ranks of tp"],
    ["~dp", "its gradient is a partial sum over dp: before the update, the ranks' gradients are added up there"],
    ["exposed", "red: the rank waits for a collective, nothing is computed meanwhile", "exposed"],
    ["hidden", "violet: it runs while the rank computes", "hidden"],
    ["see timeline", "grey-blue: sent between stages; who waits for it is in the timeline", "unknown"],
    ["lit", "yellow: what the line of the spec under the pointer caused, or the line that caused it", "like-lit"],
    ["bubble", "the share of a step in which ranks wait for other stages"],
    ["bucket 2", "gradients that are summed in one collective"],
    ["⇄2", "two collectives in this module"],
    ["{0-39,41}", "layers that are equal, shown once; figures are of all of them"],
  ];
  return table([], rows.map(([sign, about, kind = ""]) => [el("code", { class: kind }, sign), about]), { wide: false });
}

function splitSummary() {
  const by = new Map();
  D.weights.forEach((w) => by.set(weightAxes(w), [...(by.get(weightAxes(w)) || []), w]));
  return [...by].map(([axes, weights]) => {
    const lines = [...new Set(weights.flatMap((w) => w.lines || []))];
    const text = `${several(sum(weights.map((w) => w.count || 1)), "weight")}, ${size(sum(weights.map((w) => (w.whole || 0) * (w.count || 1))))} of one device`;
    return thing(el("p", {}, el("span", { class: `chip ${splitClass(axes)}` }, axes || "whole"), ` ${text}`), "", axes ? lines : []);
  });
}

const RANKS = ["--forward", "--backward", "--weights", "--pair", "--inputs", "--other"].map((name) => `var(${name})`);

/** Draw attention's scores: rows are queries, columns are keys, coloured by the rank that computes them. */
function scoresPicture(s) {
  const side = 200, high = side / s.cells.length, wide = side / s.cells[0].length;
  const cells = s.cells.flatMap((row, i) => row.map((rank, j) => sized(svg("rect", { x: j * wide, y: i * high, width: wide, height: high, "data-tip": rank === null ? "nothing is computed" : `rank ${rank}` }), { fill: rank === null ? "var(--sunk)" : RANKS[rank % RANKS.length] })));
  const ranks = s.pairs.slice(0, 9).flatMap((pairs, rank) => [sized(svg("rect", { x: side + 14, y: 4 + 20 * rank, width: 12, height: 12 }), { fill: RANKS[rank % RANKS.length] }), svg("text", { class: "soft", x: side + 32, y: 14 + 20 * rank }, `rank ${rank}: ${count(pairs)}`)]);
  const rest = s.pairs.length > 9 ? svg("text", { class: "soft", x: side + 32, y: 14 + 180 }, `and ${s.pairs.length - 9} more`) : "";
  return svg("svg", { width: side + 130, height: side + 4, viewBox: `0 0 ${side + 130} ${side + 4}`, role: "img", "aria-label": s.work }, cells, ranks, rest);
}

/** Draw the hidden and exposed time of each axis's collectives; their bytes if no device is known. */
function axisBars(short = false) {
  const axes = [...new Set(D.rows.map((r) => r.axes))];
  if (!axes.length) return el("p", { class: "soft" }, "Ranks send nothing to each other.");
  const of = (a, key) => sum(D.rows.filter((r) => r.axes === a).map((r) => r[key] || 0));
  const timed = D.rows.some((r) => typeof r.seconds === "number");
  const most = Math.max(...axes.map((a) => of(a, timed ? "seconds" : "bytes"))) || 1;
  const rows = axes.map((a) => {
    const taken = of(a, "seconds"), waited = of(a, "exposed");
    const lines = [...new Set(D.rows.filter((r) => r.axes === a).flatMap((r) => r.lines || []))];
    const bars = timed ? [["exposed", waited], ["hidden", taken - waited]].filter(([, s]) => s > 1e-9).map(([name, s]) => sized(el("i", { "data-tip": `${name} ${seconds(s)}` }), { background: `var(--${name})`, width: `${100 * s / most}%` }))
      : sized(el("i"), { background: "var(--unknown)", width: `${100 * of(a, "bytes") / most}%` });
    const said = taken ? `${seconds(waited)} of ${seconds(taken)}` : timed ? "see timeline" : "";
    return thing(el("tr", {}, el("td", {}, el("b", {}, a)), el("td", { class: "fill" }, el("div", { class: "bar", role: "img", "aria-label": `${seconds(waited)} exposed of ${seconds(taken)}` }, bars)),
      short ? "" : number(size(of(a, "bytes"))), number(said, waited > 0.01 * taken ? "exposed" : "soft")), "", lines);
  });
  return table(["axis", "", ...(short ? [] : ["#bytes"]), `#${timed ? "exposed of all" : ""}`], rows, { wide: false, class: "axes" });
}

function commPanel() {
  const axes = [...new Set(D.rows.map((r) => r.axes))];
  if (!axes.length) return el("p", {}, "Ranks send nothing to each other.");
  const heads = ["cause", "collective", "#a step", F.axis ? "#bytes, all stages" : "#bytes a rank", "#takes", "#exposed", "behind"];
  const sections = axes.map((a) => {
    const rows = D.rows.map((r, i) => [r, i]).filter(([r]) => r.axes === a).map(([r, i]) => {
      const row = el("tr", { class: "item", "data-with": r.messages.map((m) => `m${m}`).join(" "), "aria-label": `${r.kind} over ${r.axes}: its cause` },
        el("td", { class: "why" }, r.cause), el("td", {}, `${r.kind}, ${r.direction}`), number(r.count.toLocaleString("en")), number(size(r.bytes)), timesOf(r), el("td", { class: "behind" }, r.behind || ""));
      return acts(thing(row, `r${i}`, r.lines), () => pick(r.messages.length === 1 ? `m${r.messages[0]}` : `r${i}`));
    });
    const ranks = a.split("+").map((axis) => axisSizes[axis.split("[")[0]] || 1).reduce((p, q) => p * q, 1);
    return el("section", {}, el("h3", {}, a, " ", el("small", {}, `${several(ranks, "rank")} in a group`)), table(heads, rows));
  });
  return [el("h2", {}, "Collectives of a step, by axis and cause"), axisBars(),
    el("p", { class: "hint" }, "A click on a row says which collectives of the program it counts, and why they are there."), sections];
}

function proofPanel() {
  const p = D.proof;
  if (!p) return el("p", { class: "hint" }, "The program was not checked. `shardc inspect --html FILE` checks it, as `shardc verify --static` does.");
  return [
    el("p", { class: `verdict ${p.ok ? "good" : "bad"}` }, p.said),
    el("p", {}, "An independent checker reads the text of every stage and the captured graph, runs nothing, and follows every value: which slice, replica or partial sum of which value of the model it is; that each collective turns one into the other; that gradients are summed over the right axes, once; that every parameter is updated by its owners and published."),
    p.gaps.length ? el("h3", {}, "What is not proven") : "",
    p.gaps.map((g) => el("div", { class: "gap" }, el("b", {}, g.where), ": ", g.what, list([["line", g.line ? code(g.line) : ""], ["model", g.source], ["right", g.right]])))];
}

const CALL = /^    (\w+) = /;

function textPanel() {
  const byName = new Map();
  D.after.forEach((o, i) => byName.set(`${o.stage} ${o.name}`, i));
  let stage = -1;
  const rows = D.text.map((text) => {
    const begun = /^def stage(\d+)\(/.exec(text);
    if (begun) stage = Number(begun[1]);
    const bucket = /^# bucket (\d+): /.exec(text);
    const m = bucket ? D.messages.find((b) => b.buckets && within(b.buckets, Number(bucket[1]))) : null;
    const called = CALL.exec(text) || /^    (\w+),  # .* \| \w+\/\w+ /.exec(text);
    const i = called ? byName.get(`${stage} ${called[1]}`) : undefined;
    const message = m ? m.i : i !== undefined ? D.after[i].message : undefined;
    if (message !== undefined) return acts(thing(el("div", { class: `message ${exposure(D.messages[message])}` }, text), `m${message}`, D.messages[message].lines), () => pick(`m${message}`));
    if (i !== undefined) return thing(el("div", { onclick: () => pick(`o${i}`) }, text), `o${i}`, linesOfThing(`o${i}`));
    return el("div", { class: /^\s*#/.test(text) ? "source" : null }, text || " ");
  });
  return el("div", { id: "text", tabindex: "0", role: "group", "aria-label": "The program as text" }, rows);
}
