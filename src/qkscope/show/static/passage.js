"use strict";
// A text with the token that asks and the key it attends to marked.
(() => {
  const { make } = qk;
  const MEANT = { query: " the token that asks", key: " the one it attends to most", both: " one that attends to itself" };
  const same = (row) => row.query_start === row.key_start && row.query_stop === row.key_stop;

  // what the marks in some texts mean
  qk.marks = (texts) => {
    const names = [...(texts.some((row) => !same(row)) ? ["query", "key"] : []), ...(texts.some(same) ? ["both"] : [])];
    return names.length
      ? make(
          "p",
          { class: "facts marks" },
          "In the texts: ",
          ...names.flatMap((name, i) => [i ? ", " : "", make("mark", { class: name }, name), MEANT[name]]),
          ".",
        )
      : null;
  };

  // on one line: a break is a mark
  const plain = (letters) => letters.join("").replaceAll("\n", " ↵ ");
  qk.passage = (row) => {
    const spans = ["query", "key"].map((side) => ({ side, start: row[`${side}_start`], stop: row[`${side}_stop`] }));
    const marks = same(row) ? [{ ...spans[0], side: "both" }] : spans.sort((a, b) => a.start - b.start || a.stop - b.stop);
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
})();
