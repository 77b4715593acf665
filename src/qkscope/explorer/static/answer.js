"use strict";
// The parts of an answer: sentences, a logit as a waterfall of its parts, and pairs of bars before and after.
(() => {
  const { make, fixed } = qk;
  const percent = (value) => (value === null ? "–" : value < 0.0995 && value > 0 ? `${(100 * value).toFixed(1)}%` : `${Math.round(100 * value)}%`);
  qk.percent = percent;
  qk.badge = (verdict) => (verdict ? make("span", { class: `badge ${verdict}` }, verdict) : "");

  // rows: [{name, value, share, button}]; they add up to the sum
  qk.waterfall = (element, rows, sum, colours = {}) => {
    let reached = 0;
    const steps = rows.map((row) => {
      const from = reached;
      reached += row.value;
      return [from, reached];
    });
    const ends = [0, sum, ...steps.flat()],
      [low, high] = [Math.min(...ends), Math.max(...ends)],
      x = (value) => (100 * (value - low)) / (high - low || 1);
    const track = (from, to, colour) =>
      make(
        "div",
        { class: "track" },
        make("span", { class: "zero", style: { left: `${x(0)}%` } }),
        make("i", {
          class: to >= from ? "more" : "less",
          style: { left: `${x(Math.min(from, to))}%`, width: `${Math.abs(x(to) - x(from))}%`, ...(colour && to >= from ? { background: colour } : {}) },
        }),
      );
    element.append(
      ...rows.flatMap((row, i) => [
        make("div", { class: "label", title: row.title || "" }, row.name),
        track(...steps[i], colours[row.name]),
        make("div", { class: "value" }, `${fixed(row.value)}${row.share === null || row.share === undefined ? "" : ` · ${fixed(100 * row.share, 0)}%`}`),
        row.button || make("span", {}),
      ]),
      make("div", { class: "label sum" }, "together"),
      track(0, sum),
      make("div", { class: "value sum" }, fixed(sum)),
      make("span", {}),
    );
  };

  // rows: [{label, values: [[kind, value]], words, onclick}]
  qk.pairs = (rows, largest = 1) =>
    make(
      "div",
      { class: "bars" },
      ...rows.flatMap((row) => [
        make(row.onclick ? "button" : "div", { class: "label", type: row.onclick ? "button" : null, onclick: row.onclick || (() => {}) }, row.label),
        make(
          "div",
          { class: "two" },
          ...row.values.map(([kind, value]) => make("i", { class: kind, style: { width: `${Math.min(100, (100 * (value || 0)) / largest)}%` } })),
        ),
        make("div", { class: "value" }, row.words),
        make("span", {}),
      ]),
    );
  qk.legend = (...names) =>
    make("div", { class: "legend" }, ...names.map(([kind, text]) => make("span", {}, make("span", { class: `swatch ${kind}` }), text)));
})();
