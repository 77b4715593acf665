"use strict";
// Cards of features that were found without labels: what speaks for each, what its swap carries, and the texts where it
// is strongest with their two tokens marked.
(() => {
  const { make, draw, fixed } = qk;
  const MEANT = { query: " the token that asks", key: " the one it attends to most", both: " one that attends to itself" };
  const known = (value) => value !== null && value !== undefined;

  // what the marks in the texts mean
  qk.marks = (names) =>
    names.length
      ? make(
          "p",
          { class: "words marks" },
          "In the texts: ",
          ...names.flatMap((name, i) => [i ? "," : "", i ? " " : "", make("mark", { class: name }, name), MEANT[name]]),
          ".",
        )
      : null;

  // a text with the query and the key it attends to marked; they may be the same token
  qk.passage = (row) => {
    const spans = ["query", "key"].map((side) => ({ side, start: row[`${side}_start`], stop: row[`${side}_stop`] }));
    const same = spans[0].start === spans[1].start && spans[0].stop === spans[1].stop;
    const marks = same ? [{ ...spans[0], side: "both" }] : spans.sort((a, b) => a.start - b.start || a.stop - b.stop);
    const letters = [...row.text], // places are of characters, not of the halves of one
      pieces = [];
    let last = 0;
    for (const { side, start, stop } of marks) {
      if (start < last) continue;
      pieces.push(letters.slice(last, start).join(""), make("mark", { class: side }, letters.slice(start, stop).join("")));
      last = stop;
    }
    return make("blockquote", {}, ...pieces, letters.slice(last).join(""));
  };

  qk.charts.cards = (element, rows, { cards, examples, spectrum, marks }) => {
    const place = make("div", {}),
      texts = (card) => examples.filter((row) => row.feature === card.feature).map(qk.passage);
    element.replaceChildren(
      ...[
        qk.marks(marks),
        spectrum.length ? figure(
              "Singular values of the self-contrast; a dash is their 95% quantile when passages exchange what they " +
                "attended to, or its direction alone",
              place,
            ) : null,
        make(
          "div",
          { class: "deck" },
          ...cards.map((card) =>
            make(
              "article",
              { class: card.loose ? "card loose" : "card" },
              make("h3", {}, card.title),
              make("p", { class: "facts" }, card.facts),
              figure(
                "Logit between two keys that swapping it carries (95% interval), beside baselines of the same size",
                bars(card.bars),
              ),
              ...texts(card),
            ),
          ),
        ),
      ].filter(Boolean),
    );
    if (spectrum.length) qk.spectrum(place, spectrum, [], 60 + 26 * spectrum.length);
  };
  const figure = (words, ...inside) => make("figure", {}, make("figcaption", {}, words), ...inside);

  // name, value and the ends of its interval; the first bar is the feature's own
  function bars(rows) {
    const left = 90,
      widest = Math.max(0.2, ...rows.flatMap(([, value, , high]) => [value ?? 0, high ?? 0])),
      along = (value) => left + (170 * Math.max(value, 0)) / widest;
    const svg = draw("svg", {
      viewBox: `0 0 380 ${6 + 17 * rows.length}`,
      role: "img",
      "aria-label": "logit carried by a swap",
    });
    rows.forEach(([name, value, low, high], i) => {
      const y = 4 + 17 * i;
      let end = known(value) ? along(value) : left,
        said = fixed(value);
      svg.append(draw("text", { x: 84, y: y + 10, "text-anchor": "end" }, name));
      if (known(value))
        svg.append(
          draw("rect", { class: i ? "baseline" : "feature", x: left, y, width: (end - left).toFixed(1), height: 11 }),
        );
      if (known(low) && known(high)) {
        const d = `M${along(low).toFixed(1)} ${y + 5.5}H${along(high).toFixed(1)}`;
        [end, said] = [Math.max(end, along(high)), `${said} [${fixed(low)}, ${fixed(high)}]`]; // bars end at 0
        svg.append(draw("path", { class: "under", d }), draw("path", { d, stroke: "currentColor" }));
      }
      svg.append(draw("text", { class: "soft", x: (end + 6).toFixed(1), y: y + 10 }, said));
    });
    return svg;
  }
})();
