"use strict";
// Draws the charts of a page with Vega-Lite, and follows the runs of a live one.
const DARK = {{ dark | tojson }}; // colours of charts on a light page: what they are on a dark one
const darkTheme = matchMedia("(prefers-color-scheme: dark)");
const figures = () => [...document.querySelectorAll("[data-chart]")];
const titleOf = (figure) => figure.querySelector(".drawing").getAttribute("aria-label");
const CHOSEN = { signals: (name) => /^chosen/.test(name), data: (name) => name === "chosen_store" };

function prepare(figure) {
  const { data, specs } = JSON.parse(figure.querySelector("script").textContent);
  const values = data.data.map((row) => Object.fromEntries(data.columns.map((name, n) => [name, row[n]])));
  const box = figure.querySelector(".drawing"), select = figure.querySelector("select");
  figure.draw = async (state, light = false) => {
    let spec = JSON.stringify(specs[select ? select.value : 0]);
    if (darkTheme.matches && !light) for (const [one, other] of Object.entries(DARK)) spec = spec.replaceAll(`"${one}"`, `"${other}"`);
    spec = { ...JSON.parse(spec), data: { values } };
    if (spec.concat) spec.columns = Math.max(1, Math.min(spec.columns, Math.floor(box.clientWidth / (spec.concat[0].width + 70))));
    figure.embedded?.finalize();
    figure.embedded = await vegaEmbed(box, spec, { ast: true, actions: false, logLevel: 1, mode: "vega-lite", renderer: "canvas" });
    if (state) await figure.embedded.view.setState(state).runAsync();
    cues();
  };
  select?.addEventListener("change", () => figure.draw());
}

function start(kept = {}) {
  if (window.vegaEmbed) figures().forEach(prepare);
  figures().forEach((figure) => {
    const own = kept[titleOf(figure)];
    if (own?.axis) figure.querySelector("select").value = own.axis;
    figure.state = own?.state;
    near.observe(figure);
  });
  cues();
}
// A chart far down the page is drawn when it comes near, so that the first ones are there at once.
const near = new IntersectionObserver((seen) => seen.filter((one) => one.isIntersecting).forEach(({ target }) => {
  near.unobserve(target);
  target.draw?.(target.state);
}), { rootMargin: "600px" });
const redraw = (light) => figures().forEach((figure) => (figure.embedded || light) && figure.draw?.(null, light));
function cues() {
  document.querySelectorAll(".frame").forEach((frame) => {
    frame.classList.toggle("scrolls", frame.scrollWidth > frame.clientWidth + 1);
  });
}

// What a reader has chosen stays when a live page is replaced.
const choices = () => Object.fromEntries(figures().map((figure) => [titleOf(figure),
  { axis: figure.querySelector("select")?.value, state: figure.embedded?.view.getState(CHOSEN) }]));
async function follow(version) {
  for (;;) {
    await new Promise((done) => setTimeout(done, 1000));
    try {
      const now = await (await fetch("/version")).text();
      if (now !== version) {
        const answer = await fetch("/"), text = await answer.text();
        if (!answer.ok) throw new Error(text);
        const page = new DOMParser().parseFromString(text, "text/html"), kept = choices();
        for (const part of ["main", "nav ol"]) document.querySelector(part).replaceWith(document.adoptNode(page.querySelector(part)));
        document.title = page.title;
        start(kept);
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
darkTheme.addEventListener("change", () => redraw(false));
addEventListener("resize", cues);
addEventListener("beforeprint", () => redraw(true));
addEventListener("afterprint", () => redraw(false));
if ("live" in document.body.dataset) follow(document.body.dataset.live);
