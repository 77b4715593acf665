"use strict";
// A prompt that can be asked: tokens filled by attention, one that asks, one that is looked at. Pieces of one character
// are one token to the eye. Long prompts have a strip on which the whole of it is seen.
(() => {
  const { make, visible, piece, tip, near, fixed } = qk;
  const LONG = 300;

  // groups of places that read as one token
  qk.joined = (texts) => {
    const groups = [];
    texts.forEach((text, i) => (text === "" && groups.length ? groups[groups.length - 1].push(i) : groups.push([i])));
    return groups;
  };

  // onlook(place or -1), onpick(place, shift)
  qk.tokens = (element, { texts, onlook, onpick, strip }) => {
    const groups = qk.joined(texts),
      of = new Map(groups.flatMap((own, g) => own.map((i) => [i, g])));
    let row = [],
      at = -1,
      asking = -1;
    const chips = groups.map((own, g) => {
      const text = texts[own[0]];
      const fill = make("span", { class: "fill", "data-g": g }, visible(text));
      return make("span", { class: `token${text.trim() === "" ? " white" : ""}`, "data-g": g }, fill);
    });
    const box = make("div", {
      class: "prompt",
      tabindex: 0,
      role: "application",
      "aria-label": "The prompt, token by token. Arrow keys move, Enter picks, q asks from a token.",
    });
    box.append(...chips.flatMap((chip, g) => (texts[groups[g][0]].includes("\n") ? [chip, make("br")] : [chip])));
    const share = (g) => groups[g].reduce((sum, i) => sum + (row[i] || 0), 0);
    // of the pieces of a character, the one that is looked at most, and the last one to ask
    const place = (g) => groups[g].reduce((best, i) => ((row[i] || 0) > (row[best] || 0) ? i : best), groups[g][0]);
    const last = (g) => groups[g][groups[g].length - 1];
    const look = (g, x, y) => {
      if (at >= 0) chips[at].classList.remove("on");
      at = g;
      if (g < 0) {
        tip.hide();
        return onlook(-1);
      }
      chips[g].classList.add("on");
      const later = groups[g][0] > asking;
      tip.show(
        [[`${visible(texts[groups[g][0]])}  ·  token ${groups[g][0]}`], later ? ["after the token that asks", ""] : ["attention", fixed(share(g), 3)]],
        x,
        y + 14,
      );
      onlook(later ? -1 : place(g));
    };
    const pick = (g, shift) => onpick(shift ? last(g) : place(g), shift);
    const group = (event) => (event.target.dataset && event.target.dataset.g !== undefined ? Number(event.target.dataset.g) : -1);
    box.addEventListener("pointermove", (event) => {
      const g = group(event);
      if (g >= 0) look(g, event.clientX, event.clientY);
    });
    box.addEventListener("pointerleave", () => look(-1));
    box.addEventListener("blur", () => look(-1));
    box.addEventListener("click", (event) => group(event) >= 0 && pick(group(event), event.shiftKey));
    box.addEventListener("keydown", (event) => {
      if ((event.key === "Enter" || event.key === "q") && at >= 0) return pick(at, event.key === "q" || event.shiftKey);
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const next = Math.max(0, Math.min(chips.length - 1, (at < 0 ? (step > 0 ? -1 : chips.length) : at) + step));
      chips[next].scrollIntoView({ block: "nearest" });
      look(next, ...near(chips[next]));
    });
    element.replaceChildren(box);

    // the whole of a long prompt at a glance
    const long = groups.length > LONG;
    element.parentElement.classList.toggle("long", long);
    strip.hidden = !long;
    const canvas = make("canvas", { role: "img", "aria-label": "Attention along the prompt; click to go there." });
    strip.replaceChildren(canvas);
    const scrollTo = (g) => (element.scrollTop = chips[g].offsetTop - element.offsetTop - element.clientHeight / 2);
    canvas.addEventListener("click", (event) => {
      const x = (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth;
      scrollTo(Math.min(chips.length - 1, Math.floor(x * chips.length)));
    });
    const drawStrip = (key) => {
      if (!long) return;
      const [w, h] = [(canvas.width = canvas.clientWidth || 600), (canvas.height = 26)],
        pen = canvas.getContext("2d"),
        style = getComputedStyle(document.documentElement);
      const bins = new Float64Array(w);
      groups.forEach((own, g) => {
        const x = Math.floor((g / groups.length) * w);
        if (g) bins[x] = Math.max(bins[x], share(g));
      });
      const most = Math.max(1e-9, ...bins);
      pen.fillStyle = style.getPropertyValue("--original");
      bins.forEach((value, x) => pen.fillRect(x, h - (value / most) * (h - 4), 1.5, (value / most) * (h - 4)));
      for (const [i, colour] of [[key, "--ink"], [asking, "--target"]]) {
        pen.fillStyle = style.getPropertyValue(colour);
        pen.fillRect(Math.floor((of.get(i) / groups.length) * w) - 1, 0, 2, h);
      }
    };

    return {
      long,
      paint(values, query, key) {
        [row, asking] = [values, query];
        chips.forEach((chip, g) => {
          const part = Math.min(1, share(g)) ** 0.6,
            fill = chip.firstChild,
            mix = part > 0.05 ? `color-mix(in srgb, var(--original) ${(70 * part).toFixed(0)}%, transparent)` : "";
          if (fill.style.backgroundColor !== mix) fill.style.backgroundColor = mix;
          chip.classList.toggle("later", groups[g][0] > query);
          chip.classList.toggle("asks", of.get(query) === g);
          chip.classList.toggle("key", of.get(key) === g);
        });
        drawStrip(key);
      },
      show(i) {
        if (long) scrollTo(of.get(i));
      },
      text: (i) => piece(texts[groups[of.get(i)][0]]),
      focus: () => box.focus({ preventScroll: true }),
      focused: () => document.activeElement === box,
    };
  };
})();
