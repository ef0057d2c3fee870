// Write what the page's scripts draw as text, without a document (drawing.py).
"use strict";

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

/** Return an element as text. A tip becomes a title, which any viewer of SVG shows. */
function markup(node) {
  if (!node.tag) return escaped(node);
  const styles = Object.entries(node.style).map(([name, value]) => `${name}:${value}`).join(";");
  const attributes = Object.entries({ ...node.attributes, ...(styles ? { style: styles } : {}) });
  const tip = node.svg && node.attributes["data-tip"] ? `<title>${escaped(node.attributes["data-tip"])}</title>` : "";
  const head = attributes.map(([name, value]) => ` ${name}="${escaped(value)}"`).join("");
  const inside = tip + node.children.map(markup).join("");
  return inside || !node.svg ? `<${node.tag}${head}>${inside}</${node.tag}>` : `<${node.tag}${head}/>`;
}

/** Return a drawing as a complete SVG file. sheet: picture.css, whose colours are inserted, for both themes. */
function standalone(drawing, title, sheet) {
  const colours = Object.fromEntries([...sheet.matchAll(/(--[\w-]+): ([^;]+);/g)].map((m) => [m[1], m[2]]));
  const filled = (text, theme) => text.replace(/var\((--[\w-]+)\)/g, (_, name) => colours[name].replace(/light-dark\((.*), (.*)\)/, theme));
  const rules = sheet.replace(/\/\*.*?\*\/|:root[^{]*\{[^}]*\}/gs, "").trim();
  const style = `\n${filled(rules, "$1")}\n@media(prefers-color-scheme:dark){\n${filled(rules, "$2")}\n}`;
  const wide = Number(drawing.attributes.width), top = 36, height = Number(drawing.attributes.height) + top;
  const width = Math.max(wide, 24 + textWidth(title, "600 14px sans-serif"));
  const root = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, role: "img" },
    svg("title", {}, title), svg("style", {}, style), svg("rect", { class: "paper", width, height }), svg("text", { class: "title", x: 12, y: 22 }, title),
    svg("svg", { x: (width - wide) / 2, y: top, width: wide, height: height - top, viewBox: drawing.attributes.viewBox }, drawing.children));
  return `${filled(markup(root), "$1")}\n`;
}

/** Estimate the width of a text in pixels, by Helvetica's letters or a monospaced font. */
textWidth = (text, font) => {
  const high = Number(/([\d.]+)px/.exec(font)[1]);
  const letters = [...text].map((c) => (/mono/.test(font) ? 0.61 : /[iljtf.,:;|!'()[\] ]/.test(c) ? 0.3 : /[mwMW@%—]/.test(c) ? 0.88 : /[A-Z]/.test(c) ? 0.7 : 0.57));
  return high * sum(letters) * (/600/.test(font) ? 1.12 : 1.05);
};

