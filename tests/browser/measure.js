// What tests/browser/test_report.py measures in a page. An expression: an object of functions.
(() => {
  const seen = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const name = (element) => `${element.tagName}.${element.getAttribute("class") ?? ""} ${element.textContent.trim().slice(0, 40)}`;
  const channels = (text) => {
    const found = text.match(/[\d.]+/g).map(Number);
    return found.length === 3 ? [...found, 1] : found;
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const background = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(channels(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((one) => {
      const share = one / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const texts = () => {
    const found = new Set();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const parent = walker.currentNode.parentElement;
      if (walker.currentNode.data.trim() && !parent.closest("script,style,noscript") && seen(parent)) found.add(parent);
    }
    return [...found];
  };

  // WCAG: 4.5, or 3 for text of at least 24 pixels, or 18.66 if it is bold.
  const faint = () =>
    texts().map((element) => {
      const style = getComputedStyle(element);
      const below = background(element);
      const color = channels(element instanceof SVGElement ? style.fill : style.color);
      const [dark, light] = [luminance(over(color, below)), luminance(below)].sort((a, b) => a - b);
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      return { what: name(element), contrast: (light + 0.05) / (dark + 0.05), least: large ? 3 : 4.5 };
    }).filter((one) => !(one.contrast >= one.least));

  const scrolls = (element) => {
    for (let at = element; at && at !== document.documentElement; at = at.parentElement) {
      if (["auto", "scroll"].includes(getComputedStyle(at).overflowX)) return true;
    }
    return false;
  };
  // Texts beyond the edge of the window that no box around them scrolls to.
  const beyond = () => {
    const width = document.documentElement.clientWidth;
    const found = texts().filter((element) => !scrolls(element)).filter((element) => {
      const range = document.createRange();
      range.selectNodeContents(element);
      return [...range.getClientRects()].some((box) => box.width && (box.right > width + 1 || box.left < -1));
    });
    return { page: document.documentElement.scrollWidth - width, texts: found.map(name) };
  };
  // Boxes that hide a part of what they hold, with or without a way to scroll to it: on paper there is none.
  const hiding = () =>
    [...document.body.querySelectorAll("*")].filter((element) => {
      const style = getComputedStyle(element);
      if (!seen(element) || element instanceof SVGElement || style.display === "inline") return false;
      const hides = (value) => value !== "visible";
      return (hides(style.overflowX) && element.scrollWidth > element.clientWidth + 1) ||
        (hides(style.overflowY) && element.scrollHeight > element.clientHeight + 1);
    }).map(name);
  const overlapping = () => {
    const found = [];
    for (const svg of document.querySelectorAll("svg")) {
      if (!seen(svg)) continue;
      const boxes = [...svg.querySelectorAll("text")].map((one) => [one.textContent, one.getBoundingClientRect()]);
      boxes.forEach(([a, one], index) => {
        for (const [b, other] of boxes.slice(index + 1)) {
          const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
          const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
          if (across > 2 && down > 4) found.push(`${svg.getAttribute("aria-label")}: ${a} / ${b}`);
        }
      });
    }
    return found;
  };
  const table = (place) =>
    [...place.querySelectorAll("table tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
  return { faint, beyond, hiding, overlapping, table, count: () => texts().length };
})()
