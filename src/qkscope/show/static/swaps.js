"use strict";
// The causal test as bars: attention on the right key and on the target after each swap, and the shift with its interval.
(() => {
  const { draw, make, fixed, tip, pointed, near, redraw, ticks, swatch } = qk;
  qk.charts.swaps = (element, rows, { conditions }) => {
    const bar = make("div", { class: "choices" }),
      place = make("div", {}),
      before = { name: "before", control: false };
    const own = qk.byHead(rows, bar, () => again());
    const legend = qk.legend([swatch("var(--original)"), "on the right key"], [swatch("var(--target)"), "on the target"]);
    element.replaceChildren(bar, legend, place);
    const again = redraw(place, (width) => place.replaceChildren(bars(own(), { before, ...conditions }, width)));
  };

  const interval = (name, value, low, high) =>
    value === null || value === undefined ? [] : [[name, `${fixed(value)} [${fixed(low)}, ${fixed(high)}]`]];
  function bars(rows, conditions, width) {
    const colours = qk.partColours(Object.values(conditions).flatMap(({ of }) => of ?? []));
    const isControl = (row) => conditions[row.condition].control;
    const named = (row, short = false) => {
      const { name } = conditions[row.condition];
      return short ? name.replace(", as ", ", ").replace("Cov q Cov k", "Cov Cov") : name;
    };
    const { orig_before, target_before } = rows[0],
      before = { ...rows[0], condition: "before", rank: null, orig_after: orig_before, target_after: target_before, shift: null };
    const shown = [before, ...rows.filter((row) => !isControl(row)), ...rows.filter(isControl)];
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
    const columns = (values, at) => {
      for (const value of values)
        svg.append(
          draw("line", { class: "axis", x1: at(value), x2: at(value), y1: top, y2: height - 22 }),
          draw("text", { class: "soft", x: at(value), y: height - 8, "text-anchor": "middle" }, String(value).replace("-", "−")),
        );
    };
    columns(narrow ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1], x);
    columns(ticks(low, high, narrow ? 2 : 4), s);
    svg.append(draw("line", { class: "zero", x1: s(0), x2: s(0), y1: top, y2: height - 22 }));
    shown.forEach((row, i) => {
      const y = top + i * line,
        pale = isControl(row) ? 0.5 : 1,
        own = conditions[row.condition].of ? colours[conditions[row.condition].of] : "var(--ink)";
      const middle = y + line / 2,
        bar = (value, below, fill) =>
          draw("rect", { x: x(0), y: y + below, width: Math.max(x(value) - x(0), 0.5), height: 9, fill, opacity: pale });
      if (i > 0 && isControl(row) && !isControl(shown[i - 1]))
        svg.append(draw("line", { class: "zero", x1: 0, x2: width, y1: y + 0.5, y2: y + 0.5, "stroke-dasharray": "2 3" }));
      svg.append(
        draw(
          "text",
          { x: label - 8, y: middle + 4, "text-anchor": "end", class: pale < 1 ? "soft" : "" },
          named(row, narrow),
          row.rank && !narrow ? draw("tspan", { fill: "var(--soft)" }, ` · ${row.rank}`) : null,
        ),
        bar(row.orig_after, 5, "var(--original)"),
        bar(row.target_after, 16, "var(--target)"),
      );
      if (row.shift !== null && row.shift !== undefined) {
        const ends = { x1: s(row.shift_low ?? row.shift), x2: s(row.shift_high ?? row.shift), y1: middle, y2: middle };
        svg.append(
          draw("line", { ...ends, stroke: own, "stroke-width": 1.8 }),
          draw("circle", { cx: s(row.shift), cy: middle, r: 4, fill: own }),
        );
      }
      const lines = [
        [`${row.head} · ${named(row)}`],
        ["dimensions", row.rank ?? "–"],
        ["on the right key", `${fixed(row.orig_before)} → ${fixed(row.orig_after)}`],
        ["on the target", `${fixed(row.target_before)} → ${fixed(row.target_after)}`],
        ...interval("shift", row.shift, row.shift_low, row.shift_high),
        ...interval("more than random", row.gain, row.gain_low, row.gain_high),
        ["prompts", `${row.n ?? "–"}${row.draws > 1 ? ` × ${row.draws} draws` : ""}`],
      ];
      notes.push(lines);
      rects.push(draw("rect", { class: "row", x: 0, y, width, height: line, fill: "transparent", ...pointed(lines) }));
      svg.append(rects.at(-1));
    });
    return svg;
  }
})();
