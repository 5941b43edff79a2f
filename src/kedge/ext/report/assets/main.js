// Tabs, theme, and startup.
const TABS = [["overview", "Overview", overview], ["curves", "Curves", curves], ["completions", "Completions", completions], ["tokens", "Tokens", tokens]];
let DATA = null;

function open() {
  const wanted = place().tab, [name, , build] = TABS.find(([n]) => n === wanted) || TABS[0];
  theme.listeners.length = 0;
  tip(null);
  document.querySelectorAll("#tabs a").forEach((a) => a.setAttribute("aria-selected", String(a.dataset.tab === name)));
  $("main").replaceChildren(build(DATA));
  $("main").dataset.tab = name;
}

(async () => {
  const began = performance.now();
  theme.set(matchMedia("(prefers-color-scheme: dark)").matches);
  $("theme").addEventListener("click", () => theme.set(!document.documentElement.classList.contains("dark")));
  if (place().given.get("theme")) theme.set(place().given.get("theme") === "dark");
  try {
    DATA = await readData();
  } catch (error) {
    $("main").replaceChildren(el("p", { className: "pad" }, `The data of this page cannot be read (${error}); it needs a browser of 2023 or later.`));
    return;
  }
  $("data").remove();
  if (DATA.live) setTimeout(() => location.reload(), 1000 * DATA.live);
  if (DATA.runs) TABS.splice(0, TABS.length, ["overview", "Overview", twoRuns], ...TABS.slice(1, 3));
  $("name").textContent = DATA.name;
  const sizes = { curves: Object.keys(DATA.series).filter((n) => n !== "episode").length, completions: Object.values(DATA.tables).reduce((n, t) => n + rowCount(t), 0), tokens: rowCount(DATA.tokens) };
  $("tabs").append(...TABS.map(([name, label]) => {
    const link = el("a", { href: `#${name}`, role: "tab" }, label, sizes[name] !== undefined ? ` ${fmt(sizes[name])}` : "");
    link.dataset.tab = name;
    return link;
  }));
  addEventListener("hashchange", open);
  open();
  document.documentElement.dataset.ready = Math.round(performance.now() - began);
})();
