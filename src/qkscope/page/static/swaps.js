"use strict";
// The causal test as bars: attention on the right key and on the target after each swap, and the shift with its interval.
(() => {
  const { draw, make, fixed, tip, pointed, near, redraw, choose, ticks } = qk;
  qk.charts.swaps = (element, rows, { conditions }) => {
    const heads = [...new Set(rows.map((row) => row.head))];
    const bar = make("div", { class: "choices" }),
      place = make("div", {});
    let head = heads[0];
    const legend = make(
      "div",
      { class: "legend" },
      ...[
        ["--original", "on the right key"],
        ["--target", "on the target"],
      ].map(([colour, words]) =>
        make("span", {}, make("span", { class: "swatch", style: { background: `var(${colour})` } }), words),
      ),
      make("span", {}, "pale: controls"),
      make("span", {}, "●─ shift, 95%, in the colour of what was swapped"),
    );
    element.replaceChildren(bar, legend, place);
    const again = redraw(place, (width) =>
      place.replaceChildren(
        bars(
          rows.filter((row) => row.head === head),
          { before: { name: "before", control: false }, ...conditions },
          width,
        ),
      ),
    );
    if (heads.length > 1)
      bar.append(
        ...choose("head", heads, head, (next) => {
          head = next;
          again();
        }),
      );
  };

  function bars(rows, conditions, width) {
    const colours = qk.partColours(Object.values(conditions).flatMap(({ of }) => of ?? []));
    const isControl = (row) => conditions[row.condition].control;
    const named = (row, short = false) =>
      short
        ? conditions[row.condition].name.replace(", as ", ", ").replace("Cov q Cov k", "Cov Cov")
        : conditions[row.condition].name;
    const before = {
      ...rows[0],
      condition: "before",
      rank: null,
      orig_after: rows[0].orig_before,
      target_after: rows[0].target_before,
      shift: null,
    };
    const shown = [
      before,
      ...rows.filter((row) => !isControl(row)),
      ...rows.filter((row) => isControl(row)),
    ];
    const narrow = width < 560,
      label = narrow ? 128 : 172,
      line = 30,
      gap = narrow ? 18 : 44,
      top = 22;
    const room = width - label - gap,
      first = Math.floor(room * (narrow ? 0.55 : 0.6)),
      second = room - first - 6;
    const low = Math.min(0, ...rows.map((row) => row.shift_low ?? row.shift)),
      high = Math.max(0.05, ...rows.map((row) => row.shift_high ?? row.shift));
    const x = (value) => label + first * value;
    const s = (value) => label + first + gap + (second * (value - low)) / (high - low);
    const height = top + shown.length * line + 26;
    let at = -1;
    const notes = [],
      rects = [];
    const svg = draw(
      "svg",
      {
        width,
        height,
        tabindex: 0,
        role: "application",
        "aria-label": "Attention after each swap. Up and down arrow keys move.",
        onblur: tip.hide,
        onkeydown(event) {
          const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
          if (!step) return;
          event.preventDefault();
          at = Math.max(0, Math.min(rects.length - 1, at + step));
          rects[at].scrollIntoView({ block: "nearest" });
          tip.show(notes[at], ...near(rects[at]));
        },
      },
      draw("text", { class: "soft", x: label, y: 11 }, narrow ? "attention" : "attention after the swap"),
      draw("text", { class: "soft", x: s(low), y: 11 }, "shift"),
    );
    for (const value of narrow ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1])
      svg.append(
        draw("line", { class: "axis", x1: x(value), x2: x(value), y1: top, y2: height - 22 }),
        draw("text", { class: "soft", x: x(value), y: height - 8, "text-anchor": "middle" }, String(value)),
      );
    for (const value of ticks(low, high, narrow ? 2 : 4))
      svg.append(
        draw("line", { class: "axis", x1: s(value), x2: s(value), y1: top, y2: height - 22 }),
        draw(
          "text",
          { class: "soft", x: s(value), y: height - 8, "text-anchor": "middle" },
          String(value).replace("-", "−"),
        ),
      );
    svg.append(draw("line", { class: "zero", x1: s(0), x2: s(0), y1: top, y2: height - 22 }));
    shown.forEach((row, i) => {
      const y = top + i * line,
        pale = isControl(row) ? 0.5 : 1,
        own = conditions[row.condition].of ? colours[conditions[row.condition].of] : "var(--ink)";
      if (i > 0 && isControl(row) && !isControl(shown[i - 1]))
        svg.append(
          draw("line", { class: "zero", x1: 0, x2: width, y1: y + 0.5, y2: y + 0.5, "stroke-dasharray": "2 3" }),
        );
      svg.append(
        draw(
          "text",
          { x: label - 8, y: y + line / 2 + 4, "text-anchor": "end", class: pale < 1 ? "soft" : "" },
          named(row, narrow),
          row.rank && !narrow ? draw("tspan", { fill: "var(--soft)" }, ` · ${row.rank}`) : null,
        ),
      );
      svg.append(
        draw("rect", {
          x: x(0),
          y: y + 5,
          width: Math.max(x(row.orig_after) - x(0), 0.5),
          height: 9,
          fill: "var(--original)",
          opacity: pale,
        }),
        draw("rect", {
          x: x(0),
          y: y + 16,
          width: Math.max(x(row.target_after) - x(0), 0.5),
          height: 9,
          fill: "var(--target)",
          opacity: pale,
        }),
      );
      if (row.shift !== null && row.shift !== undefined) {
        if (row.shift_low !== null)
          svg.append(
            draw("line", {
              x1: s(row.shift_low),
              x2: s(row.shift_high),
              y1: y + line / 2,
              y2: y + line / 2,
              stroke: own,
              "stroke-width": 1.8,
            }),
          );
        svg.append(draw("circle", { cx: s(row.shift), cy: y + line / 2, r: 4, fill: own }));
      }
      const lines = [
        [`${row.head} · ${named(row)}`],
        ["dimensions", row.rank ?? "–"],
        ["on the right key", `${fixed(row.orig_before)} → ${fixed(row.orig_after)}`],
        ["on the target", `${fixed(row.target_before)} → ${fixed(row.target_after)}`],
        ...(row.shift === null
          ? []
          : [["shift", `${fixed(row.shift)} [${fixed(row.shift_low)}, ${fixed(row.shift_high)}]`]]),
        ...(row.gain === null || row.gain === undefined
          ? []
          : [["more than random", `${fixed(row.gain)} [${fixed(row.gain_low)}, ${fixed(row.gain_high)}]`]]),
        ["prompts", `${row.n ?? "–"}${row.draws > 1 ? ` × ${row.draws} draws` : ""}`],
      ];
      notes.push(lines);
      rects.push(draw("rect", { class: "row", x: 0, y, width, height: line, fill: "transparent", ...pointed(lines) }));
      svg.append(rects.at(-1));
    });
    return svg;
  }
})();
