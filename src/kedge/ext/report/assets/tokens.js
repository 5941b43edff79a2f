// Responses with tokens colored by a training quantity.
const QUANTITIES = {
  advantage: { label: "advantage", text: "above 0: training makes the token more likely", center: 0 },
  kl: { label: "KL to the reference", text: "log-probability minus the reference's, nats", center: 0 },
  ratio: { label: "ratio, after the iteration", text: "probability after the iteration / before; colored by its logarithm", center: 0 },
  value: { label: "value", text: "predicted return before the token", center: null },
  error: { label: "return minus value", text: "above 0: the return was higher than predicted", center: 0 },
  reward: { label: "reward", text: "reward of the token: score at its position, minus the KL penalty", center: 0 },
  logprob: { label: "log-probability", text: "under the sampling policy, nats; a strong color means unlikely", center: 0 },
  staleness: { label: "learner vs. rollout engine", text: "log-probability of the learner before training minus that of the rollout engine", center: 0 },
};

// Per-token values of each quantity; null if the run has none.
const minus = (a, b) => (a && b ? a.map((x, i) => (x === null || b[i] === null ? null : x - b[i])) : null);
const DERIVE = {
  advantage: (r) => r.advantage, value: (r) => r.value, reward: (r) => r.reward, logprob: (r) => r.logprob,
  kl: (r) => minus(r.logprob, r.reference), ratio: (r) => minus(r.after, r.logprob),
  error: (r) => minus(r.return, r.value), staleness: (r) => minus(r.logprob, r.sampler),
};
const SORTS = {
  "as sampled": () => 0, "highest score": (a, b) => b.row.score - a.row.score, "lowest score": (a, b) => a.row.score - b.row.score,
  "furthest from the reference": (a, b) => b.kl - a.kl, "most changed by training": (a, b) => b.moved - a.moved, "longest": (a, b) => b.row.length - a.row.length,
  "value most wrong": (a, b) => b.wrong - a.wrong,
};

function tokens(data) {
  const all = data.tokens.flatMap(({ step, rows }) => rows.map((row, index) => measured(row, step, index)));
  if (!all.length) return el("p", { className: "pad quiet" }, "This run has no token-level responses; set log_token_rows to the number to log per iteration.");
  const { given } = place();
  const kinds = Object.keys(QUANTITIES).filter((k) => all.some((r) => DERIVE[k](r.row)));
  const scores = all.map((r) => r.row.score).filter((s) => s !== null).sort((a, b) => a - b);
  const search = el("input", { type: "search", placeholder: "in prompt or response…", value: given.get("find") || "" });
  const step = el("select", { title: "step" }, el("option", { value: "" }, "all steps"), data.tokens.map((t) => el("option", { value: t.step }, `step ${t.step}`)));
  const sort = el("select", { title: "order" }, Object.keys(SORTS).map((s) => el("option", {}, s)));
  const color = el("select", { id: "color", title: "color by" }, kinds.map((k) => el("option", { value: k }, QUANTITIES[k].label)));
  const own = el("input", { type: "checkbox" }), count = el("span", { className: "quiet" });
  const head = el("div"), legend = el("div", { className: "legend" }), text = el("div", { className: "tokens card" }), strip = el("canvas", { className: "strip" }), foot = el("div");
  step.value = given.get("step") || "";
  sort.value = given.get("sort") in SORTS ? given.get("sort") : "as sampled";
  color.value = kinds.includes(given.get("color")) ? given.get("color") : kinds[0];
  const ranges = {};
  let current = null, spans = [], lit = -1;

  const list = virtualList({
    height: 58,
    draw: (r) => el("div", {}, el("div", { className: "top" }, `step ${r.step}`, scoreChip(r.row.score, scores), `${fmt(r.row.length)} tokens`, r.row.finished ? "" : " · cut off"),
      el("div", { className: "line" }, r.text || "(empty)")),
    choose: (r) => { current = r; show(); },
  });

  function fill() {
    const word = search.value.trim().toLowerCase();
    const found = all.filter((r) => (!step.value || r.step === Number(step.value)) && (!word || r.text.toLowerCase().includes(word) || r.row.prompt.toLowerCase().includes(word)));
    if (sort.value !== "as sampled") found.sort(SORTS[sort.value]);
    count.textContent = `${fmt(found.length)} of ${fmt(all.length)} responses`;
    remember({ find: word, step: step.value, sort: sort.value === "as sampled" ? "" : sort.value });
    const wanted = place().given.get("at"), at = wanted ? found.findIndex((r) => r.name === wanted) : 0;
    list.fill(found, Math.max(0, at));
  }

  // The value of the strongest color: the 98th percentile over this or all responses.
  function range(kind) {
    if (!own.checked && ranges[kind]) return ranges[kind];
    const every = own.checked ? 1 : Math.max(1, Math.floor(all.length / 1000));
    const xs = (own.checked ? [current] : all.filter((_, i) => i % every === 0)).flatMap((r) => (DERIVE[kind](r.row) || []).filter((x) => x !== null)).sort((a, b) => a - b);
    const at = (q) => xs[Math.min(xs.length - 1, Math.floor(q * xs.length))] || 0;
    const sizes = xs.map(Math.abs).sort((a, b) => a - b);
    const center = QUANTITIES[kind].center === null ? at(0.5) : QUANTITIES[kind].center;
    const size = QUANTITIES[kind].center === null ? Math.max(at(0.98) - center, center - at(0.02)) : sizes[Math.min(sizes.length - 1, Math.floor(0.98 * sizes.length))];
    const found = { center, size: size || 1e-9, low: xs[0] < center, high: xs[xs.length - 1] > center };
    if (!own.checked) ranges[kind] = found;
    return found;
  }

  const paint = (x, r) => {
    if (x === null || x === undefined) return "transparent";
    const t = Math.max(-1, Math.min(1, (x - r.center) / r.size));
    return `rgba(${t < 0 ? "var(--low)" : "var(--high)"}, ${(0.8 * Math.abs(t)).toFixed(3)})`;
  };

  function show() {
    if (!current) { head.replaceChildren(el("p", { className: "quiet" }, "No response contains this text.")); [legend, text, foot].forEach((e) => e.replaceChildren()); strip.hidden = true; return; }
    const { row } = current, kind = color.value, xs = DERIVE[kind](row) || [], r = range(kind);
    remember({ at: current.name, color: kind });
    head.replaceChildren(el("div", { className: "bar" }, el("b", {}, `step ${current.step}, row ${current.index}`), scoreChip(row.score, scores),
      Object.entries(row.rewards).map(([n, x]) => el("span", { className: "chip", title: "reward source" }, `${n} ${fmt(x)}`)),
      el("span", { className: "quiet" }, [`${fmt(row.length)} tokens`, row.finished ? "terminated" : "truncated", row.lag ? `${row.lag} iterations old` : "",
        row.tokens.length < row.length ? `the first ${row.tokens.length} are shown` : ""].filter(Boolean).join(" · "))),
    el("div", { className: "card", style: "margin-top:12px" }, el("h3", { className: "quiet" }, "Prompt"), el("pre", {}, row.prompt)));
    const name = (x) => fmt(kind === "ratio" ? Math.exp(x) : x, 3);
    const stops = [[r.low, -1], [true, 0], [r.high, 1]].filter(([on]) => on).map(([, t]) => t);
    legend.replaceChildren(el("span", { className: "num" }, name(r.center + stops[0] * r.size)),
      el("i", { style: `background:linear-gradient(90deg,${stops.map((t) => paint(r.center + t * r.size, r)).join(",")})` }),
      el("span", { className: "num" }, name(r.center + stops[stops.length - 1] * r.size)), el("span", { className: "quiet" }, QUANTITIES[kind].text));
    spans = row.tokens.map((token, i) => {
      const made = el("span", { className: row.trained && !row.trained[i] ? "off" : "" });
      made.style.background = paint(xs[i], r);
      made.dataset.i = i;
      token.split(/(\n)/).forEach((part) => made.append(...(part === "\n" ? [el("span", { className: "sign" }, "⏎"), "\n"] : [part])));
      if (token === "") made.append(el("span", { className: "sign" }, "·"));
      return made;
    });
    text.replaceChildren(...(row.turn ? byTurn(row, spans) : spans));
    strip.hidden = false;
    foot.replaceChildren(related());
    bars();
  }

  function bars() {
    const ratio = devicePixelRatio || 1, w = strip.clientWidth, h = strip.clientHeight;
    if (!current || !w) return;
    strip.width = w * ratio;
    strip.height = h * ratio;
    const pen = strip.getContext("2d"), xs = DERIVE[color.value](current.row) || [], real = xs.filter((x) => x !== null);
    pen.scale(ratio, ratio);
    const zero = QUANTITIES[color.value].center === null ? Math.min(0, ...real) : 0;
    const low = Math.min(zero, ...real), high = Math.max(zero, ...real, low + 1e-9), Y = (x) => 4 + (h - 8) * (1 - (x - low) / (high - low));
    const step = (w - 50) / Math.max(1, xs.length);
    xs.forEach((x, i) => {
      if (x === null) return;
      pen.fillStyle = `rgb(${theme.color(x < 0 ? "--low" : "--high")})`;
      pen.globalAlpha = i === lit ? 1 : 0.65;
      const [a, b] = [Y(Math.max(x, zero)), Y(Math.min(x, zero))];
      pen.fillRect(50 + i * step, a, Math.max(1, step - 1), Math.max(1, b - a));
    });
    pen.globalAlpha = 1;
    pen.fillStyle = theme.color("--quiet");
    pen.font = "10.5px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.fillText(fmt(high, 3), 44, 12);
    pen.fillText(fmt(low, 3), 44, h - 4);
    pen.fillRect(50, Y(zero), w - 50, 1);
  }

  function light(i, event) {
    if (spans[lit]) spans[lit].classList.remove("on");
    lit = spans[i] ? i : -1;
    if (lit < 0) { tip(null); bars(); return; }
    spans[lit].classList.add("on");
    bars();
    const { row } = current, rows = kinds.filter((k) => DERIVE[k](row)).map((k) => {
      const x = DERIVE[k](row)[lit];
      const line = el("tr", { className: k === color.value ? "now" : "" }, el("td", {}, QUANTITIES[k].label), el("td", { className: "num" }, fmt(k === "ratio" && x !== null ? Math.exp(x) : x)));
      return line;
    });
    tip(el("div", {}, el("b", {}, `${lit + 1}. `, el("code", {}, shown(row.tokens[lit]))), row.trained && !row.trained[lit] ? el("div", { className: "quiet" }, "not trained on") : null, el("table", {}, rows)), event);
  }

  // Other responses to the same prompt.
  function related() {
    const others = all.filter((r) => r !== current && r.row.prompt === current.row.prompt).slice(0, 24);
    if (!others.length) return "";
    return el("div", { className: "card" }, el("h3", {}, "Other responses to this prompt"), el("table", {}, others.map((r) => el("tr", {},
      el("td", { style: "white-space:nowrap" }, el("a", { href: `#tokens?${new URLSearchParams({ at: r.name, color: color.value })}` }, `step ${r.step}, row ${r.index}`)), el("td", {}, scoreChip(r.row.score, scores)), el("td", {}, r.text)))));
  }

  text.addEventListener("pointerover", (event) => { const span = event.target.closest("span[data-i]"); if (span) light(Number(span.dataset.i), event); });
  text.addEventListener("pointerleave", () => light(-1));
  strip.addEventListener("pointermove", (event) => {
    const box = strip.getBoundingClientRect(), n = current.row.tokens.length;
    light(Math.floor(((event.clientX - box.left - 50) / (box.width - 50)) * n), event);
  });
  strip.addEventListener("pointerleave", () => light(-1));
  search.addEventListener("input", later(fill));
  step.addEventListener("change", fill);
  sort.addEventListener("change", fill);
  color.addEventListener("change", show);
  own.addEventListener("change", show);
  theme.listeners.push(bars);
  new ResizeObserver(later(bars, 60)).observe(strip);
  fill();
  return el("div", { className: "split" }, el("div", { className: "side" }, el("div", { className: "bar" }, search, step, sort, count), list.box),
    el("div", { className: "detail" }, head, el("div", { className: "bar" }, el("label", {}, "color by ", color), legend, el("label", { className: "quiet" }, own, " scale to this response")), text, strip, foot));
}

// The tokens of an episode: a block per turn of the policy, with its reward and advantage, and one per answer.
function byTurn(row, spans) {
  const blocks = [];
  spans.forEach((span, i) => {
    const turn = row.turn[i];
    if (!blocks.length || blocks[blocks.length - 1].turn !== turn) blocks.push({ turn, at: [] });
    blocks[blocks.length - 1].at.push(i);
  });
  const total = (xs, at) => at.reduce((a, i) => a + (xs[i] || 0), 0);
  return blocks.map(({ turn, at }) => el("div", { className: turn < 0 ? "turn env" : "turn" },
    el("div", { className: "who" }, turn < 0 ? "environment" : [`turn ${turn + 1}`, row.reward ? `reward ${fmt(total(row.reward, at), 3)}` : "",
      row.advantage ? `advantage ${fmt(total(row.advantage, at) / at.length, 3)}` : ""].filter(Boolean).join(" · ")),
    at.map((i) => spans[i])));
}

function measured(row, step, index) {
  const total = (xs) => (xs ? xs.reduce((a, x) => a + (x || 0), 0) : 0);
  return {
    row, step, index, name: `${step}.${index}`, text: row.tokens.join(""), kl: total(DERIVE.kl(row)),
    moved: total((DERIVE.ratio(row) || []).map((x) => Math.abs(x || 0))) / Math.max(1, row.tokens.length),
    wrong: Math.max(0, ...(DERIVE.error(row) || []).map((x) => Math.abs(x || 0))),
  };
}
