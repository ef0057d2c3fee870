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
  const shown = x || state.picked;
  const give = (kind, selector) => {
    document.querySelectorAll(`.${kind}`).forEach((e) => e.classList.remove(kind));
    if (selector) document.querySelectorAll(selector).forEach((e) => e.classList.add(kind));
  };
  give("lit", shown && selectorOf(shown));
  give("picked", state.picked && `[data-x="${state.picked}"]`);
  counts(shown);
}

/** Show on each tab how many highlighted things its panel has. */
function counts(x) {
  const { messages, rows } = causedBy(x && x[0] === "l" ? Number(x.slice(1)) : 0);
  const lit = { graph: messages.filter((m) => !m.buckets), comm: rows, timeline: messages.filter((m) => m.timed) };
  document.querySelectorAll("#tabs i").forEach((old) => old.remove());
  for (const [tab, { length }] of Object.entries(lit)) {
    if (length) byId(`tab-${tab}`).append(made(el("i", { title: "things that the line of the spec caused" }, String(length))));
  }
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
  const near = (e, name) => { const found = e.target.closest && e.target.closest(`[data-${name}]`); return found ? found.dataset[name] : ""; };
  document.addEventListener("pointerover", (e) => { light(near(e, "x")); tip(near(e, "tip"), e); });
  document.addEventListener("pointermove", (e) => { if (near(e, "tip")) tip(near(e, "tip"), e); });
  document.addEventListener("pointerleave", () => { light(null); tip("", {}); });
  document.addEventListener("focusin", (e) => { if (near(e, "x")) light(near(e, "x")); });
}
