// DOM helpers, number format, URL state, theme, tooltip.
const $ = (id) => document.getElementById(id);

function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && name !== "list" && name !== "style") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.flat(2).filter((c) => c !== null && c !== undefined));
  return made;
}

function fmt(x, digits = 4) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const a = Math.abs(x);
  if (Number.isInteger(x) && a < 1e7) return x.toLocaleString("en-US");
  if (a !== 0 && (a >= 1e5 || a < 1e-3)) return x.toExponential(2);
  return String(Number(x.toPrecision(digits)));
}

const mean = (xs) => xs.reduce((a, b) => a + b, 0) / xs.length;
const ends = (ys) => {
  const n = Math.max(1, Math.round(ys.length * 0.2));
  return [mean(ys.slice(0, n)), mean(ys.slice(-n))];
};

// View state is kept in the URL, so that it can be shared: #tokens?color=kl&at=12
function place() {
  const [tab, query] = location.hash.slice(1).split("?");
  return { tab, given: new URLSearchParams(query || "") };
}

function remember(changes) {
  const { tab, given } = place();
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined) given.delete(name);
    else given.set(name, value);
  }
  const query = given.toString();
  history.replaceState(null, "", `#${tab || "overview"}${query ? "?" + query : ""}`);
}

function later(run, wait = 120) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...given), wait);
  };
}

const theme = {
  listeners: [],
  set(dark) {
    document.documentElement.classList.toggle("dark", dark);
    theme.listeners.forEach((tell) => tell());
  },
  color: (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim(),
};

function tip(content, event) {
  const box = $("tip");
  if (!content) { box.hidden = true; return; }
  box.replaceChildren(content);
  box.hidden = false;
  const { offsetWidth: w, offsetHeight: h } = box;
  const x = event.clientX + 14, y = event.clientY + 16;
  box.style.left = `${Math.max(4, Math.min(x, innerWidth - w - 8))}px`;
  box.style.top = `${y + h > innerHeight - 8 ? Math.max(4, event.clientY - h - 12) : y}px`;
}

function rowsOf(pairs, head) {
  return el("table", {}, head ? el("tr", {}, head.map((h, i) => el("th", { className: i ? "num" : "" }, h))) : null,
    pairs.map((cells) => el("tr", {}, cells.map((c, i) =>
      el("td", { className: i ? "num" : "" }, typeof c === "number" ? fmt(c) : c)))));
}

// A score, colored by its rank among all scores.
function scoreChip(score, sorted) {
  if (score === null || score === undefined) return el("span", { className: "chip" }, "no score");
  let low = 0, high = sorted.length;
  while (low < high) { const m = (low + high) >> 1; if (sorted[m] < score) low = m + 1; else high = m; }
  const share = sorted.length > 1 ? low / (sorted.length - 1) : 0.5;
  return el("span", { className: `chip ${share > 0.66 ? "good" : share < 0.33 ? "bad" : ""}`, title: "score; green and red: the highest and lowest third" }, fmt(score));
}

// Text with the search term marked.
function marked(text, word) {
  if (!word) return [text];
  const found = [], low = text.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(word); at >= 0 && found.length < 400; at = low.indexOf(word, from)) {
    found.push(text.slice(from, at), el("mark", {}, text.slice(at, at + word.length)));
    from = at + word.length;
  }
  return [...found, text.slice(from)];
}

const shown = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

async function readData() {
  const text = atob($("data").textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}
