// A memory's past: gates and state over the text, and the places of its trail.

import { $, count, element } from "./api.js";

const BAND = 44, PLOT = 25, EDGE = 8;
const COLOURS = ["var(--a)", "var(--b)", "var(--c)"];
const NAMES = { "state length": "Length of the state", "state change": "Change of the state" };
const named = (what) => NAMES[what] ?? what[0].toUpperCase() + what.slice(1).replaceAll("_", " ");
const few = (value) => Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });

function shape(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// What was measured -> the values of each layer; a trace has them as "LAYER WHAT".
function measured(trace) {
  const found = new Map();
  for (const [name, values] of Object.entries(trace)) {
    const [, layer, what] = name.match(/^(\d+) (.*)$/) ?? [];
    if (what) found.set(what, [...(found.get(what) ?? []), [layer, values]]);
  }
  return found;
}

export function drawPast(memory, choose) {
  const width = Math.max(280, $("past").clientWidth - 40), at = memory.trace.at ?? [], bands = measured(memory.trace);
  const line = bands.size * BAND + 14, height = line + 26;
  const x = (position) => EDGE + ((width - 2 * EDGE) * position) / Math.max(memory.tokens, 1);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "The memory's past" });
  svg.style.height = `${height}px`;
  const told = [];
  [...bands].forEach(([what, layers], number) => {
    const all = layers.flatMap(([, values]) => values), top = number * BAND;
    const low = Math.min(...all), range = Math.max(...all) - low;
    const y = (value) => top + BAND - 6 - (PLOT - 6) * (range ? (value - low) / range : 0.5);
    const value = shape("text", { class: "value", x: width - EDGE, y: top + 12, "text-anchor": "end" });
    svg.append(shape("text", { x: EDGE, y: top + 12 }, named(what)), value);
    layers.forEach(([, values], layer) => {
      const path = values.map((v, i) => `${i ? "L" : "M"}${x(at[i]).toFixed(1)} ${y(v).toFixed(1)}`).join("");
      const drawn = shape("path", { d: values.length > 1 ? path : `${path}h.1` });
      drawn.style.stroke = COLOURS[layer % COLOURS.length];
      svg.append(drawn);
    });
    told.push((i) => (value.textContent = layers.map(([, values]) => few(values[i])).join(" · ")));
  });
  const layers = [...bands.values()][0]?.map(([layer]) => layer) ?? [];
  $("past-what").textContent = layers.length === 1 ? `The state of layer ${layers[0]} over the text` : "The state over the text";
  $("series").replaceChildren(...(layers.length > 1 ? layers : []).flatMap((layer, number) => {
    const key = element("i", { class: "line" });
    key.style.background = COLOURS[number % COLOURS.length];
    return [key, element("span", {}, `layer ${layer}`)];
  }));

  const where = shape("text", { x: width - EDGE, y: height - 4, "text-anchor": "end" });
  const cross = shape("line", { class: "cross", y1: 4, y2: line, visibility: "hidden" });
  const show = (i) => {
    for (const tell of told) tell(i < 0 ? at.length - 1 : i);
    where.textContent = `${count(i < 0 ? memory.tokens : at[i])} tokens`;
    cross.setAttribute("visibility", i < 0 ? "hidden" : "visible");
    if (i >= 0) for (const end of ["x1", "x2"]) cross.setAttribute(end, x(at[i]));
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), position = ((event.clientX - box.left) * width) / box.width;
    const near = at.reduce((best, p, i) => (Math.abs(x(p) - position) < Math.abs(x(at[best]) - position) ? i : best), 0);
    if (at.length) show(near);
  });
  svg.addEventListener("pointerleave", () => show(-1));
  if (at.length || !bands.size) show(-1);
  svg.append(cross, shape("line", { class: "axis", x1: EDGE, x2: width - EDGE, y1: line, y2: line }));

  for (const position of memory.trail) {
    const label = `Checkpoint after ${count(position)} tokens`;
    const dot = shape("circle", { class: "stop", cx: x(position), cy: line, r: 6, tabindex: 0, role: "button", "aria-label": label, "data-at": position }, shape("title", {}, label));
    const take = () => {
      for (const other of svg.querySelectorAll(".chosen")) other.classList.remove("chosen");
      dot.classList.add("chosen");
      choose(position);
    };
    dot.addEventListener("click", take);
    dot.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      take();
    });
    svg.append(dot);
  }
  if (!memory.trail.includes(memory.tokens)) svg.append(shape("circle", { class: "now", cx: x(memory.tokens), cy: line, r: 4 }, shape("title", {}, "Now")));
  svg.append(shape("text", { x: EDGE, y: height - 4 }, "0"), where);
  $("chart").replaceChildren(svg);
}
