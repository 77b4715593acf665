"use strict";
// Charts from rows of numbers. Whatever comes from data goes in as a text node or an attribute, never as markup, and
// sizes are real pixels: a chart is drawn again when its place changes width, so that words stay readable on a phone.
const qk = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const set = (node, given, children) => {
    for (const [name, value] of Object.entries(given || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(node.style, value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  };
  const make = (name, given, ...children) => set(document.createElement(name), given, children);
  const draw = (name, given, ...children) => set(document.createElementNS(SVG, name), given, children);
  const number = (value, digits = 3) => {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value) && digits === 3) return String(value);
    const size = Math.abs(value);
    const text = size !== 0 && size < 0.001 ? value.toExponential(1) : value.toPrecision(digits);
    return (size >= 0.001 || size === 0 ? String(Number(text)) : text).replace("-", "−");
  };
  const fixed = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
  const pretty = (name) => name.replaceAll("_", " ");
  const piece = (text) => visible(text.trim() === "" ? text : text.trim());
  const visible = (text) => (text === "" ? "∅" : text.trim() === "" ? text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/[ \u00a0]/g, "␣") : text.replaceAll("\n", "↵").replaceAll("\t", "⇥"));

  // ------------------------------------------------------------------ colours: Okabe and Ito's, and viridis
  const PARTS = ["#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#0072B2", "#E69F00"];
  const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
  const viridis = (share) => {
    const at = Math.max(0, Math.min(1, share || 0)) * (VIRIDIS.length - 1);
    const low = Math.min(Math.floor(at), VIRIDIS.length - 2);
    const mixed = VIRIDIS[low].map((value, i) => Math.round(value + (at - low) * (VIRIDIS[low + 1][i] - value)));
    return `rgb(${mixed.join(",")})`;
  };
  const partColours = (parts) => {
    let next = 0;
    return Object.fromEntries(parts.map((name) => [name, name === "residual" ? "var(--rest)" : PARTS[next++ % PARTS.length]]));
  };

  // ------------------------------------------------------------------ the note beside the pointer, read out when it changes
  const tip = {
    show(lines, x, y) {
      const note = document.getElementById("tip");
      note.replaceChildren(...lines.map(([name, value, colour]) =>
        value === undefined ? make("div", {}, make("b", {}, name))
          : make("div", {}, make("span", {}, colour ? make("span", { class: "swatch", style: { background: colour } }) : null, name), make("span", {}, value))));
      note.hidden = false;
      const { width, height } = note.getBoundingClientRect();
      note.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
      note.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
    },
    hide() { document.getElementById("tip").hidden = true; },
  };
  // a mouse points by moving, a finger by touching
  const pointed = (lines) => {
    const show = (event) => tip.show(lines, event.clientX, event.clientY);
    return { onpointermove: show, onpointerdown: show, onpointerleave: tip.hide };
  };
  const near = (node) => { const box = node.getBoundingClientRect(); return [box.left + box.width / 2, box.bottom - 8]; };

  // ------------------------------------------------------------------ small pieces
  const redraw = (element, render) => {
    let width = 0;
    const again = () => {
      const now = Math.floor(element.clientWidth);
      if (now > 0 && now !== width) { width = now; render(now); }
    };
    new ResizeObserver(again).observe(element);
    again();
    return () => { width = 0; again(); };
  };
  // one of several: buttons that say which is pressed
  const choose = (label, names, chosen, change, show = pretty, colours = {}) => {
    const buttons = names.map((name) => make("button", { type: "button", "aria-pressed": String(name === chosen), onclick() {
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(names[i] === name)));
      change(name);
    } }, colours[name] ? make("span", { class: "swatch", style: { background: colours[name] } }) : null, show(name)));
    return [make("span", { class: "of" }, label), ...buttons];
  };
  const ticks = (low, high, count = 5) => {
    const raw = (high - low) / count || 1, base = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * base).find((value) => value >= raw);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(10)));
    return found;
  };

  // ------------------------------------------------------------------ every head as a cell: layers across, heads up
  function map(element, { rows, value, lines, marked = [], range = [0, 1], title = "", onpick = null, picked = null }) {
    const at = new Map();
    let layers = 0, heads = 0;
    for (const row of rows) {
      const [, layer, head] = /^L(\d+)H(\d+)$/.exec(row.head).map(Number);
      at.set(`${layer},${head}`, row);
      layers = Math.max(layers, layer + 1);
      heads = Math.max(heads, head + 1);
    }
    let cells = new Map(), cursor = null, place = null, current = picked, svg = null, outline = null;
    const colour = (row) => (value(row) === null ? "var(--wash)" : viridis((value(row) - range[0]) / (range[1] - range[0] || 1)));
    const render = (width) => {
      const left = 38, top = 18, room = Math.floor((width - left - 4) / layers);
      const cell = Math.max(8, Math.min(heads > 16 ? 15 : 24, room));
      const [w, h] = [left + layers * cell + 4, top + heads * cell + 58];
      cells = new Map();
      const every = (count) => Math.max(1, Math.ceil(22 / cell), Math.ceil(count / 16));
      svg = draw("svg", { width: w, height: h, tabindex: 0, role: "application", "aria-label": `${title || "Heads"}: ${layers} layers of ${heads} heads. Arrow keys move${onpick ? ", Enter picks" : ""}.` });
      for (const [key, row] of at) {
        const [layer, head] = key.split(",").map(Number);
        const rect = draw("rect", { class: "cell", x: left + layer * cell, y: top + (heads - 1 - head) * cell, width: cell, height: cell, rx: 2, fill: colour(row), "data-at": key });
        cells.set(key, rect);
        svg.append(rect);
      }
      for (let i = 0; i < layers; i += every(layers)) svg.append(draw("text", { class: "soft", x: left + (i + 0.5) * cell, y: top + heads * cell + 14, "text-anchor": "middle" }, String(i)));
      for (let i = 0; i < heads; i += every(heads)) svg.append(draw("text", { class: "soft", x: left - 6, y: top + (heads - 0.5 - i) * cell + 4, "text-anchor": "end" }, String(i)));
      svg.append(draw("text", { class: "soft", x: left, y: top + heads * cell + 32 }, "layer"), draw("text", { class: "soft", x: left - 6, y: 11, "text-anchor": "end" }, "head"));
      const bar = Math.min(120, w - left - 90), right = w - 4, y = top + heads * cell + 24;
      for (let i = 0; i < bar; i += 2) svg.append(draw("rect", { x: right - bar + i, y, width: 2.5, height: 7, fill: viridis(i / bar) }));
      svg.append(draw("text", { class: "soft", x: right - bar, y: y + 20, "text-anchor": "start" }, number(range[0], 2)), draw("text", { class: "soft", x: right, y: y + 20, "text-anchor": "end" }, number(range[1], 2)), draw("text", { class: "soft scale", x: right - bar / 2, y: y + 20, "text-anchor": "middle" }, title));
      for (const key of marked.map((head) => head.slice(1).replace("H", ","))) {
        const own = cells.get(key);
        if (own) svg.append(draw("circle", { cx: Number(own.getAttribute("x")) + cell / 2, cy: Number(own.getAttribute("y")) + cell / 2, r: Math.max(2, cell / 7), fill: "#fff", stroke: "#000", "stroke-width": 1, "pointer-events": "none" }));
      }
      place = draw("rect", { class: "cursor", width: cell, height: cell, rx: 2, visibility: "hidden", "stroke-dasharray": "3 2" });
      outline = draw("rect", { class: "cursor chosen", width: cell, height: cell, rx: 2, visibility: "hidden" });
      svg.append(place, outline);
      for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, (event) => { const key = event.target.dataset && event.target.dataset.at; key ? look(key, event.clientX, event.clientY) : leave(); });
      svg.addEventListener("pointerleave", leave);
      svg.addEventListener("click", (event) => event.target.dataset && event.target.dataset.at && pick(event.target.dataset.at));
      svg.addEventListener("blur", leave);
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
    const look = (key, x, y) => { cursor = key; frame(place, key); tip.show(lines(at.get(key)), x, y); };
    const leave = () => { if (place) place.setAttribute("visibility", "hidden"); tip.hide(); };
    const pick = (key) => { if (!onpick) return; current = at.get(key).head; frame(outline, key); onpick(current); };
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
      repaint(changed, words = title) {
        [value, title] = [changed, words];
        svg.querySelector(".scale").textContent = title;
        for (const [key, rect] of cells) rect.setAttribute("fill", colour(at.get(key)));
      },
      mark(changed) { marked = changed; again(); },
    };
  }

  // ------------------------------------------------------------------ singular values over their null band
  function spectra(element, rows, panels) {
    const grid = make("div", { class: "panels" });
    element.replaceChildren(make("div", { class: "legend" }, make("span", {}, "● kept"), make("span", {}, "○ not kept"),
      make("span", {}, make("span", { class: "swatch", style: { background: "var(--band)" } }), "null, median to 95%")), grid);
    for (const panel of panels) {
      const own = rows.filter((row) => row.panel === panel.name), box = make("div", {});
      grid.append(box);
      redraw(box, (width) => box.replaceChildren(spectrum(panel, own, width)));
    }
  }
  function spectrum(panel, rows, width) {
    const [left, right, top, bottom, height] = [44, 8, 42, 26, 200];
    const values = rows.flatMap((row) => [row.value, row.null_median, row.null_high]).filter((value) => value > 0);
    const [low, high] = [Math.log10(Math.min(...values)), Math.log10(Math.max(...values))];
    const pad = Math.max(0.08 * (high - low), 0.05);
    const x = (i) => left + 8 + ((width - left - right - 16) * (i - 1)) / Math.max(rows.length - 1, 1);
    const y = (value) => top + (height - top - bottom) * (1 - (Math.log10(value) - low + pad) / (high - low + 2 * pad));
    const svg = draw("svg", { width, height, role: "img", "aria-label": `${panel.name}: ${panel.rank} kept, ${panel.above} above the null` },
      draw("text", { class: "title", x: 0, y: 13 }, panel.name),
      draw("text", { class: "soft", x: 0, y: 30 }, `kept ${panel.rank} · above null ${panel.above} · mean ${fixed(panel.dominance)} · ${panel.verdict}`));
    const lines = (steps) => { const found = []; for (let power = Math.floor(low - pad); power <= high + pad; power += 1) found.push(...steps.map((k) => k * 10 ** power)); return found.filter((v) => Math.log10(v) > low - pad && Math.log10(v) < high + pad); };
    for (const value of lines([1]).length > 1 ? lines([1]) : lines([1, 3])) {
      svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }), draw("text", { class: "soft", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
    }
    const tested = rows.filter((row) => row.null_high > 0);
    if (tested.length) {
      const half = tested.length === 1 ? 5 : 0;
      const points = [...tested.map((row) => [x(row.component) - half, y(row.null_high)]), ...(half ? [[x(1) + half, y(tested[0].null_high)], [x(1) + half, y(tested[0].null_median)]] : []), ...tested.toReversed().map((row) => [x(row.component) - half, y(row.null_median)])];
      svg.append(draw("polygon", { points: points.map((point) => point.join(",")).join(" "), fill: "var(--band)" }));
    }
    svg.append(draw("polyline", { points: rows.filter((row) => row.value > 0).map((row) => `${x(row.component)},${y(row.value)}`).join(" "), fill: "none", stroke: "var(--original)", "stroke-width": 1, opacity: 0.5 }));
    for (const row of rows.filter((r) => r.value > 0)) {
      const lines = [[`component ${row.component}`], ["singular value", number(row.value)], ["null, median", number(row.null_median)], ["null, 95%", number(row.null_high)]];
      svg.append(draw("circle", { cx: x(row.component), cy: y(row.value), r: 3.5, fill: row.kept ? "var(--original)" : "var(--paper)", stroke: "var(--original)", "stroke-width": 1.3 }),
        draw("circle", { cx: x(row.component), cy: y(row.value), r: 9, fill: "transparent", ...pointed(lines) }));
    }
    const step = rows.length > 14 ? 5 : rows.length > 8 ? 2 : 1;
    for (let i = 1; i <= rows.length; i += i === 1 && step === 5 ? 4 : step) svg.append(draw("text", { class: "soft", x: x(i), y: height - 8, "text-anchor": "middle" }, String(i)));
    return svg;
  }

  // ------------------------------------------------------------------ points that can be turned (plotly's one job here)
  function cloud(element, rows, panels) {
    const stage = make("div", { class: "stage", tabindex: 0, role: "application", "aria-label": "Keys and queries in three dimensions. Arrow keys turn, plus and minus zoom." });
    const bar = make("div", { class: "choices" });
    let name = panels[0].name, by = Object.keys(panels[0].colourings)[0];
    const render = () => {
      const panel = panels.find((each) => each.name === name);
      if (!panel.colourings[by]) by = Object.keys(panel.colourings)[0];
      bar.replaceChildren(...(panels.length > 1 ? choose("feature", panels.map((p) => p.name), name, (next) => { name = next; render(); }) : []),
        ...(Object.keys(panel.colourings).length > 1 ? choose("colour", Object.keys(panel.colourings), by, (next) => { by = next; render(); }) : []));
      const { names, ordered } = panel.colourings[by];
      const css = getComputedStyle(document.documentElement), ink = css.getPropertyValue("--ink").trim(), line = css.getPropertyValue("--line").trim();
      const dark = (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
      const palette = ordered ? names.map((_, i) => viridis((dark ? 0.25 : 0) + (dark ? 0.75 : 0.92) * i / Math.max(names.length - 1, 1))) : names.map((_, i) => ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8c6d5a", "#7a7f87"][i % 9]);
      const traces = [];
      for (const [index, label] of [...names.entries(), [-1, null]]) for (const side of ["key", "query"]) {
        const own = rows.filter((row) => row.cloud === name && row.side === side && row[by] === label);
        if (!own.length) continue;
        traces.push({ type: "scatter3d", mode: "markers", name: label === null ? "other" : label, legendgroup: String(label), showlegend: side === "key" || !rows.some((r) => r.cloud === name && r.side === "key" && r[by] === label),
          x: own.map((r) => r.x), y: own.map((r) => r.y), z: own.map((r) => r.z),
          text: own.map((row) => Object.keys(panel.colourings).map((key) => `${escaped(key)}: ${escaped(String(row[key] === null ? "other" : row[key]))}`).join("<br>")),
          hovertemplate: `<b>${side}</b><br>%{text}<extra></extra>`,
          marker: { size: side === "key" ? 3.5 : 6, symbol: side === "key" ? "circle" : "diamond", color: index < 0 ? css.getPropertyValue("--rest").trim() : palette[index], opacity: index < 0 ? 0.3 : side === "key" ? 0.75 : 1, line: { width: side === "key" ? 0 : 1, color: ink } } });
      }
      const axis = (i) => ({ title: { text: `PC ${i}`, font: { size: 11 } }, showticklabels: false, gridcolor: line, zerolinecolor: line, showbackground: false, showspikes: false });
      const camera = stage.layout && stage.layout.scene && stage.layout.scene.camera;
      Plotly.react(stage, traces, { margin: { l: 0, r: 0, t: 0, b: 0 }, paper_bgcolor: "rgba(0,0,0,0)", font: { color: ink, family: "system-ui, sans-serif", size: 12 }, uirevision: "same",
        scene: { xaxis: axis(1), yaxis: axis(2), zaxis: axis(3), aspectmode: "cube", camera: camera || { eye: { x: 1.3, y: 1.3, z: 0.7 } }, dragmode: "orbit" },
        hoverlabel: { bgcolor: ink, font: { color: css.getPropertyValue("--paper").trim(), size: 12 }, bordercolor: ink },
        legend: { orientation: "v", x: 0, y: 1, itemsizing: "constant", bgcolor: "rgba(0,0,0,0)", title: { text: `${escaped(by)}<br><sup>● key  ◆ query</sup>`, font: { size: 12 } } } },
      { displayModeBar: false, responsive: true });
    };
    stage.addEventListener("keydown", (event) => {
      const turn = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, 0.15], ArrowDown: [0, -0.15] }[event.key];
      const zoom = { "+": 0.9, "=": 0.9, "-": 1.1 }[event.key];
      if (!turn && !zoom) return;
      event.preventDefault();
      const { x, y, z } = stage._fullLayout.scene.camera.eye, r = Math.hypot(x, y, z) * (zoom || 1);
      const round = Math.atan2(y, x) + (turn ? turn[0] : 0), up = Math.max(-1.5, Math.min(1.5, Math.asin(z / Math.hypot(x, y, z)) + (turn ? turn[1] : 0)));
      Plotly.relayout(stage, { "scene.camera.eye": { x: r * Math.cos(up) * Math.cos(round), y: r * Math.cos(up) * Math.sin(round), z: r * Math.sin(up) } });
    });
    element.replaceChildren(bar, stage);
    // drawn when it comes near, so that the page is there at once
    new IntersectionObserver((seen, watcher) => { if (seen.some((each) => each.isIntersecting)) { watcher.disconnect(); render(); } }, { rootMargin: "300px" }).observe(stage);
    document.addEventListener("qk-theme", () => stage.data && render());
  }
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");  // plotly reads markup

  return { make, draw, number, fixed, pretty, visible, piece, partColours, viridis, tip, pointed, near, redraw, choose, ticks, map, spectra, cloud };
})();
