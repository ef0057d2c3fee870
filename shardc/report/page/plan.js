// Draw a plan: the best spec and why, the priced specs by time and memory, parts of a step's time and memory, what helps.
"use strict";

const P = JSON.parse(typeof document === "undefined" ? DATA : document.getElementById("data").textContent);
const SHADES = ["#8db4e8", "#e8ca7c", "#b9a0d8", "#bdbdae", "#86cfd3", "#8fc99a", "#d9a37e", "#e08f86", "#a9b18f", "#d3c3b4", "#9a9a9a"];
const shadesOf = (names) => Object.fromEntries(names.map((name, i) => [name, SHADES[i]]));
const MEMORY = shadesOf(P.kinds), TIME = shadesOf(Object.keys(P.words));

function planSections() {
  const section = (title, ...parts) => el("section", {}, el("h2", {}, title), parts);
  const first = P.rows[0];
  return [
    el("h1", {}, P.title), P.facts.map((fact, i) => el("p", { class: i ? "soft" : null }, fact)),
    P.spec ? section("The best spec", el("pre", {}, P.spec)) : first ? section("Nothing fits", P.lacking.map((text) => el("p", { class: "bad" }, text))) : "",
    first ? [
      section("Time and memory", el("p", { class: "hint" }, `${P.rows.filter((c) => c.fits).length} of ${several(P.rows.length, "priced choice")} fit`), el("figure", {}, planPicture())),
      section("Specs that were priced", pricedSpecs(), [["memory", "memory", MEMORY], ["time", "shares", TIME]].map(([name, key, shades]) => keysOf(name, key, shades))),
      section("Where a step of the first one goes", waterfall()),
      section("Memory of a device, of the rank that needs most", el("p", {}, P.memory),
        table([], Object.entries(first.memory).sort((a, b) => b[1] - a[1]).map(([k, n]) => [k, number(size(n)), shaded({ [k]: n }, first.needs, MEMORY)]))),
    ] : "",
    P.what_if.length ? section("What would help", table(["", "#step", "#of today's", "fits"], P.what_if.map((x) => [x.what, number(seconds(x.step_seconds)), number(`${x.ratio.toFixed(2)}×`), fitsText(x.fits)]))) : "",
    P.answers.length ? section("Answers", table([], P.answers)) : "",
    P.refused.length ? section("Not possible", table([], P.refused)) : "",
  ];
}

const fitsText = (fits) => el("span", { class: fits ? "good" : "bad" }, fits ? "yes" : "no");

/** Return parts of a whole as a bar, in the order and colours of `shades`. */
const shaded = (parts, whole, shades) => bar(Object.keys(shades).filter((k) => parts[k] > 0).map((k) => [parts[k], shades[k], k]), whole);

/** Draw the table of specs, in the order and with the numbers of the plot. */
function pricedSpecs() {
  const heads = ["#", "mesh", "zero", "schedule", "recompute", "microbatches", "#live", "#needs", `of ${size(P.limit)}`, "fits", "#step", "#MFU", `#${P.rate}/s`, "time", "limited by"];
  return table(heads, P.rows.map((c, i) => [number(String(i + 1)), c.mesh, c.zero, c.schedule, c.recompute, c.microbatches, number(size(c.peak)), number(size(c.needs)),
    shaded(c.memory, Math.max(P.limit, c.needs), MEMORY), fitsText(c.fits), number(seconds(c.seconds)), number(percent(c.mfu)), number(count(c.rate)), shaded(c.shares, 1, TIME), c.limited]));
}

/** Draw the legend of bars, with the kinds that are large enough to see. */
function keysOf(name, key, shades) {
  const seen = (k) => P.rows.some((c) => c[key][k] > 0.005 * (key === "memory" ? c.needs : 1));
  return el("p", { class: "legend" }, `${name}: `, Object.keys(shades).filter(seen).map((k) => mark(shades[k], P.words[k] || k)));
}

function waterfall() {
  const whole = P.rows[0].seconds;
  let sofar = 0;
  return table(["from the device's peak to a step", "#", "#so far", ""], P.waterfall.map(([text, cause, n]) => {
    sofar += n;
    const drawn = shaded({ before: Math.max(sofar - Math.abs(n), 0), [cause]: Math.abs(n) }, whole, { before: "none", ...TIME });
    return [text, number(`${n > 0 ? "+" : "-"} ${seconds(Math.abs(n))}`), number(`${Math.round(100 * sofar / whole)}%`), drawn];
  }));
}

// --- the plot

const FAR = 2.5;    // specs that need more than so many times the limit are drawn at the upper edge
const NEAR = 0.4;   // if all need less than this part of the limit, the axis ends above them, and the limit is beyond it
const SPREAD = 8;   // if the largest number is more than so many times the smallest, the axis is logarithmic

/** Return the scale of an axis: {at: number -> 0 to 1, ticks, how: words}. end: of an axis that is not logarithmic. */
function scaleOf(values, end, most, binary) {
  const low = Math.min(...values) / 1.15, high = Math.max(...values) * 1.15;
  if (!values.length || Math.max(...values) <= SPREAD * Math.min(...values)) return { at: (x) => x / end, ticks: ticks(end, most, binary), how: "" };
  const steps = binary ? Array.from({ length: 64 }, (_, k) => 2 ** k) : Array.from({ length: 18 }, (_, k) => [1, 2, 5].map((b) => b * 10 ** (k - 9))).flat();
  const inside = steps.filter((x) => low <= x && x <= high), every = Math.ceil(inside.length / most);
  return { at: (x) => Math.log(x / low) / Math.log(high / low), ticks: inside.filter((_, i) => i % every === 0), how: " (logarithmic)" };
}

/** Plot every priced spec by the seconds of a step and the bytes of the fullest rank; numbers are rows of the table.
 *  The line connects specs that fit and are not worse than another one in both time and memory. */
function planPicture() {
  const [width, left, top, wide, high] = [1100, 84, 30, 620, 360], bottom = top + high;
  const needs = P.rows.map((c) => c.needs), most = Math.max(...needs), beyond = most < NEAR * P.limit;
  const time = scaleOf(P.rows.map((c) => c.seconds), 1.08 * Math.max(...P.rows.map((c) => c.seconds)), 8, false);
  const memory = scaleOf([...needs, ...(beyond ? [] : [P.limit])], 1.08 * (beyond ? most : Math.min(Math.max(P.limit, most), FAR * P.limit)), 6, true);
  const X = (s) => left + wide * time.at(s), Y = (n, upper = 1) => top + high * (1 - Math.min(memory.at(n), upper));
  const front = [];
  for (const c of P.rows.filter((r) => r.fits).sort((a, b) => a.seconds - b.seconds || a.needs - b.needs)) if (!front.length || c.needs < front.at(-1).needs) front.push(c);
  const dots = P.rows.map((c, i) => svg("g", { "data-tip": `${c.name}: step ${seconds(c.seconds)}, ${size(c.peak)} live, needs ${size(c.needs)}` },
    svg("circle", { class: `dot ${c.fits ? (i ? "fits" : "best") : "not"}`, cx: X(c.seconds), cy: Y(c.needs, 0.99), r: 9 }),
    svg("text", { class: i || !c.fits ? "dark" : "light", x: X(c.seconds), y: Y(c.needs, 0.99) + 4, "text-anchor": "middle" }, i + 1)));
  const listed = P.rows.slice(0, Math.floor(high / 30)).map((c, i) => [
    svg("text", { x: left + wide + 24, y: top + 12 + 30 * i, "data-tip": c.name }, cut(`${i + 1}  ${c.name}`, width - left - wide - 32)),
    label(left + wide + 40, top + 25 + 30 * i, `${seconds(c.seconds)}, ${size(c.needs)}${c.fits ? "" : ", does not fit"}`)]);
  const rest = P.rows.length - listed.length;
  const usable = `${size(P.limit)} usable of ${P.device}${beyond ? ", far above" : ""}`;
  return svg("svg", { width, height: bottom + 70, viewBox: `0 0 ${width} ${bottom + 70}`, role: "img", "aria-label": "priced specs by time and memory; the table says the same" },
    memory.ticks.map((n) => [line(left, left + wide, Y(n), Y(n)), label(left - 8, Y(n) + 4, size(n), { "text-anchor": "end" })]),
    time.ticks.map((s) => [line(X(s), X(s), bottom, bottom + 5), label(X(s), bottom + 17, s ? seconds(s) : "0", { "text-anchor": "middle" })]),
    svg("rect", { class: "frame", x: left, y: top, width: wide, height: high }),
    label(left, top - 10, `memory that the fullest rank needs, reserved and outside${memory.how}`),
    label(left + wide, bottom + 34, `time of a step${time.how}`, { "text-anchor": "end" }),
    line(left, left + wide, Y(P.limit), Y(P.limit), "limit"), svg("text", { class: "limit", x: left + 6, y: Y(P.limit) + (beyond ? 13 : -5) }, usable),
    front.length ? svg("path", { class: "front", d: `M${front.map((c) => `${X(c.seconds)},${Y(c.needs, 0.99)}`).join("L")}` }) : "",
    dots.reverse(), listed, rest > 0 ? label(left + wide + 24, top + 12 + 30 * listed.length, `and ${rest} more`) : "",
    [["best", "best"], ["fits", "fits"], ["not", "does not fit"]].map(([kind, words], i) => [svg("circle", { class: `dot ${kind}`, cx: left + 7 + 90 * i, cy: bottom + 54, r: 7 }), label(left + 20 + 90 * i, bottom + 58, words)]));
}

if (typeof document !== "undefined") fill(document.getElementById("plan"), planSections());
