"use strict";
// Why, in four charts of one make: a row is a name, a track with bars and marks on it, and a number. Places on a track are
// shares of its width, so that a row needs no drawing anew on another screen.
(() => {
  const { make, fixed, signed, percent, piece, choose, swatch, legend } = qk;
  const at = (value) => `${(100 * Math.max(0, Math.min(1, value))).toFixed(2)}%`;
  const span = (kind, from, to, colour) =>
    make("i", { class: kind, style: { left: at(from), width: at(to - from), background: colour ?? "" } });
  const mark = (value) => make("i", { class: "mark", style: { left: at(value) } });
  const row = (name, track, value, kind = "") => [
    make("div", { class: `name ${kind}` }, ...[name].flat()),
    make("div", { class: `track ${kind}`, "aria-hidden": "true" }, ...track),
    make("div", { class: `value ${kind}` }, ...[value].flat()),
  ];

  // text with its verdicts coloured; a page that can go on makes links of the heads that it names, as writers of a side
  const GOOD = ["depends on", "it depends on them", "shown", "yes"];
  const verdict = (word) =>
    make("b", { class: GOOD.includes(word) ? "good" : word === "open" ? "open" : "soft" }, word ?? "");
  qk.rich ??= qk.unbroken;
  const judged = (text) => {
    const [, before, word, after] = /^(.*: )(shown|not shown|it depends on them|it does not depend on them|untested|open)((?:[ .].*)?)$/s.exec(text) ?? [];
    return word ? [...qk.rich(before), verdict(word), after] : qk.rich(text);
  };

  qk.charts.said = (element, rows) => {
    const items = rows.map(({ line }) => {
      const [, name, rest] = /^([A-Z][a-z' ]+): (.*)$/s.exec(line) ?? [null, "", line];
      return [name, rest];
    });
    const named = ([name, rest], i) => [
      make("dt", {}, i && items[i - 1][0] === name ? "" : name),
      make("dd", {}, ...judged(rest)),
    ];
    element.replaceChildren(make("dl", { class: "lines" }, ...items.flatMap(named)));
  };

  // a waterfall; button: what can be done with a part, where anything can
  qk.charts.parts = (element, rows, { ways, button = () => null }) => {
    const bar = make("div", { class: "choices" }),
      place = make("div", { class: "why" });
    const show = (way) => {
      const parts = rows.filter((each) => `${each.by} ${each.side}` === way),
        colours = qk.partColours(["residual", ...(parts[0].by === "features" ? parts.map(({ part }) => part) : [])]);
      let sum = 0;
      const steps = parts.map((each) => [each, sum, (sum += each.value)]);
      const ends = [0, sum, ...steps.map(([, , end]) => end)],
        low = Math.min(...ends),
        wide = Math.max(...ends) - low || 1,
        x = (value) => (value - low) / wide;
      const colour = ({ part, value }) =>
        part === "rest" ? colours.residual : (colours[part] ?? `var(${value < 0 ? "--target" : "--original"})`);
      const track = (from, to, fill) => [mark(x(0)), span("bar", x(Math.min(from, to)), x(Math.max(from, to)), fill)];
      const value = (each) => [signed(each.value), make("small", {}, percent(each.share)), button(each) ?? ""];
      place.replaceChildren(
        ...steps.flatMap(([each, from, to]) => row(qk.rich(each.part, each.side), track(from, to, colour(each)), value(each))),
        ...row("logit", track(0, sum, "var(--ink)"), signed(sum), "sum"),
      );
    };
    element.replaceChildren(bar, place);
    const names = Object.keys(ways);
    if (!names.length) return;
    bar.append(...choose("by", names, names[0], show, (name) => ways[name]));
    show(names[0]);
  };

  // attention before and after, over what random changes leave
  qk.charts.tests = (element, rows) => {
    const bar = make("div", { class: "choices" }),
      place = make("div", { class: "why tests" }),
      sizes = [...new Set(rows.map(({ k }) => k))].filter(Boolean);
    let size = sizes.includes(2) ? 2 : sizes[0];
    const test = (each) =>
      row(
        [...qk.rich(each.writers, each.side), make("small", {}, each.done)],
        [
          ...(each.control_high === null ? [] : [span("band", each.control_low, each.control_high)]),
          span("bar", 0, each.after, "var(--original)"),
          mark(each.before),
        ],
        [
          `${percent(each.before)} → ${percent(each.after)}`,
          make("small", {}, each.beside),
          verdict(each.verdict),
        ],
      );
    const show = () => place.replaceChildren(...own().filter(({ k }) => !k || k === size).flatMap(test));
    const own = qk.byHead(rows, bar, show);
    if (sizes.length > 1) bar.append(...choose("writers cut", sizes, size, (next) => ((size = next), show()), String));
    const shown = legend(
      [swatch("var(--original)"), "attention on the key, after"],
      ...(rows.some((each) => each.control_high !== null) ? [[swatch("", "band"), rows[0].band ?? "random writers"]] : []),
      [swatch("var(--ink)", "line"), "before"],
    );
    element.replaceChildren(bar, shown, place);
    show();
  };

  qk.charts.output = (element, rows, { after }) => {
    const most = Math.max(1e-9, ...rows.flatMap((each) => [each.before, each.without_key, each.without_other ?? 0]));
    // where a small chance becomes many times as large, the bars hardly show it
    const times = ({ before, without_key: after }) => {
      const [low, high] = [before, after].sort((a, b) => a - b);
      const words = `${after > before ? "×" : "÷"}${fixed(Math.min(high / low, 999), 0)}`;
      return high > 0.005 && high / low >= 3 ? make("small", {}, words) : "";
    };
    const token = (each) =>
      row(
        piece(each.token),
        [
          span("bar upper", 0, each.before / most, "var(--original)"),
          span("bar lower", 0, each.without_key / most, "var(--target)"),
          ...(each.without_other === null ? [] : [mark(each.without_other / most)]),
        ],
        [
          `${percent(each.before, 1)} → ${percent(each.without_key, 1)}`,
          times(each),
          each.direct === null ? "" : make("small", {}, `direct ${signed(each.direct)}`),
        ],
      );
    const shown = [[swatch("var(--original)"), "before"], [swatch("var(--target)"), after]];
    if (rows.some((each) => each.without_other !== null)) shown.push([swatch("var(--ink)", "line"), "with its second key hidden instead"]);
    element.replaceChildren(legend(...shown), make("div", { class: "why output" }, ...rows.flatMap(token)));
  };
})();
