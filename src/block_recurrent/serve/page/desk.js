// The text pane: the end of what was read, then what is generated, each token colored by how much the memory helped.

import { $, call, count, element, events, json } from "./api.js";
import { freeName } from "./main.js";

const FULL_COLOR = 3; // bits
const ALTERNATIVES = 6;
const desk = { memory: null, passages: [], refresh: null, writing: null };
window.desk = desk; // for tests

// ---- Passages generated since the page was opened, as long as the memory still has them

const kept = new Map(); // by the memory's id

export function openDesk(memory, { refresh }) {
  if (desk.memory?.name !== memory.name) told("");
  hideTip();
  const known = kept.get(memory.id) ?? kept.get(memory.parent) ?? [];
  desk.passages = known.filter((passage) => passage.end <= memory.tokens && memory.trail.includes(passage.at));
  kept.set(memory.id, desk.passages);
  Object.assign(desk, { memory, refresh });
  draw();
}

function draw() {
  const shown = desk.passages.length ? desk.passages[0].before : desk.memory.ending;
  $("text").replaceChildren(element("span", { class: "ending" }, shown.slice(-600)));
  desk.passages.forEach((passage, p) => passage.tokens.forEach((token, t) => $("text").append(span(token, p, t))));
  $("text").scrollTop = $("text").scrollHeight;
  $("legend").hidden = $("against").parentElement.hidden = !desk.passages.length;
}

function span(token, p, t) {
  const made = element("span", { "data-i": `${p}.${t}` }, token.text);
  if (token.given) made.className = "given";
  color(made, token);
  return made;
}

function worth(token) {
  const without = token.bits?.[$("against").value] ?? token.bits?.empty;
  return without === undefined ? null : without - token.bits.memory;
}

function color(made, token) {
  const bits = worth(token);
  if (bits === null) return;
  const alpha = Math.min(Math.abs(bits) / FULL_COLOR, 1) * 0.65;
  made.style.background = `rgb(var(--${bits > 0 ? "helped" : "hurt"}) / ${alpha.toFixed(3)})`;
  made.dataset.worth = bits.toFixed(2);
}

$("against").addEventListener("change", draw);

function told(text, wrong = false) {
  $("told").textContent = text;
  $("told").classList.toggle("wrong", wrong);
}

// ---- Writing

const numberOf = (id) => ($(id).value === "" ? undefined : Number($(id).value));

async function write(prompt, { into = desk.memory.name, from = desk.memory.name, at = desk.memory.tokens } = {}) {
  const before = desk.passages.length ? desk.passages[0].before : desk.memory.ending;
  const passage = { at, end: Infinity, before, tokens: [] };
  desk.passages.push(passage);
  const number = desk.passages.length - 1;
  const caret = element("span", { class: "caret" });
  $("text").append(caret);
  desk.writing = new AbortController();
  buttons(true);
  try {
    passage.tokens = await tokensOf(prompt, from);
    passage.tokens.forEach((token, t) => caret.before(span(token, number, t)));
    const body = {
      prompt: passage.tokens.map((token) => token.id), memory: from, save_as: into, stream: true, logprobs: ALTERNATIVES,
      max_tokens: numberOf("tokens") ?? 120, temperature: numberOf("temperature") ?? 0.8, seed: numberOf("seed"),
    };
    const began = performance.now();
    let written = 0;
    for await (const event of events("POST", "/v1/completions", body, { signal: desk.writing.signal })) {
      const choice = event.choices[0];
      if (!choice) { passage.end = event.saved.tokens; continue; }
      if (!choice.token_ids.length) continue;
      const token = { id: choice.token_ids[0], text: choice.text, top: choice.logprobs.top_logprobs[0] };
      passage.tokens.push(token);
      caret.before(span(token, number, passage.tokens.length - 1));
      $("text").scrollTop = $("text").scrollHeight;
      written++;
      told(`${count(written)} tokens, ${(written / ((performance.now() - began) / 1000)).toFixed(0)} a second, seed ${event.seed}`);
    }
    await score(passage, from.includes("@") ? from : `${from}@${at}`, into);
  } catch (error) {
    desk.passages.pop();
    told(error.name === "AbortError" ? "Stopped: the memory is unchanged." : error.message, error.name !== "AbortError");
    draw();
  } finally {
    buttons(false);
  }
}

// The words of a prompt as tokens; the memory's own tokenizer makes them.
async function tokensOf(prompt, memory) {
  if (typeof prompt !== "string") return prompt.map((token) => ({ ...token, bits: undefined }));
  if (!prompt) return [];
  const scored = await json("POST", "/v1/score", { memory, text: prompt });
  return scored.token_ids.map((id, i) => ({ id, text: shownToken(scored.tokens, i), given: true }));
}

// A character of several byte tokens is shown with its last one.
function shownToken(tokens, i) {
  if (!tokens[i].startsWith("bytes:")) return tokens[i];
  if (tokens[i + 1]?.startsWith("bytes:")) return "";
  let first = i;
  while (first > 0 && tokens[first - 1].startsWith("bytes:")) first--;
  const bytes = tokens.slice(first, i + 1).flatMap((token) => token.match(/[0-9a-f]{2}/g).map((pair) => parseInt(pair, 16)));
  return new TextDecoder().decode(new Uint8Array(bytes));
}

async function score(passage, reference, into) {
  const ids = passage.tokens.map((token) => token.id);
  kept.set(desk.memory.id, desk.passages);
  const passages = desk.passages;
  await desk.refresh(into);
  kept.set(desk.memory.id, passages);
  openDesk(desk.memory, desk);
  const place = reference.split("@")[1];
  if (!ids.length || !desk.memory.trail.includes(Number(place))) return;
  const { bits } = await json("POST", "/v1/score", { memory: `${into}@${place}`, token_ids: ids });
  passage.tokens.forEach((token, i) => {
    token.bits = Object.fromEntries(Object.entries(bits).map(([name, values]) => [name, values[i]]));
  });
  draw();
}

function buttons(busy) {
  $("go").replaceChildren(busy ? "Stop" : "Write ", ...(busy ? [element("kbd", {}, "Esc")] : [element("kbd", {}, "Ctrl ⏎")]));
  $("read-only").disabled = busy;
  document.querySelector(".caret")?.remove();
  if (!busy) desk.writing = null;
}

$("write").addEventListener("submit", (event) => {
  event.preventDefault();
  if (desk.writing) return desk.writing.abort();
  const prompt = $("prompt").value;
  $("prompt").value = "";
  write(prompt);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("write").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  desk.writing?.abort();
  hideTip();
});
$("read-only").addEventListener("click", async () => {
  const text = $("prompt").value;
  if (!text) return;
  const name = encodeURIComponent(desk.memory.name);
  try {
    await call("POST", `/v1/memories/${name}/read?from=${name}`, new Blob([text], { type: "text/plain" }));
    $("prompt").value = "";
    await desk.refresh(desk.memory.name);
  } catch (error) {
    told(error.message, true);
  }
});

// ---- Alternatives: another token there is another branch

function tokenAt(target) {
  const index = target.dataset?.i;
  if (!index) return null;
  const [p, t] = index.split(".").map(Number);
  return { passage: desk.passages[p], t, token: desk.passages[p]?.tokens[t] };
}

const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ $/, "␣");

function showTip(target) {
  const { passage, t, token } = tokenAt(target);
  if (!token) return;
  const rows = Object.entries(token.top ?? {}).map(([text, logProbability]) => {
    const taken = text === token.text;
    const row = element("tr", taken ? { class: "taken" } : { "data-token": text, title: "Continue from here with this token, in a new branch" });
    row.append(element("td", {}, visible(text)), element("td", {}, `${(100 * Math.exp(logProbability)).toFixed(1)} %`));
    if (!taken && !text.startsWith("bytes:")) row.addEventListener("click", () => branch(passage, t, text));
    return row;
  });
  $("tip").replaceChildren(element("table", {}, ...rows));
  if (token.bits) {
    const line = element("p");
    line.append(element("b", {}, `${token.bits.memory.toFixed(2)} bits`), " with the memory");
    if (token.bits.cleared !== undefined) line.append(element("br"), element("b", {}, `${token.bits.cleared.toFixed(2)}`), " with its state cleared");
    line.append(element("br"), element("b", {}, `${token.bits.empty.toFixed(2)}`), " with an empty memory");
    $("tip").append(line);
  }
  if (!$("tip").textContent) return;
  $("tip").hidden = false;
  const at = target.getBoundingClientRect(), own = $("tip").getBoundingClientRect();
  $("tip").style.left = `${Math.max(6, Math.min(at.left, innerWidth - own.width - 6))}px`;
  $("tip").style.top = `${at.bottom + own.height + 8 > innerHeight ? Math.max(6, at.top - own.height - 6) : at.bottom + 6}px`;
}

function hideTip() {
  $("tip").hidden = true;
}

async function branch(passage, t, text) {
  hideTip();
  const name = freeName(desk.memory.name);
  const given = passage.tokens.slice(0, t);
  const passages = desk.passages.slice(0, desk.passages.indexOf(passage));
  const from = `${desk.memory.name}@${passage.at}`;
  const fork = await json("POST", `/v1/memories/${encodeURIComponent(desk.memory.name)}/fork`, { name, at: passage.at });
  const other = await tokensOf(text, from);
  kept.set(fork.id, passages);
  await desk.refresh(name);
  await write([...given, ...other], { into: name, from: name, at: passage.at });
}

let leaving;
$("text").addEventListener("pointerover", (event) => {
  clearTimeout(leaving);
  if (tokenAt(event.target)) showTip(event.target);
});
for (const place of [$("text"), $("tip")]) {
  place.addEventListener("pointerleave", () => (leaving = setTimeout(hideTip, 250)));
}
$("tip").addEventListener("pointerenter", () => clearTimeout(leaving));
document.addEventListener("scroll", hideTip, true);
$("text").addEventListener("click", (event) => tokenAt(event.target) && showTip(event.target));
