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
  const pretty = (name) => name.replaceAll("_", " ");
  const piece = (text) => visible(text.trim() === "" ? text : text.trim());
  const visible = (text) =>
    text === ""
      ? "∅"
      : text.trim() === ""
        ? text
            .replaceAll("\n", "↵")
            .replaceAll("\t", "⇥")
            .replace(/[ \u00a0]/g, "␣")
        : text.replaceAll("\n", "↵").replaceAll("\t", "⇥");

  // ------------------------------------------------------------------ a colour for a share: viridis
  const VIRIDIS = [
    [68, 1, 84],
    [71, 44, 122],
    [59, 81, 139],
    [44, 113, 142],
    [33, 144, 141],
    [39, 173, 129],
    [92, 200, 99],
    [170, 220, 50],
    [253, 231, 37],
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
  const tip = {
    show(lines, x, y) {
      const note = document.getElementById("tip");
      note.replaceChildren(
        ...lines.map(([name, value, colour]) =>
          value === undefined
            ? make("div", {}, make("b", {}, name))
            : make(
                "div",
                {},
                make(
                  "span",
                  {},
                  colour ? make("span", { class: "swatch", style: { background: colour } }) : null,
                  name,
                ),
                make("span", {}, value),
              ),
        ),
      );
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
  const near = (node) => {
    const box = node.getBoundingClientRect();
    return [box.left + box.width / 2, box.bottom - 8];
  };

  // ------------------------------------------------------------------ small pieces
  const redraw = (element, render) => {
    let width = 0;
    const again = () => {
      const now = Math.floor(element.clientWidth);
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
  // one of several: buttons that say which is pressed
  const choose = (label, names, chosen, change, show = pretty, colours = {}) => {
    const buttons = names.map((name) =>
      make(
        "button",
        {
          type: "button",
          "aria-pressed": String(name === chosen),
          onclick() {
            buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(names[i] === name)));
            change(name);
          },
        },
        colours[name] ? make("span", { class: "swatch", style: { background: colours[name] } }) : null,
        show(name),
      ),
    );
    return [make("span", { class: "of" }, label), ...buttons];
  };
  const ticks = (low, high, count = 5) => {
    const raw = (high - low) / count || 1,
      base = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * base).find((value) => value >= raw);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step)
      found.push(Number(at.toPrecision(10)));
    return found;
  };

  return {
    charts: {}, // kind of block -> (element, rows, options): each script adds its own
    make,
    draw,
    number,
    fixed,
    pretty,
    visible,
    piece,
    viridis,
    isDark,
    tip,
    pointed,
    near,
    redraw,
    choose,
    ticks,
  };
})();
