"use strict";
// What the live page shows, as text: its address, the prompt with the words that were typed over others, and Python.
(() => {
  const number = (text) => (/^\d+$/.test(text ?? "") ? Number(text) : null);

  // path: steps of head, query and key
  qk.address = ({ prompt, query, versus, path, changes }) => {
    const given = new URLSearchParams({ p: prompt, q: query });
    if (versus !== null) given.set("v", versus);
    for (const { head, query: from, key } of path) given.append("s", `${head}.${from}.${key}`);
    for (const change of changes) given.append("c", change);
    return `#${given}`;
  };
  qk.readAddress = () => {
    const given = new URLSearchParams(location.hash.slice(1)),
      prompt = given.get("p");
    const path = given.getAll("s").map((text) => {
      const [head, query, key] = text.split(".");
      return { head, query: number(query) ?? 0, key: number(key) };
    });
    const rest = { query: number(given.get("q")), versus: given.get("v"), path, changes: given.getAll("c") };
    return prompt ? { prompt, ...rest } : null;
  };

  // words that were typed over others, by place
  qk.typed = (changes) => {
    const found = changes.map((text) => /^replace (\d+) (.*)$/s.exec(text)).filter(Boolean);
    return new Map(found.map(([, place, text]) => [Number(place), text]));
  };
  // the prompt with them: some tokenizers leave out the blanks between words, and the model's own beginning is not typed
  qk.rewritten = ({ prompt, changes }, tokens) => {
    const others = qk.typed(changes),
      texts = tokens.map((text, i) => others.get(i) ?? text);
    return texts.slice(/^<.*>$/.test(tokens[0]) ? 1 : 0).join(tokens.join("").endsWith(prompt) ? "" : " ");
  };

  // a string of JSON is one of Python
  qk.python = (model, { prompt, head, query, key, versus = null }, calls) => {
    const quoted = (value) => JSON.stringify(value),
      hidden = calls.some(([name, args]) => name === "hide" && args.join() === [head, key, query].join()),
      asked = [`"${head}"`, `query=${query}`];
    if (!hidden) asked.push(`key=${key}`); // what is hidden cannot be asked about
    if (versus !== null) asked.push(`versus=${quoted(versus)}`);
    const ask = `print(qk.why(scope, ${[quoted(prompt), ...asked].join(", ")}))`;
    const call = ([name, [first, ...more]]) => {
      const rest = name === "hide" ? [`key=${more[0]}`, `query=${more[1]}`] : more.map(quoted);
      return `scope.${name}(${[quoted(first), ...rest].join(", ")})`;
    };
    const lines = calls.length ? [`with ${calls.map(call).join(", ")}:`, `    ${ask}`] : [ask];
    return ["import qkscope as qk", "", `scope = qk.Scope.load(${quoted(model)})`, ...lines, ""].join("\n");
  };
})();
