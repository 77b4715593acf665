"use strict";
// A prompt as it reads. A token is its text, filled by the chosen part, over a strip with a bar for each part, drawn as
// backgrounds, so that thousands of tokens stay light. Negative is hatched: sign is not told by hue alone.
(() => {
  const { make, fixed, visible, tip, near, swatch } = qk;
  const TEXT = 28.5,
    STRIP = 40,
    BAR = 6,
    STEP = 7,
    TWICE = 230; // milliseconds in which a second click may come
  const solid = (colour) => `linear-gradient(${colour},${colour})`;

  // rows: token, attention, logit and parts of each token; onlook(i), onleave(), onpick(i, whether it is to ask),
  // onedit(i, text): what was typed over a token
  qk.prompt = (element, { rows, parts = [], onlook, onleave = () => {}, onpick = null, onedit = null }) => {
    const colours = qk.partColours(["attention", "logit", ...parts]),
      keys = onpick ? "Arrow keys move, Enter picks, q asks from a token, e types over it." : "Arrow keys move.";
    let shown = "attention",
      at = -1,
      notes = new Map(), // of tokens, more lines to read
      wait = null; // a click may be the first of two
    const box = make("div", {
      class: "prompt",
      tabindex: 0,
      role: "application",
      "aria-label": `The prompt, token by token. ${keys}`,
    });
    box.style.setProperty("--strip", parts.length ? `${STRIP}px` : "6px");
    // the largest part, the first token's aside: many heads rest there
    const top = (name) => {
      const values = rows.map((row) => Math.abs(row[name] ?? 0)),
        later = values.slice(1);
      return Math.max(1e-9, ...(later.length ? later : values));
    };
    const largest = Math.max(1e-9, ...parts.map(top));
    const bars = (row) => {
      const middle = TEXT + 4 + STRIP / 2;
      return [
        ...parts.map((name, j) => {
          const size = Math.min(1, Math.abs(row[name]) / largest) * (STRIP / 2 - 1);
          const [left, above] = [3 + j * STEP, row[name] > 0 ? middle - size : middle];
          return `${solid(colours[name])} ${left}px ${above}px / ${BAR}px ${Math.max(size, 0.5)}px no-repeat`;
        }),
        `${solid("var(--line)")} 0 ${middle - 0.5}px / 100% 1px no-repeat`,
      ].join(", ");
    };
    const shape = (text, i) => (text === "" && i ? "·" : visible(text)); // a further piece of a character
    const tokens = rows.map((row, i) => {
      const kind = `token${row.token.trim() === "" ? " white" : ""}${i === rows.length - 1 ? " asks" : ""}`,
        fill = make("span", { class: "fill", "data-i": i }, shape(row.token, i)),
        token = make("span", { class: kind, "data-i": i }, fill);
      if (parts.length) {
        token.style.background = bars(row);
        fill.style.minWidth = `${parts.length * STEP + 6}px`;
      }
      return token;
    });
    // one colour and one class for each token: nothing else changes
    const paint = () => {
      const full = shown === "attention" ? 1 : top(shown);
      tokens.forEach(({ firstChild: fill }, i) => {
        const value = rows[i][shown] ?? 0,
          share = Math.min(1, Math.abs(value) / full) ** (shown === "attention" ? 0.7 : 1),
          mixed = `color-mix(in srgb, ${colours[shown]} ${(58 * share).toFixed(1)}%, transparent)`; // more, and letters on dark paper have too little contrast
        fill.style.backgroundColor = share > 0.02 ? mixed : "";
        fill.classList.toggle("less", value < 0 && share > 0.02);
      });
    };
    const look = (i, x, y, quiet = false) => {
      tokens[at]?.classList.remove("on");
      at = i;
      tokens[i].classList.add("on");
      const row = rows[i],
        known = row.logit !== undefined && row.logit !== null;
      const lines = [
        [`${visible(row.token)}  ·  token ${row.position ?? i}`],
        ["attention", fixed(row.attention, 3)],
        ...(known ? [["logit", fixed(row.logit)]] : []),
        ...parts.map((name) => [name, fixed(row[name]), colours[name]]),
        ...(notes.get(i)?.lines ?? []),
      ];
      if (!quiet) tip.show(lines, x, y);
      onlook(i);
    };
    const leave = () => {
      tip.hide();
      onleave();
    };
    const place = ({ target }) => (target.dataset.i === undefined ? null : Number(target.dataset.i));
    qk.follow(box, place, look, leave);
    // a token with the pieces of its character becomes a field: Enter takes what was typed, Escape does not
    const edit = (i) => {
      while (i > 0 && rows[i].token === "") i--;
      const [text, fill] = [rows[i].token, tokens[i].firstChild],
        input = make("input", { class: "over", size: Math.max(3, text.length), "aria-label": `Type over ${visible(text)}` });
      let open = true;
      const end = (typed) => {
        if (!open) return;
        open = false;
        tokens[i].replaceChildren(fill);
        box.focus({ preventScroll: true });
        if (typed && typed !== text.trim()) onedit(i, /^\s*/.exec(text)[0] + typed);
      };
      input.value = text.trim();
      input.addEventListener("blur", () => end(""));
      input.addEventListener("keydown", (event) => {
        event.stopPropagation();
        if (event.key === "Enter" || event.key === "Escape") end(event.key === "Enter" ? input.value.trim() : "");
      });
      tip.hide();
      tokens[i].replaceChildren(input);
      input.focus();
      input.select();
    };
    box.addEventListener("click", (event) => {
      const i = place(event);
      clearTimeout(wait);
      if (onpick && i !== null && event.detail < 2)
        wait = setTimeout(() => onpick(i, event.shiftKey), onedit && !event.shiftKey ? TWICE : 0);
    });
    box.addEventListener("dblclick", (event) => {
      clearTimeout(wait);
      if (onedit && place(event) !== null) edit(place(event));
    });
    box.addEventListener("keydown", (event) => {
      const picks = event.key === "Enter" || event.key === "q";
      if (event.key === "e" && at >= 0 && onedit) {
        event.preventDefault();
        return edit(at);
      }
      if (picks && at >= 0 && onpick) return onpick(at, event.key === "q" || event.shiftKey);
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (step === undefined) return undefined;
      event.preventDefault();
      const start = at >= 0 ? at : step > 0 ? -1 : tokens.length,
        next = Math.max(0, Math.min(tokens.length - 1, start + step));
      tokens[next].scrollIntoView({ block: "nearest" });
      return look(next, ...near(tokens[next]));
    });
    box.append(...tokens.flatMap((token, i) => (rows[i].token.includes("\n") ? [token, make("br")] : [token])));
    element.replaceChildren(box);
    paint();
    return {
      colours,
      show(name) {
        shown = name;
        paint();
      },
      look: (i) => look(i, 0, 0, true),
      mark(i, words) {
        tokens[i].classList.add("picked");
        tokens[i].dataset.mark = words;
      },
      // another row of attention, from another token, about another key
      ask(attention, query, key) {
        rows.forEach((row, i) => (row.attention = attention[i] ?? null));
        for (const [kind, is] of [["later", (i) => i > query], ["asks", (i) => i === query], ["key", (i) => i === key]])
          tokens.forEach((token, i) => token.classList.toggle(kind, is(i)));
        paint();
        element.scrollTop = tokens[key].offsetTop - element.clientHeight / 2; // of a long prompt
      },
      // tokens by place: a kind that colours them, and lines to read
      note(given) {
        notes = given;
        tokens.forEach((token, i) => {
          for (const kind of ["cause", "open"]) token.classList.toggle(kind, notes.get(i)?.kind === kind);
        });
      },
      // other words in the place of some
      put: (texts) =>
        tokens.forEach((token, i) => {
          if (token.firstChild.dataset.i !== undefined) token.firstChild.textContent = shape(texts.get(i) ?? rows[i].token, i);
          token.classList.toggle("typed", texts.has(i));
        }),
      // from somewhere else: these tokens are meant
      point: (...meant) => tokens.forEach((token, i) => token.classList.toggle("on", meant.includes(i))),
      edit,
      focus: () => box.focus({ preventScroll: true }),
    };
  };

  // the parts of one token's logit, and their sum
  const split = (element, row, parts, colours, largest) => {
    const bar = (value, background) => {
      const share = Math.min(1, Math.abs(value) / largest) * 50,
        left = value >= 0 ? "50%" : `${50 - share}%`;
      return make("div", { class: "bar" }, make("i", { style: { background, width: `${share}%`, left } }));
    };
    const known = row.logit !== undefined && row.logit !== null,
      share = make("span", {}, `  gets ${fixed(row.attention, 3)} of the attention`),
      sum = (kind, text) => make("div", { class: `${kind} sum` }, text);
    element.replaceChildren(
      make("div", { class: "of" }, qk.piece(row.token), share),
      ...parts.flatMap((name) => [
        make("div", {}, swatch(colours[name]), name),
        bar(row[name], colours[name]),
        make("div", { class: "value" }, fixed(row[name])),
      ]),
      ...(known ? [sum("", "logit"), sum("", ""), sum("value", fixed(row.logit))] : []),
    );
    element.classList.add("split");
  };

  qk.charts.tokens = (element, rows, { parts, key = null }) => {
    const bar = make("div", { class: "choices" }),
      place = make("div", {}),
      below = make("div", { "aria-live": "polite" });
    const largest = Math.max(1e-9, ...parts.flatMap((name) => rows.map((row) => Math.abs(row[name]))));
    element.replaceChildren(
      bar,
      make("div", { class: "beside prompted" }, place, make("div", { class: "stay" }, below)),
    );
    const onlook = (i) => split(below, rows[i], parts, view.colours, largest);
    const view = qk.prompt(place, { rows, parts, onlook });
    if (parts.length)
      bar.append(...qk.choose("coloured by", ["attention", ...parts], "attention", view.show, qk.pretty, view.colours));
    const best = rows.reduce((top, row, i) => (row.attention > rows[top].attention ? i : top), 0);
    const asked = rows.findIndex((row) => row.position === key);
    if (asked >= 0) view.mark(asked, "key");
    view.look(asked >= 0 ? asked : best);
  };
})();
