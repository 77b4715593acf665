"use strict";
// A prompt as it reads. A token is its text, filled by the chosen part, over a strip with a bar for each part, drawn as
// backgrounds, so that thousands of tokens stay light. Negative is hatched: sign is not told by hue alone.
(() => {
  const { make, fixed, visible, tip, near } = qk;
  const TEXT = 28.5,
    STRIP = 40,
    BAR = 6,
    STEP = 7;
  const solid = (colour) => `linear-gradient(${colour},${colour})`;

  // shown: "attention", "logit" or a part; picked: token index -> mark; scale: what a full bar means (else the largest)
  qk.prompt = (
    element,
    { rows, parts = [], shown = "attention", onlook = null, onpick = null, label = "The prompt, token by token" },
  ) => {
    const colours = qk.partColours(["attention", "logit", ...parts]);
    let tokens = [],
      fills = [],
      at = -1;
    const data = rows,
      names = parts;
    const box = make("div", {
      class: "prompt",
      tabindex: 0,
      role: "application",
      "aria-label": `${label}. Arrow keys move${onpick ? ", Enter picks" : ""}.`,
      style: { "--strip": "0px" },
    });
    box.style.setProperty("--strip", parts.length ? `${STRIP}px` : "6px");
    const top = (name) => {
      const values = data.map((row) => Math.abs(row[name] ?? 0)),
        later = values.slice(1);
      return Math.max(1e-9, ...(later.length ? later : values));
    };
    const paint = () => {
      // one colour and one class for each token: nothing else changes
      const full = shown === "attention" ? 1 : top(shown),
        colour = colours[shown];
      fills.forEach((fill, i) => {
        const value = data[i][shown] ?? 0,
          share = Math.min(1, Math.abs(value) / full) ** (shown === "attention" ? 0.7 : 1);
        fill.style.backgroundColor = share > 0.02 ? `color-mix(in srgb, ${colour} ${(75 * share).toFixed(1)}%, transparent)` : "";
        const less = value < 0 && share > 0.02;
        if (fill.classList.contains("less") !== less) fill.classList.toggle("less", less);
      });
    };
    const bars = (row, largest) => {
      const middle = TEXT + 4 + STRIP / 2;
      return [
        ...names.map((name, j) => {
          const size = Math.min(1, Math.abs(row[name]) / largest) * (STRIP / 2 - 1);
          const [left, above] = [3 + j * STEP, row[name] > 0 ? middle - size : middle];
          return `${solid(colours[name])} ${left}px ${above}px / ${BAR}px ${Math.max(size, 0.5)}px no-repeat`;
        }),
        `${solid("var(--line)")} 0 ${middle - 0.5}px / 100% 1px no-repeat`,
      ].join(", ");
    };
    const build = () => {
      const pieces = [],
        largest = Math.max(1e-9, ...names.map(top));
      tokens = data.map((row, i) => {
        const white = row.token.trim() === "",
          fill = make("span", { class: "fill", "data-i": i }, visible(row.token));
        const token = make(
          "span",
          { class: `token${white ? " white" : ""}${i === data.length - 1 ? " asks" : ""}`, "data-i": i },
          fill,
        );
        if (names.length) {
          token.style.background = bars(row, largest);
          fill.style.minWidth = `${names.length * STEP + 6}px`;
        }
        fills.push(fill);
        pieces.push(token);
        if (row.token.includes("\n")) pieces.push(make("br"));
        return token;
      });
      box.replaceChildren(...pieces);
      paint();
    };
    const look = (i, x, y, quiet = false) => {
      if (at >= 0 && tokens[at]) tokens[at].classList.remove("on");
      at = i;
      tokens[i].classList.add("on");
      const row = data[i];
      if (!quiet)
        tip.show(
          [
            [`${visible(row.token)}  ·  token ${row.position ?? i}`],
            ["attention", fixed(row.attention, 3)],
            ...(row.logit === undefined || row.logit === null ? [] : [["logit", fixed(row.logit)]]),
            ...names.map((name) => [name, fixed(row[name]), colours[name]]),
          ],
          x,
          y,
        );
      if (onlook) onlook(i);
    };
    const indexOf = (event) =>
      event.target.dataset && event.target.dataset.i !== undefined ? Number(event.target.dataset.i) : -1;
    for (const kind of ["pointermove", "pointerdown"])
      box.addEventListener(kind, (event) => {
        const i = indexOf(event);
        i >= 0 ? look(i, event.clientX, event.clientY) : tip.hide();
      });
    box.addEventListener("pointerleave", tip.hide);
    box.addEventListener("blur", tip.hide);
    box.addEventListener("click", (event) => {
      const i = indexOf(event);
      if (i >= 0 && onpick) onpick(i);
    });
    box.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (event.key === "Enter" && at >= 0 && onpick) return onpick(at);
      if (step === undefined) return;
      event.preventDefault();
      const next = Math.max(
        0,
        Math.min(tokens.length - 1, (at < 0 ? -Math.sign(step) * (step > 0 ? 1 : 0) : at) + step),
      );
      tokens[next].scrollIntoView({ block: "nearest" });
      look(next, ...near(tokens[next]));
    });
    element.replaceChildren(box);
    build();
    return {
      show(name) {
        shown = name;
        paint();
      },
      mark(marks) {
        tokens.forEach((token, i) => {
          const mark = marks[i];
          token.classList.toggle("picked", mark !== undefined);
          if (mark !== undefined) token.dataset.mark = mark;
        });
      },
      look(i) {
        look(i, 0, 0, true);
      },
      colours,
    };
  };

  // the parts of one token's logit, and their sum
  qk.split = (element, row, parts, colours, largest) => {
    const bar = (value, colour) => {
      const share = Math.min(1, Math.abs(value) / largest) * 50;
      return make(
        "div",
        { class: "bar" },
        make("i", { style: { background: colour, width: `${share}%`, left: value >= 0 ? "50%" : `${50 - share}%` } }),
      );
    };
    element.replaceChildren(
      make(
        "div",
        { class: "of" },
        qk.piece(row.token),
        make("span", {}, `  gets ${fixed(row.attention, 3)} of the attention`),
      ),
      ...parts.flatMap((name) => [
        make("div", {}, make("span", { class: "swatch", style: { background: colours[name] } }), name),
        bar(row[name], colours[name]),
        make("div", { class: "value" }, fixed(row[name])),
      ]),
      ...(row.logit === undefined || row.logit === null
        ? []
        : [
            make("div", { class: "sum" }, "logit"),
            make("div", { class: "sum" }, ""),
            make("div", { class: "value sum" }, fixed(row.logit)),
          ]),
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
    const view = qk.prompt(place, {
      rows,
      parts,
      onlook: (i) => qk.split(below, rows[i], parts, view.colours, largest),
    });
    if (parts.length)
      bar.append(
        ...qk.choose(
          "coloured by",
          ["attention", ...parts],
          "attention",
          (name) => view.show(name),
          qk.pretty,
          view.colours,
        ),
      );
    const best = rows.reduce((found, row, i) => (row.attention > rows[found].attention ? i : found), 0);
    const asked = rows.findIndex((row) => row.position === key);
    if (asked >= 0) view.mark({ [asked]: "key" });
    view.look(asked >= 0 ? asked : best);
  };
})();
