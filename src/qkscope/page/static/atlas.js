"use strict";
// The table of all heads: a column sorts it, a word or a verdict filters it. What is missing sorts as smallest.
(() => {
  const { make, number, fixed } = qk;
  const COLUMNS = {
    head: "head",
    directions: "directions",
    q: "q",
    z: "z",
    mass: "off the first",
    top_weight: "on one key",
    logit_share: "logit share",
    carried: "first two",
    carried_key_pca: "key PCA",
    carried_random: "random",
    relation: "attends to",
  };
  const worth = (row, name) =>
    (name === "head" ? row.layer * 1000 + row.index : name === "relation" ? row.relation && row.relation_rate : row[name]) ??
    -Infinity;
  const text = (row, name) =>
    name === "directions" ? number(row[name]) : name === "q" ? brief(row.q) : fixed(row[name]);
  const brief = (value) => (value === null ? "–" : String(Number(value.toPrecision(2))));

  qk.charts.atlas = (element, rows, { examples, relations, marks }) => {
    const lines = new Map(
      rows.map((row) => [
        row,
        make(
          "tr",
          {},
          ...Object.keys(COLUMNS).map((name) =>
            name === "head"
              ? make("td", {}, row.head)
              : name === "relation"
                ? make("td", { class: "relation" }, relations[row.head] || "–")
                : make("td", { class: "n" }, text(row, name)),
          ),
          make("td", { class: "text" }, examples[row.head] ? qk.passage(examples[row.head]) : null),
        ),
      ]),
    );
    const body = make("tbody", {}, ...lines.values()),
      shown = make("output", {});
    const wanted = make("input", { type: "search", "aria-label": "filter", placeholder: "L18, Anna, ...", oninput: filter });
    const verdicts = [...new Set(rows.map((row) => row.verdict))];
    const verdict = make(
      "select",
      { "aria-label": "verdict", onchange: filter },
      make("option", { value: "" }, "all"),
      ...verdicts.map((name) => make("option", { value: name }, name)),
    );
    function filter() {
      const word = wanted.value.trim().toLowerCase();
      let count = 0;
      for (const [row, line] of lines) {
        const there = line.textContent.toLowerCase().includes(word) && (!verdict.value || row.verdict === verdict.value);
        line.hidden = !there;
        count += there;
      }
      shown.textContent = `${count} of ${rows.length} heads`;
    }
    const columns = Object.entries(COLUMNS).map(([name, title]) => {
      const onclick = () => {
        const up = column.getAttribute("aria-sort") === "descending";
        columns.forEach((other) => other.removeAttribute("aria-sort"));
        column.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = (a, b) => (worth(a, name) < worth(b, name) ? -1 : worth(a, name) > worth(b, name) ? 1 : 0);
        body.append(...[...lines.keys()].sort((a, b) => (up ? order(a, b) : order(b, a))).map((row) => lines.get(row)));
      };
      const column = make(
        "th",
        { scope: "col", class: name === "head" || name === "relation" ? null : "n" },
        make("button", { type: "button", onclick }, title),
      );
      return column;
    });
    const head = make("tr", {}, ...columns, make("th", { scope: "col" }, "where it is strongest"));
    element.replaceChildren(
      ...[
        qk.marks(marks),
        make("p", { class: "choices" }, wanted, verdict, shown),
        make(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "Every head" },
          make("table", {}, make("thead", {}, head), body),
        ),
      ].filter(Boolean),
    );
    filter();
  };
})();
