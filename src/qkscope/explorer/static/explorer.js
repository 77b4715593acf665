"use strict";
// Type a prompt; any token asks, any head answers, a click on a token says why, and what if not. The address is the
// whole state. The server answers in JSON; all text goes in as text.
(() => {
  const { make, map, choose, fixed, visible, percent, isDark } = qk;
  const $ = (id) => document.getElementById(id);
  const WAYS = { "writers key": "writers of the key", "writers query": "writers of the query", singular: "singular vectors", features: "features" },
    ORDER = Object.keys(WAYS);
  const MODES = { key: "looked at", query: "asks", swap: "swapped with it" };
  const state = { prompt: "", query: null, head: null, key: null, changes: [], features: "" };
  let model = null,
    seen = null, // what look found
    found = null, // the answer
    changed = null, // what the changes do
    view = null,
    grid = null,
    mode = "key",
    by = "writers key",
    painted = "attention",
    watched = -1,
    turn = 0; // answers to an older question are not shown

  async function ask(what, question) {
    document.body.classList.add("busy");
    try {
      const answer = await fetch(
        `api/${what}`,
        question ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question) } : {},
      );
      const value = await answer.json();
      if (!answer.ok) throw new Error(value.error);
      $("error").hidden = true;
      return value;
    } catch (error) {
      $("error").textContent = error instanceof TypeError ? "qkscope does not answer any more: start it again." : error.message;
      $("error").hidden = false;
      throw error;
    } finally {
      document.body.classList.remove("busy");
    }
  }
  const quietly = (promise) => promise.catch(() => {});
  const busy = (text) => ($("state").textContent = text);
  const about = () => ({ prompt: state.prompt, query: state.query, head: state.head, key: state.key });

  // ------------------------------------------------------------------ the address
  function write() {
    const given = { p: state.prompt, q: state.query, h: state.head, k: state.key };
    if (state.changes.length) given.c = state.changes.join(";");
    history.replaceState(null, "", `#${new URLSearchParams(given)}`);
  }
  function read() {
    const given = new URLSearchParams(location.hash.slice(1)),
      place = (name) => (/^\d+$/.test(given.get(name) || "") ? Number(given.get(name)) : null);
    if (!given.get("p")) return null;
    return { prompt: given.get("p"), query: place("q"), head: given.get("h"), key: place("k"), changes: (given.get("c") || "").split(";").filter(Boolean) };
  }

  // ------------------------------------------------------------------ questions
  // one after the other: where heads look, why this one looks there, what the changes do
  async function look(prompt, { query = null, head = null, key = null, changes = [] } = {}) {
    const mine = ++turn,
      start = performance.now();
    busy("looking");
    $("look").disabled = true;
    try {
      const asked = query === null ? { prompt } : { prompt, query };
      const next = await ask("look", asked);
      if (mine !== turn) return;
      const fresh = !seen || prompt !== state.prompt;
      seen = { ...next, bytes: bytes(next.attention) };
      Object.assign(state, { prompt, query: next.query });
      if ($("prompt").value !== prompt && fresh) $("prompt").value = prompt;
      edited();
      $("seen").hidden = false;
      if (fresh) drawTokens();
      const first = next.matter[0];
      await why(head || first.head, head ? key : first.key, changes);
      busy(`${seen.tokens.length} tokens, ${((performance.now() - start) / 1000).toFixed(2)} s`);
    } finally {
      $("look").disabled = false;
      if ($("state").textContent === "looking") busy("");
    }
  }
  async function why(head, key, changes = []) {
    const mine = ++turn,
      question = { prompt: state.prompt, query: state.query, head };
    if (key !== null) question.key = key;
    const next = await ask("why", question);
    if (mine !== turn) return;
    found = next;
    changed = null;
    watched = -1;
    Object.assign(state, { head: next.head, key: next.key, changes: [] });
    if (!ways().includes(by)) by = ways()[0] || "";
    if (changes.length) return change(changes);
    draw();
  }
  async function change(changes) {
    const mine = ++turn;
    if (!changes.length) {
      changed = null;
      state.changes = [];
      return draw();
    }
    busy("changing");
    try {
      const next = await ask("change", { ...about(), changes });
      if (mine !== turn) return;
      changed = { ...next, bytes: bytes(next.all) };
      state.changes = changes;
    } finally {
      if (mine === turn) busy("");
      if (found) draw();
    }
    busy(`changed in ${changed.seconds.toFixed(2)} s`);
  }
  const toggle = (text) => quietly(change(state.changes.includes(text) ? state.changes.filter((each) => each !== text) : [...state.changes, text]));
  const ways = () => [...new Set(found.parts.map(way))].sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
  const way = (row) => (row.by === "writers" ? `writers ${row.side}` : row.by);
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

  // ------------------------------------------------------------------ drawing
  function draw() {
    write();
    const row = changed ? changed.row : found.row;
    $("asker").textContent = view.text(state.query);
    $("asks-from").textContent = `token ${state.query}`;
    $("head").textContent = state.head;
    $("key").textContent = view.text(state.key);
    view.paint(row, state.query, state.key);
    view.show(state.key);
    drawSink();
    drawKeys();
    drawMap();
    drawMatter();
    drawWhy();
    drawChanges();
    drawNext();
  }
  function drawTokens() {
    const focused = view && view.focused();
    view = qk.tokens($("tokens"), {
      texts: seen.tokens,
      strip: $("strip"),
      onlook(i) {
        watched = i;
        requestAnimationFrame(drawMap);
      },
      onpick: (i, shift) => quietly(pick(i, shift ? "query" : mode)),
    });
    if (focused) view.focus();
    grid = null;
  }
  async function pick(i, how) {
    if (how === "query") {
      setMode("key");
      return look(state.prompt, { query: i, head: state.head });
    }
    if (i > state.query) {
      $("error").textContent = `${view.text(i)} stands after the token that asks, which sees only what is before it. Shift-click makes it the one that asks.`;
      $("error").hidden = false;
      return undefined;
    }
    $("error").hidden = true;
    if (how === "swap") {
      setMode("key");
      return change([...state.changes, `swap ${i}${state.features ? ` ${state.features}` : ""}`]);
    }
    return why(state.head, i);
  }
  function setMode(next) {
    mode = next;
    $("mode").replaceChildren(
      ...choose("a click picks the token that is", ["key", "query", "swap"], mode, (name) => (mode = name), (name) => MODES[name]),
      make("span", { class: "hint" }, "shift-click: asks"),
    );
  }
  function drawSink() {
    const first = found.row[0],
      now = changed ? ` → ${percent(changed.row[0])}` : "";
    $("sink").textContent = state.key === 0 ? "" : `On the first token, where heads rest: ${percent(first)}${now}.`;
  }
  // the keys that get most, the first token aside
  function drawKeys() {
    const count = view.long ? 10 : 4,
      worth = found.row.map((value, i) => Math.max(value, changed ? changed.row[i] : 0));
    const best = [...worth.keys()].filter((i) => i > 0).sort((a, b) => worth[b] - worth[a]).slice(0, count);
    $("keys").replaceChildren(
      qk.pairs(
        best.map((i) => ({
          label: `${view.text(i)}${view.long ? `  ${i}` : ""}`,
          values: [[changed ? "before" : "after", found.row[i]], ...(changed ? [["after", changed.row[i]]] : [])],
          words: changed ? `${percent(found.row[i])} → ${percent(changed.row[i])}` : percent(found.row[i]),
          onclick: () => quietly(pick(i, "key")),
        })),
      ),
    );
  }
  const pale = (share) => `color-mix(in srgb, var(--original) ${(100 * Math.min(1, share)).toFixed(1)}%, var(--wash))`;
  const apart = (share) =>
    `color-mix(in srgb, ${share < 0.5 ? "var(--target)" : "var(--original)"} ${Math.min(100, 200 * Math.abs(share - 0.5)).toFixed(1)}%, var(--wash))`;
  function drawMap() {
    if (!found) return;
    const size = state.query + 1,
      at = new Map(model.heads.map((name, i) => [name, i])),
      key = watched >= 0 ? watched : state.key;
    const was = (row) => seen.bytes[at.get(row.head) * size + key] / 255,
      now = (row) => changed.bytes[at.get(row.head) * size + key] / 255,
      difference = painted === "difference" && changed;
    const gained = (row) => now(row) - was(row);
    const value = difference ? (row) => Math.sign(gained(row)) * Math.sqrt(Math.abs(gained(row))) : (row) => Math.sqrt(was(row));
    $("watched").textContent = view.text(key);
    $("painted").hidden = !changed;
    const look = [value, difference ? "√ change" : "√ attention", difference ? [-1, 1] : [0, 1], difference ? apart : pale];
    if (!grid) {
      grid = map($("map"), {
        rows: model.heads.map((name) => ({ head: name })),
        value,
        title: look[1],
        range: look[2],
        paint: look[3],
        lines: (row) => [
          [row.head],
          [`attention on ${$("watched").textContent}`, fixed(seen.bytes[at.get(row.head) * (state.query + 1) + (watched >= 0 ? watched : state.key)] / 255)],
          ...(model.said[row.head] ? [["name", model.said[row.head]]] : []),
        ],
        marked: model.fitted,
        picked: state.head,
        onpick: (next) => quietly(why(next, null)),
      });
    } else {
      grid.repaint(...look);
      grid.pick(state.head);
    }
    const order = [...at.keys()].sort((a, b) => Math.abs(value({ head: b })) - Math.abs(value({ head: a }))).slice(0, 5);
    const said = (name) => (difference ? fixed(gained({ head: name })) : fixed(was({ head: name })));
    $("best").replaceChildren(
      make("span", { class: "of" }, difference ? "most changed" : "most"),
      ...order.map((name) =>
        make("button", { type: "button", "aria-pressed": String(name === state.head), onclick: () => quietly(why(name, key)) }, `${called(name)} ${said(name)}`),
      ),
    );
  }
  const called = (head) => (model.said[head] ? `${head} (${model.said[head]})` : head);
  function drawMatter() {
    $("matter").replaceChildren(
      make("span", { class: "of", title: "probability of the next token that moves when the head may not look there" }, "matter most for the next token"),
      ...seen.matter.map((row) =>
        make(
          "button",
          { type: "button", "aria-pressed": String(row.head === state.head && row.key === state.key), onclick: () => quietly(why(row.head, row.key)) },
          `${called(row.head)} → ${view.text(row.key)} ${percent(row.moved)}`,
        ),
      ),
    );
  }
  function drawPainted() {
    $("painted").replaceChildren(
      ...choose("coloured by", ["attention", "difference"], painted, (name) => {
        painted = name;
        drawMap();
      }, (name) => (name === "difference" ? "what the changes do" : "attention before")),
    );
  }

  function drawWhy() {
    $("said").replaceChildren(...found.said.map((line) => make("p", {}, line)));
    $("verdict").replaceChildren(qk.badge(found.verdict));
    const known = found.about ? `${model.folder}: ${found.about}` : model.no_writers;
    $("known").textContent = known;
    $("known").hidden = !known;
    $("texts").replaceChildren(
      ...found.texts.map((row) => {
        const own = qk.passage(row);
        own.append(make("button", { type: "button", onclick: () => quietly(look(row.text, { head: state.head, query: row.query_at, key: row.key_at })) }, "look at it"));
        return own;
      }),
    );
    $("by").replaceChildren(
      ...choose(`its logit over the other keys, ${fixed(found.logit)}, by`, ways(), by, (name) => {
        by = name;
        drawParts();
      }, (name) => WAYS[name]),
    );
    drawParts();
    const fitted = Object.keys(found.fitted).filter((name) => name !== "discovered").length;
    $("fit").hidden = fitted > 0;
    $("fit").textContent = `Fit ${model.task} features at ${state.head}`;
  }
  function drawParts() {
    const place = $("parts"),
      side = by.split(" ")[1],
      bars = make("div", { class: "bars" }),
      focused = place.contains(document.activeElement) ? document.activeElement.dataset.cut : null;
    const rows = found.parts.filter((row) => way(row) === by).map((row) => {
      const text = `cut ${side} ${row.part}`,
        cut = state.changes.includes(text),
        cuttable = side && row.part !== "rest" && row.part !== "bias";
      return {
        name: side ? writer(row.part) : row.part,
        value: row.value,
        share: row.share,
        button: cuttable
          ? make("button", { type: "button", "aria-pressed": String(cut), "data-cut": text, onclick: () => toggle(text) }, cut ? "restore" : "cut")
          : null,
      };
    });
    place.replaceChildren(bars);
    if (rows.length) qk.waterfall(bars, rows, found.logit, by === "features" ? qk.partColours(rows.map((row) => row.name)) : {});
    if (focused) [...place.querySelectorAll("button")].find((each) => each.dataset.cut === focused)?.focus({ preventScroll: true });
  }
  const writer = (name) => (/^M\d/.test(name) ? `${name} (MLP)` : name);

  function drawChanges() {
    const key = view.text(state.key),
      names = Object.keys(found.fitted),
      hidden = state.changes.includes("remove");
    $("offers").replaceChildren(
      make("button", { type: "button", id: "remove", "aria-pressed": String(hidden), onclick: () => toggle("remove") }, `hide ${key} from ${state.head}`),
      make("button", { type: "button", id: "swap", onclick: () => setMode("swap") }, `swap ${key} with …`),
      ...(names.length
        ? choose("in", ["", ...names], state.features, (name) => (state.features = name), (name) => name || "its whole key")
        : []),
      make("span", { class: "hint" }, "or cut a writer"),
    );
    const words = (text) => {
      const swap = /^swap (\d+)(?: (.*))?$/.exec(text);
      if (swap) return `${key} ⇄ ${view.text(Number(swap[1]))} (${swap[2] || "whole key"})`;
      return text === "remove" ? `${key} hidden from ${state.head}` : text.replace(/^cut (\w+) /, "cut from the $1: ");
    };
    $("changes").replaceChildren(
      ...state.changes.map((text) =>
        make("span", { class: "made-change" }, words(text), make("button", { type: "button", "aria-label": `undo ${words(text)}`, onclick: () => toggle(text) }, "×")),
      ),
    );
    for (const name of ["undo", "clear"]) $(name).disabled = !state.changes.length;
    if (!changed) return $("moved").replaceChildren(make("p", { class: "words" }, "Nothing is changed. Every change acts on this head's attention at this token alone; the model then runs on."));
    const bars = [["before", changed.before], ["after", changed.after], ...(changed.random === null ? [] : [["random", changed.random]])];
    return $("moved").replaceChildren(
      make("p", {}, qk.badge(changed.verdict), ` ${changed.said}`),
      qk.legend(["before", "before"], ["after", "after"], ...(changed.random === null ? [] : [["random", "random ones of the same size"]])),
      qk.pairs([{ label: key, values: bars, words: `${percent(changed.before)} → ${percent(changed.after)}${changed.random === null ? "" : `, random ${percent(changed.random)}`}` }]),
    );
  }
  function drawNext() {
    const shown = changed || found.removed,
      largest = Math.max(...shown.next.flatMap((row) => [row.before, row.after]));
    $("likely").textContent = `Probability of what comes after “${view.text(state.query)}”: as it is, and ${changed ? "with the changes" : `without ${state.head}'s attention to ${view.text(state.key)}`}.`;
    $("answers").replaceChildren(
      qk.pairs(
        shown.next.map((row) => ({
          label: visible(row.token),
          values: [["before", row.before], ["after", row.after]],
          words: `${percent(row.before)} → ${percent(row.after)}`,
        })),
        largest,
      ),
    );
  }

  // ------------------------------------------------------------------ what can be pressed
  function edited() {
    const stale = Boolean(seen) && $("prompt").value !== state.prompt;
    document.body.classList.toggle("stale", stale);
    $("stale").hidden = !stale;
    const wide = Math.max(20, $("prompt").clientWidth / 9.5),
      lines = $("prompt").value.split("\n").reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / wide)), 0);
    $("prompt").rows = lines > 12 ? 3 : Math.min(6, lines);
  }
  async function save() {
    const page = await ask("save", { ...about(), changes: state.changes }),
      address = URL.createObjectURL(new Blob([page.html], { type: "text/html" }));
    make("a", { href: address, download: page.name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
    $("done").textContent = `saved ${page.name}`;
  }
  async function fit() {
    const head = state.head;
    $("fit").disabled = true;
    $("fit").textContent = `Fitting on ${model.fitted_on} prompts …`;
    try {
      await ask("fit", { head });
      if (!model.fitted.includes(head)) model.fitted.push(head);
      if (grid) grid.mark(model.fitted);
      by = "features";
      if (head === state.head) await why(head, state.key, state.changes);
    } finally {
      $("fit").disabled = false;
    }
  }
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    quietly(look($("prompt").value));
  });
  $("prompt").addEventListener("input", edited);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    quietly(look($("prompt").value));
  });
  $("examples").addEventListener("change", (event) => {
    const text = model.examples[Number(event.target.value)];
    event.target.value = "";
    $("prompt").value = text;
    quietly(look(text));
  });
  $("undo").addEventListener("click", () => quietly(change(state.changes.slice(0, -1))));
  $("clear").addEventListener("click", () => quietly(change([])));
  $("save").addEventListener("click", () => quietly(save()));
  $("fit").addEventListener("click", () => quietly(fit()));
  $("python").addEventListener("click", () =>
    navigator.clipboard.writeText(found.python).then(
      () => ($("done").textContent = "copied"),
      () => ($("done").textContent = "the browser does not let a page copy: copy the address instead"),
    ),
  );
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    document.dispatchEvent(new Event("qk-theme"));
    if (found) view.paint(changed ? changed.row : found.row, state.query, state.key);
  });
  addEventListener("hashchange", () => {
    const given = read();
    if (given) quietly(look(given.prompt, given));
  });
  quietly(
    (async () => {
      model = await ask("model");
      $("model").textContent = `${model.model} · ${model.heads.length} heads${model.folder ? ` · ${model.folder}` : ""}`;
      $("examples").append(...model.examples.map((text, i) => make("option", { value: i }, visible(text).slice(0, 60))));
      setMode("key");
      drawPainted();
      const given = read() || { prompt: model.prompt };
      $("prompt").value = given.prompt;
      await look(given.prompt, given);
    })(),
  );
})();
