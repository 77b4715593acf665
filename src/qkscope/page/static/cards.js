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

  // on one line: a break is a mark
  const plain = (letters) => letters.join("").replaceAll("\n", " ↵ ");
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
      pieces.push(plain(letters.slice(last, start)), make("mark", { class: side }, plain(letters.slice(start, stop))));
      last = stop;
    }
    return make("blockquote", {}, ...pieces, plain(letters.slice(last)));
  };

  qk.charts.cards = (element, rows, { cards, examples, spectrum, marks }) => {
    const place = make("div", { style: { color: qk.partColours(["self_contrast"]).self_contrast } });
    element.replaceChildren(
      ...[
        qk.marks(marks),
        make(
          "div",
          { class: "deck" },
          ...cards.map((card) => {
            const texts = examples.filter((row) => row.feature === card.feature).map(qk.passage);
            return make(
              "article",
              { class: card.loose ? "card loose" : "card" },
              make("h3", {}, card.title),
              make("div", { class: "texts" }, ...texts),
              make(
                "div",
                { class: "evidence" },
                make("p", { class: "facts" }, card.facts),
                figure("What swapping it carries of the logit between two keys (95% interval), beside others of its size", bars(card.bars)),
              ),
            );
          }),
        ),
        spectrum.length
          ? figure(
              "How much each direction weighs, the largest first; a dash is what chance reaches in one of twenty shuffles",
              place,
            )
          : null,
      ].filter(Boolean),
    );
    if (spectrum.length) qk.spectrum(place, spectrum, [], 60 + 26 * spectrum.length);
  };
  const figure = (words, ...inside) => make("figure", {}, make("figcaption", {}, words), ...inside);

  // label, the name whose colour it has, value and the ends of its interval; the first bar is the feature's own
  function bars(rows) {
    const left = 90,
      colours = qk.partColours(rows.map(([, name]) => name)),
      widest = Math.max(0.2, ...rows.flatMap(([, , value, , high]) => [value ?? 0, high ?? 0])),
      along = (value) => left + (170 * Math.max(value, 0)) / widest;
    const svg = draw("svg", {
      viewBox: `0 0 380 ${6 + 17 * rows.length}`,
      role: "img",
      "aria-label": "logit carried by a swap",
    });
    rows.forEach(([label, name, value, low, high], i) => {
      const y = 4 + 17 * i;
      let end = known(value) ? along(value) : left,
        said = fixed(value);
      svg.append(draw("text", { x: 84, y: y + 10, "text-anchor": "end" }, label));
      if (known(value))
        svg.append(
          draw("rect", { fill: colours[name], x: left, y, width: (end - left).toFixed(1), height: 11 }),
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
