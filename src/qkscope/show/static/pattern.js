"use strict";
// A head's whole pattern: a row for each query token, a column for each that is looked at; darker is more.
(() => {
  const { make, percent, piece, tip, redraw } = qk;
  const LABELLED = 11, // pixels of a cell from which on tokens are written beside it
    LARGEST = 24;
  const short = (text) => (text.length > 10 ? `${text.slice(0, 9)}…` : text);

  // bytes: row after row; onlook(query, key) or onlook(null); onpick(query, key); small: no words
  qk.pattern = (element, { bytes, tokens, small = false, asks = null, onlook = () => {}, onpick = () => {} }) => {
    const size = tokens.length,
      canvas = make("canvas", { tabindex: small ? null : 0, role: "img" }),
      value = (i, j) => bytes[i * size + j] / 255;
    const keys = small ? "" : " Arrow keys move, Enter picks.";
    canvas.setAttribute("aria-label", `Attention of ${size} tokens to each other.${keys}`);
    let cell = 1,
      left = 0,
      at = null;
    const paint = (width) => {
      const names = tokens.map((text) => short(piece(text)));
      const room = Math.max(...names.map((text) => text.length)) * 7 + 10,
        written = !small && (width - room) / size >= LABELLED;
      left = written ? room : 0;
      cell = Math.max(small ? 0.1 : 1, Math.min(LARGEST, (width - left) / size));
      if (cell > 3) cell = Math.floor(cell);
      const [wide, high] = [Math.ceil(left + size * cell), Math.ceil(size * cell + (written ? room : 0))],
        sharp = devicePixelRatio || 1;
      Object.assign(canvas, { width: wide * sharp, height: high * sharp });
      Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px` });
      const on = canvas.getContext("2d"),
        style = getComputedStyle(canvas);
      on.scale(sharp, sharp);
      const probe = make("i", { style: { color: "var(--original)" } });
      element.append(probe);
      const hue = getComputedStyle(probe).color;
      probe.style.color = "var(--wash)";
      const wash = getComputedStyle(probe).color;
      probe.remove();
      on.fillStyle = wash;
      for (let i = 0; i < size; i++) on.fillRect(left, i * cell, (i + 1) * cell, cell);
      on.fillStyle = hue;
      for (let i = 0; i < size; i++)
        for (let j = 0; j <= i; j++) {
          const share = value(i, j);
          if (share < 0.004) continue;
          on.globalAlpha = Math.sqrt(share);
          on.fillRect(left + j * cell, i * cell, cell, cell);
        }
      on.globalAlpha = 1;
      if (!written) return;
      on.font = "11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
      on.fillStyle = style.color;
      on.textBaseline = "middle";
      names.forEach((text, i) => {
        on.textAlign = "right";
        on.font = on.font.replace(/^(bold )?/, i === asks ? "bold " : "");
        on.fillText(text, left - 5, (i + 0.5) * cell);
        on.save();
        on.translate(left + (i + 0.5) * cell, size * cell + 5);
        on.rotate(-Math.PI / 2);
        on.fillText(text, 0, 0);
        on.restore();
      });
    };
    const show = (i, j, x, y) => {
      at = [i, j];
      const both = `${piece(tokens[i])} → ${piece(tokens[j])}`;
      tip.show([[both], ["attention", percent(value(i, j))], ["tokens", `${i} → ${j}`]], x, y);
      onlook(i, j);
    };
    const place = ({ offsetX, offsetY }) => {
      const [i, j] = [Math.floor(offsetY / cell), Math.floor((offsetX - left) / cell)];
      return i < 0 || j < 0 || i >= size || j > i ? null : [i, j];
    };
    const leave = () => {
      tip.hide();
      onlook(null);
    };
    if (!small) {
      qk.follow(canvas, place, ([i, j], x, y) => show(i, j, x, y), leave);
      canvas.addEventListener("click", (event) => place(event) && onpick(...place(event)));
      canvas.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
        if (event.key === "Enter" && at) return onpick(...at);
        if (!step) return undefined;
        event.preventDefault();
        const [i, j] = at ? [at[0] + step[0], at[1] + step[1]] : [asks ?? size - 1, 0],
          box = canvas.getBoundingClientRect();
        if (i < 0 || j < 0 || i >= size || j > i) return undefined;
        return show(i, j, box.left + left + j * cell, box.top + i * cell);
      });
    }
    element.replaceChildren(small ? canvas : make("div", { class: "scroll" }, canvas)); // of a long prompt
    const again = redraw(element, paint);
    document.addEventListener("qk-theme", () => canvas.isConnected && again());
  };

  // a saved page and a notebook: the rows of a table
  qk.charts ??= {};
  qk.charts.pattern = (element, rows) => {
    const size = Math.max(...rows.map(({ key }) => key)) + 1,
      bytes = new Uint8Array(size * size),
      tokens = Array(size).fill("");
    for (const { query, key, token, attention } of rows) {
      bytes[query * size + key] = Math.round(255 * attention);
      tokens[key] = token;
    }
    const place = make("div", {}),
      said = make("p", { class: "soft", "aria-live": "polite" }, "\u00a0");
    const onlook = (i, j) => {
      const words = `${piece(tokens[i] ?? "")} → ${piece(tokens[j] ?? "")} ${percent(bytes[i * size + j] / 255)}`;
      said.textContent = i === null || i === undefined ? "\u00a0" : words;
    };
    element.replaceChildren(place, said);
    qk.pattern(place, { bytes, tokens, onlook });
  };
})();
