"use strict";
// One colour for each name, wherever it is drawn: known names have their own, a reader's own names take one by their
// letters, and keep it as long as the page is open. Each colour is for white paper and for dark. What stands between the
// marks is JSON: page/colours.py reads it for figures, and says the same rule.
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
      "self_contrast": "rust", "key_pca": "gold", "cov_qk": "navy", "omega_svd": "sand", "random": "grey", "sham": "grey",
      "both": "ink", "all": "ink", "ceiling": "ink", "logit": "ink", "residual": "pale", "attention": "blue",
      "the right key": "blue", "another key": "pale"
    },
    "others": ["violet", "olive", "petrol", "wine"],
    "spare": ["turquoise", "purple"],
    "labels": ["turquoise", "purple", "rust", "gold", "navy", "wine", "olive", "violet"],
    "lines": {"key_pca": "dashed", "cov_qk": "dashed", "omega_svd": "dashed", "random": "dotted", "ceiling": "dotted"}
  } /* table */;
  const met = new Map(); // names that were drawn here, and their hues
  const DASHES = { dashed: "7 3", dotted: "1 3" };

  const hash = (name) =>
    new TextEncoder().encode(name).reduce((sum, byte) => Math.imul(sum ^ byte, 16777619) >>> 0, 2166136261);
  const hueOf = (name) => {
    if (!met.has(name)) {
      const start = hash(name) % TABLE.others.length;
      const turn = [...TABLE.others.slice(start), ...TABLE.others.slice(0, start), ...TABLE.spare];
      const taken = [...met.values()];
      const free = turn.find((hue) => !taken.includes(hue)) ?? turn[0];
      met.set(name, Object.hasOwn(TABLE.named, name) ? TABLE.named[name] : free);
    }
    return met.get(name);
  };
  const css = (hue) => `light-dark(${TABLE.hues[hue].join(", ")})`;

  // known names first, so that they keep their hues to themselves
  qk.partColours = (names) => {
    [...names].sort((a, b) => Object.hasOwn(TABLE.named, b) - Object.hasOwn(TABLE.named, a)).forEach(hueOf);
    return Object.fromEntries(names.map((name) => [name, css(hueOf(name))]));
  };
  qk.dash = (name) => DASHES[TABLE.lines[name]];
  // for a canvas, which knows no themes: the labels of points, one after the other
  qk.labelColours = (labels) =>
    labels.map((label, i) => {
      const own = Object.hasOwn(TABLE.named, label) && labels.every((each) => Object.hasOwn(TABLE.named, each));
      return TABLE.hues[own ? TABLE.named[label] : TABLE.labels[i % TABLE.labels.length]][Number(qk.isDark())];
    });
})();
