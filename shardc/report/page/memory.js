// Draw live bytes over a step, stacked by kind, and a table of those at the peak.
"use strict";

const KINDS = { parameters: "#5b7fb5", optimizer: "#8db4e8", gradients: "#8fc99a", buffers: "#9a9a8c", inputs: "#bdbdae", activations: "#e8ca7c", gathered: "#86cfd3", communication: "#b9a0d8", temporaries: "#e39b8b" };

/** Draw the memory panel. wide: width of a picture in pixels. */
function memoryPanel(wide) {
  const m = D.memory;
  if (!m) return el("p", { class: "hint" }, "This program is not compiled: it has no step.");
  const kinds = Object.keys(KINDS).filter((k) => m.panels.some((p) => p.curve[k]));
  const peak = Math.max(...m.panels.map((p) => p.peak));
  return [
    el("div", { class: "bar-of-tools" }, el("b", { class: F.fits ? "" : "bad" }, `peak ${size(peak)} of ${size(m.limit)} on ${F.device}${F.fits ? "" : ": does not fit"}`),
      el("span", { class: "soft" }, "live tensors of one step, op by op in the order in which they run (not to scale with time)")),
    el("div", { class: "legend" }, kinds.map((k) => mark(KINDS[k], k))),
    peakTable(m, kinds),
    m.panels.map((p) => memoryPicture(p, m, kinds, peak, wide))];
}

const placeOf = (p) => (F.axis ? `${F.axis}=${p.at.join(",")}` : "every rank");

/** Return how many microbatches' activations a rank keeps at most (early stages keep more); "" without a pipeline. */
function keptBy(p) {
  const row = F.axis && D.timeline ? D.timeline.rows.find((r) => p.at.includes(r.at)) : null;
  return row ? String(row.live) : "";
}

function memoryPicture(p, m, kinds, peak, wide) {
  const high = m.panels.length > 2 ? 120 : 200, left = 64, W = Math.max(wide, 300), inner = W - left - 8;
  const top = 1.06 * (m.limit < 3 * peak ? Math.max(peak, m.limit) : peak);
  const n = p.ops.length, end = { "text-anchor": "end" };
  const X = (i) => left + i / n * inner, Y = (bytes) => 6 + high * (1 - bytes / top);
  const parts = ticks(top, 4, true).flatMap((bytes) => [line(left, W - 8, Y(bytes), Y(bytes)), label(left - 5, Y(bytes) + 4, size(bytes), end)]);
  let total = new Array(n).fill(0);
  for (const kind of kinds.filter((k) => p.curve[k])) {
    const above = total.map((b, i) => b + p.curve[kind][i]);
    const there = above.map((b, i) => `V${Y(b).toFixed(1)}H${X(i + 1).toFixed(1)}`).join("");
    const back = total.map((b, i) => `V${Y(b).toFixed(1)}H${X(i).toFixed(1)}`).reverse().join("");
    parts.push(sized(svg("path", { d: `M${left},${Y(0)}${there}${back}Z` }), { fill: KINDS[kind] }));
    total = above;
  }
  const at = total.indexOf(Math.max(...total));
  p.parts.forEach(([name, begin], i) => {
    const wide = X(i + 1 < p.parts.length ? p.parts[i + 1][1] : n) - X(begin);
    const short = [name, name.split(" of ")[0], name.replace(/(\w)\w* of microbatch (\d+).*/, (_, k, mb) => k.toUpperCase() + mb)].find((t) => textWidth(t, "11px system-ui") < wide - 4);
    parts.push(line(X(begin), X(begin), 6, high + 6), short ? label(X(begin) + wide / 2, high + 19, short, { "text-anchor": "middle" }) : "");
  });
  if (m.limit <= top) parts.push(line(left, W - 8, Y(m.limit), Y(m.limit), "limit"), label(W - 10, Y(m.limit) - 4, `${F.device} has ${size(m.limit)}`, end));
  parts.push(sized(svg("circle", { cx: X(at + 0.5), cy: Y(total[at]), r: 4 }), { fill: "var(--bad)" }));
  const moment = (i) => {
    const part = p.parts.filter(([, begin]) => begin <= i).at(-1), live = kinds.filter((k) => p.curve[k] && p.curve[k][i]);
    return `${size(total[i])} in ${part ? part[0] : "the step"}${p.names[p.ops[i]] ? `, ${p.names[p.ops[i]]}` : ""}: ${live.map((k) => `${k} ${size(p.curve[k][i])}`).join(", ")}`;
  };
  let place = at;
  const move = (picture, i) => {
    place = Math.min(Math.max(i, 0), n - 1);
    for (const end of ["x1", "x2"]) picture.querySelector(".cross").setAttribute(end, X(place + 0.5));
    picture.nextElementSibling.textContent = moment(place);
  };
  const steps = Object.entries({ ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }).map(([key, by]) => [key, (e) => move(e.currentTarget, place + by)]);
  const picture = svg("svg", { width: W, height: high + 26, tabindex: "0", role: "img", "aria-label": `memory of ${placeOf(p)}: peak ${size(p.peak)} at ${p.where}. Left and right move along the step.`,
    onpointermove: (e) => move(e.currentTarget, Math.floor((e.clientX - e.currentTarget.getBoundingClientRect().left - left) / inner * n)),
    onkeydown: keyed(Object.fromEntries(steps)) }, parts, line(X(at + 0.5), X(at + 0.5), 6, high + 6, "cross"));
  return el("figure", {}, el("h3", {}, `${placeOf(p)}: ${size(p.peak)}`, " ", el("small", {}, `at ${p.where}`)), picture, el("p", { class: "hint", "aria-live": "polite" }, moment(at)));
}

/** Draw the table of the peak. The peak and the largest kinds come first, since a narrow panel shows only these. */
function peakTable(m, kinds) {
  const most = (k) => Math.max(...m.panels.map((p) => p.kinds[k] || 0));
  const columns = [
    ["peak", (p) => number(size(p.peak), p.peak > m.limit ? "bad" : "")],
    ...(m.panels.some(keptBy) ? [["microbatches kept", (p) => number(keptBy(p))]] : []),
    ...[...kinds].sort((a, b) => most(b) - most(a)).map((k) => [k, (p) => number(p.kinds[k] ? size(p.kinds[k]) : "–")]),
    ["between steps", (p) => number(size(sum(Object.values(p.resident))))],
    ...(m.panels.some((p) => p.host) ? [["outside, at most", (p) => number(size(p.host))]] : []),
  ];
  return el("div", {}, el("h3", {}, "At the peak, and between steps"),
    table(["rank", ...columns.map(([name]) => `#${name}`)], m.panels.map((p) => [placeOf(p), ...columns.map(([, cell]) => cell(p))])));
}
