"use strict";
// Who reads whom: a column for each reading head, a line for each writer, and a mark where one reads the other, as large
// as its share of the reader's logit. Pointed at, walked by keys; a head that is picked leaves its own marks alone.
(() => {
  const { draw, make, fixed, tip, near, redraw, choose } = qk;
  const LEFT = 34,
    TOP = 8,
    BELOW = 38,
    REACH = 16, // pixels from a mark within which it is meant
    MANY = 8, // lines of a list
    MUCH = 0.1; // a share from which on a writer counts as read, as in the answer
  const layerOf = (name) => Number(/^[LM](\d+)/.exec(name)?.[1] ?? -1);
  const isHead = (name) => /^L\d+H\d+$/.test(name);
  const numbers = (name) => (name.match(/\d+/g) ?? []).map(Number);
  // the embedding, then layer by layer the heads and what else writes there
  const before = (a, b) =>
    layerOf(a) - layerOf(b) || isHead(b) - isHead(a) || (numbers(a)[1] ?? 0) - (numbers(b)[1] ?? 0);
  const layersOf = (names) =>
    [...Map.groupBy(names.keys(), (i) => layerOf(names[i]))].map(([layer, own]) => ({
      layer,
      first: own[0],
      middle: (own[0] + own.at(-1)) / 2,
    }));

  qk.charts.reads = (element, rows) => {
    const readers = [...new Set(rows.map((row) => row.reader))].sort(before),
      heads = [...new Set([...readers, ...rows.map((row) => row.writer).filter(isHead)])].sort(before),
      writers = [...new Set([...rows.map((row) => row.writer), ...heads])].filter((name) => layerOf(name) < layerOf(readers.at(-1))).sort(before),
      column = new Map(readers.map((name, i) => [name, i])),
      line = new Map(writers.map((name, i) => [name, i]));
    const bar = make("div", { class: "choices" }),
      place = make("div", {}),
      lists = make("div", { class: "panels" });
    let side = "key",
      chosen = null,
      cursor = null,
      marks = [];
    const shown = () => rows.filter((row) => row.side === side);
    const own = (row) => chosen === null || row.reader === chosen || row.writer === chosen;
    const facts = (row) => [
      [`${row.reader} reads ${row.writer}`],
      [`share of its ${row.side}'s logit`, fixed(row.share)],
      ["passages", String(row.n)],
    ];

    const render = (width) => {
      const wide = width - LEFT - 10,
        high = Math.min(wide, 620),
        x = (i) => LEFT + ((i + 0.5) * wide) / readers.length,
        y = (i) => TOP + high - ((i + 0.5) * high) / writers.length;
      const svg = draw("svg", {
        width,
        height: TOP + high + BELOW,
        tabindex: 0,
        role: "application",
        "aria-label": `Who reads whom: ${readers.length} reading heads across, ${writers.length} writers up. Arrow keys move, Enter picks, Escape shows all.`,
      });
      // a line where a layer begins, its number in the middle of it
      const across = layersOf(readers),
        up = layersOf(writers).filter(({ layer }) => layer >= 0);
      const named = (layers, room) => layers.filter((_, i) => i % Math.ceil((20 * layers.length) / room) === 0);
      for (const { first } of across)
        svg.append(draw("line", { class: "axis", x1: x(first - 0.5), x2: x(first - 0.5), y1: TOP, y2: TOP + high }));
      for (const { first } of up)
        svg.append(draw("line", { class: "axis", x1: LEFT, x2: LEFT + wide, y1: y(first - 0.5), y2: y(first - 0.5) }));
      for (const { layer, middle } of named(across, wide))
        svg.append(draw("text", { class: "soft", x: x(middle), y: TOP + high + 15, "text-anchor": "middle" }, String(layer)));
      for (const { layer, middle } of named(up, high))
        svg.append(draw("text", { class: "soft", x: LEFT - 6, y: y(middle) + 4, "text-anchor": "end" }, String(layer)));
      svg.append(
        draw("text", { class: "soft", x: LEFT, y: TOP + high + 32 }, "reader's layer; up: the writer's"),
        ...(chosen !== null && column.has(chosen)
          ? [draw("line", { class: "zero", x1: x(column.get(chosen)), x2: x(column.get(chosen)), y1: TOP, y2: TOP + high })]
          : []),
        ...(chosen !== null && line.has(chosen)
          ? [draw("line", { class: "zero", x1: LEFT, x2: LEFT + wide, y1: y(line.get(chosen)), y2: y(line.get(chosen)) })]
          : []),
      );
      marks = shown().map((row) => {
        const [cx, cy] = [x(column.get(row.reader)), y(line.get(row.writer))],
          r = Math.max(1.1, (width < 500 ? 5 : 8) * Math.sqrt(Math.min(1, Math.abs(row.share)))),
          kind = `mark ${row.share < 0 ? "against" : "for"}${own(row) ? "" : " dim"}`,
          at = { class: kind, "data-reader": row.reader, "data-writer": row.writer };
        const node = isHead(row.writer)
          ? draw("circle", { cx, cy, r, ...at })
          : draw("rect", { x: cx - 0.9 * r, y: cy - 0.9 * r, width: 1.8 * r, height: 1.8 * r, ...at });
        return { row, cx, cy, node };
      });
      const ring = draw("circle", { class: "meant", r: 10, visibility: "hidden" });
      svg.append(...marks.filter(({ row }) => !own(row)).map(({ node }) => node));
      svg.append(...marks.filter(({ row }) => own(row)).map(({ node }) => node), ring);

      const look = (mark, px, py) => {
        cursor = mark.row;
        ring.setAttribute("cx", mark.cx);
        ring.setAttribute("cy", mark.cy);
        ring.setAttribute("visibility", "visible");
        tip.show(facts(mark.row), px, py);
      };
      const leave = () => {
        cursor = null;
        ring.setAttribute("visibility", "hidden");
        tip.hide();
      };
      const meant = (event) => {
        const box = svg.getBoundingClientRect(),
          [px, py] = [event.clientX - box.left, event.clientY - box.top];
        let best = null,
          least = REACH;
        for (const mark of marks) {
          const far = Math.hypot(mark.cx - px, mark.cy - py);
          if (own(mark.row) && far < least) [best, least] = [mark, far];
        }
        return best;
      };
      qk.follow(svg, meant, look, leave);
      svg.addEventListener("click", (event) => pick(meant(event)?.row.reader ?? null));
      svg.addEventListener("keydown", (event) => {
        if (event.key === "Escape") return pick(null);
        if (event.key === "Enter") return cursor && pick(cursor.reader);
        const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
        if (!step) return;
        event.preventDefault();
        const of = (name) => marks.filter(({ row }) => row.reader === name).sort((a, b) => Math.abs(b.row.share) - Math.abs(a.row.share));
        const there = cursor ? column.get(cursor.reader) + step[0] : column.get(chosen) ?? 0;
        const all = of(readers[Math.max(0, Math.min(readers.length - 1, there))]);
        const at = cursor && !step[0] ? all.findIndex(({ row }) => row === cursor) + step[1] : 0;
        if (all[at]) look(all[at], ...near(all[at].node));
      });
      const held = document.activeElement?.parentNode === place;
      place.replaceChildren(svg);
      if (held) svg.focus({ preventScroll: true });
    };
    const again = redraw(place, render);

    const named = (name) => (isHead(name) ? make("button", { type: "button", onclick: () => pick(name) }, name) : name);
    const list = (title, last, lines) =>
      qk.table([title, last], lines.length ? lines.map(([name, value]) => [named(name), value]) : [["none", "–"]]);
    const largest = (found) => [...found].sort((a, b) => Math.abs(b.share) - Math.abs(a.share));
    const tell = () => {
      if (chosen === null) {
        const count = new Map();
        for (const row of shown()) if (row.share >= MUCH) count.set(row.writer, (count.get(row.writer) ?? 0) + 1);
        const order = [...count].sort((a, b) => b[1] - a[1]);
        const of = (those) => order.filter(([name]) => those(name)).slice(0, MANY).map(([name, n]) => [name, String(n)]);
        lists.replaceChildren(
          list("most read heads", "readers", of(isHead)),
          list("most read others", "readers", of((name) => !isHead(name))),
        );
        return;
      }
      const wrote = largest(shown().filter((row) => row.reader === chosen)).map((row) => [row.writer, fixed(row.share)]);
      const read = largest(shown().filter((row) => row.writer === chosen)).map((row) => [row.reader, fixed(row.share)]);
      const more = read.length > MANY ? `, ${MANY} of ${read.length}` : "";
      lists.replaceChildren(
        list(`who wrote ${chosen}'s ${side}`, "share", wrote),
        list(`whose ${side} ${chosen} wrote${more}`, "share", read.slice(0, MANY)),
      );
    };
    const which = make(
      "select",
      { "aria-label": "head", onchange: () => pick(which.value || null) },
      make("option", { value: "" }, "every head"),
      ...heads.map((name) => make("option", { value: name }, name)),
    );
    function pick(name) {
      chosen = name;
      which.value = name ?? "";
      tip.hide();
      again();
      tell();
    }
    bar.append(
      ...choose("share of the logit, split over writers of", ["key", "query"], side, (next) => {
        side = next;
        pick(chosen);
      }),
      make("span", { class: "of" }, "show"),
      which,
    );
    const icon = (shape, kind, size) =>
      draw("svg", { width: 12, height: 12 }, draw(shape, { class: `mark ${kind}`, ...size }));
    const round = { cx: 6, cy: 6, r: 5 };
    const legend = qk.legend(
      [icon("circle", "for", round), "a head"],
      [icon("rect", "for", { x: 1.5, y: 1.5, width: 9, height: 9 }), "an MLP or the embedding"],
      [icon("circle", "against", round), "negative share"],
    );
    element.replaceChildren(bar, legend, place, lists);
    pick(null);
  };
})();
