"use strict";
// A prompt as it reads. Each token is one element: its text, filled by the chosen part, over a strip with a bar for each
// part (all of it backgrounds), so that thousands of tokens stay light. Negative is hatched: sign is not told by hue alone.
(() => {
  const { make, fixed, number, partColours, tip, near } = qk;
  const TEXT = 28.5, STRIP = 40, BAR = 6, STEP = 7;
  const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥"));
  const solid = (colour) => `linear-gradient(${colour},${colour})`;
  const faint = (colour, share) => `color-mix(in srgb, ${colour} ${Math.round(100 * share)}%, transparent)`;

  // shown: "attention", "logit" or a part; picked: token index -> mark; scale: what a full bar means (else the largest)
  qk.prompt = (element, { rows, parts = [], shown = "attention", onlook = null, onpick = null, label = "The prompt, token by token" }) => {
    const colours = { attention: "var(--original)", logit: "var(--ink)", ...partColours(parts) };
    let tokens = [], at = -1, data = rows, names = parts;
    const box = make("div", { class: "prompt", tabindex: 0, role: "application", "aria-label": `${label}. Arrow keys move${onpick ? ", Enter picks" : ""}.`, style: { "--strip": "0px" } });
    box.style.setProperty("--strip", parts.length ? `${STRIP}px` : "6px");
    const top = (name) => {
      const values = data.map((row) => Math.abs(row[name] ?? 0)), later = values.slice(1);
      return Math.max(1e-9, ...(later.length ? later : values));
    };
    const paint = () => {
      const full = shown === "attention" ? 1 : top(shown), bars = Math.max(1e-9, ...names.map(top)), middle = TEXT + 4 + STRIP / 2;
      tokens.forEach((token, i) => {
        const row = data[i], layers = [], value = row[shown] ?? 0;
        names.forEach((name, j) => {
          const size = Math.min(1, Math.abs(row[name]) / bars) * (STRIP / 2 - 1), up = row[name] > 0;
          layers.push(`${solid(colours[name])} ${3 + j * STEP}px ${up ? middle - size : middle}px / ${BAR}px ${Math.max(size, 0.5)}px no-repeat`);
        });
        if (names.length) layers.push(`${solid("var(--line)")} 0 ${middle - 0.5}px / 100% 1px no-repeat`);
        const share = Math.min(1, Math.abs(value) / full) ** (shown === "attention" ? 0.7 : 1);
        if (share > 0.02) {
          const colour = colours[shown];
          layers.push(value >= 0 ? `${solid(faint(colour, 0.75 * share))} 0 0 / 100% ${TEXT}px no-repeat`
            : `repeating-linear-gradient(135deg, ${faint(colour, share)} 0 1.5px, transparent 1.5px 6px) 0 0 / 100% ${TEXT}px no-repeat`);
        }
        token.style.background = layers.join(", ");
      });
    };
    const build = () => {
      const pieces = [];
      tokens = data.map((row, i) => {
        const white = row.token.trim() === "";
        const token = make("span", { class: `token${white ? " white" : ""}${i === data.length - 1 ? " asks" : ""}`, "data-i": i }, visible(row.token));
        token.style.minWidth = `${names.length * STEP + 6}px`;
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
      if (!quiet) tip.show([[`${visible(row.token)}  ·  token ${row.position ?? i}`], ["attention", fixed(row.attention, 3)], ...(row.logit === undefined || row.logit === null ? [] : [["logit", fixed(row.logit)]]), ...names.map((name) => [name, fixed(row[name]), colours[name]])], x, y);
      if (onlook) onlook(i);
    };
    const indexOf = (event) => (event.target.dataset && event.target.dataset.i !== undefined ? Number(event.target.dataset.i) : -1);
    box.addEventListener("pointermove", (event) => { const i = indexOf(event); i >= 0 ? look(i, event.clientX, event.clientY) : tip.hide(); });
    box.addEventListener("pointerleave", tip.hide);
    box.addEventListener("blur", tip.hide);
    box.addEventListener("click", (event) => { const i = indexOf(event); if (i >= 0 && onpick) onpick(i); });
    box.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (event.key === "Enter" && at >= 0 && onpick) return onpick(at);
      if (step === undefined) return;
      event.preventDefault();
      const next = Math.max(0, Math.min(tokens.length - 1, (at < 0 ? -Math.sign(step) * (step > 0 ? 1 : 0) : at) + step));
      tokens[next].scrollIntoView({ block: "nearest" });
      look(next, ...near(tokens[next]));
    });
    element.replaceChildren(box);
    build();
    return {
      show(name) { shown = name; paint(); },
      mark(marks) { tokens.forEach((token, i) => { const mark = marks[i]; token.classList.toggle("picked", mark !== undefined); if (mark !== undefined) token.dataset.mark = mark; }); },
      look(i) { look(i, 0, 0, true); },
      colours,
    };
  };

  // the parts of one token's logit, and their sum
  qk.split = (element, row, parts, colours, largest) => {
    const bar = (value, colour) => {
      const share = Math.min(1, Math.abs(value) / largest) * 50;
      return make("div", { class: "bar" }, make("i", { style: { background: colour, width: `${share}%`, left: value >= 0 ? "50%" : `${50 - share}%` } }));
    };
    element.replaceChildren(make("div", { class: "of" }, visible(row.token), make("span", {}, `  gets ${fixed(row.attention, 3)} of the attention`)),
      ...parts.flatMap((name) => [make("div", {}, make("span", { class: "swatch", style: { background: colours[name] } }), name), bar(row[name], colours[name]), make("div", { class: "value" }, fixed(row[name]))]),
      ...(row.logit === undefined || row.logit === null ? [] : [make("div", { class: "sum" }, "logit"), make("div", { class: "sum" }, ""), make("div", { class: "value sum" }, fixed(row.logit))]));
    element.classList.add("split");
  };

  qk.tokens = (element, rows, parts) => {
    const bar = make("div", { class: "choices" }), place = make("div", {}), below = make("div", { "aria-live": "polite" });
    const largest = Math.max(1e-9, ...parts.flatMap((name) => rows.map((row) => Math.abs(row[name]))));
    element.replaceChildren(bar, place, below);
    const view = qk.prompt(place, { rows, parts, onlook: (i) => qk.split(below, rows[i], parts, view.colours, largest) });
    bar.append(...qk.choose("coloured by", ["attention", ...parts], "attention", (name) => view.show(name), qk.pretty, view.colours));
    const best = rows.reduce((found, row, i) => (row.attention > rows[found].attention ? i : found), 0);
    view.look(best);
  };
})();
