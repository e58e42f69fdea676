// The shelf of memories, and the one that is open.

import { $, ask, call, count, element, events, json, size } from "./api.js";
import { drawPast } from "./past.js";
import { openDesk } from "./desk.js";

const state = { memories: [], open: null };
const encoded = (name) => encodeURIComponent(name);
window.memories = state; // for tests

// ---- The shelf

export async function refresh(name) {
  state.memories = (await json("GET", "/v1/memories")).data;
  drawShelf();
  const there = state.memories.some((memory) => memory.name === (name ?? state.open?.name));
  await open(there ? (name ?? state.open.name) : state.memories[0]?.name);
}

// Forks stand below what they were forked from.
function inTree() {
  const ids = new Set(state.memories.map((memory) => memory.id));
  const rows = [];
  const add = (memory, depth) => {
    rows.push([memory, depth]);
    for (const child of state.memories) if (child.parent && child.parent === memory.id) add(child, depth + 1);
  };
  for (const memory of state.memories) if (!ids.has(memory.parent)) add(memory, 0);
  return rows;
}

function drawShelf() {
  $("shelf").replaceChildren(
    ...inTree().map(([memory, depth]) => {
      const item = element("li", { role: "option", id: `memory-${memory.name}`, "data-name": memory.name });
      if (depth) item.className = "child";
      item.style.setProperty("--depth", Math.min(depth, 5));
      const kept = memory.bytes ? size(memory.bytes) : "another model’s";
      item.append(
        element("b", {}, memory.title === memory.name || !depth ? memory.title : memory.name),
        element("small", {}, element("span", {}, `${count(memory.tokens)} tokens`), element("span", { title: "Size of the memory, which is fixed" }, kept)),
      );
      item.addEventListener("click", () => open(memory.name));
      return item;
    }),
  );
}

$("shelf").addEventListener("keydown", (event) => {
  const items = [...$("shelf").children];
  const at = items.findIndex((item) => item.dataset.name === state.open?.name);
  const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (to === undefined || !items[to]) return;
  event.preventDefault();
  open(items[to].dataset.name);
});

async function open(name) {
  state.open = name ? await json("GET", `/v1/memories/${encoded(name)}`) : null;
  $("room").hidden = !state.open;
  $("empty").hidden = Boolean(state.open);
  for (const item of $("shelf").children) {
    const chosen = item.dataset.name === name;
    item.setAttribute("aria-selected", chosen);
    if (chosen) item.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  if (!state.open) return;
  $("shelf").setAttribute("aria-activedescendant", `memory-${name}`);
  const memory = state.open;
  $("title").textContent = memory.title === memory.name || memory.parent ? memory.name : memory.title;
  const ratio = memory.bytes && memory.text_bytes > 2 * memory.bytes ? `, 1 : ${Math.round(memory.text_bytes / memory.bytes)}` : "";
  const kept = memory.bytes ? `, kept in ${size(memory.bytes)}${ratio}` : "";
  $("facts").textContent = `${count(memory.tokens)} tokens, ${size(memory.text_bytes)} of text${kept} · ${memory.model ?? memory.model_name}`;
  drawPast(memory, choosePlace);
  $("place").hidden = true;
  openDesk(memory, { refresh });
}

// ---- Reading

let reading = null, before = Promise.resolve();

// One after the other.
function take(files) {
  for (const file of files) before = before.then(() => read(file, file.name));
}

async function read(blob, title) {
  const isMemory = title.endsWith(".memory"), plainTitle = title.replace(/\.[^.\s]*$/, "");
  const plain = plainTitle.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 50) || "text";
  const taken = new Set(state.memories.map((memory) => memory.name));
  let free = plain;
  for (let n = 2; taken.has(free); n++) free = `${plain}-${n}`;
  $("wrong").hidden = true;
  $("progress").hidden = false;
  $("progress-title").textContent = plainTitle;
  $("progress-bar").value = 0;
  $("progress-told").textContent = "";
  reading = new AbortController();
  try {
    const { signal } = reading;
    if (isMemory) await call("PUT", `/v1/memories/${free}/file`, new Blob([blob]), { signal });
    else {
      const query = new URLSearchParams({ stream: "true", title: plainTitle.slice(0, 200), model: $("model").value });
      const text = new Blob([blob], { type: "text/plain" }); // a file has a type of its own
      for await (const event of events("POST", `/v1/memories/${free}/read?${query}`, text, { signal })) {
        if (event.memory) continue;
        $("progress-bar").value = event.bytes / event.total_bytes;
        $("progress-told").textContent = `${count(event.tokens)} tokens${event.tokens_per_second ? `, ${count(event.tokens_per_second)} a second` : ""}`;
      }
    }
    await refresh(free);
  } catch (error) {
    $("wrong").hidden = error.name === "AbortError";
    $("wrong").textContent = `${title}: ${error.message}`;
  } finally {
    $("progress").hidden = true;
  }
}

$("progress-stop").addEventListener("click", () => reading?.abort());
$("file").addEventListener("change", () => {
  take($("file").files);
  $("file").value = "";
});
$("begin").addEventListener("click", () => $("file").click());
$("drop").addEventListener("keydown", (event) => {
  if (event.key === "Enter" || event.key === " ") $("file").click();
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files);
  });
}
$("blank").addEventListener("click", async () => {
  const text = await ask("Beginning of the text:", "", "Read");
  if (text) take([new File([text], text.slice(0, 40).replaceAll(".", " "))]);
});

// ---- Actions on a memory

function alertOf(error) {
  $("told").textContent = error.message;
  $("told").classList.add("wrong");
}

const act = (id, work) => $(id).addEventListener("click", () => work().catch(alertOf));

export function freeName(name) {
  const base = name.replace(/-\d+$/, "");
  const taken = new Set(state.memories.map((memory) => memory.name));
  let n = 2;
  while (taken.has(`${base}-${n}`)) n++;
  return `${base}-${n}`;
}

async function fork(at) {
  const name = await ask("Name of the branch:", freeName(state.open.name), "Branch");
  if (!name) return;
  await json("POST", `/v1/memories/${encoded(state.open.name)}/fork`, at === undefined ? { name } : { name, at });
  await refresh(name);
}
act("fork", () => fork());
act("rename", async () => {
  const name = await ask("New name:", state.open.name, "Rename");
  if (name && name !== state.open.name) {
    await json("PATCH", `/v1/memories/${encoded(state.open.name)}`, { name });
    await refresh(name);
  }
});
act("download", async () => {
  const { name } = state.open;
  const file = await (await call("GET", `/v1/memories/${encoded(name)}/file`)).blob(); // with the key, unlike a link
  const link = element("a", { href: URL.createObjectURL(file), download: `${name}.memory` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
});
act("delete", async () => {
  if ((await ask(`Type the name to delete “${state.open.name}”:`, "", "Delete")) === state.open.name) {
    await call("DELETE", `/v1/memories/${encoded(state.open.name)}`);
    await refresh();
  }
});

let drawn = 0;
new ResizeObserver(() => {
  if (state.open && $("past").clientWidth !== drawn) drawPast(state.open, choosePlace);
  drawn = $("past").clientWidth;
}).observe($("past"));

let chosen = null;
function choosePlace(position) {
  chosen = position;
  $("place").hidden = false;
  $("place-told").textContent = `After ${count(position)} tokens`;
  $("place-rewind").focus({ preventScroll: true });
}
act("place-fork", () => fork(chosen));
act("place-rewind", async () => {
  await json("POST", `/v1/memories/${encoded(state.open.name)}/rewind`, { to: chosen });
  await refresh(state.open.name);
});

const models = (await json("GET", "/v1/models")).data;
$("model").append(...models.map((model) => element("option", {}, model.id)));
$("model-choice").hidden = models.length < 2;
await refresh();
document.documentElement.dataset.ready = "";
