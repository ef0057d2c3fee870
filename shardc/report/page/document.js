// Handle the page's document: turn what panels draw into elements, highlight things, show a tip at the pointer.
"use strict";

const byId = (id) => document.getElementById(id);

/** Make an element of the document. */
function made(node) {
  if (!node.tag) return node instanceof Node ? node : document.createTextNode(String(node));
  const element = node.svg ? document.createElementNS("http://www.w3.org/2000/svg", node.tag) : document.createElement(node.tag);
  for (const [name, value] of Object.entries(node.attributes)) element.setAttribute(name, value);
  for (const [name, value] of Object.entries(node.style)) element.style.setProperty(name, value);
  for (const [name, act] of node.on) element.addEventListener(name, act);
  element.append(...node.children.map(made));
  return element;
}

/** Replace the content of an element. */
function fill(element, ...nodes) {
  element.replaceChildren(...nodes.flat(Infinity).filter((node) => node !== null && node !== "").map(made));
}

const pen = document.createElement("canvas").getContext("2d");
textWidth = (text, font) => {
  pen.font = font;
  return pen.measureText(text).width;
};

// --- highlights

function light(x) {
  document.querySelectorAll(".lit").forEach((e) => e.classList.remove("lit"));
  const shown = x || state.picked;
  if (shown) document.querySelectorAll(selectorOf(shown)).forEach((e) => e.classList.add("lit"));
  document.querySelectorAll(".picked").forEach((e) => e.classList.remove("picked"));
  if (state.picked) document.querySelectorAll(`[data-x="${state.picked}"]`).forEach((e) => e.classList.add("picked"));
  counts(shown);
}

/** Show on each tab how many highlighted things its panel has. */
function counts(x) {
  const line = x && x[0] === "l" ? causedBy(Number(x.slice(1))) : null;
  const found = line ? { graph: line.messages.filter((m) => !m.buckets).length, comm: line.rows.length, timeline: line.messages.filter(isTimed).length } : {};
  document.querySelectorAll("#tabs button").forEach((button) => {
    const n = found[button.dataset.tab];
    const old = button.querySelector("i");
    if (old) old.remove();
    if (n) button.append(made(el("i", { title: "things that the line of the spec caused" }, String(n))));
  });
}

// --- a tip at the pointer, for text that has no room

function tip(text, at) {
  const box = byId("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const left = Math.min(at.clientX + 14, innerWidth - box.offsetWidth - 8);
  const top = at.clientY + 18 + box.offsetHeight > innerHeight ? at.clientY - box.offsetHeight - 10 : at.clientY + 18;
  Object.assign(box.style, { left: `${Math.max(left, 4)}px`, top: `${Math.max(top, 4)}px` });
}

/** Highlight the thing under the pointer or the focus, in all places. */
function follow() {
  const thingOf = (e) => e.target.closest && e.target.closest("[data-x]");
  document.addEventListener("pointerover", (e) => {
    const found = thingOf(e);
    light(found ? found.dataset.x : null);
    const said = e.target.closest && e.target.closest("[data-tip]");
    tip(said ? said.dataset.tip : "", e);
  });
  document.addEventListener("pointermove", (e) => {
    const said = e.target.closest && e.target.closest("[data-tip]");
    if (said) tip(said.dataset.tip, e);
  });
  document.addEventListener("pointerleave", () => { light(null); tip("", {}); });
  document.addEventListener("focusin", (e) => { const found = thingOf(e); if (found) light(found.dataset.x); });
}
