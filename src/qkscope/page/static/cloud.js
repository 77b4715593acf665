"use strict";
// Keys and queries as points that can be turned: the one thing that plotly does here.
(() => {
  const { make, choose, viridis, isDark } = qk;
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"); // plotly reads markup

  // a row for each point, with its label in every colouring
  function* pointsOf({ name, keys, queries, colourings }) {
    for (const [side, points, of] of [
      ["key", keys, "keys"],
      ["query", queries, "queries"],
    ])
      for (const [i, [x, y, z]] of points.entries()) {
        const labels = Object.entries(colourings).map(([by, each]) => [by, each.names[each[of][i]] ?? null]);
        yield { cloud: name, side, x, y, z, ...Object.fromEntries(labels) };
      }
  }

  qk.charts.cloud = (element, rows, { panels }) => {
    for (const panel of panels) rows.push(...pointsOf(panel)); // what the reader can copy
    const stage = make("div", {
      class: "stage",
      tabindex: 0,
      role: "application",
      "aria-label": "Keys and queries in three dimensions. Arrow keys turn, plus and minus zoom.",
    });
    const bar = make("div", { class: "choices" });
    let name = panels[0].name,
      by = Object.keys(panels[0].colourings)[0];
    const render = () => {
      const panel = panels.find((each) => each.name === name);
      if (!panel.colourings[by]) by = Object.keys(panel.colourings)[0];
      bar.replaceChildren(
        ...(panels.length > 1
          ? choose(
              "feature",
              panels.map((p) => p.name),
              name,
              (next) => {
                name = next;
                render();
              },
            )
          : []),
        ...(Object.keys(panel.colourings).length > 1
          ? choose("colour", Object.keys(panel.colourings), by, (next) => {
              by = next;
              render();
            })
          : []),
      );
      const { names, ordered } = panel.colourings[by];
      const css = getComputedStyle(document.documentElement),
        ink = css.getPropertyValue("--ink").trim(),
        line = css.getPropertyValue("--line").trim();
      const dark = isDark();
      const palette = ordered
        ? names.map((_, i) => viridis((dark ? 0.25 : 0) + ((dark ? 0.75 : 0.92) * i) / Math.max(names.length - 1, 1)))
        : names.map(
            (_, i) =>
              ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8c6d5a", "#7a7f87"][
                i % 9
              ],
          );
      const traces = [];
      for (const [index, label] of [...names.entries(), [-1, null]])
        for (const side of ["key", "query"]) {
          const own = rows.filter((row) => row.cloud === name && row.side === side && row[by] === label);
          if (!own.length) continue;
          traces.push({
            type: "scatter3d",
            mode: "markers",
            name: label === null ? "other" : escaped(label),
            legendgroup: String(label),
            showlegend: side === "key" || !rows.some((r) => r.cloud === name && r.side === "key" && r[by] === label),
            x: own.map((r) => r.x),
            y: own.map((r) => r.y),
            z: own.map((r) => r.z),
            text: own.map((row) =>
              Object.keys(panel.colourings)
                .map((key) => `${escaped(key)}: ${escaped(String(row[key] === null ? "other" : row[key]))}`)
                .join("<br>"),
            ),
            hovertemplate: `<b>${side}</b><br>%{text}<extra></extra>`,
            marker: {
              size: side === "key" ? 3.5 : 6,
              symbol: side === "key" ? "circle" : "diamond",
              color: index < 0 ? css.getPropertyValue("--rest").trim() : palette[index],
              opacity: index < 0 ? 0.3 : side === "key" ? 0.75 : 1,
              line: { width: side === "key" ? 0 : 1, color: ink },
            },
          });
        }
      const axis = (i) => ({
        title: { text: `PC ${i}`, font: { size: 11 } },
        showticklabels: false,
        gridcolor: line,
        zerolinecolor: line,
        showbackground: false,
        showspikes: false,
      });
      const camera = stage.layout && stage.layout.scene && stage.layout.scene.camera;
      Plotly.react(
        stage,
        traces,
        {
          margin: { l: 0, r: 0, t: 0, b: 0 },
          paper_bgcolor: "rgba(0,0,0,0)",
          font: { color: ink, family: "system-ui, sans-serif", size: 12 },
          uirevision: "same",
          scene: {
            xaxis: axis(1),
            yaxis: axis(2),
            zaxis: axis(3),
            aspectmode: "cube",
            camera: camera || { eye: { x: 1.3, y: 1.3, z: 0.7 } },
            dragmode: "orbit",
          },
          hoverlabel: {
            bgcolor: ink,
            font: { color: css.getPropertyValue("--paper").trim(), size: 12 },
            bordercolor: ink,
          },
          legend: {
            orientation: "v",
            x: 0,
            y: 1,
            itemsizing: "constant",
            bgcolor: "rgba(0,0,0,0)",
            title: { text: `${escaped(by)}<br><sup>● key  ◆ query</sup>`, font: { size: 12 } },
          },
        },
        { displayModeBar: false, responsive: true },
      );
    };
    stage.addEventListener("keydown", (event) => {
      const turn = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, 0.15], ArrowDown: [0, -0.15] }[
        event.key
      ];
      const zoom = { "+": 0.9, "=": 0.9, "-": 1.1 }[event.key];
      if (!turn && !zoom) return;
      event.preventDefault();
      const { x, y, z } = stage._fullLayout.scene.camera.eye,
        r = Math.hypot(x, y, z) * (zoom || 1);
      const round = Math.atan2(y, x) + (turn ? turn[0] : 0),
        up = Math.max(-1.5, Math.min(1.5, Math.asin(z / Math.hypot(x, y, z)) + (turn ? turn[1] : 0)));
      Plotly.relayout(stage, {
        "scene.camera.eye": {
          x: r * Math.cos(up) * Math.cos(round),
          y: r * Math.cos(up) * Math.sin(round),
          z: r * Math.sin(up),
        },
      });
    });
    element.replaceChildren(bar, stage);
    // drawn when it comes near, so that the page is there at once
    new IntersectionObserver(
      (seen, watcher) => {
        if (seen.some((each) => each.isIntersecting)) {
          watcher.disconnect();
          render();
        }
      },
      { rootMargin: "300px" },
    ).observe(stage);
    document.addEventListener("qk-theme", () => stage.data && render());
  };
})();
