"use strict";
// One colour for each name, wherever it is drawn: known names have their own, a reader's own names take one by their
// letters, and keep it as long as the page is open; of one that is taken, a deeper one. Each colour is for white paper and for dark. What stands between the
// marks is JSON: the papers' figures.py reads it for figures, and says the same rule.
(() => {
  const TABLE = /* table */ {
    "hues": {
      "turquoise": ["#1FA1AD", "#5FE3DC"], "purple": ["#A845B8", "#E592EC"], "rust": ["#8A1F00", "#F0602A"],
      "gold": ["#A29404", "#F7DC34"], "navy": ["#174789", "#3D8FE0"], "wine": ["#B0103F", "#FF7A80"],
      "olive": ["#857700", "#A9CF7C"], "violet": ["#5A12B8", "#7A5CFF"], "petrol": ["#145C67", "#3A8A9A"],
      "sand": ["#94896C", "#F2E0C0"], "blue": ["#3B6EA8", "#6FA3DD"], "orange": ["#D9822B", "#E9A055"],
      "grey": ["#6B7280", "#9AA2AF"], "pale": ["#B5BAC3", "#6D7480"], "ink": ["#22262E", "#E4E7EC"]
    },
    "named": {
      "order": "turquoise", "lexical": "purple", "box": "wine", "category": "turquoise", "next": "turquoise", "word": "purple",
      "subject": "turquoise", "name": "purple", "year": "turquoise", "half": "purple", "gender": "turquoise", "person": "purple",
      "key_pca": "gold", "cov_qk": "navy", "cov_qk_moving": "navy", "omega_svd": "sand", "random": "grey", "sham": "grey",
      "both": "ink", "all": "ink", "ceiling": "ink", "logit": "ink", "residual": "pale", "attention": "blue",
      "the right key": "blue", "another key": "pale",
      "induction": "turquoise", "duplicate token": "rust", "same word": "wine", "previous token": "navy", "position": "petrol",
      "self": "violet", "key word": "gold", "query word": "purple", "key and query words": "olive", "few words": "sand",
      "no few words": "blue", "no single word": "grey", "sink": "pale"
    },
    "others": ["violet", "olive", "petrol", "wine"],
    "spare": ["turquoise", "purple"],
    "labels": ["turquoise", "purple", "rust", "gold", "navy", "wine", "olive", "violet"],
    "lines": {"key_pca": "dashed", "cov_qk": "dashed", "cov_qk_moving": "dashed", "omega_svd": "dashed", "random": "dotted", "ceiling": "dotted"}
  } /* table */;
  const met = new Map(); // names that were drawn here, with their hue and how deep it is
  const DASHES = { dashed: "7 3", dotted: "1 3" };

  const hash = (name) =>
    new TextEncoder().encode(name).reduce((sum, byte) => Math.imul(sum ^ byte, 16777619) >>> 0, 2166136261);
  const choose = (name) => {
    if (Object.hasOwn(TABLE.named, name)) return [TABLE.named[name], 0];
    const start = hash(name) % TABLE.others.length,
      turn = [...TABLE.others.slice(start), ...TABLE.others.slice(0, start), ...TABLE.spare],
      taken = (hue) => [...met.values()].filter(([each]) => each === hue).length;
    const hue = turn.find((each) => !taken(each)) ?? turn.reduce((a, b) => (taken(b) < taken(a) ? b : a));
    return [hue, taken(hue)];
  };
  const css = (name) => {
    const [hue, deep] = met.get(name),
      plain = `light-dark(${TABLE.hues[hue].join(", ")})`;
    return deep ? `color-mix(in srgb, ${plain} ${(100 * 0.65 ** deep).toFixed(1)}%, var(--ink))` : plain;
  };

  // known names first, so that they keep their hues to themselves
  qk.partColours = (names) => {
    const known = (name) => Object.hasOwn(TABLE.named, name);
    for (const name of [...names.filter(known), ...names.filter((each) => !known(each))])
      if (!met.has(name)) met.set(name, choose(name));
    return Object.fromEntries(names.map((name) => [name, css(name)]));
  };
  qk.dash = (name) => DASHES[TABLE.lines[name]];
})();
