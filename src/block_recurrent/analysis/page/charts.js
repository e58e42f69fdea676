"use strict";
// Charts on canvas: lines, bars and heat maps that follow the theme, the window's size and the screen's density.

const charts = [];

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A canvas whose `draw(context, width, height)` is called when it is seen, resized, or the theme changes. */
function chart(canvas, draw) {
  const redraw = () => {
    const { width, height } = canvas.getBoundingClientRect();
    if (!width || !height) return;
    const density = window.devicePixelRatio || 1;
    const [w, h] = [Math.round(width * density), Math.round(height * density)];
    if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
    const context = canvas.getContext("2d");
    context.setTransform(density, 0, 0, density, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `12px ${css("--sans")}`;
    draw(context, width, height);
  };
  charts.push(redraw);
  new ResizeObserver(redraw).observe(canvas);
  return redraw;
}

function redrawAll() {
  for (const redraw of charts) redraw();
}

/** Round numbers that cut [low, high] into about `count` parts. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-6; x += step) found.push(Math.abs(x) < step * 1e-6 ? 0 : x);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    for (const m of [1, 2, 5]) if (m * 10 ** p >= low * 0.999 && m * 10 ** p <= high * 1.001) found.push(m * 10 ** p);
  return found.length > 9 ? found.filter((x) => Number.isInteger(Math.log10(x) + 1e-9) || /^1/.test(String(x))) : found;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toFixed(size >= 1e7 ? 0 : 1)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toFixed(0)}k`;
  if (size >= 1e3) return value.toLocaleString("en");
  return String(+value.toFixed(size >= 10 ? 1 : size >= 1 ? 2 : 3));
}

function axisText(context, text, x, y, align = "center", baseline = "middle") {
  context.fillStyle = css("--faint-ink");
  context.textAlign = align;
  context.textBaseline = baseline;
  const half = align === "center" ? context.measureText(text).width / 2 : 0; // a label at the edge is kept inside
  context.fillText(text, Math.min(x, (context.canvas.clientWidth || Infinity) - half), y);
}

function extent(arrays) {
  let [low, high] = [Infinity, -Infinity];
  for (const array of arrays)
    for (const value of array)
      if (value !== null && Number.isFinite(value)) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
  return low > high ? [0, 1] : [low, high];
}

/** The mean of some values, ignoring what is missing; used where bars or points have no number. */
const isNumber = (value) => value !== null && Number.isFinite(value);

/**
 * Lines over x. spec: {series: [{label, x, y, color, dashed, points}], xLabel, yLabel, xLog, yFrom, yTo, counts, lines}
 * counts: {label, x, y} is drawn as an area with an axis of its own; lines: [{y, label}] are drawn across.
 */
function lineChart(canvas, spec) {
  let hover = null;
  const box = { left: 58, right: spec.counts ? 58 : 18, top: 14, bottom: 42 };
  const xs = extent(spec.series.map((s) => s.x));
  let [yLow, yHigh] = extent([...spec.series.map((s) => s.y), (spec.lines || []).map((line) => line.y)]);
  const margin = (yHigh - yLow || 1) * 0.06;
  [yLow, yHigh] = [spec.yFrom ?? yLow - margin, spec.yTo ?? yHigh + margin];
  const place = (w, h) => {
    const f = spec.xLog ? Math.log : (x) => x;
    const [x0, x1] = [f(xs[0]), f(xs[1])];
    return {
      x: (x) => box.left + ((f(x) - x0) / (x1 - x0 || 1)) * (w - box.left - box.right),
      y: (y) => h - box.bottom - ((y - yLow) / (yHigh - yLow || 1)) * (h - box.top - box.bottom),
    };
  };
  const redraw = chart(canvas, (context, w, h) => {
    const at = place(w, h);
    if (spec.counts) drawCounts(context, spec.counts, at, w, h, box);
    drawGrid(context, spec, at, w, h, box, xs, [yLow, yHigh]);
    for (const line of spec.lines || []) {
      context.setLineDash([3, 4]);
      stroke(context, [xs[0], xs[1]], [line.y, line.y], at, css("--faint-ink"), 1);
      context.setLineDash([]);
      axisText(context, line.label, box.left + 4, at.y(line.y) - 8, "left");
    }
    for (const s of spec.series) {
      context.setLineDash(s.dashed ? [5, 4] : []);
      stroke(context, s.x, s.y, at, css(s.color), 2);
      context.setLineDash([]);
      if (s.points) for (let i = 0; i < s.x.length; i++) if (isNumber(s.y[i])) dot(context, at.x(s.x[i]), at.y(s.y[i]), css(s.color));
    }
    if (hover !== null) drawHover(context, spec, at, w, h, box, hover);
  });
  canvas.addEventListener("pointermove", (event) => {
    hover = event.offsetX;
    redraw();
  });
  canvas.addEventListener("pointerleave", () => {
    hover = null;
    redraw();
  });
  return redraw;
}

function drawGrid(context, spec, at, w, h, box, xs, ys) {
  context.strokeStyle = css("--grid");
  context.lineWidth = 1;
  for (const y of ticks(ys[0], ys[1], Math.max(2, (h - box.top - box.bottom) / 44))) {
    context.beginPath();
    context.moveTo(box.left, at.y(y));
    context.lineTo(w - box.right, at.y(y));
    context.stroke();
    axisText(context, short(y), box.left - 8, at.y(y), "right");
  }
  let free = -Infinity;
  for (const x of spec.xLog ? logTicks(xs[0], xs[1]) : ticks(xs[0], xs[1], w / 110)) {
    if (at.x(x) < free) continue;
    axisText(context, short(x), at.x(x), h - box.bottom + 14);
    free = at.x(x) + 44;
  }
  axisText(context, spec.xLabel, (box.left + w - box.right) / 2, h - 8);
  context.save();
  context.translate(12, (h - box.bottom + box.top) / 2);
  context.rotate(-Math.PI / 2);
  axisText(context, spec.yLabel, 0, 0);
  context.restore();
}

function drawCounts(context, counts, at, w, h, box) {
  const most = Math.max(...counts.y);
  const y = (value) => h - box.bottom - (value / most) * (h - box.top - box.bottom);
  context.beginPath();
  context.moveTo(at.x(counts.x[0]), h - box.bottom);
  for (let i = 0; i < counts.x.length; i++) {
    context.lineTo(at.x(counts.x[i]), y(counts.y[Math.max(0, i)]));
  }
  context.lineTo(at.x(counts.x[counts.x.length - 1]), h - box.bottom);
  context.fillStyle = css("--count-fill");
  context.fill();
  context.save();
  for (const value of ticks(0, most, 4)) if (Number.isInteger(value)) axisText(context, short(value), w - box.right + 8, y(value), "left");
  context.translate(w - 12, (h - box.bottom + box.top) / 2);
  context.rotate(Math.PI / 2);
  axisText(context, counts.label, 0, 0);
  context.restore();
}

function stroke(context, xs, ys, at, color, width) {
  context.strokeStyle = color;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.beginPath();
  let open = false;
  for (let i = 0; i < xs.length; i++) {
    if (!isNumber(ys[i])) {
      open = false;
      continue;
    }
    if (open) context.lineTo(at.x(xs[i]), at.y(ys[i]));
    else context.moveTo(at.x(xs[i]), at.y(ys[i]));
    open = true;
  }
  context.stroke();
}

function dot(context, x, y, color) {
  context.fillStyle = color;
  context.beginPath();
  context.arc(x, y, 3.5, 0, 2 * Math.PI);
  context.fill();
}

function nearest(xs, wanted) {
  let [low, high] = [0, xs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - xs[low - 1] < xs[low] - wanted ? low - 1 : low;
}

function drawHover(context, spec, at, w, h, box, hover) {
  const x0 = at.x(spec.series[0].x[0]);
  let index = 0;
  const first = spec.series[0];
  index = nearest(Array.from(first.x, at.x), hover < x0 ? x0 : hover);
  const x = at.x(first.x[index]);
  context.strokeStyle = css("--faint-ink");
  context.beginPath();
  context.moveTo(x, box.top);
  context.lineTo(x, h - box.bottom);
  context.stroke();
  const lines = [`${spec.xLabel} ${short(first.x[index])}`];
  for (const s of spec.series) {
    const i = nearest(s.x, first.x[index]);
    if (!isNumber(s.y[i])) continue;
    dot(context, at.x(s.x[i]), at.y(s.y[i]), css(s.color));
    lines.push(`${s.label}  ${s.y[i].toFixed(3)}`);
  }
  if (spec.counts) lines.push(`${spec.counts.label}  ${spec.counts.y[nearest(spec.counts.x, first.x[index])]}`);
  const width = Math.max(...lines.map((line) => context.measureText(line).width)) + 20;
  const left = x + width + 12 > w ? x - width - 10 : x + 10;
  context.fillStyle = css("--card");
  context.strokeStyle = css("--grid");
  context.beginPath();
  context.roundRect(left, box.top + 4, width, 18 * lines.length + 10, 6);
  context.fill();
  context.stroke();
  lines.forEach((line, i) => {
    context.fillStyle = i ? css("--ink") : css("--faint-ink");
    context.textAlign = "left";
    context.fillText(line, left + 10, box.top + 18 + 18 * i);
  });
}
