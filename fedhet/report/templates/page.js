"use strict";
// Draws the charts of a page with Plotly, and follows the runs of a live one.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const number = (value) => Number(value.toPrecision(4)).toLocaleString("en");
const DASHES = ["solid", "7px,3px", "2px,2px", "9px,3px,2px,3px"]; // as STYLES in colors.py
const OPTIONS = { responsive: true, displaylogo: false, displayModeBar: false };

function traces(data, line, axis, hidden, place) {
  const x = data.x[line.x[axis]], color = css(`line-${line.color}`), visible = !hidden.has(line.label);
  if (!x.length) return [];
  const width = line.completed ? 3 - 1.4 * place : 1.1, // equal lines stay visible
     few = x.length === 1;
  const range = (n) => (line.low ? ` (${number(line.low[n])} to ${number(line.high[n])}, ${line.runs} runs)` : "");
  const name = plain(line.label) + (line.completed ? "" : ", not completed");
  const text = x.map((at, n) => `<b>${name}</b><br>${plain(data.axes[axis])} ${number(at)}: ${number(line.y[n])}${range(n)}`);
  const found = [];
  if (line.low) {
    found.push({ x: [...x, ...[...x].reverse()], y: [...line.high, ...[...line.low].reverse()], fill: "toself",
      fillcolor: color, opacity: 0.16, line: { width: 0 }, hoverinfo: "skip", visible, mode: "lines" });
  }
  const last = x.map((_, n) => (n === x.length - 1 ? 9 : 0));
  found.push({ x, y: line.y, text, hoverinfo: "text", visible, mode: line.completed && !few ? "lines" : "lines+markers",
    line: { color, width, dash: DASHES[line.style] },
    marker: { color, size: line.completed ? 7 : last, symbol: line.completed ? "circle" : "x" } });
  return found;
}

// The values that the shown part of x has decide the range of y; the steep start does not.
function ranges(data, panel, axis, part, hidden) {
  const there = (line) => !hidden.has(line.label) && data.x[line.x[axis]].length, lines = panel.lines.filter(there);
  const all = data.panels.flatMap((one) => one.lines.filter(there)); // so that panels have the same range of x
  if (!lines.length) return {};
  const ends = all.flatMap((line) => [data.x[line.x[axis]][0], data.x[line.x[axis]].at(-1)]);
  const low = Math.min(...ends), high = Math.max(...ends), start = low + part * (high - low);
  const pad = 0.015 * (high - start) || 0.5;
  if (!part && panel.range) {
    return { x: [start - pad, high + pad], y: panel.log ? panel.range.map(Math.log10) : panel.range };
  }
  const values = lines.flatMap((line) => data.x[line.x[axis]].flatMap((x, n) =>
    x >= start + (part ? 0 : 0.1 * (high - low)) ? [line.low ? line.low[n] : line.y[n], line.high ? line.high[n] : line.y[n]] : []));
  const shown = (panel.log ? values.filter((v) => v > 0).map(Math.log10) : values).concat(part || panel.log ? [] : panel.marks);
  if (!shown.length) return { x: [start - pad, high + pad] };
  const bottom = Math.min(...shown), top = Math.max(...shown), space = 0.05 * (top - bottom) || Math.abs(top) * 0.1 || 1;
  return { x: [start - pad, high + pad], y: [bottom - space, top + space] };
}

function logTicks([low, high]) {
  const powers = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, n) => Math.floor(low) + n);
  const steps = high - low < 2 ? [1, 2, 5] : [1];
  const values = powers.flatMap((power) => steps.map((step) => step * 10 ** power));
  return { tickvals: values, ticktext: values.map((value) => String(Number(value.toPrecision(1)))) };
}

function layout(data, panel, axis, part, hidden) {
  const range = ranges(data, panel, axis, part, hidden), ink = css("text"), grid = css("rule");
  const style = { gridcolor: grid, linecolor: css("axis"), tickcolor: css("axis"), ticks: "outside", ticklen: 4, zeroline: false, automargin: true };
  return {
    ...base(ink),
    showlegend: false, hovermode: "closest",
    xaxis: { ...style, showgrid: false, showline: true, title: { text: plain(data.axes[axis]), standoff: 6 }, range: range.x, rangemode: "nonnegative" },
    yaxis: { ...style, title: { text: plain(panel.y), standoff: 6 }, range: range.y, type: panel.log ? "log" : "linear", exponentformat: "power", nticks: 7, ...(panel.log && range.y ? logTicks(range.y) : {}) },
    shapes: panel.marks.map((y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, layer: "below", line: { color: css("axis"), width: 1.2, dash: "dot" } })),
  };
}

const base = (ink) => ({
  margin: { l: 50, r: 12, t: 10, b: 42 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { color: ink, size: 12, family: "system-ui, sans-serif" },
  hoverlabel: { bgcolor: css("code"), bordercolor: css("axis"), font: { color: ink }, align: "left" }, dragmode: "zoom",
});

function heatMap(data, plot) {
  const clients = data.counts[0].map((_, n) => n), none = data.counts.map((row) => row.map((n) => (n ? n ** 0.4 : null)));
  const text = data.counts.map((row, c) => row.map((n, k) => `client ${k}, class ${plain(data.classes[c])}: ${n} examples`));
  const axis = { showgrid: false, zeroline: false, automargin: true, ticks: "outside", ticklen: 4, linecolor: css("axis") };
  const trace = { type: "heatmap", z: none, x: clients, y: data.classes.map((_, n) => n), text, hoverinfo: "text", xgap: 1, ygap: 1,
    colorscale: [[0, css("code")], [1, css("line-0")]], zmin: 0, showscale: false };
  const step = Math.ceil(data.classes.length / 25), shown = data.classes.map((_, n) => n).filter((n) => n % step === 0);
  Plotly.react(plot, [trace], { ...base(css("text")), xaxis: { ...axis, title: { text: "client", standoff: 6 } },
    yaxis: { ...axis, autorange: "reversed", title: { text: "class", standoff: 6 }, tickvals: shown, ticktext: shown.map((n) => plain(data.classes[n])) } }, OPTIONS);
}

function chart(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent), box = figure.querySelector(".panels");
  const select = (name) => figure.querySelector(`[data-choice=${name}]`), buttons = [...figure.querySelectorAll(".legend button")];
  const panels = data.panels || [{ title: "" }];
  box.style.setProperty("--abreast", Math.min(data.abreast || 1, panels.length));
  box.classList.toggle("one", panels.length === 1);
  const plots = panels.map((panel) => {
    const holder = Object.assign(document.createElement("div"), { className: "panel" });
    if (panel.title) holder.append(Object.assign(document.createElement("b"), { textContent: panel.title }));
    const plot = holder.appendChild(Object.assign(document.createElement("div"), { className: "plot" }));
    box.append(holder);
    return plot;
  });
  function draw() {
    if (data.counts) return heatMap(data, plots[0]);
    const axis = Number(select("axis")?.value || 0), part = Number(select("part").value);
    const hidden = new Set(buttons.filter((b) => b.getAttribute("aria-pressed") === "false").map((b) => b.dataset.line));
    panels.forEach((panel, n) => Plotly.react(plots[n], panel.lines.flatMap((line, at) => traces(data, line, axis, hidden, at / panel.lines.length)), layout(data, panel, axis, part, hidden), OPTIONS));
  }
  figure.addEventListener("change", draw);
  buttons.forEach((button) => button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") === "false");
    draw();
  }));
  figure.draw = draw;
}

const figures = () => [...document.querySelectorAll("[data-chart]")];
function start() {
  if (window.Plotly) figures().forEach(chart);
  cues();
  // A chart far down the page is drawn when it comes near, so that the first ones are there at once.
  const near = new IntersectionObserver((seen) => seen.filter((one) => one.isIntersecting).forEach((one) => {
    near.unobserve(one.target);
    one.target.draw?.();
    one.target.drawn = true;
  }), { rootMargin: "600px" });
  figures().forEach((figure) => near.observe(figure));
}
function cues() {
  document.querySelectorAll(".frame").forEach((frame) => {
    frame.classList.toggle("scrolls", frame.scrollWidth > frame.clientWidth + 1);
  });
}
const redraw = (all) => figures().forEach((figure) => (figure.drawn || all) && figure.draw?.());

// What a reader has chosen stays when a live page is replaced.
function choices() {
  const kept = {};
  figures().forEach((figure) => {
    const name = figure.querySelector(".panels").getAttribute("aria-label").split(".")[0];
    kept[name] = { picked: [...figure.querySelectorAll("select")].map((s) => [s.dataset.choice, s.value]),
      hidden: [...figure.querySelectorAll("[aria-pressed=false]")].map((b) => b.dataset.line) };
  });
  return kept;
}
function choose(kept) {
  figures().forEach((figure) => {
    const own = kept[figure.querySelector(".panels").getAttribute("aria-label").split(".")[0]];
    own?.picked.forEach(([name, value]) => { const s = figure.querySelector(`[data-choice=${name}]`); if (s) s.value = value; });
    figure.querySelectorAll("[data-line]").forEach((b) => b.setAttribute("aria-pressed", !own?.hidden.includes(b.dataset.line)));
  });
}
async function follow(version) {
  for (;;) {
    await new Promise((done) => setTimeout(done, 1000));
    try {
      const now = await (await fetch("/version")).text();
      if (now !== version) {
        const answer = await fetch("/"), text = await answer.text();
        if (!answer.ok) throw new Error(text);
        const page = new DOMParser().parseFromString(text, "text/html"), kept = choices();
        document.querySelector("main").replaceWith(document.adoptNode(page.querySelector("main")));
        document.querySelector("nav ol").replaceWith(document.adoptNode(page.querySelector("nav ol")));
        document.title = page.title;
        choose(kept);
        start();
        version = now;
      }
      document.getElementById("live").textContent = `Live: the page follows the runs. Last change seen: ${now.split(" ")[0]}`;
    } catch (error) {
      const gone = error instanceof TypeError; // of fetch: nobody answers
      document.getElementById("live").textContent = gone ? "The live view has ended; this is its last page." : error.message;
    }
  }
}

if (innerWidth < 1216) document.querySelector("nav details").open = false;
start();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(false));
addEventListener("resize", cues);
addEventListener("beforeprint", () => redraw(true));
addEventListener("afterprint", () => redraw(false));
if ("live" in document.body.dataset) follow(document.body.dataset.live);
