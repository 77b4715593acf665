"use strict";
// What all charts are made of. Whatever comes from data goes in as a text node or an attribute, never as markup, and
// sizes are real pixels: a chart is drawn again when its place changes width, so that words stay readable on a phone.
const qk = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const set = (node, given, children) => {
    for (const [name, value] of Object.entries(given || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(node.style, value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  };
  const make = (name, given, ...children) => set(document.createElement(name), given, children);
  const draw = (name, given, ...children) => set(document.createElementNS(SVG, name), given, children);
  const number = (value, digits = 3) => {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value) && digits === 3) return String(value);
    const size = Math.abs(value);
    const text = size !== 0 && size < 0.001 ? value.toExponential(1) : value.toPrecision(digits);
    return (size >= 0.001 || size === 0 ? String(Number(text)) : text).replace("-", "−");
  };
  const fixed = (value, digits = 2) =>
    value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−");
  const signed = (value, digits = 1) => (value > 0 ? "+" : "") + fixed(value, digits);
  const pretty = (name) => name.replaceAll("_", " ");
  const percent = (value, digits = 0) =>
    value === null || value === undefined ? "–" : `${fixed(Number((100 * value).toFixed(digits)) || 0, digits)}%`;
  const visible = (text) => {
    const shown = text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
    return text === "" ? "∅" : text.trim() === "" ? shown.replace(/[ \u00a0]/g, "␣") : shown;
  };
  const quoted = (text) => `'${visible(text)}'`; // a token in running prose
  const piece = (text) => visible(text.trim() === "" ? text : text.trim());
  // a sentence whose lines do not break between a quote and the blank of its token
  const unbroken = (text) =>
    text.split(/(?<!\w)(' +[^' ]+'?)/).map((part, i) => (i % 2 ? make("span", { class: "quoted" }, part) : part));

  // ------------------------------------------------------------------ a colour for a share: viridis
  const VIRIDIS = [
    [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99],
    [170, 220, 50], [253, 231, 37],
  ];
  const viridis = (share) => {
    const at = Math.max(0, Math.min(1, share || 0)) * (VIRIDIS.length - 1);
    const low = Math.min(Math.floor(at), VIRIDIS.length - 2);
    const mixed = VIRIDIS[low].map((value, i) => Math.round(value + (at - low) * (VIRIDIS[low + 1][i] - value)));
    return `rgb(${mixed.join(",")})`;
  };
  const isDark = () =>
    (document.documentElement.dataset.theme ||
      (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

  // ------------------------------------------------------------------ the note beside the pointer, read out when it changes
  const swatch = (background, kind = "") => make("span", { class: `swatch ${kind}`, style: { background } });
  const noted = ([name, value, colour]) =>
    value === undefined
      ? make("div", {}, make("b", {}, name))
      : make("div", {}, make("span", {}, colour ? swatch(colour) : null, name), make("span", {}, value));
  const tip = {
    show(lines, x, y) {
      const note = document.getElementById("tip");
      note.replaceChildren(...lines.map(noted));
      note.hidden = false;
      const { width, height } = note.getBoundingClientRect();
      note.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
      note.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
    },
    hide() {
      document.getElementById("tip").hidden = true;
    },
  };
  // a mouse points by moving, a finger by touching
  const pointed = (lines) => {
    const show = (event) => tip.show(lines, event.clientX, event.clientY);
    return { onpointermove: show, onpointerdown: show, onpointerleave: tip.hide };
  };
  // the same for a whole chart: find says what an event is at, or null
  const follow = (node, find, look, leave = tip.hide) => {
    for (const kind of ["pointermove", "pointerdown"])
      node.addEventListener(kind, (event) => {
        const at = find(event);
        at === null ? leave() : look(at, event.clientX, event.clientY);
      });
    node.addEventListener("pointerleave", leave);
    node.addEventListener("blur", leave);
  };
  const near = (node) => {
    const box = node.getBoundingClientRect();
    return [box.left + box.width / 2, box.bottom - 8];
  };

  // ------------------------------------------------------------------ small pieces
  const redraw = (element, render) => {
    let width = 0;
    const again = () => {
      const { paddingLeft, paddingRight } = getComputedStyle(element),
        now = Math.floor(element.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight));
      if (now > 0 && now !== width) {
        width = now;
        render(now);
      }
    };
    new ResizeObserver(again).observe(element);
    again();
    return () => {
      width = 0;
      again();
    };
  };
  const button = (words, onclick, given = {}) => make("button", { type: "button", onclick, ...given }, ...[words].flat());
  // one of several: buttons that say which is pressed
  const choose = (label, names, chosen, change, show = pretty, colours = {}) => {
    const press = (name) => {
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(names[i] === name)));
      change(name);
    };
    const buttons = names.map((name) => {
      const given = { type: "button", "aria-pressed": String(name === chosen), onclick: () => press(name) };
      return make("button", given, colours[name] ? swatch(colours[name]) : null, show(name));
    });
    return [make("span", { class: "of" }, label), ...buttons];
  };
  // buttons for the heads of some rows, where there are several; gives the rows of the one that is pressed
  const byHead = (rows, bar, change) => {
    const heads = [...new Set(rows.map((row) => row.head))];
    let chosen = heads[0];
    const pick = (head) => {
      chosen = head;
      change();
    };
    if (heads.length > 1) bar.append(...choose("head", heads, chosen, pick));
    return () => rows.filter((row) => row.head === chosen);
  };
  // a button that puts a name into a set, or takes it out
  const toggle = (set, name, pressed, change, given, ...children) => {
    const onclick = () => {
      if (!set.delete(name)) set.add(name);
      button.setAttribute("aria-pressed", String(pressed()));
      change();
    };
    const button = make("button", { type: "button", "aria-pressed": String(pressed()), ...given, onclick }, ...children);
    return button;
  };
  const legend = (...entries) =>
    make("div", { class: "legend" }, ...entries.map(([mark, words]) => make("span", {}, mark, words)));
  const stroke = (colour, width, dash = null) =>
    draw(
      "svg",
      { class: "stroke", width: 26, height: 8, "aria-hidden": "true" },
      draw("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke: colour, "stroke-width": width, "stroke-dasharray": dash }),
    );
  // rows of cells, the last one a number
  const table = (titles, rows, isSoft = () => false) => {
    const last = (i) => (i === titles.length - 1 ? "n" : null);
    const line = (row) => row.map((cell, i) => make("td", { class: last(i) }, ...[cell].flat()));
    return make(
      "table",
      { class: "best" },
      make("thead", {}, make("tr", {}, ...titles.map((title, i) => make("th", { scope: "col", class: last(i) }, title)))),
      make("tbody", {}, ...rows.map((row, i) => make("tr", { class: isSoft(i) ? "soft" : null }, ...line(row)))),
    );
  };
  // horizontal lines of a chart, with their numbers at the left
  const rules = (svg, values, y, left, right, show = (value) => String(value).replace("-", "−")) => {
    for (const value of values)
      svg.append(
        draw("line", { class: "axis", x1: left, x2: right, y1: y(value), y2: y(value) }),
        draw("text", { class: "soft", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, show(value)),
      );
  };
  const ticks = (low, high, count = 5) => {
    const raw = (high - low) / count || 1,
      base = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * base).find((value) => value >= raw);
    const values = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step)
      values.push(Number(at.toPrecision(10)));
    return values;
  };

  return {
    charts: {}, // kind of block -> (element, rows, options): each script adds its own
    ...{ make, draw, number, fixed, signed, percent, pretty, visible, quoted, piece, unbroken, viridis, isDark, swatch, legend, stroke, table },
    ...{ tip, pointed, follow, near, redraw, button, choose, byHead, toggle, ticks, rules },
  };
})();
