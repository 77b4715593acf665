"use strict";
// Questions to the server: an answer is the last line of a reply; lines before it say what is known early and what is
// under way. One question at a time: a new one, or Cancel, closes the connection of the old one, which ends its work.
(() => {
  const KEPT = 60; // answers, so that a step back costs nothing
  const memo = new Map();
  let controller = new AbortController();

  const lines = async function* (body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { value, done } = await reader.read();
      const parts = (held + (value ?? "")).split("\n");
      held = done ? "" : parts.pop();
      yield* parts.filter(Boolean).map((line) => JSON.parse(line));
      if (done) return;
    }
  };

  // early(part) is shown before the answer is whole; doing(text) says how far it is
  qk.ask = async (what, question = null, { early = () => {}, doing = () => {} } = {}) => {
    const name = JSON.stringify([what, question]);
    if (memo.has(name)) return memo.get(name);
    const { signal } = controller;
    const headers = { "Content-Type": "application/json" },
      sent = question ? { method: "POST", headers, body: JSON.stringify(question) } : {};
    let answer = null;
    try {
      const reply = await fetch(`api/${what}`, { ...sent, signal });
      for await (const line of lines(reply.body)) {
        if (line.doing) doing(line.doing);
        else if (line.early) early(line.early);
        else answer = line;
      }
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("qkscope does not answer any more: start it again.");
    }
    if (!answer) throw new Error("qkscope stopped in the middle of an answer: ask again.");
    if (answer.error) throw new Error(answer.error);
    memo.set(name, answer);
    if (memo.size > KEPT) memo.delete(memo.keys().next().value);
    return answer;
  };
  qk.cancel = () => {
    controller.abort();
    controller = new AbortController();
  };
  // a byte for each number
  qk.bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
})();
