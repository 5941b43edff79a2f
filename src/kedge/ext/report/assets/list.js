// A virtual list: only visible rows are rendered.
function virtualList({ height, draw, choose }) {
  const space = el("div", { className: "space" });
  const box = el("div", { className: "list", tabIndex: 0, role: "listbox" }, space);
  let items = [], chosen = -1, first = -1, last = -1;

  function render(force) {
    const from = Math.max(0, Math.floor(box.scrollTop / height) - 4);
    const to = Math.min(items.length, Math.ceil((box.scrollTop + box.clientHeight) / height) + 4);
    if (!force && from === first && to === last) return;
    [first, last] = [from, to];
    const made = [];
    for (let i = from; i < to; i++) {
      const row = draw(items[i], i);
      row.classList.add("item");
      row.setAttribute("role", "option");
      row.setAttribute("aria-selected", String(i === chosen));
      row.style.top = `${i * height}px`;
      row.style.height = `${height}px`;
      row.addEventListener("click", () => select(i));
      made.push(row);
    }
    space.replaceChildren(...made);
  }

  function select(i) {
    if (!items.length) { chosen = -1; choose(null); return; }
    chosen = Math.max(0, Math.min(items.length - 1, i));
    const top = chosen * height;
    if (top < box.scrollTop) box.scrollTop = top;
    if (top + height > box.scrollTop + box.clientHeight) box.scrollTop = top + height - box.clientHeight;
    render(true);
    choose(items[chosen]);
  }

  box.addEventListener("scroll", () => render(false), { passive: true });
  box.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (by) { event.preventDefault(); select(chosen + by); }
  });
  new ResizeObserver(() => render(true)).observe(box);

  return {
    box,
    select,
    fill(next, at = 0) {
      items = next;
      space.style.height = `${items.length * height}px`;
      if (!at) box.scrollTop = 0;
      select(at);
    },
  };
}
