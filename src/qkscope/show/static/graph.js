"use strict";
// A logit followed down: tokens left to right, layers bottom to top. A pill is a writer at a token, MLPs stand above the
// heads of their layer. Solid lines are as wide as their share of the logit; a dashed one says why a head looked there.
(() => {
  const { draw, make, fixed, visible, piece, tip, pointed, near, redraw, choose, stroke } = qk;
  const PILL = 44,
    TALL = 30,
    WIDEST = 11,
    MAIN = 0.2, // share of why a head looked, from which on a writer is drawn at once
    AXIS = 40,
    SMALLEST = { any: 0, "5%": 0.05, "10%": 0.1 };
  const signed = (value) => (value > 0 ? "+" : "") + fixed(value);
  const short = (text) => (text.length > 9 ? `${text.slice(0, 8)}…` : text);
  const quoted = (row) => `“${piece(row.token ?? "")}” (token ${row.position})`;

  // nodes and edges as a picture: what the root leads to along lines that are wide enough, and why heads looked there
  const pictured = (edges, nodes, why, least) => {
    const top = Math.max(0, ...nodes.map((node) => node.layer ?? 0)) + 1;
    const places = nodes.map((node, i) => ({
      key: i ? `${node.side ?? ""} ${node.writer} ${node.position}`.trim() : "root",
      node,
      position: node.position,
      level: i ? (node.layer ?? -1) + (node.writer.startsWith("M") ? 0.5 : 0) : top,
      root: !i,
      into: edges.filter((edge) => edge.target === node.id),
    }));
    const shown = new Set([0]),
      lines = new Map();
    const line = (edge, dashed) => {
      const key = `${edge.source} ${edge.target} ${dashed}`;
      if (!lines.has(key)) lines.set(key, { from: places[edge.target], to: places[edge.source], dashed, share: 0, edges: [] });
      const own = lines.get(key);
      own.share += edge.share ?? 0;
      own.edges.push(edge);
    };
    const queue = [0];
    while (queue.length)
      for (const edge of places[queue.shift()].into)
        if (edge.source !== null && edge.of === null && Math.abs(edge.share) >= least) {
          line(edge, false);
          if (!shown.has(edge.source)) queue.push(edge.source);
          shown.add(edge.source);
        }
    const asked = { main: MAIN, all: 0, none: Infinity }[why];
    for (const id of [...shown])
      for (const edge of places[id].into)
        if (edge.source !== null && edge.of === id && Math.abs(edge.share) >= asked) {
          line(edge, true);
          places[edge.source].ghost ??= !shown.has(edge.source);
        }
    return { places: places.filter((at) => shown.has(at.node.id) || at.ghost), lines: [...lines.values()], root: places[0] };
  };

  const laidOut = (picture, prompt, width) => {
    const { places } = picture;
    const used = [...new Set(places.map((at) => at.position))].sort((a, b) => a - b);
    const texts = new Map(prompt.map((row) => [row.position, row.token]));
    for (const { node } of places) texts.set(node.position, node.token);
    const near = new Set(used.flatMap((i) => [i - 1, i, i + 1]).filter((i) => texts.has(i)));
    const columns = [];
    for (const i of [...texts.keys()].sort((a, b) => a - b)) {
      if (near.has(i)) {
        const text = short(visible(texts.get(i)));
        const rows = Map.groupBy(places.filter((at) => at.position === i), (at) => at.level);
        const lanes = Math.max(0, ...[...rows.values()].map((row) => row.length));
        const size = Math.max(lanes * (PILL + 8), 8 + 7.2 * text.length, 20);
        columns.push({ i, text, takesPart: used.includes(i), size });
      } else if (columns.length && columns.at(-1).i !== null) columns.push({ i: null, text: "…", size: 18 });
    }
    const room = width - AXIS - 8,
      needed = columns.reduce((sum, column) => sum + column.size, 0);
    const spread = Math.max(0, Math.min((room - needed) / columns.length, 34));
    let x = AXIS;
    for (const column of columns) {
      column.x = x + (column.size + spread) / 2;
      x += column.size + spread;
    }
    const levels = [...new Set(places.map((at) => at.level))].sort((a, b) => b - a);
    const height = new Map();
    let y = 24;
    levels.forEach((level, i) => {
      if (i) y += levels[i - 1] - level > 1 ? 50 : 42;
      height.set(level, y);
    });
    const at = new Map(columns.map((column) => [column.i, column.x]));
    for (const [, own] of Map.groupBy(places, (one) => `${one.position} ${one.level}`)) {
      own.forEach((one, i) => {
        one.x = at.get(one.position) + (i - (own.length - 1) / 2) * (PILL + 6);
        one.y = height.get(one.level);
      });
    }
    return { columns, levels, height, width: Math.max(x + 8, AXIS + 60), bottom: y + 40 };
  };

  const path = ({ from, to }) => {
    const [x1, y1, x2, y2] = [from.x, from.y + TALL / 2, to.x, to.y - TALL / 2];
    if (Math.abs(x1 - x2) < 2 && y2 - y1 > 60) {
      const bow = PILL / 2 + 10 + Math.min(24, (y2 - y1) / 14); // around what stands between
      return `M${x1},${y1} C${x1 + bow},${y1 + 24} ${x2 + bow},${y2 - 24} ${x2},${y2}`;
    }
    if (y2 < y1) {
      const side = (Math.sign(x2 - x1) * PILL) / 2,
        [start, end] = [x1 + side, x2 - side],
        middle = (start + end) / 2;
      return `M${start},${from.y} C${middle},${from.y} ${middle},${to.y} ${end},${to.y}`;
    }
    const bend = Math.max(10, (y2 - y1) / 2);
    return `M${x1},${y1} C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}`;
  };

  const named = (source, nodes) =>
    source === null ? "all the rest" : `${nodes[source].writer} at ${quoted(nodes[source])}`;
  const told = (at, kind, of, nodes) =>
    at.into
      .filter((edge) => edge.kind === kind && edge.of === of)
      .map((edge) => [named(edge.source, nodes), `${signed(edge.value)} (${fixed(edge.share)})`]);
  const said = (at, nodes) => {
    const { node } = at,
      looks = node.towards !== null && node.attention !== null;
    return [
      [at.root && node.writer === "answer" ? "the answer over its rival" : `${node.writer} at ${quoted(node)}`],
      ...(looks ? [[`attention on token ${node.towards}`, fixed(node.attention)]] : []),
      ...(node.value === null ? [] : [[at.root ? "logit" : "part of the logit", signed(node.value)]]),
      ...(node.value === null || at.root ? [] : [["share", fixed(node.share)]]),
      ...(node.rank ? [["rank in the running model", `${node.rank}`]] : []),
      ...(node.reason ? [[node.reason]] : []),
      ...["value", "query", "key"].flatMap((kind) => told(at, kind, null, nodes)),
    ];
  };
  const saidWhy = ({ from, edges }, nodes) => [
    [`Why ${from.node.writer} at ${quoted(from.node)} looked at token ${from.node.towards}`],
    ["its logit over all others it saw", signed(from.node.look)],
    ...edges.map((edge) => [
      `${named(edge.source, nodes)}, ${edge.kind} side`,
      `${signed(edge.value)} (${fixed(edge.share)})`,
    ]),
  ];

  qk.charts.graph = (element, edges, { prompt, nodes }) => {
    let why = "main",
      least = nodes.length > 40 ? "5%" : "any",
      picked = null,
      picture = null,
      groups = new Map(),
      drawn = [];
    const stage = make("div", { class: "graph scroll" });
    const legend = qk.legend(
      [stroke("var(--original)", 4), "raises the logit"],
      [stroke("var(--target)", 4), "lowers the logit"],
      [stroke("var(--soft)", 1.5, "4 3"), "why it looked there"],
    );
    const again = redraw(stage, (width) => render(width));
    const asks = choose("Why it looked there", ["main", "all", "none"], why, (name) => {
      why = name;
      again();
    });
    const sizes = choose("Lines of at least", Object.keys(SMALLEST), least, (name) => {
      least = name;
      again();
    });
    const buttons = make("div", { class: "choices" }, ...asks, ...sizes);
    element.replaceChildren(buttons, legend, stage);

    // all that leads to a place and all that it leads to
    const related = (at) => {
      const found = new Set([at]),
        edges = new Set();
      const walk = (from, one, other, dashed) => {
        for (const { line } of drawn)
          if (line[one] === from && !edges.has(line) && (dashed || !line.dashed)) {
            edges.add(line);
            found.add(line[other]);
            if (!line.dashed) walk(line[other], one, other, false);
          }
      };
      walk(at, "from", "to", true);
      walk(at, "to", "from", true);
      return { found, edges };
    };
    const mark = () => {
      const { found, edges } = picked ? related(picked) : {};
      for (const [at, group] of groups) {
        group.classList.toggle("dim", Boolean(picked) && !found.has(at));
        group.setAttribute("aria-pressed", String(at === picked));
      }
      for (const { line, shape } of drawn) shape.classList.toggle("dim", Boolean(picked) && !edges.has(line));
    };
    const pick = (at) => {
      picked = picked === at ? null : at;
      mark();
    };
    const step = (at, key) => {
      const solid = drawn.filter(({ line }) => !line.dashed).map(({ line }) => line);
      const largest = (one, other) =>
        solid.filter((line) => line[one] === at).sort((a, b) => Math.abs(b.share) - Math.abs(a.share))[0]?.[other];
      if (key === "ArrowDown") return largest("from", "to");
      if (key === "ArrowUp") return largest("to", "from");
      const along = picture.places.filter((one) => groups.has(one)).sort((a, b) => a.x - b.x || a.y - b.y);
      return along[along.indexOf(at) + (key === "ArrowRight" ? 1 : -1)];
    };

    function render(width) {
      const kept = picked && picked.key;
      picture = pictured(edges, nodes, why, SMALLEST[least]);
      const { columns, levels, height, bottom, width: wide } = laidOut(picture, prompt, width);
      groups = new Map();
      const svg = draw("svg", {
        width: wide,
        height: bottom,
        role: "group",
        "aria-label": "Graph of writers: arrow keys move along lines, Enter follows one, Escape shows all",
      });
      for (const level of levels.filter(Number.isInteger)) {
        const y = height.get(level);
        svg.append(
          draw("line", { class: "axis", x1: AXIS - 6, x2: wide - 4, y1: y, y2: y, opacity: 0.6 }),
          draw("text", { class: "soft", x: 0, y: y + 4 }, level < 0 ? "input" : level === picture.root.level ? "" : `${level}`),
        );
      }
      svg.append(draw("text", { class: "soft", x: 0, y: 9, "font-size": 11 }, "layer"));
      for (const { text, x, takesPart } of columns)
        svg.append(draw("text", { class: takesPart ? "token" : "soft", x, y: bottom - 8, "text-anchor": "middle" }, text));
      drawn = picture.lines
        .toSorted((a, b) => Math.abs(b.share) - Math.abs(a.share))
        .map((line) => {
          const d = path(line),
            colour = line.dashed ? "var(--soft)" : line.share < 0 ? "var(--target)" : "var(--original)",
            size = line.dashed ? 1.4 : Math.max(1.2, Math.min(1.3, Math.abs(line.share)) * WIDEST);
          const shape = draw(
            "g",
            {
              class: `line${line.dashed ? " why" : ""}`,
              ...pointed(line.dashed ? saidWhy(line, nodes) : said(line.to, nodes)),
            },
            draw("path", { d, stroke: colour, "stroke-width": size, "stroke-dasharray": line.dashed ? "4 3" : null }),
            draw("path", { d, stroke: "transparent", "stroke-width": Math.max(10, size) }),
          );
          svg.append(shape);
          return { line, shape };
        });
      for (const at of picture.places.toSorted((a, b) => b.level - a.level || a.x - b.x)) {
        const { ghost, node } = at,
          lines = said(at, nodes);
        const group = draw("g", {
          class: `place${ghost ? " ghost" : at.root ? " root" : ""}`,
          tabindex: at.root ? 0 : -1,
          role: "button",
          "data-at": at.key,
          "aria-label": lines.map((line) => line.join(" ")).join(", "),
          transform: `translate(${at.x},${at.y})`,
          ...pointed(lines),
          onclick: () => pick(at),
          onfocus: () => group.matches(":focus-visible") && tip.show(lines, ...near(group)),
          onblur: tip.hide,
          onkeydown: (event) => {
            if (event.key === "Enter" || event.key === " ") pick(at);
            else if (event.key === "Escape") pick(picked);
            else if (event.key.startsWith("Arrow")) {
              const to = groups.get(step(at, event.key));
              if (to) {
                group.setAttribute("tabindex", -1);
                to.setAttribute("tabindex", 0);
                to.focus();
              }
            } else return;
            event.preventDefault();
          },
        });
        const name = { embedding: "embed." }[node.writer] ?? node.writer,
          value = at.root ? fixed(node.value, 1) : fixed(node.share);
        group.append(
          draw("rect", { x: -PILL / 2, y: -TALL / 2, width: PILL, height: TALL, rx: 6 }),
          draw("text", { y: ghost ? 4 : -2, "text-anchor": "middle" }, name),
          ghost ? "" : draw("text", { class: "soft", y: 11, "text-anchor": "middle" }, value),
        );
        groups.set(at, group);
        svg.append(group);
      }
      const fresh = !stage.firstChild;
      stage.replaceChildren(svg);
      if (fresh) stage.scrollLeft = wide; // what is followed stands at the right
      picked = picture.places.find((at) => at.key === kept) ?? null;
      mark();
    }
  };
})();
