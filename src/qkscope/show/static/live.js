"use strict";
// Type a prompt: what comes next and rather than what, which heads decide it, why each looks where it does, and what if.
// One function goes anywhere (`go`): the address is the whole state, and every click is a step of the back button.
// Answers are results with the blocks of a saved page. All text goes in as text.
(() => {
  const { make, button, choose, fixed, signed, percent, visible, piece } = qk;
  const $ = (id) => document.getElementById(id);
  const MODES = { key: "ask why the head looks at it", query: "ask from it", type: "replace it" };
  const MOST = 5, // buttons in a line
    MULTIPLES = 12, // small patterns
    NARROW = 1024; // pixels under which the reason stands below the heads
  const OPEN = ["In words", "Because: words replaced", "Carried by"]; // folds that are open at first
  const EMPTY = { prompt: "", query: null, versus: null, path: [], changes: [] };
  let state = EMPTY, // path: steps of head, query and key, each a writer of the one before
    model = null,
    seen = null, // the next token, and where all heads look
    answer = null, // why this one looks there
    changed = null, // what the changes do
    view = null, // of the prompt
    grid = null, // of all heads
    places = null, // of heads in what the server sends
    mode = "key",
    painted = "attention",
    watched = -1,
    all = false, // whether all heads that decide are listed
    turn = 0; // answers to an older question are not shown
  const folds = new Map(OPEN.map((title) => [title, true]));

  const refuse = (sentence) => {
    $("error").textContent = sentence;
    $("error").hidden = !sentence;
  };
  const say = (text) => ($("state").textContent = text);
  // a token as it reads; a further piece of a character names it
  const token = (i) => {
    let first = i;
    while (first > 0 && seen.tokens[first] === "") first--;
    return piece(seen.tokens[first]) + (first < i ? "…" : "");
  };
  const step = () => state.path.at(-1);
  const called = (head) => (model.names[head] ? `${head} (${model.names[head]})` : head);
  // the rival that was chosen, in questions about the token that it is a rival at
  const rival = () => (step().query === seen.query && state.versus !== null ? { versus: state.versus } : {});

  // ------------------------------------------------------------------ the address
  const write = (how) => {
    const to = qk.address(state);
    if (how === "push" && to !== location.hash) history.pushState(null, "", to);
    else if (how !== "stay") history.replaceState(null, "", to);
    document.title = `${step().head} → ${token(step().key)} · qkscope`;
  };

  // ------------------------------------------------------------------ one way to go anywhere
  // where heads look, then why this one looks there, then what the changes do; each is drawn as it comes
  async function go(next, how = "push") {
    const mine = ++turn,
      wanted = { ...EMPTY, ...next };
    const place = ({ prompt, query, versus, path }) => JSON.stringify([prompt, query, versus, path]);
    // changes asked for before the last ones are answered are added to these
    if (place(wanted) === place(state)) state = { ...state, changes: wanted.changes };
    qk.cancel();
    refuse("");
    busy(true);
    const doing = (text) => mine === turn && progress(text),
      ask = (what, question, early) => qk.ask(what, question, { doing, early: (part) => mine === turn && early(part) });
    try {
      await look(wanted, ask, mine);
      if (mine !== turn) return;
      const first = seen.result.tables.heads[0];
      if (!wanted.path.length) wanted.path = [{ head: first.head, query: seen.query, key: first.key }];
      await why(wanted, ask, mine, how);
      if (mine !== turn) return;
      await change(wanted, ask, mine);
      if (mine === turn && wanted.changes.length) write(how === "push" ? "replace" : how);
    } catch (error) {
      if (mine !== turn || error.name === "AbortError") return;
      refuse(error.message);
      throw error;
    } finally {
      if (mine === turn) busy(false);
    }
  }
  const quietly = (promise) => promise.catch(() => {}); // the sentence stands in the page
  const move = (change) => quietly(go({ ...state, ...change }));

  async function look({ prompt, query, versus }, ask, mine) {
    const same = seen?.result && prompt === state.prompt && query === state.query && versus === state.versus;
    if (same) return;
    const question = { prompt, ...(query === null ? {} : { query }), ...(versus === null ? {} : { versus }) };
    const show = (part) => {
      const fresh = !seen || prompt !== state.prompt;
      if (fresh || part.query !== state.query) answer = changed = null;
      $("reason").classList.toggle("waiting", !answer);
      seen = { ...part, bytes: qk.bytes(part.attention) };
      state = { ...state, prompt, query: part.query, versus };
      if (fresh) drawTokens();
      edited();
      $("seen").hidden = false;
      drawNext();
      drawHeads();
    };
    const whole = await ask("look", question, show);
    if (mine === turn) show(whole);
  }
  async function why(wanted, ask, mine, how) {
    const { head, query, key } = wanted.path.at(-1),
      versus = query === seen.query && state.versus !== null ? { versus: state.versus } : {},
      question = { prompt: state.prompt, query, head, ...(key === null ? {} : { key }), ...versus };
    let shown = false;
    const show = (part) => {
      if (!shown) {
        const last = { head: part.head, query: part.query, key: part.key };
        state = { ...state, path: [...wanted.path.slice(0, -1), last], changes: wanted.changes };
        write(how);
      }
      shown = true;
      answer = part;
      changed = null;
      watched = -1;
      draw();
    };
    const whole = await ask("why", question, show);
    if (mine === turn) show(whole);
  }
  async function change({ changes }, ask, mine) {
    if (changes.length) {
      try {
        const next = await ask("change", { prompt: state.prompt, ...step(), changes, ...rival() }, () => {});
        if (mine !== turn) return;
        changed = { ...next, bytes: qk.bytes(next.attention) };
      } catch (error) {
        if (mine === turn && error.name !== "AbortError") {
          state = { ...state, changes: changes.slice(0, -1) }; // as before the one that was refused
          write("replace");
          draw();
        }
        throw error;
      }
    } else changed = null;
    draw();
  }
  function busy(on) {
    document.body.classList.toggle("busy", on);
    $("cancel").hidden = !on;
    progress(on ? "looking" : "");
    if (!on && seen) say(`${seen.tokens.length} tokens`);
  }
  function progress(text) {
    say(text ? `… ${text}` : "");
    $("doing").hidden = !text || !answer || Boolean(answer.result);
    $("doing").textContent = text ? `Looking for the reason: ${text}` : "";
  }
  function cancel() {
    if (!document.body.classList.contains("busy")) return;
    turn++;
    qk.cancel();
    busy(false);
    say("cancelled");
    if (seen && !seen.result) $("heads").textContent = "Cancelled: press Look to try every head.";
    if (answer && !answer.result) {
      $("doing").textContent = "Cancelled: this is where the head looks; its reason was not looked for. ";
      $("doing").append(button("Look for it", () => move({})));
      $("doing").hidden = false;
    }
  }

  // ------------------------------------------------------------------ the next token, and who decides it
  function drawNext() {
    const [best, ...others] = seen.next,
      rival = seen.rival;
    const last = seen.query === seen.tokens.length - 1;
    $("after").textContent = last ? "Next" : `After ${token(seen.query)} (token ${seen.query})`;
    // after a what-if the new next token stands first, and what it was behind it
    const after = changed?.result.tables.next ?? [],
      now = after.reduce((most, row) => (row.after > (most?.after ?? -1) ? row : most), null),
      share = (value) => percent(value, value > 0.98 ? 1 : 0);
    $("best").textContent = piece(now?.token ?? best.token);
    $("chance").textContent = share(now ? now.after : best.probability);
    $("was").textContent = now ? `(was ${qk.quoted(best.token)} ${share(best.probability)})` : "";
    // a word may be a token with and one without a blank before it: the one like the answer is meant
    const rivals = new Map(),
      alike = (text) => text.startsWith(" ") === best.token.startsWith(" "),
      words = seen.tokens.slice(0, seen.query + 1).filter((text) => /[\p{L}\p{N}]/u.test(text));
    for (const text of [...others.map((row) => row.token), ...words])
      if (text.trim() && (!rivals.has(text.trim()) || alike(text))) rivals.set(text.trim(), text);
    rivals.delete(best.token.trim());
    rivals.set(rival.token.trim(), rival.token);
    $("versus").replaceChildren(...[...rivals].map(([name, text]) => make("option", { value: text }, visible(name))));
    $("versus").value = rival.token;
    const [made] = changed?.result.tables.changes ?? [],
      lead = made ? `${signed(made.difference)} → ${signed(made.difference_after)}` : signed(seen.difference);
    $("difference").textContent = `${piece(best.token)} − ${piece(rival.token)} ${lead} in logits`;
    $("others").replaceChildren(
      make("span", { class: "of" }, "or"),
      ...others.map((row) => {
        const words = `${piece(row.token)} ${percent(row.probability, row.probability < 0.1 ? 1 : 0)}`,
          given = { "aria-pressed": String(row.id === rival.id), title: `rather than ${row.token}` };
        return row.token.trim() ? button(words, () => versus(row.token), given) : make("span", {}, words);
      }),
    );
    $("says").textContent = seen.says ? `continues: “${visible(seen.says.trim())}”` : "\u00a0";
  }
  const versus = (text) => move({ versus: text, path: state.path.slice(0, 1) });

  function drawHeads() {
    const rows = seen.result?.tables.heads;
    $("tried").textContent = rows ? `${rows.length} tried${changed ? ", before the change" : ""}` : "";
    if (!rows) return $("heads").replaceChildren(make("p", { class: "soft" }, "trying every head …"));
    const onpick = ({ head, key }) => {
      move({ path: [{ head, query: seen.query, key }] });
      if (innerWidth < NARROW) $("reason").scrollIntoView({ behavior: "smooth" });
    };
    const onmore = () => {
      all = !all;
      drawHeads();
    };
    const given = { rows, answer: seen.next[0], rival: seen.rival, picked: state.path[0]?.head, all };
    return qk.heads($("heads"), { ...given, token, called, onpick, onmore });
  }

  // ------------------------------------------------------------------ why
  function draw() {
    const { head, query, key } = step();
    $("reason").classList.remove("waiting");
    drawNext();
    drawHeads();
    drawTrail();
    $("before").hidden = !changed;
    $("answer").replaceChildren(...qk.rich(typeof answer.answer === "string" ? answer.answer : answer.result.answer));
    if (answer.result) $("doing").hidden = true;
    view.ask(changed ? changed.row : answer.row, query, key);
    const causes = qk.causes(answer.result?.tables ?? {}, answer.row[key]);
    view.note(causes);
    view.put(qk.typed(state.changes));
    const kinds = new Set([...causes.values()].map(({ kind }) => kind)),
      decides = "decides: replaced, less than half of the attention is left",
      marks = [["asks", "query"], ["key", "key"], ["cause", decides], ["open", "may decide"]];
    $("marks").replaceChildren(
      ...marks
        .filter(([kind]) => kinds.has(kind) || kind === "asks" || kind === "key")
        .map(([kind, words]) => make("span", {}, make("span", { class: `token ${kind}` }, "word"), ` ${words}`)),
      make("span", {}, `on the first token, where idle heads rest: ${percent((changed ? changed.row : answer.row)[0])}`),
    );
    drawOffers();
    drawBlocks();
    drawMap();
    drawChanges();
    drawPattern();
    if ($("patterns-fold").open) quietly(drawPatterns());
    if ($("circuit-fold").open) quietly(drawCircuit());
  }
  // Mary ‹ L23H0 ‹ L20H0 ‹ John
  function drawTrail() {
    const steps = state.path.flatMap(({ head, query }, i) => {
      const words = query === seen.query ? head : `${head} at ${token(query)}`,
        to = () => move({ path: state.path.slice(0, i + 1) });
      return [button(words, to, { "aria-current": i === state.path.length - 1 ? "step" : null }), "‹"];
    });
    $("trail").replaceChildren(
      button(piece(seen.next[0].token), () => move({ path: [] }), { title: "back to the next token" }),
      "‹",
      ...steps,
      make("span", { class: "piece", id: "key" }, token(step().key)),
    );
  }
  // names of heads in words are links: why did that one look where it did?
  qk.rich = (text, side) =>
    text.split(/(\bL\d+H\d+\b)/).flatMap((part, i) => {
      if (i % 2 === 0 || !step() || part === step().head || !places.has(part)) return qk.unbroken(part);
      const from = reads(part, side);
      if (from === null) return part;
      const key = from === seen.query ? favourite(part) : null,
        title = `why did ${part} look ${key === null ? `where it did, from ${token(from)}` : `at ${token(key)}`}?`,
        to = () => move({ path: [...state.path, { head: part, query: from, key }] });
      return button(part, to, { class: "link", title });
    });
  // where a writer read what it wrote into this head's query or key; the first token sees nothing but itself
  function reads(writer, side) {
    const { query, key } = step(),
      tables = answer?.result?.tables ?? {};
    const carried = (tables.carriers ?? []).find((row) => row.writers.split(", ").includes(writer)),
      parts = (tables.parts ?? []).filter((row) => row.part === writer),
      [part] = parts.sort((a, b) => Math.abs(b.value) - Math.abs(a.value)),
      meant = side === "key" || side === "query" ? side : (carried ?? part)?.side,
      at = meant === "key" ? key : query;
    return at > 0 && Number(/^L(\d+)/.exec(writer)[1]) < Number(/^L(\d+)/.exec(step().head)[1]) ? at : null;
  }
  const favourite = (head) => {
    const wide = seen.query + 1,
      row = [...seen.bytes.slice(places.get(head) * wide, (places.get(head) + 1) * wide)];
    return row.reduce((best, value, i) => (i > 0 && value > row[best] ? i : best), 1);
  };

  function drawTokens() {
    const watch = (i) => {
      watched = i <= state.query ? i : -1;
      if ($("map-fold").open) requestAnimationFrame(drawMap);
    };
    $("prompt").value = state.prompt;
    view = qk.prompt($("tokens"), {
      rows: seen.tokens.map((text, position) => ({ token: text, position, attention: null })),
      onlook: watch,
      onleave: () => watch(-1),
      onpick: (i, asks) => pick(i, asks ? "query" : mode),
      onedit: (i, text) => {
        setMode("key");
        const others = state.changes.filter((each) => !each.startsWith(`replace ${i} `));
        move({ changes: [...others, `replace ${i} ${text}`] });
      },
    });
    grid = null;
  }
  function pick(i, how) {
    if (!answer) return undefined;
    if (how === "type") return view.edit(i);
    setMode("key");
    const { head, query } = step();
    if (how === "query") return move({ query: i, path: [{ head, query: i, key: null }], changes: [] });
    if (i <= query) return move({ path: [...state.path.slice(0, -1), { head, query, key: i }] });
    const later = `${token(i)} comes after the query, which sees only what is before it.`;
    return refuse(`${later} Shift-click it to ask from there.`);
  }
  function setMode(next) {
    mode = next;
    const set = (name) => (mode = name),
      buttons = choose("Click a token to", Object.keys(MODES), mode, set, (name) => MODES[name]);
    $("mode").replaceChildren(...buttons, make("span", { class: "hint" }, "or double-click one to replace it"));
  }
  const has = (text) => state.changes.includes(text);
  const toggle = (text) => {
    const others = state.changes.filter((each) => each !== text);
    move({ changes: has(text) ? others : [...others, text] });
  };
  const offer = (text, words, id = null) =>
    button(words, () => toggle(text), { id, "data-change": text, "aria-pressed": String(has(text)) });
  function drawOffers() {
    const { head, query, key } = step();
    $("offers").replaceChildren(
      make("span", { class: "of" }, "What if"),
      offer(`hide ${head} ${key} ${query}`, `${head} could not look at ${token(key)}`, "hide"),
      offer(`ablate ${head}`, `${head} were ablated`, "ablate"),
    );
  }
  function drawBlocks() {
    $("about").textContent = answer.about ? `${model.folder}: ${answer.about}` : "";
    const passage = (row) => {
      const quote = qk.passage(row),
        to = { prompt: row.text, path: [{ head: step().head, query: row.query, key: null }], query: row.query };
      quote.append(button("look at it", () => quietly(go(to))));
      return quote;
    };
    $("texts").replaceChildren(...(answer.texts ?? []).map(passage));
    const isWriter = ({ by, part }) => by === "writers" && /^[LM]\d/.test(part),
      ablate = (row) => (isWriter(row) ? offer(`ablate ${row.part}`, "ablate") : null);
    const fold = (block) => {
      const options = { ...block.options, button: ablate },
        made = qk.block({ ...block, options }, folds.get(block.title) ?? false);
      made.addEventListener("toggle", () => folds.set(block.title, made.open));
      return made;
    };
    const shown = (answer.blocks ?? []).filter(({ kind }) => kind !== "tokens"); // the prompt stands above
    $("blocks").replaceChildren(...shown.map(fold));
  }

  // ------------------------------------------------------------------ all heads, and whole patterns, on demand
  const pale = (share) => `color-mix(in srgb, var(--original) ${(100 * Math.min(1, share)).toFixed(1)}%, var(--wash))`;
  const apart = (share) => {
    const [hue, far] = [share < 0.5 ? "var(--target)" : "var(--original)", Math.min(100, 200 * Math.abs(share - 0.5))];
    return `color-mix(in srgb, ${hue} ${far.toFixed(1)}%, var(--wash))`;
  };
  function drawMap() {
    if (!answer) return;
    const mine = step().query === seen.query ? step().key : favourite(step().head),
      key = watched >= 0 ? watched : mine;
    $("watched").textContent = token(key);
    if (!$("map-fold").open) return;
    const cell = (head) => places.get(head) * (seen.query + 1) + key,
      before = ({ head }) => seen.bytes[cell(head)] / 255,
      comparable = changed && step().query === seen.query,
      gained = (row) => changed.bytes[cell(row.head)] / 255 - before(row),
      difference = painted === "difference" && comparable,
      value = difference ? gained : before;
    const rooted = (row) => Math.sign(value(row)) * Math.sqrt(Math.abs(value(row))), // so that little is seen, too
      shade = difference ? ["√ change", [-1, 1], apart] : ["√ attention", [0, 1], pale];
    $("painted").hidden = !comparable;
    const onpick = (head) => move({ path: [{ head, query: seen.query, key }] });
    if (!grid)
      grid = qk.map($("map"), {
        rows: model.heads.map((head) => ({ head })),
        value: rooted,
        title: shade[0],
        range: shade[1],
        paint: shade[2],
        lines: (row) => [
          [row.head],
          [`attention on ${$("watched").textContent}`, fixed(before(row))],
          ...(model.names[row.head] ? [["name", model.names[row.head]]] : []),
        ],
        marked: model.fitted,
        picked: step().head,
        onpick: (head) => move({ path: [{ head, query: seen.query, key: null }] }),
      });
    else grid.repaint(rooted, ...shade);
    grid.pick(step().head);
    const order = model.heads.map((head) => ({ head })).sort((a, b) => Math.abs(value(b)) - Math.abs(value(a)));
    const entry = (row) => {
      const given = { "aria-pressed": String(row.head === step().head) };
      return button(`${called(row.head)} ${fixed(value(row))}`, () => onpick(row.head), given);
    };
    const label = make("span", { class: "of" }, difference ? "most changed" : "most");
    $("most").replaceChildren(label, ...order.slice(0, MOST).map(entry));
  }
  async function drawPattern() {
    if (!$("pattern-fold").open || !answer) return;
    const { head } = step(),
      bytes = answer.pattern ?? (await qk.ask("patterns", { prompt: state.prompt, heads: [head] })).patterns[head];
    if (head !== step().head) return;
    qk.pattern($("pattern"), {
      bytes: qk.bytes(bytes),
      tokens: seen.tokens,
      asks: step().query,
      onlook: (query, key) => (query === null ? view.point() : view.point(query, key)),
      onpick: (query, key) => query > 0 && move({ path: [...state.path.slice(0, -1), { head, query, key }] }),
    });
  }
  async function drawPatterns() {
    if (!$("patterns").firstChild) $("patterns").textContent = "… waiting for the model";
    const rows = seen.result?.tables.heads ?? [],
      heads = [...new Set([step().head, ...rows.slice(0, MULTIPLES).map(({ head }) => head)])].slice(0, MULTIPLES),
      { patterns } = await qk.ask("patterns", { prompt: state.prompt, heads });
    const small = (head) => {
      const place = make("span", { class: "small" }),
        to = () => move({ path: [{ head, query: seen.query, key: null }] });
      const made = button([head, place], to, { class: "multiple", "aria-pressed": String(head === step().head) });
      requestAnimationFrame(() => qk.pattern(place, { bytes: qk.bytes(patterns[head]), tokens: seen.tokens, small: true }));
      return made;
    };
    $("patterns").replaceChildren(...heads.map(small));
  }

  async function drawCircuit() {
    const question = { prompt: state.prompt, query: seen.query, ...(state.versus === null ? {} : { versus: state.versus }) };
    const asked = JSON.stringify(question);
    if ($("circuit").dataset.asked === asked) return;
    $("circuit").dataset.asked = asked;
    $("circuit").textContent = "… waiting for the model";
    const { result, blocks } = await qk.ask("circuit", question);
    if ($("circuit").dataset.asked !== asked) return;
    $("circuit").replaceChildren(make("p", { class: "words" }, result.answer), ...blocks.map((block) => qk.block(block)));
  }

  // ------------------------------------------------------------------ what if
  function drawChanges() {
    const there = state.changes.length > 0,
      undo = (id, words, rest) => button(words, () => move({ changes: rest }), { id }),
      words = (i) => changed?.words[i] ?? state.changes[i];
    const chip = (text, i) =>
      button(`${words(i)} ×`, () => toggle(text), { class: "change", "aria-label": `undo: ${words(i)}` });
    const last = [
      undo("undo", ["Undo ", make("kbd", {}, "Ctrl Z")], state.changes.slice(0, -1)),
      undo("clear", "Clear", []),
    ];
    const take = () => quietly(go({ prompt: qk.rewritten(state, seen.tokens) })),
      replaced = qk.typed(state.changes).size > 0;
    document.body.classList.toggle("changed", there);
    $("changes").replaceChildren(
      ...state.changes.map(chip),
      ...(there ? last : []),
      ...(replaced ? [button("Ask about the changed prompt", take, { id: "take" })] : []),
    );
    const row = changed?.result.tables.changes[0],
      number = (text, from, to) => make("span", { class: "moved" }, `${text} `, make("b", {}, `${from} → ${to}`));
    $("moved").replaceChildren(
      ...(row
        ? [
            number(`P(${piece(row.answer)})`, percent(row.probability), percent(row.probability_after)),
            number(`${piece(row.answer)} − ${piece(row.rival)}`, signed(row.difference), signed(row.difference_after)),
            number(`${row.head} on ${token(step().key)}`, percent(row.before), percent(row.after)),
          ]
        : [there ? "…" : "nothing is changed: replace a word, hide a token from a head, or ablate a head"]),
    );
    $("changed-fold").hidden = !row;
    $("changed-answer").textContent = row ? changed.result.answer : "";
    $("changed").replaceChildren(...(row ? changed.blocks.map((block) => qk.block(block)) : []));
    for (const each of document.querySelectorAll("[data-change]"))
      each.setAttribute("aria-pressed", String(has(each.dataset.change)));
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
    const page = await qk.ask("save", { prompt: state.prompt, ...step(), changes: state.changes, ...rival() }),
      address = URL.createObjectURL(new Blob([page.html], { type: "text/html" }));
    make("a", { href: address, download: page.name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
    say(`saved ${page.name}`);
  }
  const copy = async (text) => say((await qk.copied(text)) ? "copied" : "the browser does not let a page copy");
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    quietly(go({ prompt: $("prompt").value }));
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
  addEventListener("resize", edited);
  $("versus").addEventListener("change", (event) => versus(event.target.value));
  // a rival that is typed: with the blank before it that the answer has
  $("typed").addEventListener("change", ({ target }) => {
    const text = target.value,
      blank = seen.next[0].token.startsWith(" ") && !text.startsWith(" ") ? " " : "";
    if (!text.trim()) return;
    target.value = "";
    versus(blank + text);
  });
  $("save").addEventListener("click", () => quietly(save().catch((error) => refuse(error.message))));
  $("python").addEventListener("click", () => {
    const question = { prompt: state.prompt, ...step(), ...rival() };
    copy(qk.python(model.model, question, changed?.calls ?? []));
  });
  $("link").addEventListener("click", () => copy(location.href));
  $("cancel").addEventListener("click", cancel);
  $("map-fold").addEventListener("toggle", drawMap);
  $("pattern-fold").addEventListener("toggle", () => quietly(drawPattern()));
  $("patterns-fold").addEventListener("toggle", () => $("patterns-fold").open && quietly(drawPatterns()));
  $("circuit-fold").addEventListener("toggle", () => $("circuit-fold").open && quietly(drawCircuit()));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    const typing = event.target.matches("input, textarea, select");
    if (event.key.toLowerCase() === "z" && (event.ctrlKey || event.metaKey) && !typing && state.changes.length) {
      event.preventDefault();
      move({ changes: state.changes.slice(0, -1) });
    }
  });
  // an address that cannot be shown gives its sentence, and the page of its prompt, or of an example
  async function load(given, how) {
    try {
      await go(given, how);
    } catch (error) {
      await go({ prompt: given.prompt }, "replace").catch(() => go({ prompt: model.examples[0] }, "replace"));
      refuse(error.message);
    }
  }
  addEventListener("popstate", () => {
    const given = qk.readAddress();
    if (given) quietly(load(given, "stay"));
  });
  quietly(
    (async () => {
      model = await qk.ask("model");
      const facts = [model.model, `${model.heads.length} heads`, model.folder];
      $("model").textContent = facts.filter(Boolean).join(" · ");
      $("examples").append(...model.examples.map((text, i) => make("option", { value: i }, visible(text).slice(0, 60))));
      places = new Map(model.heads.map((head, i) => [head, i]));
      setMode("key");
      const paint = (name) => {
        painted = name;
        drawMap();
      };
      const names = { attention: "attention", difference: "what the changes do" };
      $("painted").replaceChildren(...choose("coloured by", Object.keys(names), painted, paint, (name) => names[name]));
      const given = qk.readAddress() ?? { prompt: model.examples[0] };
      $("prompt").value = given.prompt;
      await load(given, "replace");
    })().catch((error) => refuse(error.message)),
  );
})();
