"use strict";
// Type a prompt; any token asks, any head answers, a click on a token says why, and what if not. Answers are results with
// the blocks of a saved page. The address is the whole state. All text goes in as text.
(() => {
  const { make, map, choose, fixed, percent, visible, piece } = qk;
  const $ = (id) => document.getElementById(id);
  const MODES = { key: "looked at", query: "asks", swap: "swapped with it" };
  const MOST = 5; // buttons in a line
  const state = { prompt: "", query: null, head: null, key: null, changes: [] };
  let model = null,
    seen = null, // where all heads look
    answer = null, // why this one looks there
    changed = null, // what the changes do
    view = null,
    grid = null,
    places = null, // of heads in what the server sends
    mode = "key",
    features = "", // those in which a key is swapped
    painted = "attention",
    watched = -1,
    turn = 0; // answers to an older question are not shown

  async function ask(what, question) {
    document.body.classList.add("busy");
    try {
      const headers = { "Content-Type": "application/json" },
        sent = question ? { method: "POST", headers, body: JSON.stringify(question) } : {};
      const reply = await fetch(`api/${what}`, sent),
        value = await reply.json();
      if (!reply.ok) throw new Error(value.error);
      refuse("");
      return value;
    } catch (error) {
      refuse(error instanceof TypeError ? "qkscope does not answer any more: start it again." : error.message);
      throw error;
    } finally {
      document.body.classList.remove("busy");
    }
  }
  const refuse = (sentence) => {
    $("error").textContent = sentence;
    $("error").hidden = !sentence;
  };
  const quietly = (promise) => promise.catch(() => {}); // the sentence stands in the page
  const say = (text) => ($("state").textContent = text);
  const about = () => ({ prompt: state.prompt, query: state.query, head: state.head, key: state.key });
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const token = (i) => piece(seen.tokens[i]);

  // ------------------------------------------------------------------ the address
  function write() {
    const given = { p: state.prompt, q: state.query, h: state.head, k: state.key };
    if (state.changes.length) given.c = state.changes.join(";");
    history.replaceState(null, "", `#${new URLSearchParams(given)}`);
  }
  function read() {
    const given = new URLSearchParams(location.hash.slice(1)),
      place = (name) => (/^\d+$/.test(given.get(name) || "") ? Number(given.get(name)) : null),
      changes = (given.get("c") || "").split(";").filter(Boolean);
    if (!given.get("p")) return null;
    return { prompt: given.get("p"), query: place("q"), head: given.get("h"), key: place("k"), changes };
  }

  // ------------------------------------------------------------------ questions
  // one after the other: where heads look, why this one looks there, what the changes do
  async function look(prompt, { query = null, head = null, key = null, changes = [] } = {}) {
    const mine = ++turn;
    say("looking");
    $("look").disabled = true;
    try {
      const next = await ask("look", query === null ? { prompt } : { prompt, query });
      if (mine !== turn) return;
      const fresh = !seen || prompt !== state.prompt;
      seen = { ...next, bytes: bytes(next.attention) };
      Object.assign(state, { prompt, query: next.query });
      if (fresh) drawTokens();
      edited();
      $("seen").hidden = false;
      await why(head ?? next.first.head, head ? key : next.first.key, changes);
      say(`${seen.tokens.length} tokens, ${seen.seconds.toFixed(2)} s`);
    } finally {
      $("look").disabled = false;
      if ($("state").textContent === "looking") say("");
    }
  }
  async function why(head, key = null, changes = []) {
    const mine = ++turn,
      question = { prompt: state.prompt, query: state.query, head };
    const next = await ask("why", key === null ? question : { ...question, key });
    if (mine !== turn) return;
    answer = next;
    changed = null;
    watched = -1;
    Object.assign(state, { head: next.head, key: next.key, changes: [] });
    drawWhy();
    draw();
    if (changes.length) await change(changes);
  }
  async function change(changes) {
    const mine = ++turn;
    let next = null;
    if (changes.length) {
      say("changing");
      try {
        next = await ask("change", { ...about(), changes });
      } finally {
        if (mine === turn) say("");
      }
      if (mine !== turn) return;
    }
    changed = next && { ...next, bytes: bytes(next.attention) };
    state.changes = changes;
    draw();
  }
  const toggle = (text) => {
    const others = state.changes.filter((each) => each !== text);
    quietly(change(others.length < state.changes.length ? others : [...others, text]));
  };

  // ------------------------------------------------------------------ drawing
  function draw() {
    write();
    $("asker").textContent = token(state.query);
    $("asks-from").textContent = `token ${state.query}`;
    const row = changed ? changed.row : answer.row;
    view.ask(row, state.query, state.key);
    const others = [...row.keys()].filter((i) => i > 0).sort((a, b) => row[b] - row[a]);
    const key = (i) => [`${token(i)} ${percent(row[i])}`, i === state.key, () => why(state.head, i)];
    const first = make("span", { class: "of" }, `the first token, where heads rest: ${percent(row[0])}`);
    list($("keys"), `${state.head} looks most at`, others.slice(0, MOST).map(key));
    $("keys").append(first);
    drawMap();
    drawChanges();
    for (const button of document.querySelectorAll("[data-cut]")) press(button);
  }
  // a line of buttons: what each says, whether it is pressed, and what it asks
  function list(place, label, entries) {
    const button = ([words, pressed, onclick]) =>
      make("button", { type: "button", "aria-pressed": String(pressed), onclick: () => quietly(onclick()) }, words);
    place.replaceChildren(make("span", { class: "of" }, label), ...entries.map(button));
  }
  function drawTokens() {
    const focused = $("tokens").contains(document.activeElement),
      watch = (i) => {
        watched = i <= state.query ? i : -1;
        requestAnimationFrame(drawMap);
      };
    $("prompt").value = state.prompt;
    view = qk.prompt($("tokens"), {
      rows: seen.tokens.map((text, position) => ({ token: text, position, attention: null })),
      onlook: watch,
      onleave: () => watch(-1),
      onpick: (i, asks) => quietly(pick(i, asks ? "query" : mode)),
    });
    if (focused) view.focus();
    grid = null;
  }
  async function pick(i, how) {
    setMode("key");
    if (how === "query") return look(state.prompt, { query: i, head: state.head });
    if (i > state.query) {
      const later = `${token(i)} stands after the token that asks, which sees only what is before it.`;
      return refuse(`${later} Shift-click makes it the one that asks.`);
    }
    refuse("");
    return how === "swap" ? change([...state.changes, `swap ${i}${features ? ` ${features}` : ""}`]) : why(state.head, i);
  }
  function setMode(next) {
    mode = next;
    const set = (name) => (mode = name),
      buttons = choose("a click picks the token that is", Object.keys(MODES), mode, set, (name) => MODES[name]);
    $("mode").replaceChildren(...buttons, make("span", { class: "hint" }, "shift-click: asks"));
  }
  const pale = (share) => `color-mix(in srgb, var(--original) ${(100 * Math.min(1, share)).toFixed(1)}%, var(--wash))`;
  const apart = (share) => {
    const [hue, far] = [share < 0.5 ? "var(--target)" : "var(--original)", Math.min(100, 200 * Math.abs(share - 0.5))];
    return `color-mix(in srgb, ${hue} ${far.toFixed(1)}%, var(--wash))`;
  };
  function drawMap() {
    if (!answer) return;
    const key = watched >= 0 ? watched : state.key,
      cell = (head) => places.get(head) * (state.query + 1) + key,
      before = ({ head }) => seen.bytes[cell(head)] / 255,
      gained = (row) => changed.bytes[cell(row.head)] / 255 - before(row),
      difference = painted === "difference" && changed,
      value = difference ? gained : before;
    const rooted = (row) => Math.sign(value(row)) * Math.sqrt(Math.abs(value(row))), // so that little is seen, too
      look = difference ? ["√ change", [-1, 1], apart] : ["√ attention", [0, 1], pale];
    $("watched").textContent = token(key);
    $("painted").hidden = !changed;
    if (!grid)
      grid = map($("map"), {
        rows: model.heads.map((head) => ({ head })),
        value: rooted,
        title: look[0],
        range: look[1],
        paint: look[2],
        lines: (row) => [
          [row.head],
          [`attention on ${$("watched").textContent}`, fixed(before(row))],
          ...(model.names[row.head] ? [["name", model.names[row.head]]] : []),
        ],
        marked: model.fitted,
        picked: state.head,
        onpick: (head) => quietly(why(head)),
      });
    else grid.repaint(rooted, ...look);
    grid.pick(state.head);
    const order = model.heads.map((head) => ({ head })).sort((a, b) => Math.abs(value(b)) - Math.abs(value(a)));
    const entry = (row) => {
      const words = `${called(row.head)} ${fixed(value(row))}`;
      return [words, row.head === state.head, () => why(row.head, key)];
    };
    list($("best"), difference ? "most changed" : "most", order.slice(0, MOST).map(entry));
  }
  const called = (head) => (model.names[head] ? `${head} (${model.names[head]})` : head);

  function drawWhy() {
    const { result, blocks } = answer,
      matter = seen.result.tables.heads;
    $("matter").textContent = seen.result.answer;
    const entry = ({ head, key, difference, probability }) => [
      `${called(head)} → ${token(key)} ${difference > 0 ? "+" : ""}${fixed(difference, 1)}, ${percent(probability)}`,
      head === state.head && key === state.key,
      () => why(head, key),
    ];
    for (const way of ["for", "against"]) {
      const own = matter.filter(({ direction }) => direction === way);
      list($(way), `${way} it; hidden:`, own.slice(0, MOST).map(entry));
      if (own.length > MOST) $(way).append(make("span", { class: "of" }, `and ${own.length - MOST} more`));
      $(way).hidden = !own.length;
    }
    $("head").textContent = state.head;
    $("key").textContent = token(state.key);
    $("answer").textContent = result.answer;
    $("about").textContent = answer.about ? `${model.folder}: ${answer.about}` : "";
    const passage = (row) => {
      const onclick = () => quietly(look(row.text, { head: state.head })),
        quote = qk.passage(row);
      quote.append(make("button", { type: "button", onclick }, "look at it"));
      return quote;
    };
    $("texts").replaceChildren(...answer.texts.map(passage));
    const shown = blocks.filter(({ kind }) => kind !== "tokens"), // the prompt stands above
      cuttable = (block) => qk.block({ ...block, options: { ...block.options, button: cut } });
    $("blocks").replaceChildren(...shown.map(cuttable));
  }
  // a writer can be cut, and put back
  function cut({ by, side, part }) {
    if (by !== "writers" || part === "rest" || part === "bias") return null;
    const text = `cut ${side} ${part}`;
    return press(make("button", { type: "button", "data-cut": text, onclick: () => toggle(text) }));
  }
  function press(button) {
    const pressed = state.changes.includes(button.dataset.cut);
    button.setAttribute("aria-pressed", String(pressed));
    button.textContent = pressed ? "restore" : "cut";
    return button;
  }
  function drawChanges() {
    const key = token(state.key),
      hidden = state.changes.includes("hide"),
      pressed = { type: "button", id: "hide", "aria-pressed": String(hidden), onclick: () => toggle("hide") },
      some = ["", ...answer.fitted];
    if (!some.includes(features)) features = "";
    const set = (name) => (features = name),
      ways = some.length > 1 ? choose("in", some, features, set, (name) => name || "its whole key") : [];
    $("offers").replaceChildren(
      make("button", pressed, `hide ${key} from ${state.head}`),
      make("button", { type: "button", id: "swap", onclick: () => setMode("swap") }, `swap ${key} with …`),
      ...ways,
      make("span", { class: "hint" }, "or cut a writer"),
    );
    const undo = (id, label, rest) => make("button", { type: "button", id, onclick: () => quietly(change(rest)) }, label);
    const made = (text, i) => {
      const given = { type: "button", class: "change", "aria-label": `undo: ${changed.words[i]}` };
      return make("button", { ...given, onclick: () => toggle(text) }, `${changed.words[i]} ×`);
    };
    const last = [undo("undo", "Undo", state.changes.slice(0, -1)), undo("clear", "Clear", [])];
    $("changes").replaceChildren(...state.changes.map(made), ...(state.changes.length ? last : []));
    const acts = "A change acts on this head's attention at this token alone; the model then runs on.";
    $("moved").textContent = changed ? changed.result.answer : `Nothing is changed. ${acts}`;
    $("changed").replaceChildren(...(changed ? changed.blocks.map(qk.block) : []));
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
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    quietly(look($("prompt").value));
  });
  $("prompt").addEventListener("input", edited);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  $("examples").addEventListener("change", (event) => {
    $("prompt").value = model.examples[Number(event.target.value)];
    event.target.value = "";
    $("ask").requestSubmit();
  });
  $("save").addEventListener("click", () => quietly(save()));
  $("python").addEventListener("click", async () => {
    const refused = "the browser does not let a page copy: copy the address instead";
    $("done").textContent = (await qk.copied(answer.python)) ? "copied" : refused;
  });
  addEventListener("hashchange", () => {
    const given = read();
    if (given) quietly(look(given.prompt, given));
  });
  quietly(
    (async () => {
      model = await ask("model");
      const facts = [model.model, `${model.heads.length} heads`, model.folder];
      $("model").textContent = facts.filter(Boolean).join(" · ");
      $("examples").append(...model.examples.map((text, i) => make("option", { value: i }, visible(text).slice(0, 60))));
      places = new Map(model.heads.map((head, i) => [head, i]));
      setMode("key");
      const paint = (name) => {
        painted = name;
        drawMap();
      };
      const names = { attention: "attention before", difference: "what the changes do" };
      $("painted").replaceChildren(...choose("coloured by", Object.keys(names), painted, paint, (name) => names[name]));
      const given = read() ?? { prompt: model.examples[0] };
      $("prompt").value = given.prompt;
      await look(given.prompt, given);
    })(),
  );
})();
