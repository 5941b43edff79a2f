// The run, its results, and problems found.
const TILES = [
  ["objective/scores", "score"],
  ["eval_objective/scores", "evaluation score"],
  ["eval_accuracy", "evaluation accuracy"],
  ["eval_win_rate", "win rate against the initial policy"],
  ["environment/success", "success, share of episodes"],
  ["environment/turns", "turns per episode"],
  ["environment/errors", "failed environments, share"],
  ["completions/truncated_ratio", "truncated, share"],
  ["objective/kl", "KL, nats per response"],
  ["policy/entropy_avg", "entropy, nats per token"],
  ["completions/mean_length", "tokens per response"],
  ["val/explained_variance", "value: explained variance"],
];

function overview(data) {
  const played = data.series["environment/turns"]; // without episodes, truncation is in the story
  const tiles = TILES.filter(([name]) => data.series[name] && (played || name !== "completions/truncated_ratio")).map(([name, label]) => {
    const ys = data.series[name].y, [start, end] = ends(ys);
    return el("div", { className: "card tile", title: data.meanings[name] },
      el("div", { className: "label" }, label),
      el("div", { className: "value" }, fmt(end, 3), " ", el("small", {}, `from ${fmt(start, 3)}`)), spark(ys));
  });
  return el("div", { className: "wide" },
    headline(data),
    el("div", { className: "tiles" }, tiles),
    el("div", { className: "two" }, el("div", { className: "stack" }, verdict(data), provenance(data)), el("div", { className: "stack" }, whatItDid(data), options(data))),
    agent(data),
    words(data));
}

// Two runs: how each metric ended, what was set differently, what is wrong with each.
function twoRuns({ runs, differ, series, meanings }) {
  const told = (r, name) => (r.series[name] ? ends(r.series[name].y).map((y) => fmt(y, 3)).join(" → ") : "–");
  const json = (x) => (x === null || x === undefined ? "–" : typeof x === "string" ? x : JSON.stringify(x));
  const head = runs.map((r, i) => el("span", { style: `color:var(${COLORS[i]})` }, r.name));
  const results = TILES.filter(([name]) => series[name]).map(([name, label]) => [el("span", { title: meanings[name] }, label), ...runs.map((r) => told(r, name))]);
  return el("div", { className: "wide" }, runs.map(headline), el("div", { className: "two" },
    el("div", { className: "stack" }, el("div", { className: "card", id: "results" }, el("h2", {}, "How did they go?"), rowsOf(results, ["first → last fifth", ...head])),
      runs.map((r) => el("div", {}, el("h3", {}, r.name), verdict(r)))),
    el("div", { className: "card", id: "differ" }, el("h2", {}, "What differs?"), differ.length ? rowsOf(differ.map(([n, a, b]) => [n, json(a), json(b)]), ["setting", ...runs.map((r) => r.name)])
      : el("div", { className: "quiet" }, "No option or input, as far as run.json says."))));
}

// Reward by number of the turn, and late episodes won and lost, side by side.
const SHOWN_EPISODES = 3;
function agent({ played, tokens }) {
  if (!played || !played.turns) return null;
  const { turns, won, lost } = played;
  const rewards = el("div", { className: "card", id: "turns" }, el("h3", {}, "Reward by turn"),
    el("div", { className: "quiet" }, "logged episodes, first and last third of the run"),
    rowsOf(turns.map(([k, share, before, after, advantage]) => [String(k), `${fmt(100 * share, 3)}%`, fmt(before, 3), fmt(after, 3), fmt(advantage, 3)]), ["turn", "episodes", "before", "after", "advantage"]));
  const total = won.length + lost.length;
  const side = (title, found, count) => el("div", { className: "card", id: title.toLowerCase() },
    el("h3", {}, `${title} ${found.length} of ${total}`, count === null ? null : el("span", { className: "quiet" }, ` ${fmt(count, 3)} turns on average`)),
    found.length ? found.slice(0, SHOWN_EPISODES).map(([t, i]) => episode(tokens[t].step, tokens[t].rows[i]))
      : el("div", { className: "quiet" }, "None in the last third of the run."));
  return el("div", {}, el("h2", {}, "How do its episodes go?"),
    el("div", { className: "quiet" }, `Won: ${played.won_by}. Environments are gray.`),
    el("div", { className: "episodes" }, rewards, side("Won", won, played.won_turns), side("Lost", lost, played.lost_turns)));
}

function episode(step, row) {
  const parts = []; // runs of tokens of one turn, or of the environment
  row.tokens.forEach((text, t) => {
    const last = parts[parts.length - 1];
    if (last && last.turn === row.turn[t]) last.text += text;
    else parts.push({ turn: row.turn[t], text });
  });
  return el("div", { className: "answer" },
    el("div", { className: "quiet" }, `iteration ${step}, score ${fmt(row.score)}`),
    el("pre", {}, el("span", { className: "quiet" }, row.prompt.slice(-300).trimEnd() + "\n"),
      parts.map((p) => (p.turn < 0 ? el("span", { className: "quiet" }, p.text.trim() + "\n")
        : [el("b", {}, p.text.trim()), row.turn_rewards[p.turn] ? el("span", { className: "chip" }, `reward ${fmt(row.turn_rewards[p.turn], 3)}`) : null, "\n"]))));
}

function headline({ name, about, updates, series }) {
  const episodes = series.episode ? series.episode.y[series.episode.y.length - 1] : 0;
  const last = Object.values(series).reduce((m, s) => Math.max(m, s.x[s.x.length - 1]), 0);
  const parts = [
    about.algorithm || "Training", about.model ? `of ${about.model}` : "",
    about.rewards && about.rewards.length ? `against ${about.rewards.join(" + ")}` : "",
  ];
  return el("div", {},
    el("h1", { style: "margin:0;font-size:22px" }, name),
    el("div", { className: "quiet" }, `${parts.filter(Boolean).join(" ")} · ${fmt(last)} iterations · ${fmt(episodes)} responses · ${fmt(updates)} rows logged`
      + (about.started ? ` · started ${about.started.replace("T", " ").replace("+00:00", " UTC")}` : "")));
}

function verdict({ findings, unseen }) {
  const bad = findings.length > 0;
  return el("div", { className: `card verdict ${bad ? "bad" : ""}`, id: "verdict" },
    el("h2", {}, "What is wrong with it?"),
    bad ? findings.map((f) => el("div", { className: "finding" }, el("b", {}, f.rule), ` – ${f.seen}`,
      el("div", { className: "quiet" }, `Try: ${f.advice}`)))
      : el("div", {}, el("span", { className: "fine" }, "Nothing found. "), el("span", { className: "quiet" }, `No rule of kedge doctor applies. ${unseen}`)));
}

function whatItDid({ story }) {
  return el("div", { className: "card" }, el("h2", {}, "What did it do?"),
    el("dl", { className: "story" }, story.flatMap((s) => [el("dt", {}, s.title), el("dd", {}, s.text)])));
}

function words({ vocabulary: v }) {
  if (!v.praised) return null;
  const token = (text) => el("code", {}, shown(text));
  const used = (rows) => rowsOf(rows.map(([t, a, b]) => [token(t), fmt(a, 3), fmt(b, 3)]), ["token", "before", "after"]);
  const judged = (rows) => rowsOf(rows.map(([t, m, n]) => [token(t), fmt(m, 3), fmt(n)]), ["token", "advantage", "uses"]);
  const card = (title, note, body, rows) => rows.length
    ? el("div", { className: "card" }, el("h3", {}, title), el("div", { className: "quiet" }, note), body(rows)) : null;
  return el("div", {}, el("h2", {}, "What does it say more, and what for?"), el("div", { className: "tiles" },
    card("Says more", "uses per 1000 tokens, first and last third", used, v.more),
    card("Says less", "uses per 1000 tokens, first and last third", used, v.less),
    card("Praised", "mean advantage, second half of the run", judged, v.praised),
    card("Blamed", "mean advantage, second half of the run", judged, v.blamed)));
}

function provenance({ about }) {
  const rows = [
    ["algorithm", about.algorithm], ["model", about.model], ["prompts", (about.datasets || []).join(", ")],
    ["rewards", (about.rewards || []).join(", ")], ["device", about.device], ["processes", about.processes], ["machine", about.machine],
    ...Object.entries(about.versions || {}),
  ].filter(([, x]) => x !== undefined && x !== null && x !== "");
  const links = Object.entries(about.links || {}).filter(([, url]) => /^https?:/.test(url));
  return el("div", { className: "card" }, el("h2", {}, "What ran"),
    rows.length ? el("table", {}, rows.map(([k, x]) => el("tr", {}, el("td", { className: "quiet" }, k), el("td", { className: "num", style: "overflow-wrap:anywhere" }, String(x)))))
      : el("div", { className: "quiet" }, "The folder has no run.json: the run is from an older version, or only its log was given."),
    links.length ? el("div", {}, "Also on ", links.map(([name, url]) => [el("a", { href: url, rel: "noreferrer" }, name), " "])) : null,
    about.command ? el("div", {}, el("h3", { style: "margin-top:10px" }, "Command"), el("pre", { className: "command mono" }, about.command)) : null);
}

function options({ about }) {
  if (!about.options) return null;
  const changed = new Set(about.changed), body = el("table"), all = el("input", { type: "checkbox" });
  const search = el("input", { type: "search", placeholder: "option…" });
  const names = Object.keys(about.options).sort((a, b) => changed.has(b) - changed.has(a));
  const fill = () => body.replaceChildren(...names
    .filter((n) => n.includes(search.value.trim()) && (all.checked || search.value || changed.has(n)))
    .map((n) => el("tr", { className: changed.has(n) ? "changed" : "" }, el("td", { className: "mono" }, n),
      el("td", { className: "mono num", style: "overflow-wrap:anywhere" }, JSON.stringify(about.options[n])))));
  search.addEventListener("input", fill);
  all.addEventListener("change", fill);
  fill();
  return el("div", { className: "card" }, el("h2", {}, "Options"),
    el("div", { className: "bar" }, search, el("label", {}, all, " all, with defaults")), el("div", { className: "scroll" }, body));
}
