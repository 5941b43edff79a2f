// The same prompt at several steps, side by side.
function completions(data) {
  const names = Object.keys(data.tables);
  if (!names.length) {
    return el("p", { className: "pad quiet" }, "This run has no tables of completions. num_sample_generations says how many there are; with an eval_dataset they answer the same prompts each time.");
  }
  const { given } = place();
  const source = el("select", { title: "which prompts" }, names.map((n) => el("option", { value: n }, n)));
  source.value = names.includes(given.get("from")) ? given.get("from") : names.reduce((a, b) => (rowCount(data.tables[b]) > rowCount(data.tables[a]) ? b : a));
  const search = el("input", { type: "search", placeholder: "in prompt or response…", value: given.get("find") || "" });
  const count = el("span", { className: "quiet" }), detail = el("div", { className: "detail" });
  let prompts = [], sorted = [];

  const list = virtualList({
    height: 58,
    draw: (p) => el("div", {}, el("div", { className: "top" },
      el("span", {}, p.answers.length > 1 ? `${p.answers.length} steps, ${p.kinds} ${p.kinds > 1 ? "answers" : "answer"}` : `step ${p.answers[0].step}`),
      scoreChip(p.answers[0].score, sorted), p.answers.length > 1 ? ["→ ", scoreChip(p.answers[p.answers.length - 1].score, sorted)] : null),
    el("div", { className: "line" }, p.prompt)),
    choose: show,
  });

  function read() {
    const known = new Map();
    for (const { step, rows } of data.tables[source.value]) {
      for (const row of rows) {
        const { query, "model response": response, score, ...rest } = row;
        if (!known.has(query)) known.set(query, { prompt: query, answers: [] });
        known.get(query).answers.push({ step, response, score, rest });
      }
    }
    prompts = [...known.values()];
    for (const p of prompts) p.kinds = new Set(p.answers.map((a) => a.response)).size;
    prompts.sort((a, b) => b.kinds - a.kinds); // those that changed most first
    sorted = prompts.flatMap((p) => p.answers.map((a) => a.score)).filter((s) => s !== null).sort((a, b) => a - b);
    fill();
  }

  function fill() {
    const word = search.value.trim().toLowerCase();
    const found = prompts.filter((p) => !word || p.prompt.toLowerCase().includes(word) || p.answers.some((a) => a.response.toLowerCase().includes(word)));
    count.textContent = `${fmt(found.length)} of ${fmt(prompts.length)} prompts, ${fmt(sorted.length)} responses`;
    remember({ find: word, from: source.value });
    list.fill(found, 0);
  }

  function show(p) {
    if (!p) { detail.replaceChildren(el("p", { className: "quiet" }, "No prompt or response has that text.")); return; }
    const word = search.value.trim().toLowerCase();
    const said = []; // answers that are the same at successive steps are one
    for (const a of p.answers) {
      const last = said[said.length - 1];
      if (last && last.response === a.response && last.score === a.score) last.to = a.step;
      else said.push({ ...a, to: a.step });
    }
    const cards = said.map((a, i) => el("div", { className: "card" },
      el("h3", {}, a.to === a.step ? `step ${a.step}` : `steps ${a.step} to ${a.to}`, scoreChip(a.score, sorted), Object.entries(a.rest).map(([n, x]) => el("span", { className: "chip" }, `${n} ${fmt(x)}`))),
      el("pre", {}, word ? marked(a.response, word) : compared(a.response, i ? said[i - 1].response : null))));
    detail.replaceChildren(el("div", { className: "card" }, el("h3", { className: "quiet" }, "Prompt"), el("pre", {}, marked(p.prompt, word))),
      p.answers.length > 1 ? el("div", { className: "quiet" }, "Words that the response before did not have are marked.") : null, el("div", { className: "strips" }, cards));
    detail.scrollTop = 0;
  }

  search.addEventListener("input", later(fill));
  source.addEventListener("change", read);
  read();
  return el("div", { className: "split" }, el("div", { className: "side" }, el("div", { className: "bar" }, search, names.length > 1 ? source : null, count), list.box), detail);
}

const rowCount = (table) => table.reduce((n, t) => n + t.rows.length, 0);

// A response, its words marked that an earlier one did not have.
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
