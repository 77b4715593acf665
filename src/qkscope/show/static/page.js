"use strict";
// The page: every block's data becomes its chart and its two copy buttons; the theme button overrides the system's choice.
(() => {
  const { make, isDark } = qk;
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const csv = (rows) => {
    const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
    const lines = [columns, ...rows.map((row) => columns.map((name) => row[name]))];
    return lines.map((line) => `${line.map(cell).join(",")}\r\n`).join("");
  };
  qk.copied = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      /* not allowed here: the old way */
    }
    const area = make("textarea", { style: { position: "fixed", opacity: 0 } });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  qk.copyButtons = (place, rows) => {
    for (const [name, text] of [["CSV", () => csv(rows())], ["JSON", () => JSON.stringify(rows(), null, 1)]]) {
      const onclick = async () => {
        button.textContent = (await qk.copied(text())) ? "copied" : "not allowed";
        setTimeout(() => (button.textContent = name), 1200);
      };
      const button = make("button", { type: "button", "aria-label": `Copy the data as ${name}`, onclick }, name);
      place.append(button);
    }
  };

  const fill = (block, { kind, rows, options }) => {
    const copy = block.querySelector(".copy"),
      place = block.querySelector(".chart");
    if (copy) qk.copyButtons(copy, () => rows);
    try {
      qk.charts[kind](place, rows, options);
    } catch (error) {
      console.error(error); // and on to the other charts
      place.replaceChildren(make("p", { class: "words" }, "These numbers cannot be drawn; they can be copied."));
    }
  };
  // a block that came after the page, folded
  qk.block = (data, open = true) => {
    const words = data.words ? make("details", { class: "words" }, make("summary", {}, "How to read it"), data.words) : null,
      chart = make("div", { class: "chart" }),
      below = make("div", { class: "below" }, words, make("div", { class: "copy" })),
      block = make("details", { class: `fold block ${data.kind}` }, make("summary", {}, data.title), chart, below);
    block.open = open;
    fill(block, data);
    return block;
  };
  for (const sentence of document.querySelectorAll(".answer, .lead"))
    sentence.replaceChildren(...qk.unbroken(sentence.textContent));
  for (const stored of document.querySelectorAll("script.data"))
    fill(stored.parentElement, JSON.parse(stored.textContent));
  for (const claims of document.querySelectorAll("section.claims")) {
    const names = [...claims.querySelectorAll("th")].map((th) => th.textContent);
    qk.copyButtons(claims.querySelector(".copy"), () =>
      [...claims.querySelectorAll("tbody tr")].map((tr) =>
        Object.fromEntries([...tr.cells].map((td, i) => [names[i], td.textContent])),
      ),
    );
  }
  const repaint = () => document.dispatchEvent(new Event("qk-theme"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  document.getElementById("theme")?.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    repaint();
  });
  // a link may name a head, a claim or a prompt: what is folded opens, a chart of one head at a time shows it, and one of
  // all heads finds it
  const seek = () => {
    const name = location.hash.slice(1),
      place = document.getElementById(name);
    for (let folded = place?.closest("details"); folded; folded = folded.parentElement.closest("details")) folded.open = true;
    place?.scrollIntoView({ block: "center" });
    for (const button of place?.closest("section")?.querySelectorAll(".choices button") ?? []) if (button.textContent === name) button.click();
    if (/^L\d+H\d+$/.test(name)) document.dispatchEvent(new CustomEvent("qk-head", { detail: name }));
  };
  addEventListener("hashchange", seek);
  if (location.hash) addEventListener("load", seek);
  // in a notebook the page is a frame, and says how tall it is
  if (document.documentElement.classList.contains("bare")) {
    const tell = () => parent.postMessage(Math.ceil(document.body.getBoundingClientRect().height), "*");
    addEventListener("load", () => setTimeout(() => new ResizeObserver(tell).observe(document.body), 50));
  }
})();
