// Make the parts of all drawings: elements as plain values, numbers for people, round axes.
// Nothing here or in a panel's file uses a document: document.js makes a page's elements, and docs/drawing.js writes the
// same elements as text, for the documentation's pictures. Names become text of an element or of an attribute, never markup.
"use strict";

// --- elements

/** Return an element with its attributes, handlers (`onclick`) and children (elements or texts). */
function el(tag, attributes = {}, ...children) {
  const node = { tag, attributes: {}, on: [], style: {}, children: [] };
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.on.push([name.slice(2), value]);
    else if (value !== undefined && value !== null && value !== false) node.attributes[name] = value === true ? "" : String(value);
  }
  node.children = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== "");
  return node;
}

/** Return an element of SVG. */
function svg(tag, attributes = {}, ...children) {
  return Object.assign(el(tag, attributes, ...children), { svg: true });
}

/** Add styles; a page sets them one by one, as its content policy forbids style attributes. */
function sized(node, styles) {
  Object.assign(node.style, styles);
  return node;
}

/** Mark an element as a thing, which is named by x (base.js), and as what lines of the spec caused. */
function thing(node, { x, lines }) {
  if (x) node.attributes["data-x"] = x;
  if (lines && lines.length) node.attributes["data-l"] = lines.join(" ");
  return node;
}

/** Return a handler of keys. acts: a function by the name of a key; if it returns false, the key is left to others. */
const keyed = (acts) => (e) => {
  if (!acts[e.key] || acts[e.key](e) === false) return;
  e.preventDefault();
  e.stopPropagation();
};

/** Call `act` on a click, Enter or space. */
function acts(node, act) {
  node.attributes.tabindex = node.attributes.tabindex || "0";
  node.on.push(["click", act], ["keydown", keyed({ Enter: act, " ": act })]);
  return node;
}

const button = (text, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, text);
const link = (text, onclick) => button(text, onclick, { class: "link" });
const group = (name, ...buttons) => el("span", { class: "group", role: "group", "aria-label": name }, buttons);
/** Return buttons for the size of a picture. by: a factor; whole: what "fit" shows. */
const sizes = (act, by, whole) => group("Size", [["−", 1 / by, "smaller (−)"], ["fit", 0, `${whole} (0)`], ["+", by, "larger (+)"]].map(([text, times, about]) => button(text, () => act(times), { title: about, "aria-label": about })));
const code = (text) => el("code", {}, text);
const number = (text, kind = "") => el("td", { class: `number ${kind}` }, text);
const mark = (colour, text) => el("span", {}, sized(el("i"), { background: colour }), text);

/** Return parts of a whole as a bar. parts: [number, colour, text]. */
function bar(parts, whole, about = null) {
  return el("div", { class: "bar", role: about && "img", "aria-label": about }, parts.map(([n, colour, text]) => sized(el("i", { title: text }), { background: colour, width: `${100 * n / whole}%` })));
}

/** Return a table with a scroll bar. heads: texts, "#text" for a column of numbers; rows: lists of cells, or elements. */
function table(heads, rows, { wide = true, ...attributes } = {}) {
  const head = heads.map((h) => (h.startsWith("#") ? el("th", { class: "number" }, h.slice(1)) : el("th", {}, h)));
  const body = rows.map((row) => (Array.isArray(row) ? el("tr", {}, row.map((c) => (c && c.tag === "td" ? c : el("td", {}, c)))) : row));
  const whole = el("table", attributes, heads.some(Boolean) ? el("thead", {}, el("tr", {}, head)) : "", el("tbody", {}, body));
  return wide ? el("div", { class: "wide" }, whole) : whole;
}

/** Return a list of terms and their values, without those that have no value. */
function list(pairs) {
  const known = pairs.filter((pair) => pair && pair[1] !== undefined && pair[1] !== "" && pair[1] !== null);
  return el("dl", {}, known.flatMap(([term, about]) => [el("dt", {}, term), el("dd", {}, about)]));
}

// --- widths of texts

// the width of a text in pixels: document.js measures it
let textWidth;

/** Shorten a text to fit, with … at its end. */
function cut(text, pixels, high = 12) {
  const most = Math.max(Math.floor(pixels / (0.58 * high)), 1);
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

// --- numbers, in the units of shardc.ir.units

function size(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(n) < 1024) return unit === "B" ? `${Math.round(n)} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}

function seconds(s) {
  return s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(2)} ms` : `${Math.round(s * 1e6)} µs`;
}

function count(n) {
  for (const [unit, each] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) if (n >= each) return `${(n / each).toFixed(1)} ${unit}`;
  return String(Number(n.toPrecision(4)));
}

const unique = (values) => [...new Set(values)];
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const several = (n, one, plural = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : plural}`;
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

/** Group items by a key: a Map, in the order of the first ones. */
function groupBy(items, key) {
  const groups = new Map();
  for (const x of items) groups.set(key(x), groups.get(key(x)) || []).get(key(x)).push(x);
  return groups;
}

// --- axes

const line = (x1, x2, y1, y2, kind = "grid") => svg("line", { class: kind, x1, x2, y1, y2 });
const label = (x, y, text, more = {}) => svg("text", { class: "soft", x, y, ...more }, text);

/** Return 0 and at most `most` round numbers up to `end`: 1, 2 or 5 times a power of 10; binary: powers of 2. */
function ticks(end, most, binary = false) {
  if (!(end > 0)) return [0];
  const base = binary ? 2 : 10, power = base ** Math.floor(Math.log(end / most) / Math.log(base));
  const step = (binary ? [1, 2] : [1, 2, 5, 10, 20]).map((n) => n * power).find((n) => end / n <= most) || power * base;
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, i) => i * step);
}
