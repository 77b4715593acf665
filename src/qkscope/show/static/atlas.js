"use strict";
// All heads: a map to find one, and a line for each. A kind filters, a column sorts, a word searches, a click on a line
// opens it: looks as text, with the query token, the one looked at, and the words that decide marked.
(() => {
  const { make, choose, viridis, percent, fixed } = qk;
  const FEW = 30; // lines before one asks for all
  const span = (row) => (row.low === null ? "" : ` [${percent(row.low)}, ${percent(row.high)}]`);
  // title, what it means, its cell, and what it is sorted by
  const COLUMNS = {
    head: ["head", "layer and number; heads of one key head are no replications", null, (row) => row.layer * 1000 + row.index],
    name: ["jobs", "what decides where it looks, with the share of its looks", (row) => row.name, (row) => row.name],
    share: ["share", "of its looks, the first job's, with the 95% interval by document", (row) => (row.share === null ? "–" : percent(row.share) + span(row)), (row) => row.share],
    leaves: ["leaves", "how often it gives .3 or more to a token that is not the first", (row) => percent(row.leaves), (row) => row.leaves],
    offset: ["offset", "its commonest distance", (row) => (row.offset === null ? "–" : fixed(row.offset, 0)), (row) => row.offset],
    tokens: ["words", "tokens that it looks at most often", (row) => row.tokens, (row) => row.tokens],
  };
  const numeric = (name) => ["share", "leaves", "offset"].includes(name);

  const quoted = (text) => `'${text.replaceAll("'", "'\\''").replaceAll("\n", "\\n")}'`;
  const example = (row, look, model) =>
    make(
      "div",
      { class: "example" },
      qk.passage(look),
      make("p", { class: "facts" }, `${look.job}: ${percent(look.attention)} of its attention, in ${look.document}. Why? `, make("code", { class: "command" }, `qkscope why ${quoted(look.text)} --head ${row.head}${!model || model === "smollm2-135m" ? "" : ` --model ${quoted(model)}`}`)),
    );

  qk.charts.atlas = (element, rows, { families, of, scores, looks, model }) => {
    const place = make("div", {}), bar = make("div", { class: "choices" }), shown = make("output", {}), wanted = new Set(),
      colours = qk.partColours(Object.keys(families)),
      swatch = (name) => make("span", { class: "swatch", style: { background: colours[name] } }),
      more = make("button", { type: "button", onclick: () => filter((all = true)) }, `show all ${rows.length}`);
    let all = rows.length <= FEW, order = [...rows];
    const lines = new Map(
      rows.map((row) => {
        const button = make("button", { type: "button", "aria-expanded": "false" }, row.head);
        const cells = Object.entries(COLUMNS).map(([name, [, , cell]]) =>
          name === "head" ? make("td", {}, button) : make("td", { class: name === "name" ? "title" : numeric(name) ? "n" : "wide" }, ...(name === "name" ? [swatch(of[row.head])] : []), String(cell(row))),
        );
        const inside = make("td", { colspan: cells.length }), further = make("tr", { class: "further", hidden: "" }, inside);
        return [row, make("tbody", { "data-head": row.head }, make("tr", { onclick: () => open(row, further.hidden) }, ...cells), further)];
      }),
    );
    function open(row, whether) {
      const line = lines.get(row), further = line.querySelector(".further"), inside = further.firstChild, score = scores[row.head];
      further.hidden = !whether;
      if (whether && !inside.childNodes.length)
        inside.append(
          make("p", { class: "sentence" }, `${row.head} (key head ${row.key_head}): ${row.name}, ${row.looks} looks.` + (score ? ` On ${score.looks} looks in other documents its name says the token in ${percent(score.name)}, its best offset in ${percent(score.offset)}, a table of tokens in ${percent(score.tokens)}.` : "")),
          ...(looks[row.head] ? [qk.marks(looks[row.head])] : []),
          ...(looks[row.head] ?? []).map((look) => example(row, look, model)),
        );
      line.querySelector("button").setAttribute("aria-expanded", String(whether));
    }
    const search = make("input", { type: "search", "aria-label": "search", placeholder: "L18, induction, a word of a text …", oninput: () => filter() });
    const words = new Map(rows.map((row) => [row, [row.head, row.name, row.tokens, ...(looks[row.head] ?? []).map((look) => look.text)].join("\n").toLowerCase()]));
    function filter() {
      const word = search.value.trim().toLowerCase();
      let count = 0;
      for (const row of order) {
        const there = (!wanted.size || wanted.has(of[row.head])) && words.get(row).includes(word);
        count += there;
        lines.get(row).hidden = !there || (!all && count > FEW);
      }
      more.hidden = all || count <= FEW;
      shown.textContent = `${count} of ${rows.length} heads`;
    }
    const chips = Object.entries(families).map(([name, [text, count]]) => {
      const onclick = () => {
        if (!wanted.delete(name)) wanted.add(name);
        chip.setAttribute("aria-pressed", String(wanted.has(name)));
        filter();
      };
      const chip = make("button", { type: "button", "aria-pressed": "false", "data-name": name, title: text, onclick }, swatch(name), name, make("small", {}, ` ${count}`));
      return chip;
    });
    const table = make("table", {});
    const columns = Object.entries(COLUMNS).map(([name, [title, meaning, , worth]]) => {
      const onclick = () => {
        const rising = column.getAttribute("aria-sort") === "descending" || (!column.hasAttribute("aria-sort") && !numeric(name));
        columns.forEach((other) => other.removeAttribute("aria-sort"));
        column.setAttribute("aria-sort", rising ? "ascending" : "descending");
        const least = (row) => worth(row) ?? (numeric(name) ? -Infinity : "");
        order.sort((a, b) => (least(a) < least(b) ? -1 : least(a) > least(b) ? 1 : 0) * (rising ? 1 : -1));
        table.append(...order.map((row) => lines.get(row)));
        filter();
      };
      const column = make("th", { scope: "col", class: numeric(name) ? "n" : name === "tokens" ? "wide" : "", title: meaning }, make("button", { type: "button", onclick }, title));
      return column;
    });
    table.append(make("thead", {}, make("tr", {}, ...columns)), ...lines.values());
    element.replaceChildren(
      bar,
      place,
      make("p", { class: "choices" }, ...chips),
      make("p", { class: "choices" }, search, shown),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Every head" }, table),
      make("p", {}, more),
    );
    filter();
    const byKind = (row) => of[row.head];
    const grid = qk.map(place, {
      rows, value: byKind, range: null, paint: (name) => colours[name], title: "Heads", onpick,
      lines: (row) => [[row.head], ["jobs", row.name], ["looks", String(row.looks)]],
    });
    document.addEventListener("qk-head", ({ detail }) => {
      if (!of[detail]) return;
      grid.pick(detail);
      onpick(detail);
    });
    function onpick(head) {
      search.value = "";
      wanted.clear();
      chips.forEach((chip) => chip.setAttribute("aria-pressed", "false"));
      filter((all = true));
      const row = rows.find((each) => each.head === head);
      open(row, true);
      lines.get(row).scrollIntoView({ block: "start" });
      lines.get(row).querySelector("button").focus({ preventScroll: true });
    }
    bar.append(
      ...choose("coloured by", ["kind", "share", "leaves"], "kind", (name) =>
        name === "kind" ? grid.repaint(byKind, "Heads", null, (each) => colours[each]) : grid.repaint((row) => row[name], name, [0, 1], viridis),
      ),
    );
  };
})();
