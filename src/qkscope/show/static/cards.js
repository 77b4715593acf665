"use strict";
// One head that was looked at closely: its sentence, what is known of it by name, the tokens behind its leading block,
// that block's directions by their tokens, and what changes in the text did.
(() => {
  const { make } = qk;
  const token = (text) => make("code", { class: "token" }, qk.piece(text));
  const tokens = (text) => text.split(" | ").flatMap((each, i) => [i ? " " : "", token(each)]);
  const table = (titles, rows, isSoft) =>
    make(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": titles.join(", ") },
      qk.table(titles, rows, isSoft),
    );
  const figure = (words, ...inside) => make("figure", {}, make("figcaption", {}, words), ...inside);

  qk.charts.cards = (element, rows, options) => {
    const { head, sentence, distances, pairs, directions, changes, model } = options;
    const deck = [];
    if (pairs.length)
      deck.push(
        figure(
          "Tokens behind the leading block, with their share of the attention",
          table(["asking", "key", "share"], pairs.map((row) => [token(row.query_token), token(row.key_token), qk.percent(row.share)])),
        ),
      );
    if (directions.length)
      deck.push(
        figure(
          "The leading block's directions, by the tokens at their strong end; those in grey do not hold on the tested documents",
          table(
            ["asking tokens", "keys", "share of the logit"],
            directions.map((row) => [tokens(row.query_tokens), tokens(row.key_tokens), qk.interval(row.share, row.low, row.high)]),
            (i) => !directions[i].kept,
          ),
        ),
      );
    element.replaceChildren(
      make("p", { class: "sentence" }, sentence),
      ...changes.map((words) => make("p", { class: "tested" }, words)),
      qk.named(head, options, distances, model),
      ...(deck.length ? [make("div", { class: "deck" }, ...deck)] : []),
    );
  };
})();
