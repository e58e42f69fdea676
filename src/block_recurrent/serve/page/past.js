// A memory's past: gates and state over the text, and the places of its trail.

import { $, count, element } from "./api.js";

const WIDTH = 900, HEIGHT = 150, TOP = 8, FLOOR = 104, LINE = 124;
const COLOURS = ["var(--a)", "var(--b)", "var(--c)"];

function shape(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function drawPast(memory, choose) {
  const width = Math.max(280, $("past").clientWidth - 40 || WIDTH);
  const x = (position) => 8 + ((width - 16) * position) / Math.max(memory.tokens, 1);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": "The memory's past" });
  const names = Object.keys(memory.trace).filter((name) => name !== "at");
  $("series").replaceChildren();
  names.forEach((name, number) => {
    const values = memory.trace[name];
    const most = Math.max(...values, 1e-9);
    const y = (value) => FLOOR - ((FLOOR - TOP) * value) / (most * 1.08);
    const path = values.map((value, i) => `${i ? "L" : "M"}${x(memory.trace.at[i]).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const line = shape("path", { d: path });
    line.style.stroke = COLOURS[number % COLOURS.length];
    line.append(shape("title", {}, `${name}: ${values.at(-1)}, at most ${most}`));
    svg.append(line);
    const key = element("i", { class: "line" });
    key.style.background = COLOURS[number % COLOURS.length];
    $("series").append(key, element("span", {}, `layer ${name.replace("_", " ")}`));
  });
  svg.append(shape("line", { class: "axis", x1: 8, x2: width - 8, y1: LINE, y2: LINE }));
  for (const position of memory.trail) {
    const label = `Checkpoint after ${count(position)} tokens`;
    const dot = shape("circle", { class: "stop", cx: x(position), cy: LINE, r: 6, tabindex: 0, role: "button", "aria-label": label, "data-at": position }, shape("title", {}, label));
    const take = () => {
      for (const other of svg.querySelectorAll(".chosen")) other.classList.remove("chosen");
      dot.classList.add("chosen");
      choose(position);
    };
    dot.addEventListener("click", take);
    dot.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") take();
    });
    svg.append(dot);
  }
  svg.append(shape("circle", { class: "now", cx: x(memory.tokens), cy: LINE, r: 5 }, shape("title", {}, "Now")));
  svg.append(shape("text", { x: 8, y: 146 }, "0"));
  svg.append(shape("text", { x: width - 8, y: 146, "text-anchor": "end" }, `${count(memory.tokens)} tokens`));
  $("chart").replaceChildren(svg);
}
