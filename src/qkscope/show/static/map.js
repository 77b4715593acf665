"use strict";
// Every head as a cell, layers across and heads up, coloured by one number of each; pointed at, walked by keys, picked.
(() => {
  const { draw, make, number, fixed, viridis, tip, near, redraw, choose, pretty } = qk;

  const USUAL = { marked: [], range: [0, 1], title: "", onpick: null, picked: null, paint: viridis };
  qk.map = (element, given) => {
    const { rows, lines, marked, onpick, picked } = { ...USUAL, ...given };
    let { value, range, title, paint } = { ...USUAL, ...given };
    const at = new Map();
    let layers = 0,
      heads = 0;
    for (const row of rows) {
      const [, layer, head] = /^L(\d+)H(\d+)$/.exec(row.head).map(Number);
      at.set(`${layer},${head}`, row);
      layers = Math.max(layers, layer + 1);
      heads = Math.max(heads, head + 1);
    }
    let cells = new Map(),
      cursor = null,
      place = null,
      current = picked,
      svg = null,
      outline = null;
    // without a range, a value is a colour of its own
    const colour = (row) => {
      if (value(row) === null) return "var(--wash)";
      return paint(range ? (value(row) - range[0]) / (range[1] - range[0] || 1) : value(row));
    };
    const render = (width) => {
      const left = 38,
        top = 18,
        room = Math.floor((width - left - 4) / layers);
      const least = onpick && innerWidth < 736 ? 22 : 8, // that a finger hits
        cell = Math.max(least, Math.min(heads > 16 ? 15 : 24, room));
      const [w, h] = [left + layers * cell + 4, top + heads * cell + 58];
      cells = new Map();
      const every = (count) => Math.max(1, Math.ceil(22 / cell), Math.ceil(count / 16));
      svg = draw("svg", {
        width: w,
        height: h,
        tabindex: 0,
        role: "application",
        "aria-label": `${title || "Heads"}: ${layers} layers of ${heads} heads. Arrow keys move${onpick ? ", Enter picks" : ""}.`,
      });
      for (const [key, row] of at) {
        const [layer, head] = key.split(",").map(Number);
        const [x, y] = [left + layer * cell, top + (heads - 1 - head) * cell];
        const rect = draw("rect", { class: "cell", x, y, width: cell, height: cell, rx: 2, fill: colour(row), "data-at": key });
        cells.set(key, rect);
        svg.append(rect);
      }
      const label = (x, y, anchor, i) => svg.append(draw("text", { class: "soft", x, y, "text-anchor": anchor }, String(i)));
      for (let i = 0; i < layers; i += every(layers)) label(left + (i + 0.5) * cell, top + heads * cell + 14, "middle", i);
      for (let i = 0; i < heads; i += every(heads)) label(left - 6, top + (heads - 0.5 - i) * cell + 4, "end", i);
      svg.append(
        draw("text", { class: "soft", x: left, y: top + heads * cell + 32 }, "layer"),
        draw("text", { class: "soft", x: left - 6, y: 11, "text-anchor": "end" }, "head"),
      );
      if (range) {
        const bar = Math.max(110, Math.min(120, w - left - 90)),
          right = Math.max(w - 4, left + 90 + bar),
          y = top + heads * cell + 24;
        for (let i = 0; i < bar; i += 2)
          svg.append(draw("rect", { x: right - bar + i, y, width: 2.5, height: 7, fill: paint(i / bar), class: "shade" }));
        svg.append(
          draw("text", { class: "soft low", x: right - bar, y: y + 20, "text-anchor": "start" }, number(range[0], 2)),
          draw("text", { class: "soft high", x: right, y: y + 20, "text-anchor": "end" }, number(range[1], 2)),
          draw("text", { class: "soft scale", x: right - bar / 2, y: y + 20, "text-anchor": "middle" }, title),
        );
      }
      for (const key of marked.map((head) => head.slice(1).replace("H", ","))) {
        const own = cells.get(key);
        if (!own) continue;
        const [cx, cy] = ["x", "y"].map((side) => Number(own.getAttribute(side)) + cell / 2);
        svg.append(draw("circle", { class: "fitted", cx, cy, r: Math.max(2, cell / 7) }));
      }
      const box = { width: cell, height: cell, rx: 2, visibility: "hidden" };
      place = draw("rect", { class: "cursor", ...box, "stroke-dasharray": "3 2" });
      outline = draw("rect", { class: "cursor chosen", ...box });
      svg.append(place, outline);
      const key = ({ target }) => target.dataset.at ?? null;
      qk.follow(svg, key, look, leave);
      svg.addEventListener("click", (event) => key(event) && pick(key(event)));
      svg.addEventListener("keydown", move);
      element.replaceChildren(make("div", { class: "scroll" }, svg));
      if (current) frame(outline, current.slice(1).replace("H", ","));
    };
    const frame = (box, key) => {
      const own = cells.get(key);
      if (!own) return;
      for (const name of ["x", "y"]) box.setAttribute(name, own.getAttribute(name));
      box.setAttribute("visibility", "visible");
    };
    const look = (key, x, y) => {
      cursor = key;
      frame(place, key);
      tip.show(lines(at.get(key)), x, y);
    };
    const leave = () => {
      if (place) place.setAttribute("visibility", "hidden");
      tip.hide();
    };
    const pick = (key) => {
      if (!onpick) return;
      current = at.get(key).head;
      frame(outline, key);
      onpick(current);
    };
    const move = (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (event.key === "Enter" && cursor) return pick(cursor);
      if (!step) return;
      event.preventDefault();
      const [layer, head] = (cursor || (current ? current.slice(1).replace("H", ",") : "0,0")).split(",").map(Number);
      const next = cursor ? `${layer + step[0]},${head + step[1]}` : `${layer},${head}`;
      if (at.has(next)) look(next, ...near(cells.get(next)));
    };
    const again = redraw(element, render);
    return {
      repaint(changed, words = title, ends = range, shade = paint) {
        const redone = !range || !ends;
        [value, title, range] = [changed, words, ends];
        if (redone) {
          paint = shade;
          return again();
        }
        svg.querySelector(".scale").textContent = title;
        ["low", "high"].forEach((end, i) => (svg.querySelector(`.${end}`).textContent = number(range[i], 2)));
        if (shade !== paint) {
          paint = shade;
          const bar = [...svg.querySelectorAll(".shade")];
          bar.forEach((each, i) => each.setAttribute("fill", paint(i / bar.length)));
        }
        for (const [key, rect] of cells) rect.setAttribute("fill", colour(at.get(key)));
      },
      pick(head) {
        current = head;
        frame(outline, head.slice(1).replace("H", ","));
      },
    };
  };

  // the map of a ranking: one of its scores, and the heads that have most of it
  qk.charts.map = (element, rows, { scores }) => {
    const bar = make("div", { class: "choices" }),
      left = make("div", {}),
      right = make("div", {});
    let score = scores[0];
    const lines = (row) =>
      [
        [row.head],
        ["row accuracy (of all tokens)", number(row.row_accuracy)],
        ["accuracy (of the named keys)", `${fixed(row.accuracy)} [${fixed(row.low)}, ${fixed(row.high)}]`],
        ["chance", fixed(row.chance)],
        ["ratio (right key, of the named keys)", number(row.ratio)],
        ["mass (attention on the named keys)", number(row.mass)],
        ["prompts", number(row.n)],
      ].filter(([, value]) => value !== "–" && value !== "– [–, –]");
    const best = () => {
      const top = [...rows].sort((a, b) => b[score] - a[score]).slice(0, 8);
      const cells = top.map((row) => [row.head, fixed(row[score])]);
      right.replaceChildren(qk.table(["best heads", pretty(score)], cells));
    };
    element.replaceChildren(bar, make("div", { class: "beside" }, left, right));
    const view = qk.map(left, { rows, value: (row) => row[score], lines, title: pretty(score) });
    document.addEventListener("qk-head", ({ detail }) => {
      view.pick(detail);
      if (!document.getElementById(detail)) element.scrollIntoView({ block: "center" });
    });
    best();
    const show = (next) => {
      score = next;
      view.repaint((row) => row[score], pretty(score));
      best();
    };
    if (scores.length > 1) bar.append(...choose("score", scores, score, show, pretty));
  };
})();
