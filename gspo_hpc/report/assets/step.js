// Shows the tokens of a sample once it is opened: as text, shaded by a number of each token, and as a table.
// The rest of the page is complete without it. Texts are written as text nodes, never as markup; nothing is loaded.
(() => {
  const ROWS = 200; // of a table at first, and with each click
  const COLUMNS = [
    ["place", "#", 0],
    ["text", "Token", null],
    ["id", "Id", 0],
    ["engine", "Engine", 5],
    ["old", "Old policy", 5],
    ["new", "Updated policy", 5],
    ["reference", "Reference", 5],
    ["ratio", "Ratio", 6],
    ["gap", "Trainer − engine", 7],
  ];
  const SHADES = [
    ["ratio", "ratio, off 1", (one) => (one === null || one <= 0 ? null : Math.log(one))],
    ["gap", "trainer − engine", (one) => one],
    ["engine", "log-prob of the engine", (one) => one],
    ["new", "log-prob of the updated policy", (one) => one],
  ];

  const make = (name, attributes = {}, ...children) => {
    const element = document.createElement(name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    element.append(...children);
    return element;
  };

  const unpack = async (packed) => {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };

  const completed = (tokens) => {
    const trainer = tokens.old ?? tokens.new;
    const minus = (one, other) => (one === null || other === null ? null : one - other);
    tokens.place = tokens.id.map((_, index) => index + 1);
    tokens.gap = trainer && trainer.map((one, index) => minus(one, tokens.engine[index]));
    return tokens;
  };

  const visible = (text) => text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "∅";
  const shown = (one, digits) => (one === null ? "–" : one.toFixed(digits).replace("-", "−"));

  const shaded = (tokens) => {
    const text = make("div", { class: "text shaded", dir: "auto", tabindex: "0" });
    const spans = tokens.text.map((one) => make("span", {}, one));
    const choice = make("select");
    const known = SHADES.filter(([key]) => tokens[key]);
    for (const [key, name] of known) choice.append(make("option", { value: key }, name));
    const shade = () => {
      const [key, , measure] = known[choice.selectedIndex];
      const values = tokens[key].map(measure);
      const most = values.reduce((so, one) => Math.max(so, Math.abs(one ?? 0)), 0);
      spans.forEach((span, index) => {
        const share = most > 0 ? Math.abs(values[index] ?? 0) / most : 0;
        span.style.setProperty("--share", share.toFixed(3));
        span.className = share < 0.02 ? "" : values[index] < 0 ? "below" : "above";
        span.title = `${index + 1}: ${shown(tokens[key][index], 6)}`;
      });
    };
    choice.addEventListener("change", shade);
    shade();
    text.append(...spans);
    return [make("p", { class: "choice" }, make("label", {}, "Shaded by ", choice)), text];
  };

  const table = (tokens) => {
    const columns = COLUMNS.filter(([key]) => tokens[key]);
    const order = tokens.id.map((_, index) => index);
    const body = make("tbody");
    const more = make("p", { class: "more" });
    let sorted = null; // key and direction
    let count = ROWS;

    const draw = () => {
      body.replaceChildren(
        ...order.slice(0, count).map((index) =>
          make("tr", {}, ...columns.map(([key, , digits]) =>
            digits === null
              ? make("td", { class: "token" }, visible(tokens[key][index]))
              : make("td", { class: "num" }, shown(tokens[key][index], digits)),
          )),
        ),
      );
      more.replaceChildren();
      if (count >= order.length) return;
      const step = make("button", { type: "button" }, `Show ${Math.min(ROWS, order.length - count)} more`);
      const all = make("button", { type: "button" }, `Show all ${order.length}`);
      step.addEventListener("click", () => { count += ROWS; draw(); });
      all.addEventListener("click", () => { count = order.length; draw(); });
      more.append(step, " ", all);
    };

    const heads = columns.map(([key, title, digits]) => {
      const button = make("button", { type: "button" }, title);
      const head = make("th", { scope: "col", class: digits === null ? "words" : "" }, button);
      button.addEventListener("click", () => {
        const down = !(sorted && sorted.key === key && sorted.down); // the largest first, then the smallest
        sorted = { key, down };
        const side = (one) => (down ? -one : one);
        const values = tokens[key];
        order.sort((a, b) => {
          if (values[a] === values[b]) return a - b;
          if (values[a] === null || values[b] === null) return values[a] === null ? 1 : -1;
          return side(values[a] < values[b] ? -1 : 1);
        });
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        draw();
      });
      return head;
    });
    draw();
    const whole = make("table", { class: "steps" }, make("thead", {}, make("tr", {}, ...heads)), body);
    const label = { class: "table", tabindex: "0", role: "region", "aria-label": "Tokens" };
    return [make("div", label, whole), more];
  };

  const fill = async (place) => {
    if (place.childElementCount) return;
    place.append(make("p", { class: "none" }, "unpacking the tokens …"));
    try {
      const tokens = completed(await unpack(place.dataset.tokens));
      place.replaceChildren(make("h3", {}, "Tokens"), ...shaded(tokens), ...table(tokens));
    } catch (error) {
      const text = `This browser cannot unpack the tokens (${error}); the record has them, in the folder record of the run.`;
      place.replaceChildren(make("p", { class: "none" }, text));
    }
  };

  for (const details of document.querySelectorAll("details.sample")) {
    details.addEventListener("toggle", () => {
      if (details.open) fill(details.querySelector(".tokens"));
    });
  }

  const follow = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const details = target && target.closest("details");
    if (!details) return;
    details.open = true;
    details.querySelector("summary").focus({ preventScroll: true });
    details.scrollIntoView();
  };
  addEventListener("hashchange", follow);
  follow();
})();
