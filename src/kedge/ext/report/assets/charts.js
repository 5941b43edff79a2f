// Line charts on a canvas, with values at the pointer.
const COLORS = ["--accent", "--bad", "--good", "--quiet"];

function smooth(ys, weight) {
  if (!weight) return ys;
  let last = 0, mass = 0;
  return ys.map((y) => {
    last = weight * last + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return last / mass;
  });
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || power;
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-6; x += step) found.push(Math.abs(x) < step * 1e-6 ? 0 : x);
  return found;
}

// lines: [{name, x, y}].  view: {weight, log} is read on every redraw.
function lineChart(canvas, lines, view) {
  let at = null, frame = null;

  function draw() {
    const ratio = devicePixelRatio || 1, w = canvas.clientWidth, h = canvas.clientHeight;
    if (!w) return;
    canvas.width = w * ratio;
    canvas.height = h * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "10.5px system-ui, sans-serif";
    const usable = view.log && lines.every((l) => l.y.every((y) => y > 0));
    const to = usable ? Math.log10 : (y) => y;
    const smoothed = lines.map((l) => smooth(l.y, view.weight));
    const xs = lines.flatMap((l) => [l.x[0], l.x[l.x.length - 1]]);
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)], y0 = Infinity, y1 = -Infinity;
    for (const line of lines) for (const y of line.y) { const v = to(y); if (v < y0) y0 = v; if (v > y1) y1 = v; }
    if (y1 - y0 < 1e-12 + 1e-9 * Math.abs(y0)) { const pad = Math.abs(y0) * 0.1 || 1; y0 -= pad; y1 += pad; }
    if (x1 === x0) { x0 -= 1; x1 += 1; }
    const pad = (y1 - y0) * 0.06, left = 46, bottom = 18;
    y0 -= pad; y1 += pad;
    frame = { x0, x1, left, w, X: (x) => left + ((x - x0) / (x1 - x0)) * (w - left - 6), Y: (y) => (h - bottom) - ((to(y) - y0) / (y1 - y0)) * (h - bottom - 6) };
    pen.strokeStyle = theme.color("--line");
    pen.fillStyle = theme.color("--quiet");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const t of ticks(y0, y1, 4)) {
      const y = Math.round((h - bottom) - ((t - y0) / (y1 - y0)) * (h - bottom - 6)) + 0.5;
      pen.beginPath(); pen.moveTo(left, y); pen.lineTo(w - 6, y); pen.stroke();
      pen.fillText(fmt(usable ? 10 ** t : t, 3), left - 6, y);
    }
    pen.textBaseline = "top";
    pen.textAlign = "center";
    for (const t of ticks(x0, x1, Math.max(2, w / 110))) if (Number.isInteger(t)) pen.fillText(fmt(t), Math.min(w - 14, frame.X(t)), h - bottom + 5);
    lines.forEach((line, i) => {
      const color = theme.color(line.color || COLORS[i % COLORS.length]);
      if (view.weight) trace(pen, line.x, line.y, color, 0.25);
      trace(pen, line.x, smoothed[i], color, 1);
    });
    if (at === null) return;
    pen.strokeStyle = theme.color("--quiet");
    pen.setLineDash([3, 3]);
    pen.beginPath(); pen.moveTo(frame.X(at), 6); pen.lineTo(frame.X(at), h - bottom); pen.stroke();
    pen.setLineDash([]);
    lines.forEach((line, i) => {
      const k = nearest(line.x, at);
      pen.fillStyle = theme.color(line.color || COLORS[i % COLORS.length]);
      pen.beginPath(); pen.arc(frame.X(line.x[k]), frame.Y(smoothed[i][k]), 3, 0, 7); pen.fill();
    });
  }

  function trace(pen, x, y, color, alpha) {
    pen.strokeStyle = color;
    pen.fillStyle = color;
    pen.globalAlpha = alpha;
    pen.lineWidth = 1.6;
    pen.lineJoin = "round";
    pen.beginPath();
    x.forEach((each, i) => (i ? pen.lineTo(frame.X(each), frame.Y(y[i])) : pen.moveTo(frame.X(each), frame.Y(y[i]))));
    pen.stroke();
    if (x.length < 12) x.forEach((each, i) => { pen.beginPath(); pen.arc(frame.X(each), frame.Y(y[i]), 2.4, 0, 7); pen.fill(); });
    pen.globalAlpha = 1;
  }

  return {
    draw,
    lines,
    // The logged x nearest to the pointer.
    under(event) {
      if (!frame) return null;
      const x = event.clientX - canvas.getBoundingClientRect().left;
      const wanted = frame.x0 + ((x - frame.left) / (frame.w - frame.left - 6)) * (frame.x1 - frame.x0);
      return lines[0].x[nearest(lines[0].x, wanted)];
    },
    values: (x) => lines.map((l) => { const k = nearest(l.x, x); return [l.name, l.y[k], l.x[k]]; }),
    point(x) { at = x; draw(); },
  };
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) { const m = (low + high) >> 1; if (xs[m] < x) low = m + 1; else high = m; }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

// A small line without axes, for tiles.
function spark(ys) {
  const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg");
  const low = Math.min(...ys), high = Math.max(...ys), line = document.createElementNS(ns, "polyline");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  line.setAttribute("points", ys.map((y, i) => `${(100 * i) / Math.max(1, ys.length - 1)},${27 - 24 * ((y - low) / (high - low || 1))}`).join(" "));
  for (const [name, value] of [["fill", "none"], ["stroke", "var(--accent)"], ["stroke-width", "1.6"], ["vector-effect", "non-scaling-stroke"]]) line.setAttribute(name, value);
  svg.append(line);
  return svg;
}
