// Draws a cross-hair and a read-out under the pointer, at the same step in all charts. The page is complete without it.
// Values are written as text nodes, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = [];

  const make = (name, attributes, color) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (color) element.style.fill = `var(--${color})`;
    return element;
  };

  const nearest = (list, at) => {
    let best = 0;
    list.forEach((one, index) => {
      if (Math.abs(one - at) < Math.abs(list[best] - at)) best = index;
    });
    return best;
  };

  const show = ({ readout, cross, output }, step) => {
    cross.replaceChildren();
    if (step === null) {
      output.replaceChildren();
      return;
    }
    const index = nearest(readout.middle, step);
    const x = readout.x[index];
    const nodes = [`step ${readout.steps[index]}`];
    cross.append(make("line", { x1: x, x2: x, y1: cross.dataset.top, y2: cross.dataset.bottom }));
    for (const series of readout.series) {
      const y = series.y[index] ?? null; // bars have no places
      if (series.single && y === null) continue;
      if (y !== null) cross.append(make("circle", { cx: x, cy: y, r: 3.8 }, series.color));
      const swatch = document.createElement("i");
      const text = document.createElement("b");
      swatch.style.background = `var(--${series.color})`;
      text.textContent = ` ${series.texts[index]}${readout.unit ? ` ${readout.unit}` : ""}`;
      nodes.push(swatch, series.name, text);
    }
    output.replaceChildren(...nodes);
  };

  // A wide figure is drawn twice, and one of its drawings is hidden; both have the same read-out.
  const visible = () => charts.filter((chart) => chart.svg.getClientRects().length > 0);

  for (const plot of document.querySelectorAll(".plot")) {
    const readout = data[plot.dataset.chart];
    const svg = plot.querySelector("svg");
    if (!readout) continue;
    const output = plot.closest("figure").querySelector("output");
    charts.push({ svg, readout, output, cross: svg.querySelector(".cross") });
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const step = readout.middle[nearest(readout.x, x)];
      for (const chart of visible()) show(chart, step);
    });
    svg.addEventListener("pointerleave", () => {
      for (const chart of visible()) show(chart, null);
    });
  }
})();
