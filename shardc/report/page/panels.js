// Draw the overview, communication by axis, the proof, and the program's text.
"use strict";

const TABS = { overview: "Overview", graph: "Graph", timeline: "Timeline", memory: "Memory", comm: "Communication", proof: "Proof", text: "Text", tree: "Modules", spec: "Spec" };
/** The function that draws each panel, called with the width of its pictures in pixels. */
const DRAW = { overview: overviewPanel, graph: graphPanel, timeline: timelinePanel, memory: memoryPanel, comm: commPanel, proof: proofPanel, text: textPanel };

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
  const [verdict, about, kind] = !p ? ["not checked", "no proof was asked for", ""] : p.ok ? ["✓ proven", "equal to one device", "good"] : [`✗ ${several(p.gaps.length, "gap")}`, "not proven equal to one device", "bad"];
  return [...facts, fact("proof", verdict, about, kind)];
}

function overviewPanel() {
  const card = (title, ...parts) => el("section", {}, el("h2", {}, title), parts);
  const listed = (title, items, text) => (items.length ? card(title, el("ul", {}, items.map((t) => thing(el("li", {}, text(t)), t)))) : "");
  const worst = D.messages.filter((m) => m.ways.length).sort((a, b) => b.exposed - a.exposed || b.bytes - a.bytes).slice(0, 5), all = F.axis ? ", all stages added up" : "";
  return el("div", { class: "cards" },
    card(`Communication of a step, by axis${all}`, axisBars(true), link("all collectives", () => show("comm"))),
    D.memory ? memoryCard(card) : "",
    card(`Collectives that a step waits for longest${all}`, worst.length ? el("ul", {}, worst.map(messageRow)) : el("p", { class: "soft" }, "None: ranks send nothing to each other.")),
    card("How weights are split", el("div", {}, splitSummary())),
    D.scores.map((s) => card(`Attention of ${s.modules.join(", ")}`, el("p", { class: "soft" }, `${s.about}. ${s.work}`), scoresPicture(s))),
    listed("Inputs", D.inputs, (i) => [`${i.name} `, code(i.type)]),
    listed("Computed again in backward", D.regions, (r) => r.text),
    listed("Notes of the compiler", D.notes, (n) => n.text),
    card("How to read this page", typesHelp()));
}

function memoryCard(card) {
  const worst = D.memory.panels.reduce((a, b) => (b.peak > a.peak ? b : a)), kept = keptBy(worst);
  const kinds = Object.entries(worst.kinds).map(([k, n]) => [n, KINDS[k], `${k} ${size(n)}`]);
  return card(`Memory at the peak${F.axis ? ` of the fullest, ${placeOf(worst)}` : ""}`, bar(kinds, worst.peak, kinds.map(([, , text]) => text).join(", ")),
    el("div", { class: "legend" }, kinds.map(([, colour, text]) => mark(colour, text))), el("p", { class: "soft" }, `at ${worst.where}${kept ? `; activations of at most ${several(Number(kept), "microbatch", "microbatches")} are kept` : ""}`));
}

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

const allOf = (weights, key) => sum(weights.map((w) => w[key] * w.count));

function splitSummary() {
  return [...groupBy(D.weights, (w) => w.over)].map(([axes, weights]) => {
    const text = `${several(sum(weights.map((w) => w.count)), "weight")}, ${size(allOf(weights, "whole"))} of one device`;
    return thing(el("p", {}, el("span", { class: `chip ${splitClass(axes)}` }, axes || "whole"), ` ${text}`), { lines: axes ? unique(weights.flatMap((w) => w.lines)) : [] });
  });
}

const RANKS = ["--forward", "--backward", "--weights", "--pair", "--inputs", "--other"].map((name) => `var(${name})`);

/** Draw attention's scores: rows are queries, columns are keys, coloured by the rank that computes them. */
function scoresPicture(s) {
  const side = 200, high = side / s.cells.length, wide = side / s.cells[0].length;
  const square = (x, y, width, height, rank, tip = null) => sized(svg("rect", { x, y, width, height, "data-tip": tip }), { fill: rank === null ? "var(--sunk)" : RANKS[rank % RANKS.length] });
  const cells = s.cells.flatMap((row, i) => row.map((rank, j) => square(j * wide, i * high, wide, high, rank, rank === null ? "nothing is computed" : `rank ${rank}`)));
  const ranks = s.pairs.slice(0, 9).flatMap((pairs, rank) => [square(side + 14, 4 + 20 * rank, 12, 12, rank), label(side + 32, 14 + 20 * rank, `rank ${rank}: ${count(pairs)}`)]);
  const rest = s.pairs.length > 9 ? label(side + 32, 14 + 180, `and ${s.pairs.length - 9} more`) : "";
  return svg("svg", { width: side + 130, height: side + 4, viewBox: `0 0 ${side + 130} ${side + 4}`, role: "img", "aria-label": s.work }, cells, ranks, rest);
}

const byAxes = () => [...groupBy(D.rows, (r) => r.axes)];

/** Draw the hidden and exposed time of each axis's collectives; their bytes if no device is known. */
function axisBars(short = false) {
  if (!D.rows.length) return el("p", { class: "soft" }, "Ranks send nothing to each other.");
  const timed = D.rows.some((r) => typeof r.seconds === "number");
  const totals = byAxes().map(([axes, rows]) => {
    const [taken, waited, bytes] = ["seconds", "exposed", "bytes"].map((key) => sum(rows.map((r) => r[key] || 0)));
    return { axes, taken, waited, bytes, lines: unique(rows.flatMap((r) => r.lines)) };
  });
  const most = Math.max(...totals.map((t) => (timed ? t.taken : t.bytes))) || 1;
  const rows = totals.map(({ axes, taken, waited, bytes, lines }) => {
    const parts = timed ? [["exposed", waited], ["hidden", taken - waited]].filter(([, s]) => s > 1e-9).map(([name, s]) => [s, `var(--${name})`, `${name} ${seconds(s)}`]) : [[bytes, "var(--unknown)"]];
    const said = taken ? `${seconds(waited)} of ${seconds(taken)}` : timed ? "see timeline" : "";
    return thing(el("tr", {}, el("td", {}, el("b", {}, axes)), el("td", { class: "fill" }, bar(parts, most, `${seconds(waited)} exposed of ${seconds(taken)}`)),
      short ? "" : number(size(bytes)), number(said, waited > 0.01 * taken ? "exposed" : "soft")), { lines });
  });
  return table(["axis", "", ...(short ? [] : ["#bytes"]), `#${timed ? "exposed of all" : ""}`], rows, { wide: false, class: "axes" });
}

function commPanel() {
  if (!D.rows.length) return el("p", {}, "Ranks send nothing to each other.");
  const heads = ["cause", "collective", "#a step", F.axis ? "#bytes, all stages" : "#bytes a rank", "#takes", "#exposed", "behind"];
  const sections = byAxes().map(([axes, rows]) => {
    const ranks = axes.split("+").map((axis) => axisSizes[axis.split("[")[0]] || 1).reduce((p, q) => p * q, 1);
    return el("section", {}, el("h3", {}, axes, " ", el("small", {}, `${several(ranks, "rank")} in a group`)), table(heads, rows.map((r) => {
      const row = el("tr", { class: "item", "data-with": r.messages.map((m) => `m${m}`).join(" "), "aria-label": `${r.kind} over ${r.axes}: its cause` },
        el("td", { class: "why" }, r.cause), el("td", {}, `${r.kind}, ${r.direction}`), number(r.count.toLocaleString("en")), number(size(r.bytes)), timesOf(r), el("td", { class: "behind" }, r.behind));
      return acts(thing(row, r), () => pick(r.messages.length === 1 ? `m${r.messages[0]}` : r.x));
    })));
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

/** Draw the program's text. A line of an op, a collective or a bucket is a thing. */
function textPanel() {
  const ops = new Map(D.after.map((o) => [`${o.stage} ${o.name}`, o]));
  let stage = -1;
  const rows = D.text.map((text) => {
    const begun = /^def stage(\d+)\(/.exec(text), bucket = /^# bucket (\d+): /.exec(text);
    if (begun) stage = Number(begun[1]);
    const called = /^    (\w+) = /.exec(text) || /^    (\w+),  # .* \| \w+\/\w+ /.exec(text);
    const op = called ? ops.get(`${stage} ${called[1]}`) : undefined;
    const message = bucket ? D.messages.find((b) => b.buckets && within(b.buckets, Number(bucket[1]))) : op && D.messages[op.message];
    if (message) return acts(thing(el("div", { class: `message ${message.exposure}` }, text), message), () => pick(message.x));
    if (op) return thing(el("div", { onclick: () => pick(op.x) }, text), op);
    return el("div", { class: /^\s*#/.test(text) ? "source" : null }, text || " ");
  });
  return el("div", { id: "text", tabindex: "0", role: "group", "aria-label": "The program as text" }, rows);
}
