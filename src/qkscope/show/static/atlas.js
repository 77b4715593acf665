"use strict";
// All heads: a map to find one, and a line for each. A name filters, a column sorts, a word searches, a click on a line
// opens it. What is missing sorts as smallest.
(() => {
  const { make, choose, viridis, percent, interval } = qk;
  const FEW = 30; // lines before one asks for all
  const writer = (side) => (row) => (row[`${side}_writer`] ? `${row[`${side}_writer`]} ${percent(row[`${side}_share`])}` : "–");
  // title, what it means, its cell, and what it is sorted by if not by its column
  const COLUMNS = {
    head: ["head", "layer and number", null, (row) => row.layer * 1000 + row.index],
    name: ["name", "what its largest block is called"],
    share: ["share", "of the logit by which a head prefers some keys, what the block that names it explains, with its 95% interval over documents", (row) => interval(row.share, row.low, row.high)],
    precision: ["precision", "how often the key with most attention except the first token keeps the rule of the name, where one in sight does; chance: the same for a key drawn at random", (row) => (row.precision === null ? "–" : `${percent(row.precision)} (chance ${percent(row.chance)})`)],
    coverage: ["coverage", "how often a key that keeps the rule is in sight", (row) => percent(row.coverage)],
    rest: ["rest", "of its logit, what nothing that can be read off the text explains", (row) => percent(row.rest)],
    key_writer: ["key from", "who wrote most of its keys, and the share of the logit", writer("key")],
    query_writer: ["query from", "who wrote most of its queries, and the share of the logit", writer("query")],
  };
  const TERMS = ["share", "precision", "coverage", "rest"];
  const SHADES = { share: "share", rest: "rest", precision: "precision" };
  const numbers = (name) => !["head", "name", "key_writer", "query_writer"].includes(name);
  const worth = (row, name) => (COLUMNS[name][3] ? COLUMNS[name][3](row) : row[name]) ?? (numbers(name) ? -Infinity : "");
  const wide = (name) => (["coverage", "key_writer", "query_writer"].includes(name) ? "wide" : "");

  qk.charts.atlas = (element, rows, { heads, distances, names, families, model }) => {
    const place = make("div", {}),
      bar = make("div", { class: "choices" }),
      shown = make("output", {}),
      more = make("button", { type: "button", onclick: () => filter((all = true)) }, `show all ${rows.length}`),
      colours = qk.familyColours(Object.keys(families)),
      family = (row) => heads[row.head].family,
      swatch = (name) => make("span", { class: "swatch", style: { background: colours[name] } }),
      wanted = new Set();
    let all = rows.length <= FEW,
      order = [...rows];
    const lines = new Map(
      rows.map((row) => {
        const button = make("button", { type: "button", "aria-expanded": "false" }, row.head);
        const cells = Object.entries(COLUMNS).map(([name, [, , cell]]) =>
          name === "head"
            ? make("td", {}, button)
            : name === "name"
              ? make("td", { class: "title" }, swatch(family(row)), row.name)
              : make("td", { class: `${numbers(name) ? "n" : ""} ${wide(name)}` }, cell(row)),
        );
        const inside = make("td", { colspan: cells.length }),
          further = make("tr", { class: "further", hidden: "" }, inside);
        const line = make("tbody", { "data-head": row.head }, make("tr", { onclick: () => open(row, further.hidden) }, ...cells), further);
        return [row, line];
      }),
    );
    function open(row, whether) {
      const line = lines.get(row),
        further = line.querySelector(".further"),
        inside = further.firstChild;
      further.hidden = !whether;
      if (whether && !inside.childNodes.length)
        inside.append(make("p", { class: "sentence" }, row.sentence), qk.named(row.head, heads[row.head], distances, model));
      line.querySelector("button").setAttribute("aria-expanded", String(whether));
    }
    const search = make("input", { type: "search", "aria-label": "search", placeholder: "L18, previous, M0, a word of a text …", oninput: filter });
    const words = new Map(
      rows.map((row) => [row, [row.head, row.name, row.sentence, row.key_writer, row.query_writer, ...heads[row.head].examples.map(({ text }) => text)].join("\n").toLowerCase()]),
    );
    function filter() {
      const word = search.value.trim().toLowerCase();
      let count = 0;
      for (const row of order) {
        const there = (!wanted.size || wanted.has(row.name)) && words.get(row).includes(word);
        count += there;
        lines.get(row).hidden = !there || (!all && count > FEW);
      }
      more.hidden = all || count <= FEW;
      shown.textContent = `${count} of ${rows.length} heads`;
    }
    // one line of names for each family, so that they say what the colours mean, too
    const chips = names.map(([, name, count]) => {
      const chip = make(
        "button",
        {
          type: "button",
          "aria-pressed": "false",
          "data-name": name,
          onclick() {
            if (!wanted.delete(name)) wanted.add(name);
            chip.setAttribute("aria-pressed", String(wanted.has(name)));
            filter();
          },
        },
        name,
        make("small", {}, ` ${count}`),
      );
      return chip;
    });
    const legend = [...new Set(names.map(([name]) => name))].flatMap((name) => [
      make("dt", { title: families[name] }, swatch(name), name),
      make("dd", { class: "choices" }, ...chips.filter((_, i) => names[i][0] === name), make("span", {}, families[name])),
    ]);
    const table = make("table", {});
    const columns = Object.entries(COLUMNS).map(([name, [title, meaning]]) => {
      const onclick = () => {
        const up = column.getAttribute("aria-sort") === (numbers(name) ? "descending" : "ascending");
        columns.forEach((other) => other.removeAttribute("aria-sort"));
        const rising = numbers(name) === up;
        column.setAttribute("aria-sort", rising ? "ascending" : "descending");
        const compare = (a, b) => (worth(a, name) < worth(b, name) ? -1 : worth(a, name) > worth(b, name) ? 1 : 0);
        order.sort((a, b) => (rising ? compare(a, b) : compare(b, a)));
        table.append(...order.map((row) => lines.get(row)));
        filter();
      };
      const column = make("th", { scope: "col", class: `${numbers(name) ? "n" : ""} ${wide(name)}`, title: meaning }, make("button", { type: "button", onclick }, title));
      return column;
    });
    columns[Object.keys(COLUMNS).indexOf("share")].setAttribute("aria-sort", "descending"); // as the rows come
    table.append(make("thead", {}, make("tr", {}, ...columns)), ...lines.values());
    element.replaceChildren(
      bar,
      place,
      make("dl", { class: "families" }, ...legend),
      make("p", { class: "facts" }, ...TERMS.flatMap((name) => [make("b", {}, name), `: ${COLUMNS[name][1]}. `])),
      make("p", { class: "choices" }, search, shown),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Every head" }, table),
      make("p", {}, more),
      make("p", { class: "facts" }, qk.livePage(model)),
    );
    filter();

    const byName = (row) => family(row);
    const grid = qk.map(place, {
      rows,
      value: byName,
      range: null,
      paint: (name) => colours[name],
      title: "Heads",
      lines: (row) => [[`${row.head}: ${row.name}`], ["share", interval(row.share, row.low, row.high)], ["rest", percent(row.rest)]],
      onpick,
    });
    document.addEventListener("qk-head", ({ detail }) => {
      if (!heads[detail]) return;
      grid.pick(detail);
      onpick(detail);
    });
    function onpick(head) {
      search.value = "";
      wanted.clear();
      chips.forEach((chip) => chip.setAttribute("aria-pressed", "false"));
      all = true;
      filter();
      const row = rows.find((each) => each.head === head);
      open(row, true);
      lines.get(row).scrollIntoView({ block: "start" });
      lines.get(row).querySelector("button").focus({ preventScroll: true });
    }
    bar.append(
      ...choose("coloured by", ["name", ...Object.keys(SHADES)], "name", (name) =>
        name === "name" ? grid.repaint(byName, "Heads", null, (each) => colours[each]) : grid.repaint((row) => row[name], SHADES[name], [0, 1], viridis),
      ),
    );
  };
})();
