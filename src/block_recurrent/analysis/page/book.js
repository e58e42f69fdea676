"use strict";
// A whole book: the spike plot of differences, a slider, and the text of which only what is seen is drawn.

const BITS_PER_UNIT = 1 / 1000; // losses are stored in thousandths of a bit
const STRONGEST = 6; // bits of difference that have the strongest color, in a book that has such differences
const SHADES = 8;

class Book {
  constructor(arrays, name) {
    this.name = name;
    this.text = arrays.text;
    this.distance = arrays.distance;
    [this.a, this.b] = [arrays.a, arrays.b];
    this.length = this.a.length;
    this.starts = new Uint32Array(this.length + 1);
    this.difference = new Float32Array(this.length);
    for (let i = 0; i < this.length; i++) {
      this.starts[i + 1] = this.starts[i] + arrays.lengths[i];
      this.difference[i] = (this.b[i] - this.a[i]) * BITS_PER_UNIT;
    }
    this.highest = this.length ? Math.abs(this.difference[this.peak(0, this.length)]) : 0;
    this.strong = Math.max(0.5, Math.min(STRONGEST, this.highest));
  }

  token(i) {
    return this.text.slice(this.starts[i], this.starts[i + 1]);
  }

  /** The class of a token's color: `a1` to `a8` where A is better, `b1` to `b8` where B is. */
  shade(i) {
    const level = Math.min(SHADES, Math.round((Math.abs(this.difference[i]) / this.strong) * SHADES));
    return level ? (this.difference[i] > 0 ? "a" : "b") + level : "";
  }

  /** The token of the largest difference, by size, among [from, to). */
  peak(from, to) {
    let best = Math.max(0, from);
    for (let i = best; i < Math.min(to, this.length); i++)
      if (Math.abs(this.difference[i]) > Math.abs(this.difference[best])) best = i;
    return best;
  }

  excerpt(i, before = 220, after = 90) {
    const [from, to] = [this.starts[i], this.starts[i + 1]];
    return [this.text.slice(Math.max(0, from - before), from), this.text.slice(from, to), this.text.slice(to, to + after)];
  }
}

/** The text of a book from one token on, as much as fits the pane. */
class TextPane {
  constructor(element, onPick) {
    this.element = element;
    this.start = 0;
    element.addEventListener("click", (event) => {
      const token = event.target.closest("[data-i]");
      if (token) onPick(Number(token.dataset.i));
    });
  }

  /** How many characters fill the pane, roughly; a little more is drawn and cut off. */
  capacity() {
    const { clientWidth, clientHeight } = this.element;
    return Math.max(200, Math.round(((clientWidth - 40) / 8.2) * (clientHeight / 27) * 1.15));
  }

  show(book, start, selected) {
    this.start = Math.max(0, Math.min(start, book.length - 1));
    const end = book.starts[this.start] + this.capacity();
    const fragment = document.createDocumentFragment();
    let i = this.start;
    for (; i < book.length && book.starts[i] < end; i++) {
      const piece = book.token(i);
      if (!piece) continue; // part of a character that an earlier token holds
      const token = document.createElement("span");
      token.dataset.i = i;
      token.className = book.shade(i) + (i === selected ? " selected" : "");
      token.textContent = piece;
      fragment.append(token);
    }
    this.end = i;
    this.element.replaceChildren(fragment);
    this.element.scrollTop = 0;
  }
}

/** Differences by token index. The visible range can be zoomed and moved; a click picks the nearest spike. */
class SpikePlot {
  constructor(canvas, onPick) {
    this.canvas = canvas;
    this.onPick = onPick;
    this.box = { left: 58, right: 14, top: 10, bottom: 40 };
    this.hover = null;
    this.shown = [0, 0];
    this.redraw = chart(canvas, (context, w, h) => this.book && this.draw(context, w, h));
    canvas.addEventListener("wheel", (event) => this.zoom(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerleave", () => ((this.hover = null), this.redraw()));
    canvas.addEventListener("dblclick", () => this.setRange(0, this.book.length));
  }

  open(book) {
    this.book = book;
    this.selected = null;
    this.top = Math.max(0.1, book.highest) * 1.08;
    this.setRange(0, book.length);
  }

  setRange(from, to) {
    const size = Math.max(20, Math.min(to - from, this.book.length));
    this.from = Math.max(0, Math.min(from, this.book.length - size));
    this.to = this.from + size;
    this.redraw();
  }

  width() {
    return this.canvas.getBoundingClientRect().width - this.box.left - this.box.right;
  }

  xOf(token) {
    return this.box.left + ((token + 0.5 - this.from) / (this.to - this.from)) * this.width();
  }

  tokenAt(x) {
    return this.from + ((x - this.box.left) / this.width()) * (this.to - this.from);
  }

  zoom(event) {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const shift = (event.deltaX / this.width()) * (this.to - this.from);
      return this.setRange(this.from + shift, this.to + shift);
    }
    const middle = this.tokenAt(event.offsetX);
    const factor = Math.exp(event.deltaY * 0.0015);
    this.setRange(middle - (middle - this.from) * factor, middle + (this.to - middle) * factor);
  }

  grab(event) {
    const [x, from, to] = [event.offsetX, this.from, this.to];
    this.canvas.setPointerCapture(event.pointerId);
    this.dragging = false;
    const drag = (moved) => {
      if (Math.abs(moved.offsetX - x) > 4) this.dragging = true;
      if (this.dragging) {
        const shift = ((x - moved.offsetX) / this.width()) * (to - from);
        this.setRange(from + shift, to + shift);
      }
    };
    const drop = (up) => {
      this.canvas.removeEventListener("pointermove", drag);
      if (!this.dragging) this.onPick(this.spikeAt(up.offsetX));
      this.dragging = false;
    };
    this.canvas.addEventListener("pointermove", drag);
    this.canvas.addEventListener("pointerup", drop, { once: true });
  }

  move(event) {
    this.hover = event.offsetX;
    this.redraw();
  }

  spikeAt(x) {
    return this.book.peak(Math.floor(this.tokenAt(x - 5)), Math.ceil(this.tokenAt(x + 5)));
  }

  draw(context, w, h) {
    const y = (d) => this.box.top + ((this.top - d) / (2 * this.top)) * (h - this.box.top - this.box.bottom);
    for (const d of ticks(-this.top, this.top, (h - this.box.top - this.box.bottom) / 40)) {
      context.strokeStyle = css(d === 0 ? "--faint-ink" : "--grid");
      context.beginPath();
      context.moveTo(this.box.left, y(d));
      context.lineTo(w - this.box.right, y(d));
      context.stroke();
      axisText(context, d > 0 ? `+${short(d)}` : short(d).replace("-", "−"), this.box.left - 8, y(d), "right");
    }
    this.drawShown(context, w, h);
    this.drawSpikes(context, y, w);
    for (const i of ticks(this.from, this.to, w / 120)) axisText(context, short(Math.round(i)), this.xOf(i), h - this.box.bottom + 14);
    axisText(context, "token", (this.box.left + w - this.box.right) / 2, h - 8);
    context.save();
    context.translate(12, (h - this.box.bottom + this.box.top) / 2);
    context.rotate(-Math.PI / 2);
    axisText(context, "difference, bits", 0, 0);
    context.restore();
    if (this.selected !== null) this.mark(context, this.selected, y, css("--ink"));
    if (this.hover !== null && !this.dragging) this.mark(context, this.spikeAt(this.hover), y, css("--faint-ink"), true);
  }

  /** The part of the book that the text pane shows. */
  drawShown(context, w, h) {
    const [from, to] = this.shown.map((i) => this.xOf(i - 0.5));
    const left = Math.max(this.box.left, from);
    const right = Math.min(w - this.box.right, Math.max(to, from + 2));
    if (right <= left) return;
    context.fillStyle = css("--band");
    context.fillRect(left, this.box.top, right - left, h - this.box.top - this.box.bottom);
  }

  /** One stem per token where there is room, otherwise the largest difference either way per pixel. */
  drawSpikes(context, y, w) {
    const [first, last] = [Math.floor(this.from), Math.min(Math.ceil(this.to), this.book.length)];
    const columns = Math.ceil(this.width());
    const [up, down] = [new Float32Array(columns + 1), new Float32Array(columns + 1)];
    const scale = this.width() / (this.to - this.from);
    for (let i = first; i < last; i++) {
      const column = Math.max(0, Math.min(columns, Math.floor((i - this.from) * scale)));
      const d = this.book.difference[i];
      if (d > up[column]) up[column] = d;
      else if (d < down[column]) down[column] = d;
    }
    const stem = Math.max(1, Math.min(6, scale * 0.6));
    for (const [values, color] of [[up, "--a"], [down, "--b"]]) {
      context.fillStyle = css(color);
      for (let column = 0; column <= columns; column++) {
        if (!values[column]) continue;
        const [top, bottom] = [y(Math.max(0, values[column])), y(Math.min(0, values[column]))];
        context.fillRect(this.box.left + column, top, stem, Math.max(0.5, bottom - top));
      }
    }
  }

  mark(context, token, y, color, tip = false) {
    const [x, d] = [this.xOf(token), this.book.difference[token]];
    if (x < this.box.left - 1 || x > this.canvas.clientWidth - this.box.right + 1) return;
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.beginPath();
    context.arc(x, y(d), 5, 0, 2 * Math.PI);
    context.stroke();
    if (!tip) return;
    const label = `${JSON.stringify(this.book.token(token))}  ${d > 0 ? "+" : "−"}${Math.abs(d).toFixed(2)} bits`;
    const width = context.measureText(label).width + 16;
    const left = Math.min(Math.max(this.box.left, x - width / 2), this.canvas.clientWidth - this.box.right - width);
    const top = d > 0 ? y(d) + 10 : y(d) - 32;
    context.fillStyle = css("--card");
    context.beginPath();
    context.roundRect(left, top, width, 22, 5);
    context.fill();
    context.stroke();
    context.fillStyle = css("--ink");
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(label, left + 8, top + 11);
  }
}
