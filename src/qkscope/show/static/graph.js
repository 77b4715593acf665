"use strict";
// A logit followed down: tokens left to right, layers bottom to top. A pill is a writer at a token, a ring what stood at
// a token when a head read it. Solid lines are as wide as their share of the logit; a dashed one says why a head looked.
(() => {
  const { draw, make, fixed, visible, piece, tip, pointed, near, redraw, choose, stroke } = qk;
  const PILL = 44,
    TALL = 30,
    WIDEST = 11,
    MAIN = 0.2, // share of why a head looked, from which on a writer is drawn at once
    AXIS = 40;
  const signed = (value) => (value > 0 ? "+" : "") + fixed(value);
  const short = (text) => (text.length > 9 ? `${text.slice(0, 8)}…` : text);
  const quoted = (row) => `“${piece(row.token ?? "")}” (token ${row.position})`;
  const isShown = (row) => row.position !== null && row.writer !== "rest";

  // the tree of rows as a picture: the same writer at the same token is one place, however many ways lead to it
  const pictured = (rows, why) => {
    const byId = new Map(rows.map((row) => [row.id, row])),
      below = Map.groupBy(rows, (row) => row.parent),
      places = new Map(),
      lines = new Map();
    const place = (key, given) => {
      if (!places.has(key)) places.set(key, { key, rows: [], share: 0, whys: [], ...given });
      return places.get(key);
    };
    const line = (from, to, row, dashed = false) => {
      const key = `${from.key} ${to.key} ${dashed}`;
      if (!lines.has(key)) lines.set(key, { from, to, dashed, share: 0, rows: [] });
      const own = lines.get(key);
      own.share += row.share ?? 0;
      own.rows.push(row);
    };
    const ring = (side, position, layer) =>
      place(`${side} ring ${position} ${layer}`, { side, position, level: layer - 0.5, ring: true });
    const pill = (side, { writer: name, position, layer }) =>
      place(`${side} ${name} ${position}`, { side, position, level: layer ?? -1, name });
    const follow = (row, at) => {
      for (const child of below.get(row.id) ?? []) {
        if (child.kind === "why" && child.side === null) {
          at.whys.push(child);
          continue;
        }
        if (!isShown(child)) continue;
        const to = child.writer === null ? ring(child.side, child.position, child.layer) : pill(child.side, child);
        to.rows.push(child);
        to.share += child.share ?? 0;
        let from = at;
        if (row.kind === "root") {
          from = ring(child.side, child.side === "query" ? row.position : row.towards, row.layer);
          if (!from.rows.length) {
            const { side, token } = child;
            from.rows.push({ ...row, side, position: from.position, token, writer: null, of: row });
            from.share = 1;
            line(at, from, row);
          }
        }
        line(from, to, child);
        follow(child, to);
      }
    };
    const first = rows.find((row) => row.kind === "root"),
      root = place("root", { position: first.position, level: first.layer, name: first.writer, share: 1, root: true });
    root.rows.push(first);
    follow(first, root);
    // why a head looked: its own first writers, at the token it looked from and at the one it looked at
    const read = [...places.values()].filter((at) => at.whys.length);
    for (const at of read)
      for (const asked of at.whys) {
        const head = places.get(`${at.side} ${asked.writer} ${asked.position}`);
        for (const side of ["query", "key"]) {
          const least = { main: MAIN, all: 0, none: Infinity }[why];
          for (const row of below.get(asked.id) ?? [])
            if (row.side === side && isShown(row) && Math.abs(row.share) >= least)
              line(head ?? at, pill(at.side, row), { ...row, asked }, true);
        }
      }
    return { byId, below, places: [...places.values()], lines: [...lines.values()], root };
  };

  const laidOut = (picture, prompt, width) => {
    const { places } = picture;
    const used = [...new Set(places.map((at) => at.position))].sort((a, b) => a - b);
    const texts = new Map(prompt.map((row) => [row.position, row.token]));
    for (const at of places) for (const row of at.rows) if (row.token !== null) texts.set(row.position, row.token);
    const near = new Set(used.flatMap((i) => [i - 1, i, i + 1]).filter((i) => texts.has(i)));
    const columns = [];
    for (const i of [...texts.keys()].sort((a, b) => a - b)) {
      if (near.has(i)) {
        const text = short(visible(texts.get(i)));
        const rows = Map.groupBy(places.filter((at) => at.position === i), (at) => at.level);
        const lanes = Math.max(0, ...[...rows.values()].map((row) => (row[0].ring ? 0.4 : 1) * row.length));
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
      if (i) y += Number.isInteger(level) ? (levels[i - 1] - level > 1 ? 50 : 42) : 32;
      height.set(level, y);
    });
    const at = new Map(columns.map((column) => [column.i, column.x]));
    for (const [, own] of Map.groupBy(places, (one) => `${one.position} ${one.level}`)) {
      own.forEach((one, i) => {
        one.x = at.get(one.position) + (i - (own.length - 1) / 2) * (one.ring ? 18 : PILL + 6);
        one.y = height.get(one.level);
      });
    }
    return { columns, levels, height, width: Math.max(x + 8, AXIS + 60), bottom: y + 40 };
  };

  const path = ({ from, to }) => {
    const half = (at) => (at.ring ? 5 : TALL / 2);
    const [x1, y1, x2, y2] = [from.x, from.y + half(from), to.x, to.y - half(to)];
    if (Math.abs(x1 - x2) < 2 && y2 - y1 > 60) {
      const bow = PILL / 2 + 10 + Math.min(24, (y2 - y1) / 14); // around what stands between
      return `M${x1},${y1} C${x1 + bow},${y1 + 24} ${x2 + bow},${y2 - 24} ${x2},${y2}`;
    }
    if (y2 < y1) {
      const side = (at) => Math.sign(x2 - x1) * (at.ring ? 5 : PILL / 2);
      const [start, end] = [x1 + side(from), x2 - side(to)],
        middle = (start + end) / 2;
      return `M${start},${from.y} C${middle},${from.y} ${middle},${to.y} ${end},${to.y}`;
    }
    const bend = Math.max(10, (y2 - y1) / 2);
    return `M${x1},${y1} C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}`;
  };

  const parts = (row, below) =>
    (below.get(row.id) ?? [])
      .filter((child) => child.kind === row.kind || row.kind === "root")
      .filter((child) => child.side === row.side || row.side === null)
      .map((child) => [
        child.writer === "rest" ? "all the rest" : (child.writer ?? `read ${quoted(child)}`),
        signed(child.value),
      ]);
  const said = (at, { below, root }) => {
    const top = root.rows[0];
    if (at.root)
      return [
        [`${top.writer} at ${quoted(top)}`],
        ["attention on the key", fixed(top.attention)],
        ["logit of the key over the others", signed(top.value)],
      ];
    return at.rows.flatMap((row, i) => [
      [
        (at.ring
          ? row.of
            ? `${quoted(row)}: the ${row.side} of ${top.writer}`
            : `${quoted(row)}, as layer ${row.layer} read it`
          : `${row.writer} at ${quoted(row)}`) + (at.rows.length > 1 ? `, ${i + 1} of ${at.rows.length} ways` : ""),
      ],
      ...(row.attention === null || row.attention === undefined ? [] : [["attention", fixed(row.attention)]]),
      ["part of the logit", signed(row.value)],
      ["share", fixed(row.share)],
      ...parts(row.of ? { ...row.of, side: row.side } : row, below),
      ...at.whys
        .filter((asked) => asked.parent === row.id)
        .map((asked) => [`why ${asked.writer} looked here: its logit`, signed(asked.value)]),
    ]);
  };
  const saidWhy = ({ rows }, byId) =>
    rows.flatMap((row) => [
      [`Why ${row.asked.writer} at ${quoted(row.asked)} looked at ${quoted(byId.get(row.asked.parent))}`],
      ["its logit over all others it saw", signed(row.asked.value)],
      [`${row.writer}, ${row.side} side`, `${signed(row.value)} (${fixed(row.share)})`],
    ]);

  qk.charts.graph = (element, rows, { prompt }) => {
    let why = "main",
      picked = null,
      picture = null,
      groups = new Map(),
      drawn = [];
    const stage = make("div", { class: "graph scroll" });
    const legend = qk.legend(
      [stroke("var(--original)", 4), "raises the logit"],
      [stroke("var(--target)", 4), "lowers the logit"],
      [stroke("var(--soft)", 1.5, "4 3"), "why it looked there"],
      ["", "○ what stood at a token when it was read"],
    );
    const again = redraw(stage, (width) => render(width));
    const show = (name) => {
      why = name;
      again();
    };
    const buttons = make("div", { class: "choices" }, ...choose("Why it looked there", ["main", "all", "none"], why, show));
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
      picture = pictured(rows, why);
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
          draw("text", { class: "soft", x: 0, y: y + 4 }, level < 0 ? "input" : `${level}`),
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
              ...pointed(line.dashed ? saidWhy(line, picture.byId) : said(line.to, picture)),
            },
            draw("path", { d, stroke: colour, "stroke-width": size, "stroke-dasharray": line.dashed ? "4 3" : null }),
            draw("path", { d, stroke: "transparent", "stroke-width": Math.max(10, size) }),
          );
          svg.append(shape);
          return { line, shape };
        });
      for (const at of picture.places.toSorted((a, b) => b.level - a.level || a.x - b.x)) {
        const ghost = !at.rows.length;
        const lines = ghost ? saidWhy(picture.lines.find((line) => line.to === at), picture.byId) : said(at, picture);
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
        if (at.ring)
          group.append(
            draw("circle", { r: 5 }),
            draw("circle", { r: 11, fill: "transparent", stroke: "none" }),
            draw("text", { class: "soft beside", x: 10, y: 4 }, at.rows[0].of ? at.side : fixed(at.share)),
          );
        else {
          const name = at.name === "embedding" ? "embed." : at.name,
            value = at.root ? fixed(at.rows[0].value, 1) : fixed(at.share);
          group.append(
            draw("rect", { x: -PILL / 2, y: -TALL / 2, width: PILL, height: TALL, rx: 6 }),
            draw("text", { y: ghost ? 4 : -2, "text-anchor": "middle" }, name),
            ghost ? "" : draw("text", { class: "soft", y: 11, "text-anchor": "middle" }, value),
          );
        }
        groups.set(at, group);
        svg.append(group);
      }
      const fresh = !stage.firstChild;
      stage.replaceChildren(svg);
      if (fresh) stage.scrollLeft = wide; // the head that asks stands at the right
      picked = picture.places.find((at) => at.key === kept) ?? null;
      mark();
    }
  };
})();
