// The same prompt at several steps, or in two runs, side by side.
const when = ({ step, to, run }) => `${run ? `${run}, ` : ""}${step ? (to > step ? `steps ${step} to ${to}` : `step ${step}`) : to ? `before training, to step ${to}` : "before training"}`;
const same = (a, b) => a.step === b.step && a.run === b.run;

function completions(data) {
  const names = Object.keys(data.tables);
  if (!names.length) {
    return el("p", { className: "pad quiet" }, "This run has no tables of completions. Set num_sample_generations; with an eval_dataset, every table uses the same prompts.");
  }
  const { given } = place();
  const source = el("select", { title: "which prompts" }, names.map((n) => el("option", { value: n }, n)));
  source.value = names.includes(given.get("from")) ? given.get("from") : (names.find((n) => n.startsWith("eval_")) || names[0]);
  const search = el("input", { type: "search", placeholder: "search prompts and responses…", value: given.get("find") || "" });
  const count = el("span", { className: "quiet" }), detail = el("div", { className: "detail" });
  let prompts = [], sorted = [], once = false;

  const list = virtualList({
    height: 58,
    draw: (p) => el("div", {}, el("div", { className: "top" },
      el("span", {}, once ? when(p.steps[p.steps.length - 1]) : p.steps.length > 1 ? `${p.steps.length} steps, ${p.kinds} ${p.kinds > 1 ? "answers" : "answer"}` : when(p.steps[0])),
      scoreChip(average(p.steps[0]), sorted), p.steps.length > 1 ? ["→ ", scoreChip(average(p.steps[p.steps.length - 1]), sorted)] : null),
    el("div", { className: "line" }, p.prompt)),
    choose: show,
  });

  function read() {
    const known = new Map();
    for (const { step, run, rows } of data.tables[source.value]) {
      for (const row of rows) {
        const { query, "model response": response, score, ...rest } = row;
        if (!known.has(query)) known.set(query, { prompt: query, steps: [] });
        const { steps } = known.get(query);
        if (!steps.length || !same(steps[steps.length - 1], { step, run })) steps.push({ step, run, to: step, answers: [] });
        steps[steps.length - 1].answers.push({ response, score, rest });
      }
    }
    prompts = [...known.values()];
    sorted = prompts.flatMap((p) => p.steps.flatMap((s) => s.answers.map((a) => a.score))).filter((s) => s !== null).sort((a, b) => a - b);
    // Prompts that were sampled once have nothing to compare: all of a step, beside those of the first.
    once = prompts.length > 1 && prompts.every((p) => p.steps.length === 1) && data.tables[source.value].length > 1;
    if (once) {
      const first = data.tables[source.value][0];
      const at = ({ step, run }) => ({ step, run, to: step, answers: prompts.filter((p) => same(p.steps[0], { step, run })).flatMap((p) => p.steps[0].answers.map((a) => ({ ...a, query: p.prompt }))) });
      prompts = data.tables[source.value].map((t) => ({ prompt: `${t.rows.length} prompts`, steps: t === first ? [at(t)] : [at(first), at(t)] })).reverse();
    }
    for (const p of prompts) p.kinds = new Set(p.steps.flatMap((s) => s.answers.map((a) => a.response))).size;
    if (!once) prompts.sort((a, b) => b.kinds - a.kinds); // most changed first
    fill();
  }

  function fill() {
    const word = search.value.trim().toLowerCase();
    const found = prompts.filter((p) => !word || p.prompt.toLowerCase().includes(word) || p.steps.some((s) => s.answers.some((a) => `${a.query || ""} ${a.response}`.toLowerCase().includes(word))));
    count.textContent = `${fmt(found.length)} of ${fmt(prompts.length)} ${once ? "steps" : "prompts"}, ${fmt(sorted.length)} responses`;
    remember({ find: word, from: source.value });
    list.fill(found, 0);
  }

  function show(p) {
    if (!p) { detail.replaceChildren(el("p", { className: "quiet" }, "No prompt or response contains this text.")); return; }
    const word = search.value.trim().toLowerCase();
    const merged = []; // merge successive steps with equal answers
    for (const s of p.steps) {
      const last = merged[merged.length - 1];
      if (last && last.run === s.run && JSON.stringify(last.answers) === JSON.stringify(s.answers)) last.to = s.step;
      else merged.push({ ...s });
    }
    const cards = merged.map((s, i) => el("div", { className: "card" },
      el("h3", {}, when(s), s.answers.length > 1 ? el("span", { className: "quiet" }, `mean ${fmt(average(s))}`) : null),
      s.answers.map((a, k) => el("div", { className: "answer" },
        a.query ? el("div", { className: "line quiet", title: a.query }, a.query.length > 160 ? `${a.query.slice(0, 160)}…` : a.query) : null,
        el("div", {}, scoreChip(a.score, sorted), Object.entries(a.rest).map(([n, x]) => [" ", el("span", { className: "chip" }, `${n} ${typeof x === "number" ? fmt(x) : x}`)])),
        el("pre", {}, word ? marked(a.response, word) : compared(a.response, i && merged[i - 1].run === s.run && !once && s.answers.length === 1 ? merged[i - 1].answers[0].response : null))))));
    detail.replaceChildren(once ? el("div", { className: "quiet" }, "Every prompt was sampled once. With an eval_dataset, every table has the same prompts, and answers to one prompt stand side by side.")
      : el("div", { className: "card" }, el("h3", { className: "quiet" }, "Prompt"), el("pre", {}, marked(p.prompt, word))),
      !once && p.steps.length > 1 && p.steps[0].answers.length === 1 ? el("div", { className: "quiet" }, "Words that are not in the previous response are marked.") : "", el("div", { className: "strips" }, cards));
    detail.scrollTop = 0;
  }

  search.addEventListener("input", later(fill));
  source.addEventListener("change", read);
  read();
  return el("div", { className: "split" }, el("div", { className: "side" }, el("div", { className: "bar" }, search, names.length > 1 ? source : null, count), list.box), detail);
}

const rowCount = (table) => table.reduce((n, t) => n + t.rows.length, 0);

// A response, with words marked that are not in an earlier one.
function compared(text, before) {
  if (before === null) return [text];
  const had = new Map();
  for (const w of before.split(/\s+/)) had.set(w, (had.get(w) || 0) + 1);
  return text.split(/(\s+)/).map((w) => {
    if (!w.trim()) return w;
    const left = had.get(w) || 0;
    had.set(w, left - 1);
    return left > 0 ? w : el("ins", {}, w);
  });
}

const average = ({ answers }) => {
  const scores = answers.map((a) => a.score).filter((s) => s !== null);
  return scores.length ? mean(scores) : null;
};
