"use strict";
// Keys and queries as points in space, on a canvas: dragged or turned by keys. A name in the legend hides its
// points; pointing at one reads it out. Axes are principal components in one scale, and near points are larger.
(() => {
  const { make, choose, viridis, isDark, tip } = qk;
  const START = { round: 0.7, up: 0.4, zoom: 1 };
  const TURN = 0.15, // radians of an arrow key
    REACH = 14; // pixels around the pointer

  // the middle of the points, and how far they reach from there
  function measure(rows) {
    const [x, y, z] = ["x", "y", "z"].map((axis) => {
      const values = rows.map((row) => row[axis]);
      return (Math.min(...values) + Math.max(...values)) / 2;
    });
    const extent = Math.max(1e-12, ...rows.map((row) => Math.hypot(row.x - x, row.y - y, row.z - z)));
    return { middle: [x, y, z], extent };
  }

  const PLACE = ["cloud", "side", "x", "y", "z"]; // all other columns are ways to colour

  qk.charts.cloud = (element, rows) => {
    const panels = [...new Set(rows.map((row) => row.cloud))];
    const canvas = make("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": "Keys and queries in three dimensions. Arrow keys turn, plus and minus zoom, 0 turns back.",
    });
    const button = (title, text, onclick) => make("button", { type: "button", "aria-label": title, title, onclick }, text);
    const [nearer, farther] = [button("Nearer", "+", () => zoom(1.25)), button("Farther", "−", () => zoom(0.8))];
    const buttons = make("div", { class: "zoom" }, nearer, farther, button("As at first", "reset", home));
    const stage = make("div", { class: "stage" }, canvas, buttons);
    const bar = make("div", { class: "choices" }),
      legend = make("div", { class: "legend" });
    element.replaceChildren(bar, legend, stage);

    let name = panels[0],
      ways = [],
      by = null,
      view = { ...START },
      points = [],
      room = null;
    const hidden = new Set();

    function pick() {
      const own = rows.filter((row) => row.cloud === name);
      ways = Object.keys(own[0]).filter((column) => !PLACE.includes(column));
      if (!ways.includes(by)) by = ways[0];
      bar.replaceChildren(
        ...(panels.length > 1 ? choose("feature", panels, name, (next) => pick((name = next))) : []),
        ...(ways.length > 1 ? choose("colour", ways, by, (next) => pick((by = next), hidden.clear())) : []),
      );
      room = measure(own);
      points = own.map((row) => ({ row, colour: "", at: null }));
      paint();
    }

    // a colour of the style sheet as a canvas takes it
    function inked(name) {
      canvas.style.color = `var(${name})`;
      return getComputedStyle(canvas).color;
    }

    // the legend and every point's colour, which depend on the theme
    function paint() {
      const names = [...new Set(points.map(({ row }) => row[by] ?? null))].filter((label) => label !== null),
        ordered = names.every((label) => typeof label === "number"),
        other = inked("--rest"),
        spread = (i) => (isDark() ? 0.25 : 0) + ((isDark() ? 0.75 : 0.92) * i) / Math.max(names.length - 1, 1);
      if (ordered) names.sort((a, b) => a - b);
      const found = ordered ? names.map((_, i) => viridis(spread(i))) : qk.labelColours(names);
      const colours = new Map([...names.map((label, i) => [label, found[i]]), [null, other]]);
      for (const point of points) point.colour = colours.get(point.row[by]);
      const entry = (what, words, mark) => qk.toggle(hidden, what, () => !hidden.has(what), draw, {}, mark, words);
      legend.replaceChildren(
        entry("side key", "● keys", null),
        entry("side query", "◆ queries", null),
        ...[...colours]
          .filter(([label]) => points.some(({ row }) => row[by] === label))
          .map(([label, colour]) => entry(`label ${label}`, label ?? "other", qk.swatch(colour))),
        make("span", {}, "click a name to hide it"),
      );
      draw();
    }

    function draw() {
      const [width, height, dense] = [stage.clientWidth, stage.clientHeight, devicePixelRatio || 1];
      if (!width) return;
      if (canvas.width !== Math.round(width * dense) || canvas.height !== Math.round(height * dense))
        [canvas.width, canvas.height] = [Math.round(width * dense), Math.round(height * dense)];
      const pen = canvas.getContext("2d"),
        ink = inked("--ink");
      const { middle, extent } = room;
      const size = (0.44 * Math.min(width, height) * view.zoom) / extent;
      const [cr, sr, cu, su] = [Math.cos(view.round), Math.sin(view.round), Math.cos(view.up), Math.sin(view.up)];
      const place = (...at) => {
        const [x, y, z] = at.map((value, i) => value - middle[i]);
        const across = x * cr + y * sr,
          deep = y * cr - x * sr,
          near = (z * su - deep * cu) / extent,
          larger = 1 / (1 - 0.22 * near);
        return [width / 2 + across * size * larger, height / 2 - (z * cu + deep * su) * size * larger, near, larger];
      };
      pen.setTransform(dense, 0, 0, dense, 0, 0);
      pen.clearRect(0, 0, width, height);
      pen.font = "12px system-ui, sans-serif";
      pen.textAlign = "center";
      for (const [i, axis] of [[1, 0, 0], [0, 1, 0], [0, 0, 1]].entries()) {
        const [from, to] = [-1, 1].map((end) => place(...axis.map((value, j) => value * (middle[j] + end * extent))));
        pen.strokeStyle = inked("--line");
        pen.beginPath();
        pen.moveTo(from[0], from[1]);
        pen.lineTo(to[0], to[1]);
        pen.stroke();
        pen.fillStyle = inked("--soft");
        pen.fillText(`PC ${i + 1}`, Math.max(18, Math.min(width - 18, to[0])), Math.max(12, to[1] - 6));
      }
      const gone = (row) => hidden.has(`side ${row.side}`) || hidden.has(`label ${row[by]}`);
      for (const point of points) point.at = gone(point.row) ? null : place(point.row.x, point.row.y, point.row.z);
      const shown = points.filter((point) => point.at).sort((a, b) => a.at[2] - b.at[2]);
      for (const { row, colour, at } of shown) {
        const [x, y, near, larger] = at;
        pen.globalAlpha = (row[by] === null ? 0.35 : 1) * Math.max(0.25, Math.min(1, 0.72 + 0.3 * near));
        pen.fillStyle = colour;
        pen.beginPath();
        if (row.side === "key") pen.arc(x, y, 3.2 * larger, 0, 2 * Math.PI);
        else for (const [dx, dy] of [[0, -1], [1, 0], [0, 1], [-1, 0]]) pen.lineTo(x + 5.6 * larger * dx, y + 5.6 * larger * dy);
        pen.closePath();
        pen.fill();
        if (row.side === "query") {
          pen.strokeStyle = ink;
          pen.stroke();
        }
      }
      pen.globalAlpha = 1;
      stage.dataset.view = [view.round, view.up, view.zoom].map((value) => value.toFixed(3)).join(" ");
      stage.dataset.shown = shown.length;
    }

    function turn(round, up) {
      tip.hide();
      view.round += round;
      view.up = Math.max(-1.5, Math.min(1.5, view.up + up));
      draw();
    }
    function zoom(by) {
      view.zoom = Math.max(0.4, Math.min(8, view.zoom * by));
      draw();
    }
    function home() {
      view = { ...START };
      draw();
    }
    function read(event) {
      const box = canvas.getBoundingClientRect(),
        [x, y] = [event.clientX - box.left, event.clientY - box.top];
      let best = null,
        least = REACH;
      for (const point of points) {
        const away = point.at ? Math.hypot(point.at[0] - x, point.at[1] - y) - point.at[2] : Infinity; // of two, the near
        if (away < least) [best, least] = [point, away];
      }
      canvas.style.cursor = best ? "pointer" : "grab";
      if (!best) return tip.hide();
      tip.show([[best.row.side], ...ways.map((way) => [way, best.row[way] ?? "other"])], event.clientX, event.clientY);
    }

    // a finger or the mouse turns; up and down with a finger scrolls the page (page.css)
    let held = null,
      moved = 0;
    canvas.addEventListener("pointerdown", (event) => {
      [held, moved] = [event, 0];
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!held) return read(event);
      const [dx, dy] = [event.clientX - held.clientX, event.clientY - held.clientY];
      held = event;
      moved += Math.hypot(dx, dy);
      if (moved > 4) turn(-dx * 0.008, dy * 0.008);
    });
    const release = (event) => {
      if (held && event.type === "pointerup" && moved <= 4) read(event);
      held = null;
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && tip.hide());
    canvas.addEventListener("blur", tip.hide);
    canvas.addEventListener("dblclick", home);
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && document.activeElement !== canvas) return; // the page scrolls until the points are clicked
        event.preventDefault();
        zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)));
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => {
      const keys = { ArrowLeft: [TURN, 0], ArrowRight: [-TURN, 0], ArrowUp: [0, TURN], ArrowDown: [0, -TURN] };
      const nearer = { "+": 1.1, "=": 1.1, "-": 1 / 1.1 }[event.key];
      if (keys[event.key]) turn(...keys[event.key]);
      else if (nearer) zoom(nearer);
      else if (event.key === "0") home();
      else return;
      event.preventDefault();
    });

    pick();
    new ResizeObserver(draw).observe(stage);
    document.addEventListener("qk-theme", paint);
  };
})();
