// All metrics with descriptions, grouped, with search in names and descriptions.
const GROUPS = [
  ["Score and KL", /^(objective|rewards)\//], ["Evaluation", /^eval_/], ["Policy", /^(policy\/|loss\/policy|loss\/kl|val\/ratio)/],
  ["Value", /^(val\/(?!num)|loss\/value)/], ["Responses", /^(completions\/|val\/num_eos)/], ["Sampling", /^rollout\//],
  ["Optimizer", /^(lr|grad_norm|skipped)/], ["Time and memory", /^(time|memory)\/|^(eps|tokens_per_second)$/], ["From reward functions", /^log\//], ["Run", /./],
];

const legend = (lines) => lines.map((l) => [" · ", el("span", { style: `color:var(${l.color})` }, l.name)]);

function curves(data) {
  const { given } = place();
  const view = { weight: Number(given.get("smooth") || 0), log: given.get("log") === "1", axis: given.get("axis") || "step" };
  const search = el("input", { type: "search", placeholder: "metric or description…", value: given.get("find") || "", id: "find" });
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.weight });
  const log = el("button", { type: "button" }, "log scale"), axis = el("button", { type: "button" }, "by responses");
  const body = el("div", { className: "wide", style: "padding-top:0" }), count = el("span", { className: "quiet" });
  let charts = [];

  const at = view.axis === "episode" ? (xs, { episodes } = data) => xs.map((x) => episodes.y[nearest(episodes.x, x)]) : (xs) => xs;
  const names = Object.keys(data.series).filter((n) => n !== "episode");
  const overlaid = new Set(names.filter((n) => n.startsWith("eval_") && data.series[n.slice(5)]));

  function panel(name) {
    const both = name.startsWith("eval_") ? [] : [`eval_${name}`].filter((n) => overlaid.has(n));
    const lines = data.runs
      ? data.runs.filter((r) => r.series[name]).map((r) => ({ name: r.name, color: COLORS[data.runs.indexOf(r)], x: at(r.series[name].x, r), y: r.series[name].y }))
      : [name, ...both].map((n) => ({ name: n, x: at(data.series[n].x), y: data.series[n].y }));
    const canvas = el("canvas"), [, end] = ends(lines[0].y);
    const made = el("div", { className: "card chart" }, el("h3", {}, name, el("span", {}, fmt(end))), el("p", {}, data.meanings[name] || "no description", !data.runs && both.length ? " · orange: on the evaluation prompts" : "", data.runs ? legend(lines) : null), canvas);
    const chart = lineChart(canvas, lines, view);
    const each = { made, chart, visible: false };
    canvas.addEventListener("pointermove", (event) => {
      const x = chart.under(event);
      if (x === null) return;
      charts.forEach((c) => c.visible && c.chart.point(x));
      tip(el("div", {}, el("b", {}, `${view.axis === "episode" ? "responses" : "iteration"} ${fmt(x)}`), rowsOf(chart.values(x).map(([n, y]) => [n, fmt(y, 5)]))), event);
    });
    canvas.addEventListener("pointerleave", () => { tip(null); charts.forEach((c) => c.visible && c.chart.point(null)); });
    return each;
  }

  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    const each = charts.find((c) => c.made === entry.target);
    if (each) { each.visible = entry.isIntersecting; if (each.visible) each.chart.draw(); }
  }), { rootMargin: "200px" });

  function fill() {
    const word = search.value.trim().toLowerCase();
    const wanted = names.filter((n) => !word || n.toLowerCase().includes(word) || (data.meanings[n] || "").toLowerCase().includes(word));
    const left = new Set(wanted);
    seen.disconnect();
    charts = [];
    body.replaceChildren();
    for (const [title, pattern] of GROUPS) {
      const own = wanted.filter((n) => left.has(n) && pattern.test(n));
      own.forEach((n) => left.delete(n));
      if (!own.length) continue;
      const made = own.map(panel);
      charts.push(...made);
      body.append(el("h2", { className: "groupname" }, title), el("div", { className: "charts" }, made.map((c) => c.made)));
    }
    charts.forEach((c) => seen.observe(c.made));
    count.textContent = `${wanted.length} of ${names.length} metrics`;
    if (!wanted.length) body.append(el("p", { className: "quiet" }, "No metric matches the search."));
    remember({ find: word });
  }

  const redraw = () => charts.forEach((c) => c.visible && c.chart.draw());
  const press = () => { log.setAttribute("aria-pressed", String(view.log)); axis.setAttribute("aria-pressed", String(view.axis === "episode")); };
  search.addEventListener("input", later(fill));
  slider.addEventListener("input", () => { view.weight = Number(slider.value); remember({ smooth: view.weight || "" }); redraw(); });
  log.addEventListener("click", () => { view.log = !view.log; remember({ log: view.log ? "1" : "" }); press(); redraw(); });
  axis.addEventListener("click", () => { remember({ axis: view.axis === "episode" ? "" : "episode" }); open(); });
  theme.listeners.push(redraw);
  new ResizeObserver(later(redraw, 60)).observe(body);
  press();
  fill();
  return el("div", {}, el("div", { className: "wide bar", style: "display:flex" }, search, el("label", { className: "quiet" }, "smooth ", slider), log, axis, count), body);
}
