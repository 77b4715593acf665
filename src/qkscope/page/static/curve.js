"use strict";
// How the shift grows with the number of dimensions swapped: one line per method, variants when they are asked for.
(() => {
  const { draw, make, fixed, pointed, redraw, choose, ticks } = qk;
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
      found = {};
    for (const name of methods) {
      const stem = family(name),
        nth = stem === name ? 0 : (counts[stem] = (counts[stem] || 0) + 1);
      found[name] = {
        colour: nth ? `color-mix(in srgb, ${hues[stem]} ${Math.round(100 * 0.7 ** nth)}%, var(--ink))` : hues[stem],
        dash: nth ? DASHES[(nth - 1) % DASHES.length] : qk.dash(name),
        variant: nth > 0,
      };
    }
    return found;
  }

  qk.charts.curve = (element, rows, options = {}) => {
    const told = { axis: "dimensions swapped", value: "shift", of: "dimensions", ...options };
    const heads = [...new Set(rows.map((row) => row.head))],
      methods = [...new Set(rows.map((row) => row.method))],
      look = looks(methods),
      shown = new Set(methods.filter((name) => !look[name].variant));
    const bar = make("div", { class: "choices" }),
      legend = make("div", { class: "legend" }),
      place = make("div", {});
    let head = heads[0];
    element.replaceChildren(bar, legend, place);
    const again = redraw(place, (width) =>
      place.replaceChildren(
        lines(
          rows.filter((row) => row.head === head),
          methods.filter((name) => shown.has(name)),
          look,
          Math.min(width, 560),
          told,
        ),
      ),
    );
    for (const name of methods) {
      const button = make(
        "button",
        {
          type: "button",
          "aria-pressed": String(shown.has(name)),
          "data-method": name,
          onclick() {
            if (!shown.delete(name)) shown.add(name);
            button.setAttribute("aria-pressed", String(shown.has(name)));
            again();
          },
        },
        draw(
          "svg",
          {
            width: 26,
            height: 8,
            "aria-hidden": "true",
            style: { display: "inline-block", marginRight: ".5em", verticalAlign: "middle" },
          },
          draw("line", {
            x1: 0,
            x2: 26,
            y1: 4,
            y2: 4,
            stroke: look[name].colour,
            "stroke-width": 2.4,
            "stroke-dasharray": look[name].dash,
          }),
        ),
        qk.pretty(name),
      );
      legend.append(button);
    }
    legend.append(make("span", {}, "click a name to show or hide it"));
    if (heads.length > 1)
      bar.append(
        ...choose("head", heads, head, (next) => {
          head = next;
          again();
        }),
      );
  };
  function lines(rows, methods, look, width, told) {
    const [left, right, top, bottom, height] = [40, 12, 10, 34, 240];
    const sizes = [...new Set(rows.map((row) => row.k))].sort((a, b) => a - b);
    rows = rows.filter((row) => methods.includes(row.method) && known(row.shift));
    const low = Math.min(0, ...rows.map((row) => row.low ?? row.shift)),
      high = Math.max(0.05, ...rows.map((row) => row.high ?? row.shift));
    const x = (k) => left + ((width - left - right) * (k - sizes[0])) / (sizes.at(-1) - sizes[0] || 1);
    const y = (value) => top + (height - top - bottom) * (1 - (value - low) / (high - low));
    const svg = draw(
      "svg",
      { width, height, role: "img", "aria-label": `${told.value} against the number of ${told.of}` },
      draw("text", { class: "soft", x: left, y: height - 2 }, told.axis),
    );
    for (const value of ticks(low, high, 4))
      svg.append(
        draw("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
        draw(
          "text",
          { class: "soft", x: left - 7, y: y(value) + 4, "text-anchor": "end" },
          String(value).replace("-", "−"),
        ),
      );
    for (const k of sizes)
      svg.append(draw("text", { class: "soft", x: x(k), y: height - 18, "text-anchor": "middle" }, String(k)));
    const of = (method) => rows.filter((row) => row.method === method).sort((a, b) => a.k - b.k);
    for (const method of methods) {
      const own = of(method).filter((row) => known(row.low) && known(row.high));
      const points = [
        ...own.map((row) => `${x(row.k)},${y(row.high)}`),
        ...own.toReversed().map((row) => `${x(row.k)},${y(row.low)}`),
      ];
      svg.append(draw("polygon", { points: points.join(" "), fill: look[method].colour, opacity: 0.08 }));
    }
    for (const method of methods) {
      const own = of(method),
        { colour, dash } = look[method];
      svg.append(
        draw("polyline", {
          points: own.map((row) => `${x(row.k)},${y(row.shift)}`).join(" "),
          fill: "none",
          stroke: colour,
          "stroke-width": 1.8,
          "stroke-dasharray": dash,
        }),
      );
      for (const row of own)
        svg.append(
          draw("circle", { cx: x(row.k), cy: y(row.shift), r: 3, fill: colour }),
          draw("circle", {
            cx: x(row.k),
            cy: y(row.shift),
            r: 9,
            fill: "transparent",
            ...pointed([
              [`${qk.pretty(method)}, ${row.k} ${told.of}`],
              [told.value, `${fixed(row.shift)} [${fixed(row.low)}, ${fixed(row.high)}]`],
              ...(known(row.orig_after)
                ? [
                    ["right key", fixed(row.orig_after)],
                    ["target", fixed(row.target_after)],
                  ]
                : []),
            ]),
          }),
        );
    }
    return svg;
  }
})();
