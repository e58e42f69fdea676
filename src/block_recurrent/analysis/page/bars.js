"use strict";
// Bars over labels, and heat maps. Needs charts.js.

/** Vertical bars, up and down from zero. spec: {labels, values, notes, yLabel, xLabel, up, down}; up, down: colors. */
function barChart(canvas, spec) {
  const box = { left: 58, right: 14, top: 24, bottom: 56 };
  const [low, high] = extent([spec.values, [0]]);
  const room = (high - low || 1) * 0.12;
  const [yLow, yHigh] = [low < 0 ? low - room : 0, high + room];
  return chart(canvas, (context, w, h) => {
    const y = (value) => h - box.bottom - ((value - yLow) / (yHigh - yLow)) * (h - box.top - box.bottom);
    const slot = (w - box.left - box.right) / spec.labels.length;
    for (const value of ticks(yLow, yHigh, (h - box.top - box.bottom) / 44)) {
      context.strokeStyle = css(value === 0 ? "--faint-ink" : "--grid");
      context.beginPath();
      context.moveTo(box.left, y(value));
      context.lineTo(w - box.right, y(value));
      context.stroke();
      axisText(context, short(value), box.left - 8, y(value), "right");
    }
    spec.labels.forEach((label, i) => {
      const middle = box.left + slot * (i + 0.5);
      const value = spec.values[i];
      axisText(context, label, middle, h - box.bottom + 14);
      axisText(context, spec.notes[i], middle, h - box.bottom + 30);
      if (!isNumber(value)) return;
      context.fillStyle = css(value >= 0 ? spec.up : spec.down);
      const width = Math.min(64, slot * 0.62);
      const [top, bottom] = value >= 0 ? [y(value), y(0)] : [y(0), y(value)];
      context.beginPath();
      context.roundRect(middle - width / 2, top, width, Math.max(1, bottom - top), value >= 0 ? [5, 5, 0, 0] : [0, 0, 5, 5]);
      context.fill();
      context.fillStyle = css("--ink");
      context.textAlign = "center";
      context.fillText((value >= 0 ? "+" : "−") + short(Math.abs(value)), middle, value >= 0 ? top - 9 : bottom + 10);
    });
    axisText(context, spec.xLabel, (box.left + w - box.right) / 2, h - 8);
    context.save();
    context.translate(12, (h - box.bottom + box.top) / 2);
    context.rotate(-Math.PI / 2);
    axisText(context, spec.yLabel, 0, 0);
    context.restore();
  });
}

/** Colors of a heat map by value 0 to 255: from the card's color through teal to amber. */
function heatColors() {
  const stops = document.documentElement.dataset.theme === "dark"
    ? [[23, 26, 31], [17, 75, 80], [45, 155, 145], [240, 200, 100]]
    : [[250, 248, 243], [176, 219, 211], [30, 130, 124], [120, 40, 20]];
  return Array.from({ length: 256 }, (_, v) => {
    const t = (v / 255) * (stops.length - 1);
    const i = Math.min(stops.length - 2, Math.floor(t));
    return stops[i].map((from, c) => Math.round(from + (stops[i + 1][c] - from) * (t - i)));
  });
}

/** spec: {values: Uint8Array (columns * rows, column by column), columns, rows, top, xLabel, yLabel, xTo} */
function heatMap(canvas, spec) {
  const box = { left: 58, right: 14, top: 8, bottom: 40 };
  const picture = document.createElement("canvas");
  return chart(canvas, (context, w, h) => {
    [picture.width, picture.height] = [spec.columns, spec.rows];
    const pixels = new ImageData(spec.columns, spec.rows);
    const colors = heatColors();
    for (let column = 0; column < spec.columns; column++)
      for (let row = 0; row < spec.rows; row++) {
        const [r, g, b] = colors[spec.values[column * spec.rows + row]];
        pixels.data.set([r, g, b, 255], 4 * (row * spec.columns + column));
      }
    picture.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, box.left, box.top, w - box.left - box.right, h - box.top - box.bottom);
    context.strokeStyle = css("--grid");
    context.strokeRect(box.left, box.top, w - box.left - box.right, h - box.top - box.bottom);
    for (const x of ticks(0, spec.xTo, w / 110)) {
      axisText(context, short(x), box.left + (x / (spec.xTo || 1)) * (w - box.left - box.right), h - box.bottom + 13);
    }
    axisText(context, "0", box.left - 8, box.top + 7, "right");
    axisText(context, String(spec.rows - 1), box.left - 8, h - box.bottom - 7, "right");
    axisText(context, spec.xLabel, (box.left + w - box.right) / 2, h - 8);
    context.save();
    context.translate(12, (h - box.bottom + box.top) / 2);
    context.rotate(-Math.PI / 2);
    axisText(context, spec.yLabel, 0, 0);
    context.restore();
  });
}
