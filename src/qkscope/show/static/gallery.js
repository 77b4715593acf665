"use strict";
// The index of a gallery: cards, heads and claims that do not hold what is asked for are hidden.
(() => {
  const form = document.getElementById("filters"),
    words = document.getElementById("words"),
    shown = form.querySelector("output"),
    choices = [...form.querySelectorAll("select")],
    cards = [...document.querySelectorAll(".card")],
    of = new Map(cards.map((card) => [card.id, card.dataset.what])); // a claim is of its run's kind
  // what is drawn on a card is not searched
  const told = (node) => [...node.children].filter((each) => !each.matches(".thumbnail")).map((each) => each.textContent);
  const all = [...document.querySelectorAll(".found")].map((node) => ({ node, text: told(node).join(" ").toLowerCase() }));
  const kind = ({ dataset }, name) => (name === "what" && dataset.run ? of.get(`run-${dataset.run}`) : dataset[name]);
  const filter = () => {
    const asked = words.value.toLowerCase().split(/\s+/).filter(Boolean),
      chosen = choices.filter(({ value }) => value);
    for (const { node, text } of all)
      node.hidden = !(
        asked.every((word) => text.includes(word)) &&
        chosen.every(({ value, dataset }) => [undefined, value].includes(kind(node, dataset.filter)))
      );
    for (const section of document.querySelectorAll("section.heads, section.claims, section.group"))
      section.hidden = !section.querySelector(".found:not([hidden])");
    shown.textContent = `${cards.filter((card) => !card.hidden).length} of ${cards.length} runs`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("pageshow", filter); // a browser that comes back may bring back what was asked
  form.hidden = false;
  filter();
})();
