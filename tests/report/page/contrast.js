// Texts of a page whose contrast with what is behind them is below 4.5 to 1 (WCAG 2, AA): [text, contrast, colours].
(() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (e) => {
    if (e.tagName === "text") {  // in a picture: the shape of its box, or the bar that it stands on
      const shape = e.classList.contains("dark") ? e.previousElementSibling : e.parentElement.tagName === "g" && e.parentElement.querySelector(":scope > .shape");
      const fill = shape && getComputedStyle(shape).fill;
      if (fill && fill !== "none") return rgba(fill);
    }
    for (let around = e; around; around = around.parentElement) {
      const colour = rgba(getComputedStyle(around).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest("script, style, noscript")) continue;
    const style = getComputedStyle(e);
    const ink = rgba(e.tagName === "text" ? style.fill : style.color), back = behind(e);
    const [high, low] = [luminance(ink), luminance(back)].sort((a, b) => b - a);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) found.push([e.textContent.slice(0, 30), contrast, ink.join(), back.join()]);
  }
  return found;
})()
