"use strict";
// A look as text: the query token, the one looked at, and the words that decide are marked.
(() => {
  const { make } = qk;
  const MEANT = { query: " asks", key: " is looked at", both: " looks at itself", cause: " decides" };
  const kind = ({ query, key, causes }, i) =>
    i === query ? (i === key ? "both" : "query") : i === key ? "key" : causes.includes(i) ? "cause" : "";

  // what the marks in some looks mean
  qk.marks = (looks) => {
    const there = new Set(looks.flatMap((look) => look.tokens.slice(0, look.query + 1).map((_, i) => kind(look, i))));
    const named = Object.keys(MEANT).filter((name) => there.has(name)),
      mark = (name, i) => [i ? ", " : "", make("mark", { class: name }, name), MEANT[name]];
    return make("p", { class: "facts marks" }, ...named.flatMap(mark));
  };

  // on one line: a break is a mark; some tokenizers leave out the blanks between words
  qk.passage = (look) => {
    const tokens = look.tokens.slice(0, look.query + 1),
      gap = tokens.join("").endsWith(look.text) ? "" : " ";
    const pieces = tokens.flatMap((token, i) => {
      const [name, text] = [kind(look, i), token.replaceAll("\n", " ↵ ")];
      return [name ? make("mark", { class: name }, text) : text, gap];
    });
    return make("blockquote", {}, ...pieces);
  };
})();
