"use strict";
// The page itself: reads the embedded data, opens documents, and connects what is on the page.

const $ = (id) => document.getElementById(id);
const began = performance.now();

function element(tag, options = {}, ...children) {
  const made = Object.assign(document.createElement(tag), options);
  made.append(...children);
  return made;
}

/** base64 of deflated bytes -> Uint8Array */
async function unpack(base64) {
  const packed = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function unpackBook(document) {
  const [text, lengths, a, b, distance] = await Promise.all(
    ["text", "lengths", "a", "b", "distance"].map((key) => unpack(document.packed[key])),
  );
  return {
    text: new TextDecoder().decode(text),
    lengths: new Uint16Array(lengths.buffer),
    a: new Uint16Array(a.buffer),
    b: new Uint16Array(b.buffer),
    distance: new Int32Array(distance.buffer),
  };
}

class Report {
  constructor(data) {
    this.data = data;
    this.books = new Map();
    this.pane = new TextPane($("text"), (i) => this.select(i, false));
    this.spikes = new SpikePlot($("spikes"), (i) => this.select(i));
    $("slider").addEventListener("input", () => this.moveTo(Number($("slider").value)));
    $("document").addEventListener("change", () => this.open(Number($("document").value)));
    $("text").addEventListener("wheel", (event) => this.scroll(event), { passive: false });
    $("whole").addEventListener("click", () => this.spikes.setRange(0, this.book.length));
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("resize", () => this.book && this.moveTo(this.pane.start));
  }

  async open(number, token = null) {
    const embedded = this.data.documents[number];
    if (!embedded || !embedded.packed) return;
    if (!this.books.has(number)) this.books.set(number, new Book(await unpackBook(embedded), embedded.name));
    this.number = number;
    this.book = this.books.get(number);
    this.selected = null;
    $("document").value = String(number);
    $("slider").max = String(Math.max(0, this.book.length - 1));
    this.spikes.open(this.book);
    $("detail").replaceChildren(element("p", { className: "hint", textContent: "Click a spike, a word, or a row of the tables." }));
    this.moveTo(0);
    if (token !== null) this.select(token);
  }

  /** Show the text from this token on. */
  moveTo(token) {
    const start = Math.max(0, Math.min(Math.round(token), this.book.length - 1));
    $("slider").value = String(start);
    if (this.waiting) cancelAnimationFrame(this.waiting);
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.pane.show(this.book, start, this.selected);
      this.spikes.shown = [this.pane.start, this.pane.end];
      this.spikes.redraw();
      $("where").textContent = `token ${this.pane.start.toLocaleString("en")} of ${this.book.length.toLocaleString("en")}`;
    });
  }

  /** Select a token: say all about it, and bring it into the text. */
  select(token, move = true) {
    this.selected = this.spikes.selected = token;
    if (move) {
      let start = token;
      while (start > 0 && this.book.starts[token] - this.book.starts[start] < this.pane.capacity() * 0.35) start--;
      if (token < this.spikes.from || token >= this.spikes.to) this.spikes.setRange(token - 500, token + 500);
      this.moveTo(start);
    } else this.moveTo(this.pane.start);
    this.describe(token);
  }

  describe(token) {
    const { book, data } = this;
    const [a, b] = [book.a[token] * BITS_PER_UNIT, book.b[token] * BITS_PER_UNIT];
    const [before, itself, after] = book.excerpt(token, 140, 60);
    const distance = book.distance[token];
    const where = whereOf(token, distance, data.window, data.segment);
    const row = (term, value) => [element("dt", { textContent: term }), element("dd", {}, value)];
    $("detail").replaceChildren(
      element("p", { className: "excerpt" }, `…${before}`, element("mark", { className: a <= b ? "a" : "b", textContent: itself }), `${after}…`),
      element("dl", {},
        ...row("token", token.toLocaleString("en")),
        ...row(data.a.label, `${a.toFixed(3)} bits`),
        ...row(data.b.label, `${b.toFixed(3)} bits`),
        ...row("difference", `${b - a >= 0 ? "+" : "−"}${Math.abs(b - a).toFixed(3)} bits`),
        ...row("last mention", distance < 0 ? "none" : `${distance.toLocaleString("en")} tokens back`),
        ...row("location", element("span", { className: `badge ${where}`, textContent: WHERE_WORDS[where] })),
      ),
    );
  }

  scroll(event) {
    event.preventDefault();
    this.moveTo(this.pane.start + Math.sign(event.deltaY) * Math.max(1, Math.round((this.pane.end - this.pane.start) / 12)));
  }

  key(event) {
    if (!this.book || event.target.matches("select, input, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = this.pane.end - this.pane.start;
    const steps = { ArrowLeft: -page / 12, ArrowRight: page / 12, "[": -page * 0.9, "]": page * 0.9 };
    if (event.key in steps) this.moveTo(this.pane.start + steps[event.key]);
    else if (event.key === "n" || event.key === "p") this.nextTop(event.key === "n" ? 1 : -1);
    else if (event.key === "t") toggleTheme();
    else return;
    event.preventDefault();
  }

  /** The next of the top tokens of this document, by place. */
  nextTop(direction) {
    const places = [...this.data.top_a, ...this.data.top_b]
      .filter((top) => top.document === this.book.name).map((top) => top.index).sort((x, y) => x - y);
    if (!places.length) return;
    const here = this.selected ?? (direction > 0 ? -1 : Infinity);
    const next = direction > 0 ? places.find((i) => i > here) ?? places[0] : places.findLast((i) => i < here) ?? places.at(-1);
    this.select(next);
  }
}

const WHERE_WORDS = { window: "within the window", segment: "within the segment", beyond: "beyond the segment", never: "no earlier mention" };

function whereOf(index, distance, window, segment) {
  if (distance < 0) return "never";
  if (distance <= window) return "window";
  return Math.floor((index - distance + 1) / segment) === Math.floor(index / segment) ? "segment" : "beyond";
}

function toggleTheme(theme = null) {
  const root = document.documentElement;
  root.dataset.theme = theme ?? (root.dataset.theme === "dark" ? "light" : "dark");
  redrawAll();
}

async function start() {
  const data = JSON.parse($("data").textContent);
  toggleTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => toggleTheme(event.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => toggleTheme());
  document.title = data.title;
  if (data.documents) {
    const report = new Report(data);
    showComparison(data, report);
    await report.open(data.documents.findIndex((d) => d.packed));
    window.report = report;
  }
  showMemory(data.inspections || []);
  for (const spec of data.charts || []) showChart(spec);
  await new Promise(requestAnimationFrame);
  document.documentElement.dataset.ready = String(Math.round(performance.now() - began));
}

start();
