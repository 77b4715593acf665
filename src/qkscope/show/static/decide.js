"use strict";
// Heads that decide the next token, for and against it, and the words that decide where one of them looks.
(() => {
  const { make, button, fixed, signed, percent, piece } = qk;
  const SHOWN = { for: 6, against: 4 }, // heads of each kind, before the others are asked for
    NEARLY = 0.25; // of the attention: two equal words that restore so much more than each alone, though not by the rule

  // token(i) as it reads, called(head); picked: a head; onpick(row), onmore(); a saved page names no answer and picks nothing
  qk.heads = (element, { rows, answer, rival, picked, all, token, called, onpick, onmore }) => {
    const best = answer ? qk.quoted(answer.token) : "the next token",
      over = rival ? qk.quoted(rival.token) : "its rival",
      most = Math.max(0.1, ...rows.map(({ difference }) => Math.abs(difference)));
    const line = (row) => {
      const { head, key, difference, probability } = row,
        width = `${((100 * Math.abs(difference)) / most).toFixed(1)}%`,
        background = `var(${difference < 0 ? "--original" : "--target"})`,
        chances = `${answer ? `${percent(answer.probability, 1)} → ` : ""}${percent(probability, 1)}`,
        digits = probability > 0.98 || probability < 0.02 ? 1 : 0,
        pressed = { "aria-pressed": String(head === picked), title: called?.(head) };
      return make(
        "tr",
        { class: head === picked ? "picked" : null, onclick: () => onpick?.(row) },
        make("td", {}, onpick ? button(head, () => {}, pressed) : head),
        make("td", { class: "at" }, token(key)),
        make("td", { class: "n", title: chances }, percent(probability, digits)),
        make("td", { class: "bar" }, make("i", { style: { width, background } })),
        make("td", { class: "n" }, row.lead === undefined ? signed(difference) : `${fixed(row.lead_before, 1)} → ${fixed(row.lead, 1)}`),
      );
    };
    const heading = (text) => make("tr", {}, make("th", { colspan: 5, scope: "rowgroup" }, text));
    const shown = ["for", "against"].map((way) => {
      const own = rows.filter(({ direction }) => direction === way);
      return [way, own.slice(0, all ? own.length : SHOWN[way])];
    });
    const listed = shown.flatMap(([, own]) => own),
      matter = rows.filter(({ direction }) => direction !== "neither").length,
      mine = rows.find((row) => row.head === picked && !listed.includes(row));
    const body = shown.flatMap(([way, own]) => (own.length ? [heading(`${way} ${best}`), ...own.map(line)] : []));
    if (!matter) body.push(heading("no single head changes it by 0.1"));
    if (mine) body.push(heading(mine.direction === "neither" ? "neither" : `also ${mine.direction}`), line(mine));
    const title = (words, given = {}) => make("th", { scope: "col", ...given }, words),
      chance = `probability of ${best} with that token hidden from the head`,
      logits = { class: "n", colspan: 2, title: `lead of ${best} over ${over} in logits, before → with that token hidden` };
    const titles = [
      title("head"),
      title("token"),
      title("P hidden", { class: "n", title: chance }),
      title("lead", logits),
    ];
    const before = answer ? ` (${percent(answer.probability)} before)` : "",
      told =
        `Hide each head's main token from it, one head at a time: the probability of ${best} then${before},` +
        ` and its lead over ${over} in logits, before → then.`;
    const more = button(all ? "fewer" : `${matter - listed.length} more`, onmore);
    element.replaceChildren(
      make("p", { class: "words" }, told),
      make("table", { class: "heads" }, make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...body)),
      ...(all || matter > listed.length ? [make("div", { class: "choices" }, more)] : []),
    );
  };

  qk.charts.decide = (place, rows) => {
    const texts = new Map(rows.map(({ key, token }) => [key, token])),
      token = (key) => piece(texts.get(key));
    const show = (all, picked) => qk.heads(place, { rows, picked, all, token, onmore: () => show(!all, picked) });
    document.addEventListener("qk-head", ({ detail }) => show(false, detail)); // the head that a link names
    show(false);
  };

  // words that decide a look, by token: those that break it when changed, and two equal ones that do so together
  qk.causes = ({ because = [], relation = [] }, attention) => {
    const causes = new Map();
    for (const row of because)
      for (let i = row.position; i < row.end; i++)
        causes.set(i, {
          kind: { yes: "cause", open: "open" }[row.cause] ?? "",
          lines: [
            ["replaced", `${percent(row.before)} → ${percent(row.after)}`],
            ["the attention goes to", piece(row.goes_to)],
          ],
        });
    for (const { kind, verdict, positions, together, alone, different } of relation) {
      const nearly = together !== null && together - Math.max(alone, different) >= NEARLY;
      if (kind !== "same word" || (verdict !== "shown" && !nearly)) continue;
      for (const i of positions.split(", ").map(Number)) {
        const { kind: before = "", lines = [] } = causes.get(i) ?? {},
          both = [`tokens ${positions} replaced by the same word`, percent(together * attention)];
        causes.set(i, { kind: verdict === "shown" ? "cause" : before || "open", lines: [...lines, both] });
      }
    }
    return causes;
  };
})();
