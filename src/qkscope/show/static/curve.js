"use strict";
// How the shift grows with the number of dimensions swapped: one line per method, variants when they are asked for.
(() => {
  const { draw, make, fixed, pointed, redraw, toggle, stroke, ticks, rules } = qk;
  const DASHES = ["10 3 2 3", "4 2", "2 2"]; // of variants
  const known = (value) => value !== null && value !== undefined;

  // A colour of its own and a dash for each method; a variant has its method's hue, deeper.
  function looks(methods) {
    const family = (name) => {
      const stem = name.replace(/(_all|_moving|_svd|_uncentred)+$/, "");
      return methods.includes(stem) ? stem : name;
    };
    const hues = qk.partColours(methods.filter((name) => family(name) === name)),
      counts = {},
      look = {};
    for (const name of methods) {
      const stem = family(name),
        nth = stem === name ? 0 : (counts[stem] = (counts[stem] || 0) + 1);
      look[name] = {
        colour: nth ? `color-mix(in srgb, ${hues[stem]} ${Math.round(100 * 0.7 ** nth)}%, var(--ink))` : hues[stem],
        dash: nth ? DASHES[(nth - 1) % DASHES.length] : qk.dash(name),
        variant: nth > 0,
      };
    }
    return look;
  }

  // line, height: the columns that name a line and that are drawn; axis, value, of: what they are called; even: numbers
  // stand evenly
  const USUAL = { axis: "dimensions swapped", value: "shift", of: "dimensions", line: "method", height: "shift", names: {} };
  qk.charts.curve = (element, table, options = {}) => {
    const told = { ...USUAL, ...options },
      named = (row) => told.names[row[told.line]] ?? row[told.line],
      rows = table.map((row) => ({ ...row, method: named(row), shift: row[told.height] }));
    const methods = [...new Set(rows.map((row) => row.method))],
      look = looks(methods),
      shown = new Set(methods.filter((name) => !look[name].variant));
    const bar = make("div", { class: "choices" }),
      legend = make("div", { class: "legend" }),
      place = make("div", {});
    element.replaceChildren(bar, legend, place);
    const render = (width) => lines(own(), methods.filter((name) => shown.has(name)), look, Math.min(width, 560), told);
    const own = qk.byHead(rows, bar, () => again());
    const again = redraw(place, (width) => place.replaceChildren(render(width)));
    const entry = (name) => {
      const line = stroke(look[name].colour, 2.4, look[name].dash);
      return toggle(shown, name, () => shown.has(name), again, { "data-method": name }, line, qk.pretty(name));
    };
    legend.append(...methods.map(entry), make("span", {}, "click a name to show or hide it"));
  };
  function lines(rows, methods, look, width, told) {
    const [left, right, top, bottom, height] = [40, 12, 10, 34, 240];
    const sizes = [...new Set(rows.map((row) => row.k))].sort((a, b) => a - b);
    rows = rows.filter((row) => methods.includes(row.method) && known(row.shift));
    const low = Math.min(0, ...rows.map((row) => row.low ?? row.shift)),
      high = Math.max(0.05, ...rows.map((row) => row.high ?? row.shift));
    const along = (k) =>
      told.even ? sizes.indexOf(k) / (sizes.length - 1 || 1) : (k - sizes[0]) / (sizes.at(-1) - sizes[0] || 1);
    const x = (k) => left + (width - left - right) * along(k);
    const y = (value) => top + (height - top - bottom) * (1 - (value - low) / (high - low));
    const svg = draw(
      "svg",
      { width, height, role: "img", "aria-label": `${told.value} against the number of ${told.of}` },
      draw("text", { class: "soft", x: left, y: height - 2 }, told.axis),
    );
    rules(svg, ticks(low, high, 4), y, left, width - right);
    for (const k of sizes)
      svg.append(draw("text", { class: "soft", x: x(k), y: height - 18, "text-anchor": "middle" }, String(k)));
    const of = (method) => rows.filter((row) => row.method === method).sort((a, b) => a.k - b.k);
    for (const method of methods) {
      const own = of(method).filter((row) => known(row.low) && known(row.high));
      const corner = (end) => (row) => `${x(row.k)},${y(row[end])}`,
        points = [...own.map(corner("high")), ...own.toReversed().map(corner("low"))].join(" ");
      svg.append(draw("polygon", { points, fill: look[method].colour, opacity: 0.08 }));
    }
    for (const method of methods) {
      const own = of(method),
        { colour, dash } = look[method];
      const points = own.map((row) => `${x(row.k)},${y(row.shift)}`).join(" ");
      svg.append(draw("polyline", { points, fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash }));
      for (const row of own) {
        const [cx, cy] = [x(row.k), y(row.shift)],
          keys = [["right key", fixed(row.orig_after)], ["target", fixed(row.target_after)]];
        const note = [
          [`${qk.pretty(method)}, ${row.k} ${told.of}`],
          [told.value, `${fixed(row.shift)} [${fixed(row.low)}, ${fixed(row.high)}]`],
          ...(known(row.orig_after) ? keys : []),
        ];
        svg.append(
          draw("circle", { cx, cy, r: 3, fill: colour }),
          draw("circle", { cx, cy, r: 9, fill: "transparent", ...pointed(note) }),
        );
      }
    }
    return svg;
  }
})();
