"use strict";
// Why, in four charts of one make: a row is a name, a track with bars and marks on it, and a number. Places on a track are
// shares of its width, so that a row needs no drawing anew on another screen.
(() => {
  const { make, fixed, piece, choose } = qk;
  const percent = (value, digits = 0) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)}%`);
  const signed = (value, digits = 1) => (value > 0 ? "+" : "") + fixed(value, digits);
  const at = (value) => `${(100 * Math.max(0, Math.min(1, value))).toFixed(2)}%`;
  const span = (kind, from, to, colour) =>
    make("i", { class: kind, style: { left: at(from), width: at(to - from), background: colour ?? "" } });
  const mark = (value) => make("i", { class: "mark", style: { left: at(value) } });
  const row = (name, track, value, kind = "") => [
    make("div", { class: `name ${kind}` }, ...[name].flat()),
    make("div", { class: `track ${kind}`, "aria-hidden": "true" }, ...track),
    make("div", { class: `value ${kind}` }, ...[value].flat()),
  ];
  const legend = (pairs) =>
    make(
      "div",
      { class: "legend" },
      ...pairs.map(([kind, colour, words]) =>
        make("span", {}, make("i", { class: `swatch ${kind}`, style: { background: colour } }), words),
      ),
    );

  qk.charts.said = (element, rows) => {
    const items = rows.map(({ line }) => {
      const [, name, rest] = /^([A-Z][a-z ]+): (.*)$/s.exec(line) ?? [null, "", line];
      return [name, rest];
    });
    element.replaceChildren(
      make(
        "dl",
        { class: "lines" },
        ...items.flatMap(([name, rest], i) => [
          make("dt", {}, i && items[i - 1][0] === name ? "" : name),
          make("dd", {}, rest),
        ]),
      ),
    );
  };

  qk.charts.parts = (element, rows, { ways }) => {
    const bar = make("div", { class: "choices" }),
      place = make("div", { class: "why" });
    const show = (way) => {
      const own = rows.filter((each) => `${each.by} ${each.side}` === way),
        colours = qk.partColours(["residual", ...(own[0].by === "features" ? own.map(({ part }) => part) : [])]);
      let sum = 0;
      const steps = own.map((each) => [each, sum, (sum += each.value)]);
      const ends = [0, sum, ...steps.map(([, , end]) => end)],
        low = Math.min(...ends),
        wide = Math.max(...ends) - low || 1,
        x = (value) => (value - low) / wide;
      const colour = ({ part, value }) =>
        part === "rest" ? colours.residual : (colours[part] ?? `var(${value < 0 ? "--target" : "--original"})`);
      place.replaceChildren(
        ...steps.flatMap(([each, from, to]) =>
          row(
            each.part,
            [mark(x(0)), span("bar", x(Math.min(from, to)), x(Math.max(from, to)), colour(each))],
            [signed(each.value), make("small", {}, percent(each.share))],
          ),
        ),
        ...row("logit", [mark(x(0)), span("bar", x(Math.min(0, sum)), x(Math.max(0, sum)), "var(--ink)")], signed(sum), "sum"),
      );
    };
    element.replaceChildren(bar, place);
    const names = Object.keys(ways);
    bar.append(...choose("by", names, names[0], show, (name) => ways[name]));
    show(names[0]);
  };

  const verdict = (text) => make("b", { class: text === "supported" ? "good" : "soft" }, text);
  qk.charts.tests = (element, rows, { swaps }) => {
    const bar = make("div", { class: "choices" }),
      place = make("div", { class: "why tests" });
    const heads = [...new Set(rows.map(({ head }) => head))],
      sizes = [...new Set(rows.map(({ k }) => k))];
    let head = heads[0],
      size = sizes.includes(2) ? 2 : sizes[0];
    const show = () => {
      const own = rows.filter((each) => each.head === head && each.k === size),
        exchanged = swaps.filter((each) => each.head === head);
      place.replaceChildren(
        ...own.flatMap((each) =>
          row(
            [each.writers, make("small", {}, each.side === "both" ? "cut from both" : `cut from the ${each.side}`)],
            [
              span("band", each.random_low, each.random_high),
              span("bar", 0, each.after, "var(--original)"),
              mark(each.before),
            ],
            [
              `${percent(each.before)} → ${percent(each.after)}`,
              make("small", {}, `random ${percent(each.random_low)} to ${percent(each.random_high)}`),
              verdict(each.verdict),
            ],
          ),
        ),
        ...exchanged.flatMap((each) =>
          row(
            [each.writers, make("small", {}, `exchanged with ${piece(each.other_token)} (token ${each.other})`)],
            [
              span("band", 0, each.random_high),
              span("bar", 0, each.other_after, "var(--target)"),
              mark(each.other_before),
            ],
            [
              `${percent(each.other_before)} → ${percent(each.other_after)}`,
              make("small", {}, `random at most ${percent(each.random_high)}`),
              verdict(each.verdict),
            ],
          ),
        ),
      );
    };
    if (heads.length > 1) bar.append(...choose("head", heads, head, (next) => ((head = next), show())));
    if (sizes.length > 1) bar.append(...choose("writers cut", sizes, size, (next) => ((size = next), show()), String));
    const shown = [
      ["", "var(--original)", "on the key, after"],
      ...(swaps.length ? [["", "var(--target)", "on the other token, after"]] : []),
      ["band", "", "random writers"],
      ["line", "var(--ink)", "before"],
    ];
    element.replaceChildren(bar, legend(shown), place);
    show();
  };

  qk.charts.output = (element, rows) => {
    const most = Math.max(1e-9, ...rows.flatMap((each) => [each.before, each.without_key, each.without_other ?? 0]));
    const place = make("div", { class: "why output" });
    place.append(
      ...rows.flatMap((each) =>
        row(
          piece(each.token),
          [
            span("bar upper", 0, each.before / most, "var(--original)"),
            span("bar lower", 0, each.without_key / most, "var(--target)"),
            each.without_other === null ? null : mark(each.without_other / most),
          ].filter(Boolean),
          [
            `${percent(each.before, 1)} → ${percent(each.without_key, 1)}`,
            each.direct === null ? "" : make("small", {}, `straight ${signed(each.direct)}`),
          ],
        ),
      ),
    );
    const shown = [
      ["", "var(--original)", "as it is"],
      ["", "var(--target)", "without this attention"],
      ["line", "var(--ink)", "without another key"],
    ];
    element.replaceChildren(legend(shown), place);
  };
})();
