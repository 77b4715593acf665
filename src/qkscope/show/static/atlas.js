"use strict";
// All heads: a map to find one, and a line for each. A kind filters, a column sorts, a word searches, a click on a line
// opens it: looks as text, with the rule's row beside the head's.
(() => {
  const { make, choose, viridis, percent, fixed } = qk;
  const FEW = 30; // lines before one asks for all
  // title, what it means, its cell, and what it is sorted by
  const COLUMNS = {
    head: ["head", "layer and number", null, (row) => row.layer * 1000 + row.index],
    kind: ["kind", "what most of the rule does, the first token and rest aside", (row) => row.kind, (row) => row.kind],
    rule: ["rule", "weighted parts that give its attention from the text alone", (row) => row.rule, (row) => row.rule],
    rest: ["rest", "the weight of its mean row by distance; over .5 counts as no rule", (row) => percent(row.rest), (row) => row.rest],
    iou: ["IoU", "how well the rule gives the head's rows in other documents; 1 is the same", (row) => fixed(row.iou, 2), (row) => row.iou],
    mean_row_iou: ["mean row", "the same of its mean row by distance alone", (row) => fixed(row.mean_row_iou, 2), (row) => row.mean_row_iou],
    cost: ["cost", "the rise of perplexity with the rule in its place", (row) => (row.cost === null ? "–" : percent(row.cost)), (row) => row.cost],
  };
  const numeric = (name) => ["rest", "iou", "mean_row_iou", "cost"].includes(name);

  const quoted = (text) => `'${text.replaceAll("'", "'\\''").replaceAll("\n", "\\n")}'`;
  // the rule's row beside the head's, at the keys that either gives most
  const rows = (look) =>
    make(
      "table", { class: "keys" },
      make("thead", {}, make("tr", {}, ...["key", "head", "rule"].map((title) => make("th", { scope: "col" }, title)))),
      make("tbody", {}, ...look.keys.map((each) =>
        make("tr", {}, make("td", {}, look.tokens[each.key].replaceAll("\n", "↵")), make("td", { class: "n" }, percent(each.head)), make("td", { class: "n" }, percent(each.rule))))),
    );
  const example = (row, look, model) =>
    make(
      "div",
      { class: "example" },
      qk.passage(look),
      make("p", { class: "facts" }, `The head gives ${percent(look.attention)}, its rule ${percent(look.says)}, in ${look.document}. Why? `, make("code", { class: "command" }, `qkscope why ${quoted(look.text)} --head ${row.head}${!model || model === "smollm2-135m" ? "" : ` --model ${quoted(model)}`}`)),
      rows(look),
    );

  qk.charts.atlas = (element, rows, { families, of, beside, looks, model }) => {
    const place = make("div", {}), bar = make("div", { class: "choices" }), shown = make("output", {}), wanted = new Set(),
      colours = qk.partColours(Object.keys(families)),
      swatch = (name) => make("span", { class: "swatch", style: { background: colours[name] } }),
      more = make("button", { type: "button", onclick: () => filter((all = true)) }, `show all ${rows.length}`);
    let all = rows.length <= FEW, order = [...rows];
    const lines = new Map(
      rows.map((row) => {
        const button = make("button", { type: "button", "aria-expanded": "false" }, row.head);
        const cells = Object.entries(COLUMNS).map(([name, [, , cell]]) =>
          name === "head" ? make("td", {}, button) : make("td", { class: name === "kind" ? "title" : numeric(name) ? "n" : "wide" }, ...(name === "kind" ? [swatch(of[row.head])] : []), String(cell(row))),
        );
        const inside = make("td", { colspan: cells.length }), further = make("tr", { class: "further", hidden: "" }, inside);
        return [row, make("tbody", { "data-head": row.head }, make("tr", { onclick: () => open(row, further.hidden) }, ...cells), further)];
      }),
    );
    function open(row, whether) {
      const line = lines.get(row), further = line.querySelector(".further"), inside = further.firstChild, others = beside[row.head];
      further.hidden = !whether;
      if (whether && !inside.childNodes.length)
        inside.append(
          make("p", { class: "sentence" }, `${row.head}: ${row.rule}.` + (others ? ` Its best offset has an IoU of ${fixed(others.best_offset, 2)}, another head's rule ${fixed(others.other_rule, 2)}, the first token ${fixed(others.first_token, 2)}.` : "")),
          ...(looks[row.head] ? [qk.marks(looks[row.head])] : []),
          ...(looks[row.head] ?? []).map((look) => example(row, look, model)),
        );
      line.querySelector("button").setAttribute("aria-expanded", String(whether));
    }
    const search = make("input", { type: "search", "aria-label": "search", placeholder: "L18, induction, a word of a text …", oninput: () => filter() });
    const words = new Map(rows.map((row) => [row, [row.head, row.kind, row.rule, ...(looks[row.head] ?? []).map((look) => look.text)].join("\n").toLowerCase()]));
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
      const column = make("th", { scope: "col", class: numeric(name) ? "n" : name === "rule" ? "wide" : "", title: meaning }, make("button", { type: "button", onclick }, title));
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
      lines: (row) => [[row.head], ["kind", row.kind], ["IoU", fixed(row.iou, 2)]],
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
      ...choose("coloured by", ["kind", "iou", "rest"], "kind", (name) =>
        name === "kind" ? grid.repaint(byKind, "Heads", null, (each) => colours[each]) : grid.repaint((row) => row[name], name, [0, 1], viridis),
      ),
    );
  };
})();
