"use strict";
// Type a prompt, pick a head, hover a token, swap two. The server answers in JSON; all text goes in as text.
(() => {
  const { make, map, choose, fixed, visible, piece, isDark } = qk;
  const $ = (id) => document.getElementById(id);
  let model = null,
    prompt = "",
    seen = null,
    grid = null,
    view = null,
    head = "",
    rows = [],
    parts = [],
    shown = "attention";
  let watched = -1,
    picked = [],
    chosen = null,
    there = {},
    swapped = null,
    drawn = null,
    asked = 0,
    turn = 0; // answers to an older question, or to an older swap, are not shown

  async function ask(what, question) {
    document.body.classList.add("busy");
    try {
      const answer = await fetch(
        `api/${what}`,
        question
          ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question) }
          : {},
      );
      const value = await answer.json();
      if (!answer.ok) throw new Error(value.error);
      $("error").hidden = true;
      return value;
    } catch (error) {
      const gone = error instanceof TypeError ? "qkscope does not answer any more: start it again." : error.message;
      $("error").textContent = gone;
      $("error").hidden = false;
      throw error;
    } finally {
      document.body.classList.remove("busy");
    }
  }
  const quietly = (promise) => promise.catch(() => {});
  const busy = (text) => {
    $("state").textContent = text;
  };

  async function look() {
    const now = performance.now(),
      mine = ++asked;
    busy("looking");
    $("look").disabled = true;
    try {
      const text = $("prompt").value,
        found = await ask("look", { prompt: text });
      if (mine !== asked) return;
      prompt = text;
      const raw = atob(found.attention),
        bytes = new Uint8Array(raw.length);
      for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
      seen = { ...found, bytes };
      picked = [];
      swapped = null;
      watched = -1;
      $("seen").hidden = false;
      await take(head || model.head);
      busy(`${seen.tokens.length} tokens, ${((performance.now() - now) / 1000).toFixed(2)} s`);
    } finally {
      $("look").disabled = false;
      if ($("state").textContent === "looking") busy("");
    }
  }

  // one head: its split, its features
  async function take(next, features = null) {
    const mine = ++asked,
      question = { prompt, head: next };
    turn += 1;
    if (features) question.features = features;
    const found = await ask("split", question);
    if (mine !== asked) return;
    if (next !== head) {
      swapped = null;
      picked = [];
    }
    head = found.head;
    drawn = seen;
    rows = found.rows;
    parts = found.parts;
    there = found.features;
    chosen = found.chosen;
    if (!["attention", ...parts].includes(shown)) shown = "attention";
    $("head").textContent = head;
    if (watched < 0 || watched >= rows.length)
      watched = rows.reduce((best, row, i) => (row.attention > rows[best].attention ? i : best), 0);
    drawFeatures();
    drawTokens();
    drawMap();
    drawSwap();
    drawNext();
    if (Object.keys(there).length) fitted(head);
  }
  // a dot on the map, whoever had it fitted
  function fitted(name) {
    if (model.fitted.includes(name)) return;
    model.fitted.push(name);
    grid.mark(model.fitted);
  }

  function drawMap() {
    if (drawn !== seen) return; // the tokens on the page are still the last prompt's
    const size = seen.tokens.length,
      at = new Map(model.heads.map((name, i) => [name, i]));
    const value = (row) => Math.sqrt(seen.bytes[at.get(row.head) * size + watched] / 255);
    const lines = (row) => [
      [row.head],
      ["attention on it", (seen.bytes[at.get(row.head) * size + watched] / 255).toFixed(2)],
    ];
    $("watched").textContent = piece(seen.tokens[watched]);
    if (grid && grid.of === seen) return grid.repaint(value);
    grid = map($("map"), {
      rows: model.heads.map((name) => ({ head: name })),
      value,
      lines,
      marked: model.fitted,
      picked: head,
      title: "attention (√)",
      onpick: (next) => quietly(take(next)),
    });
    grid.of = seen;
  }

  function drawFeatures() {
    const names = Object.keys(there),
      place = $("features"),
      focused = [...place.children].indexOf(document.activeElement);
    $("split").classList.toggle("attention-only", !names.length);
    if (!names.length) {
      const button = make(
        "button",
        { type: "button", id: "fit", onclick: () => quietly(fit()) },
        `Fit ${model.task} features at ${head}`,
      );
      return place.replaceChildren(
        make("span", { class: "of" }, "No features were fitted at this head: its whole keys are swapped."),
        button,
      );
    }
    const colours = qk.partColours(parts.length ? parts : names);
    place.replaceChildren(
      make("span", { class: "of" }, "features"),
      ...names.map((name) =>
        make(
          "button",
          {
            type: "button",
            "aria-pressed": String(chosen.includes(name)),
            onclick() {
              const next = chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name];
              swapped = null;
              picked = [];
              quietly(take(head, next));
            },
          },
          make("span", { class: "swatch", style: { background: colours[name] || "var(--line)" } }),
          `${name} · ${there[name]} dimensions`,
        ),
      ),
    );
    if (focused >= 0) place.children[focused].focus({ preventScroll: true });
  }
  async function fit() {
    const button = $("fit"),
      at = head,
      mine = asked;
    button.disabled = true;
    button.textContent = `Fitting on ${model.fitted_on} prompts …`;
    try {
      await ask("fit", { head: at });
      fitted(at);
      if (mine === asked) await take(at); // else the reader went on to something else
    } finally {
      button.disabled = false;
    }
  }

  function drawTokens() {
    const largest = Math.max(1e-9, ...parts.flatMap((name) => rows.map((row) => Math.abs(row[name]))));
    const current = swapped ? swapped.rows : rows,
      focused = $("tokens").contains(document.activeElement);
    view = qk.prompt($("tokens"), {
      rows: current,
      parts,
      shown,
      onlook(i) {
        watched = i;
        qk.split($("split"), current[i], parts, view ? view.colours : qk.partColours(parts), largest);
        requestAnimationFrame(drawMap);
      },
      onpick: (i) => quietly(pick(i)),
    });
    $("colour").replaceChildren(
      ...(parts.length
        ? choose(
            swapped ? "coloured by (after the swap)" : "coloured by",
            ["attention", ...parts],
            shown,
            (name) => {
              shown = name;
              view.show(name);
            },
            qk.pretty,
            view.colours,
          )
        : []),
    );
    view.look(watched);
    if (focused) $("tokens").firstChild.focus({ preventScroll: true });
    marks();
  }
  const marks = () => view.mark(Object.fromEntries(picked.map((i, j) => [i, "AB"[j]])));

  async function pick(i) {
    if (drawn !== seen) return;
    const mine = ++turn;
    if (swapped || picked.length === 2) {
      picked = [];
      swapped = null;
      drawTokens();
    }
    picked = picked.includes(i) ? picked.filter((each) => each !== i) : [...picked, i];
    marks();
    drawSwap();
    if (picked.length < 2) return drawNext();
    const now = performance.now(),
      question = { prompt, head, a: picked[0], b: picked[1] };
    if (chosen.length || Object.keys(there).length) question.features = chosen;
    busy("swapping");
    try {
      const found = await ask("swap", question);
      if (mine !== turn) return $("state").textContent === "swapping" ? busy("") : undefined;
      swapped = found;
    } catch (error) {
      if (mine !== turn) throw error;
      picked = [];
      marks();
      busy("");
      throw error;
    }
    busy(`swapped in ${((performance.now() - now) / 1000).toFixed(2)} s`);
    drawTokens();
    drawSwap();
    drawNext();
  }

  const pair = (label, values, words, largest = 1) => [
    make("div", { class: "label" }, label),
    make(
      "div",
      { class: "two" },
      ...values.map(([kind, value]) => make("i", { class: kind, style: { width: `${(100 * value) / largest}%` } })),
    ),
    make("div", { class: "value" }, words),
  ];
  function drawSwap() {
    $("undo").hidden = !picked.length;
    const what =
      chosen && chosen.length
        ? `their ${chosen.join(" and ")} coordinates`
        : Object.keys(there).length
          ? "no feature is chosen: their whole keys"
          : "their whole keys";
    if (!swapped) {
      $("how").textContent = picked.length
        ? `${piece(seen.tokens[picked[0]])} is chosen. Click the token to exchange with it (${what}).`
        : `Click two tokens above to exchange ${what} at ${head}, and see where its attention goes.`;
      return $("moved").replaceChildren();
    }
    const { a, b, random, rank, features } = swapped;
    $("how").textContent =
      `${features.length ? features.join(" and ") : "The whole key"} (${rank} dimensions) exchanged between ` +
      `${piece(seen.tokens[a])} and ${piece(seen.tokens[b])} at ${head}. Attention before, after, and after the same ` +
      `with ${random.draws} random subspaces of that size.`;
    const legend = make(
      "div",
      { class: "legend" },
      ...["before", "after", "random"].map((name) => make("span", {}, make("span", { class: `swatch ${name}` }), name)),
    );
    $("moved").replaceChildren(
      legend,
      make(
        "div",
        { class: "pairs" },
        ...[
          ["A", a, random.a],
          ["B", b, random.b],
        ].flatMap(([mark, i, control]) =>
          pair(
            `${mark}  ${visible(seen.tokens[i])}`,
            [
              ["before", rows[i].attention],
              ["after", swapped.rows[i].attention],
              ["random", control],
            ],
            `${fixed(rows[i].attention)} → ${fixed(swapped.rows[i].attention)}, random ${fixed(control)}`,
          ),
        ),
      ),
    );
  }
  function drawNext() {
    const next = swapped ? swapped.next : seen.next,
      largest = Math.max(...next.flatMap((row) => [row.before, row.after ?? 0]));
    $("answers").replaceChildren(
      make(
        "div",
        { class: "pairs" },
        ...next.flatMap((row) =>
          pair(
            visible(row.token),
            [["before", row.before], ...(row.after === null ? [] : [["after", row.after]])],
            row.after === null ? fixed(row.before, 3) : `${fixed(row.before, 3)} → ${fixed(row.after, 3)}`,
            largest,
          ),
        ),
      ),
    );
    $("likely").textContent = swapped
      ? "Probability of the next token, before and after the swap at this one head."
      : "Probability of the next token.";
  }

  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    quietly(look());
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      quietly(look());
    }
  });
  $("undo").addEventListener("click", () => {
    turn += 1;
    picked = [];
    swapped = null;
    drawTokens();
    drawSwap();
    drawNext();
  });
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    document.dispatchEvent(new Event("qk-theme"));
  });
  quietly(
    (async () => {
      model = await ask("model");
      $("model").textContent =
        `${model.model} · ${model.heads.length} heads${model.folder ? ` · ${model.folder}` : ""}`;
      $("prompt").value = model.prompt;
      await look();
      if (model.quick && $("fit")) await fit();
    })(),
  );
})();
