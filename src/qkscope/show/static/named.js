"use strict";
// What is known of one head by name: its logit as one bar of blocks, the curve over distances, and texts, each with the
// command that asks why. Built when it is opened.
(() => {
  const { make, draw, fixed, percent, tip, redraw, ticks } = qk;
  const span = (low, high) => (low === null || low === undefined ? "" : ` [${percent(low)}, ${percent(high)}]`);
  const figure = (words, ...inside) => make("figure", {}, make("figcaption", {}, words), ...inside);
  qk.interval = (value, low, high) => (value === null || value === undefined ? "–" : percent(value) + span(low, high));
  qk.familyColours = (families) => ({ ...qk.partColours(families), others: "var(--band)", sham: "repeating-linear-gradient(135deg, var(--ink) 0 2px, var(--paper) 2px 4px)", rest: "var(--rest)" });

  // blocks side by side from zero on, the largest first; negative shares stand left of zero
  qk.stack = (bar) => {
    const colours = qk.familyColours(bar.map(([, family]) => family).filter((name) => !["others", "sham", "rest"].includes(name))),
      total = (some) => some.reduce((sum, part) => sum + Math.abs(part[2]), 0),
      against = bar.filter((part) => part[2] < 0),
      left = total(against),
      wide = left + total(bar.filter((part) => part[2] >= 0)) || 1,
      at = (value) => `${((100 * value) / wide).toFixed(3)}%`;
    let [before, after] = [left, left];
    const drawn = bar.map(([words, family, share, low, high]) => {
      const size = Math.abs(share);
      const from = share < 0 ? (before -= size) : after;
      if (share >= 0) after += size;
      const lines = [[words], ["share", qk.interval(share, low, high)]];
      return make("i", { class: family === "sham" ? "sham" : "", style: { left: at(from), width: at(size), background: colours[family] }, ...qk.pointed(lines) });
    });
    return make(
      "div",
      {},
      make("div", { class: "stack", "aria-hidden": "true" }, ...drawn, left ? make("b", { style: { left: at(left) } }) : null),
      make(
        "ul",
        { class: "blocks" },
        ...bar.map(([words, family, share, low, high]) =>
          make("li", {}, make("span", { class: "swatch", style: { background: colours[family] } }), `${words} `, make("b", {}, percent(share)), span(low, high)),
        ),
      ),
    );
  };

  // the logit by distance, and the part of it that is of distance alone; near distances have more room
  const TICKS = [0, 1, 2, 4, 8, 16, 32, 64];
  qk.distances = (place, distances, packed) => {
    const [logit, mean, attention] = packed.map((values, i) => values.map((value) => value / [100, 100, 1000][i]));
    const lines = { "the whole logit": [logit, "var(--original)", 4], "of distance alone": [mean, "var(--target)", 1.6] };
    redraw(place, (given) => {
      const [width, left, top, high, strip] = [Math.min(given, 560), 36, 8, 130, 40],
        all = [...logit, ...mean],
        [low, most] = [Math.min(...all), Math.max(...all)],
        far = Math.sqrt(distances.at(-1)) || 1,
        x = (d) => left + ((width - left - 14) * Math.sqrt(d)) / far,
        y = (value) => top + (high * (most - value)) / (most - low || 1),
        end = top + high + strip + 14,
        peak = Math.max(...attention) || 1;
      const svg = draw("svg", { width, height: end + 32, role: "img", "aria-label": `Logit and attention by distance, 0 to ${distances.at(-1)} tokens back` });
      for (const value of ticks(low, most, 4))
        svg.append(
          draw("line", { class: "axis", x1: left, x2: width - 8, y1: y(value), y2: y(value) }),
          draw("text", { class: "soft", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, String(value).replace("-", "−")),
        );
      for (const d of TICKS.filter((each) => each <= distances.at(-1)))
        svg.append(draw("text", { class: "soft", x: x(d), y: end + 14, "text-anchor": "middle" }, String(d)));
      svg.append(
        draw("line", { class: "axis", x1: left, x2: width - 8, y1: end, y2: end }),
        draw("text", { class: "soft", x: left, y: end + 29 }, "tokens back; bars: attention"),
      );
      for (const [values, colour, thick] of Object.values(lines))
        svg.append(draw("polyline", { points: distances.map((d, i) => `${x(d).toFixed(1)},${y(values[i]).toFixed(1)}`).join(" "), fill: "none", stroke: colour, "stroke-width": thick, "stroke-linejoin": "round" }));
      distances.forEach((d, i) => {
        const tall = (strip * attention[i]) / peak;
        svg.append(draw("rect", { x: x(d) - 1.5, y: end - tall, width: 3, height: tall, fill: "var(--soft)" }));
      });
      const meant = (event) => {
        const px = event.clientX - svg.getBoundingClientRect().left,
          i = distances.reduce((best, d, j) => (Math.abs(x(d) - px) < Math.abs(x(distances[best]) - px) ? j : best), 0);
        tip.show([[`${distances[i]} back`], ...Object.entries(lines).map(([name, [values, colour]]) => [name, fixed(values[i]), colour]), ["attention", fixed(attention[i], 3)]], event.clientX, event.clientY);
      };
      svg.addEventListener("pointermove", meant);
      svg.addEventListener("pointerdown", meant);
      svg.addEventListener("pointerleave", tip.hide);
      place.replaceChildren(svg);
    });
    return make("p", { class: "legend" }, ...Object.entries(lines).map(([name, [, colour]]) => make("span", {}, make("i", { class: "swatch", style: { background: colour } }), name)));
  };

  // ------------------------------------------------------------------ from a text to why
  const quoted = (text) => `'${text.replaceAll("'", "'\\''").replaceAll("\n", "\\n")}'`;
  const typed = (row) => Number.isInteger(row.query_at) && Number.isInteger(row.key_at) && !row.text.includes("\\n");
  qk.whyCommand = (head, row, model) =>
    ["qkscope why", quoted(row.text), "--head", head, "--query", row.query_at, "--key", row.key_at, ...(!model || model === "smollm2-135m" ? [] : ["--model", quoted(model)])].join(" ");
  const state = (head, row) => `#${new URLSearchParams({ p: row.text, q: row.query_at, h: head, k: row.key_at })}`;
  let live = ""; // where the live page is, if the reader said so
  const aim = (link) => {
    link.hidden = !live;
    if (live) link.href = live + link.dataset.state;
  };
  qk.livePage = (model) =>
    make(
      "label",
      { class: "live" },
      "to follow texts into the live page, run ",
      make("code", {}, `qkscope view --live${!model || model === "smollm2-135m" ? "" : ` --model ${quoted(model)}`}`),
      " and give its address: ",
      make("input", {
        type: "url",
        placeholder: "http://127.0.0.1:…",
        oninput(event) {
          const given = event.target.value.trim().split("#")[0];
          live = /^http:\/\/(127\.0\.0\.1|localhost):\d+\/[\w-]+\/$/.test(given) ? given : "";
          document.querySelectorAll("a[data-state]").forEach(aim);
        },
      }),
    );
  const example = (head, row, model) => {
    const own = [qk.passage(row)],
      told = `${percent(row.attention)} of its attention${row.document ? `, in ${row.document}` : ""}`;
    if (!typed(row)) return make("div", { class: "example" }, ...own, make("p", { class: "facts" }, `${told}.`));
    const command = qk.whyCommand(head, row, model),
      link = make("a", { "data-state": state(head, row), target: "_blank", rel: "noopener" }, "live page");
    aim(link);
    const button = make(
      "button",
      {
        type: "button",
        "aria-label": "Copy the command that asks why",
        async onclick() {
          button.textContent = (await qk.copied(command)) ? "copied" : "not allowed";
          setTimeout(() => (button.textContent = "copy"), 1200);
        },
      },
      "copy",
    );
    return make("div", { class: "example" }, ...own, make("p", { class: "facts" }, `${told}. Why? `, make("code", { class: "command" }, command), " ", button, " ", link));
  };

  const BLOCKS =
    "Its logit comes apart into blocks: what can be read off the text at the asking token, with what can be read at the key. Sham: what a reading gets that should explain nothing, the token seven back. Rest: what no reading explains.";
  qk.named = (head, { bar, curve, examples, rule, facts }, distances, model) => {
    const place = make("div", {});
    const parts = [figure(BLOCKS, qk.stack(bar))];
    if (distances.length && curve[0].length)
      parts.push(figure("By distance, each less its mean. Where the lines part, it matters what stands there, not how far back.", qk.distances(place, distances, curve), place));
    if (examples.length)
      parts.push(figure(`Where it attends most${rule ? ` to a key that keeps its rule (${rule})` : ""}, in tested texts, which are cut here: alone, the attention may differ.`, qk.marks(examples), ...examples.map((row) => example(head, row, model))));
    return make("div", { class: "named" }, ...parts, facts ? make("p", { class: "facts" }, facts) : null);
  };
})();
