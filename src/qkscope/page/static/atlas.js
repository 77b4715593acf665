"use strict";
// All heads: a map to find one, and a line for each with the text where it is strongest. A column sorts, a word or a
// relation filters, a click on a line opens it. What is missing sorts as smallest.
(() => {
  const { make, number, fixed, choose } = qk;
  const FEW = 30; // lines before one asks for all
  const COLUMNS = {
    head: ["head"],
    relation: ["looks at", "the relation of the most attended token to the asking one that leads chance by most"],
    directions: ["directions", "in which queries and attended keys go together more than by chance"],
    logit_share: ["logit carried", "by these directions, of the logit by which the most attended token leads another"],
    carried: ["two swapped", "what swapping the first two directions carries of that logit"],
    carried_key_pca: ["key PCA", "the same for two principal components of the keys"],
    carried_random: ["random", "the same for two random directions"],
  };
  const words = (name) => name === "head" || name === "relation";
  const wide = (name) => (name.startsWith("carried") ? "wide" : "");
  const worth = (row, name) =>
    (name === "head" ? row.layer * 1000 + row.index : name === "relation" ? row.relation && row.relation_rate : row[name]) ??
    -Infinity;
  const text = (row, name) => (name === "directions" ? number(row[name]) : fixed(row[name]));

  qk.charts.atlas = (element, rows, { examples, said, marks, scores }) => {
    const place = make("div", {}),
      bar = make("div", { class: "choices" }),
      shown = make("output", {}),
      more = make("button", { type: "button", onclick: () => filter((all = true)) }, `show all ${rows.length}`);
    let all = rows.length <= FEW,
      order = [...rows];
    const lines = new Map(
      rows.map((row) => {
        const own = (examples[row.head] || []).map(qk.passage);
        const further = make("tr", { class: "further", hidden: "" }, make("td", { colspan: 7 }, ...own.slice(1), make("p", { class: "facts" }, said[row.head].facts)));
        const button = make("button", { type: "button", "aria-expanded": "false" }, row.head);
        const cells = Object.keys(COLUMNS).map((name) =>
          name === "head"
            ? make("td", {}, button)
            : name === "relation"
              ? make("td", { class: "relation" }, said[row.head].relation || "–")
              : make("td", { class: `n ${wide(name)}` }, text(row, name)),
        );
        const first = own.length ? make("tr", {}, make("td", { class: "text", colspan: 7 }, own[0])) : null;
        const line = make("tbody", { "data-head": row.head, onclick: () => open(line, further.hidden) }, make("tr", {}, ...cells), first, further);
        return [row, line];
      }),
    );
    function open(line, whether) {
      line.querySelector(".further").hidden = !whether;
      line.querySelector("button").setAttribute("aria-expanded", String(whether));
    }
    const wanted = make("input", { type: "search", "aria-label": "filter", placeholder: "L18, Anna, ...", oninput: filter });
    const select = (label, name, first) => {
      const values = [...new Set(rows.map((row) => row[name] ?? "none"))].sort();
      const options = values.map((value) => make("option", { value }, value));
      return make("select", { "aria-label": label, onchange: filter }, make("option", { value: "" }, first), ...options);
    };
    const relation = select("looks at", "relation", "whatever it looks at"),
      verdict = select("verdict", "verdict", "every verdict");
    function filter() {
      const word = wanted.value.trim().toLowerCase(),
        is = (choice, value) => !choice.value || choice.value === (value ?? "none");
      let count = 0;
      for (const row of order) {
        const line = lines.get(row);
        const there = is(relation, row.relation) && is(verdict, row.verdict) && line.textContent.toLowerCase().includes(word);
        count += there;
        line.hidden = !there || (!all && count > FEW);
      }
      more.hidden = all || count <= FEW;
      shown.textContent = `${count} of ${rows.length} heads`;
    }
    const table = make("table", {});
    const columns = Object.entries(COLUMNS).map(([name, [title, meaning]]) => {
      const onclick = () => {
        const up = column.getAttribute("aria-sort") === "descending";
        columns.forEach((other) => other.removeAttribute("aria-sort"));
        column.setAttribute("aria-sort", up ? "ascending" : "descending");
        const compare = (a, b) => (worth(a, name) < worth(b, name) ? -1 : worth(a, name) > worth(b, name) ? 1 : 0);
        order.sort((a, b) => (up ? compare(a, b) : compare(b, a)));
        table.append(...order.map((row) => lines.get(row)));
        filter();
      };
      const column = make(
        "th",
        { scope: "col", class: words(name) ? null : `n ${wide(name)}`, title: meaning },
        make("button", { type: "button", onclick }, title),
      );
      return column;
    });
    table.append(make("thead", {}, make("tr", {}, ...columns)), ...lines.values());
    element.replaceChildren(
      ...[
        bar,
        place,
        qk.marks(marks),
        make("p", { class: "choices" }, wanted, relation, verdict, shown),
        make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Every head" }, table),
        make("p", {}, more),
      ].filter(Boolean),
    );
    filter();

    const names = Object.keys(scores),
      ends = (name) => [0, name === "directions" ? Math.max(1, ...rows.map((row) => row.directions)) : 1];
    const grid = qk.map(place, {
      rows,
      value: (row) => row[names[0]],
      range: ends(names[0]),
      title: scores[names[0]],
      lines: (row) => [
        [row.head],
        ["looks at", said[row.head].relation || "–"],
        ...names.filter((name) => name !== "relation_rate").map((name) => [scores[name], text(row, name)]),
      ],
      onpick(head) {
        [wanted.value, relation.value, verdict.value, all] = ["", "", "", true];
        filter();
        const line = [...lines.values()].find((each) => each.dataset.head === head);
        open(line, true);
        line.scrollIntoView({ block: "center" });
        line.querySelector("button").focus({ preventScroll: true });
      },
    });
    bar.append(
      ...choose(
        "coloured by",
        names,
        names[0],
        (name) => grid.repaint((row) => row[name], scores[name], ends(name)),
        (name) => scores[name],
      ),
    );
  };
})();
