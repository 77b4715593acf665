"use strict";
// Singular values over their null: one small panel for each contrast and head.
(() => {
  const { draw, make, number, pointed, redraw } = qk;
  const FLOOR = 1e-9; // of the largest value
  const DECADES = 6; // what is smaller still is round-off: it lies on the floor

  qk.charts.spectra = (element, rows, { panels }) => {
    const grid = make("div", { class: "panels" });
    const chance = [qk.swatch("var(--band)"), "by chance, median to 95%"];
    element.replaceChildren(qk.legend(["", "● kept"], ["", "○ not kept"], chance), grid);
    for (const panel of panels) {
      const own = rows.filter((row) => row.head === panel.head && row.contrast === panel.contrast),
        box = make("div", { style: { color: qk.partColours([panel.contrast])[panel.contrast] } });
      grid.append(box);
      redraw(box, (width) => box.replaceChildren(spectrum(own, panel.lines, width)));
    }
  };

  // said: a title and lines below it
  function spectrum(rows, said, width) {
    const [left, right, top, bottom] = [44, 8, said.length ? 10 + 16 * said.length : 8, 26],
      height = top + 132 + bottom,
      titles = said.map((text, i) => draw("text", { class: i ? "soft" : "title", x: 0, y: i ? 14 + 16 * i : 13 }, text));
    const nothing = Math.max(...rows.map((row) => row.value ?? 0)) < FLOOR;
    if (nothing)
      return draw(
        "svg",
        { width, height: top + 24, role: "img", "aria-label": said.join(": ") },
        ...titles,
        draw("text", { class: "soft", x: 0, y: top + 14 }, "no difference at all: what is left is rounding"),
      );
    const values = rows.flatMap((row) => [row.value, row.null_median, row.null_high]).filter((value) => value > 0);
    const high = Math.log10(Math.max(...values)),
      low = Math.max(Math.log10(Math.min(...values)), high - DECADES);
    const pad = Math.max(0.08 * (high - low), 0.05);
    const x = (i) => left + 8 + ((width - left - right - 16) * (i - 1)) / Math.max(rows.length - 1, 1);
    const y = (value) => top + (height - top - bottom) * (1 - (Math.max(Math.log10(value), low) - low + pad) / (high - low + 2 * pad));
    const svg = draw(
      "svg",
      { width, height, role: "img", "aria-label": said.slice(0, 2).join(": ") || "Singular values against chance" },
      ...titles,
    );
    const lines = (steps) => {
      const found = [];
      for (let power = Math.floor(low - pad); power <= high + pad; power += 1)
        found.push(...steps.map((k) => k * 10 ** power));
      return found.filter((v) => Math.log10(v) > low - pad && Math.log10(v) < high + pad);
    };
    const grid = [[1], [1, 3], [1, 2, 5]].map(lines).find((found) => found.length > 1) ?? [];
    const some = grid.filter((_, i) => (grid.length - 1 - i) % Math.ceil(grid.length / 4) === 0);
    qk.rules(svg, some, y, left, width - right, number);
    const tested = rows.filter((row) => row.null_high > 0);
    if (tested.length) {
      const half = tested.length === 1 ? 5 : 0, // one alone is drawn as a bar
        edge = (row, end, by) => [x(row.component) + by, y(row[end])].join(",");
      const points = [
        ...tested.map((row) => edge(row, "null_high", -half)),
        ...(half ? ["null_high", "null_median"].map((end) => edge(tested[0], end, half)) : []),
        ...tested.toReversed().map((row) => edge(row, "null_median", -half)),
      ];
      svg.append(draw("polygon", { points: points.join(" "), fill: "var(--band)" }));
    }
    const shown = rows.filter((row) => row.value > 0),
      points = shown.map((row) => `${x(row.component)},${y(row.value)}`).join(" "),
      stroke = "currentColor";
    svg.append(draw("polyline", { points, fill: "none", stroke, "stroke-width": 1, opacity: 0.5 }));
    for (const row of shown) {
      const [cx, cy] = [x(row.component), y(row.value)],
        fill = row.kept ? "currentColor" : "var(--paper)";
      const lines = [
        [`component ${row.component}`],
        ["singular value", number(row.value)],
        ["by chance, median", number(row.null_median)],
        ["by chance, 95%", number(row.null_high)],
      ];
      svg.append(
        draw("circle", { cx, cy, r: 3.5, fill, stroke, "stroke-width": 1.3 }),
        draw("circle", { cx, cy, r: 9, fill: "transparent", ...pointed(lines) }),
      );
    }
    const step = rows.length > 14 ? 5 : rows.length > 8 ? 2 : 1;
    for (let i = 1; i <= rows.length; i += i === 1 && step === 5 ? 4 : step)
      svg.append(draw("text", { class: "soft", x: x(i), y: height - 8, "text-anchor": "middle" }, String(i)));
    return svg;
  }
})();
