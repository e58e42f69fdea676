// The text pane: the end of what was read, then what is generated, each token colored by how much the memory helped.

import { $, call, count, element, events, json } from "./api.js";
import { freeName } from "./main.js";

const FULL_COLOR = 3; // bits
const ALTERNATIVES = 6;
const desk = { memory: null, passages: [], refresh: null, writing: null };
window.desk = desk; // for tests

// ---- Passages: generated since the page was opened, as long as the memory still has them, or the end of its text

const kept = new Map(); // by the memory's id

export function openDesk(memory, { refresh }) {
  if (desk.memory?.name !== memory.name && !desk.writing) told("");
  const known = kept.get(memory.id) ?? kept.get(memory.parent) ?? [];
  desk.passages = known.filter((passage) => passage.end <= memory.tokens && memory.trail.includes(passage.at));
  kept.set(memory.id, desk.passages);
  Object.assign(desk, { memory, refresh });
  draw();
  if (!desk.passages.length && memory.model) showWorth(memory).catch(() => {});
}

// The last tokens of a memory that other pages wrote or that were read, from a checkpoint that lies before them.
async function showWorth(memory) {
  for (const at of memory.trail) {
    const ids = memory.recent.slice(-(memory.tokens - at));
    if (at >= memory.tokens || ids.length < memory.tokens - at) continue;
    const scored = await json("POST", "/v1/score", { memory: `${memory.name}@${at}`, token_ids: ids });
    if (scored.position !== at) continue; // that checkpoint holds back text whose tokens may have become others
    const tokens = ids.map((id, i) => ({ id, text: shownToken(scored.tokens, i), bits: bitsAt(scored.bits, i) }));
    const first = tokens.find((token) => token.text);
    if (first) first.text = first.text.replace(/^\ufffd+/, ""); // the end of a character that began before
    const text = tokens.map((token) => token.text).join("");
    const shown = text + memory.held; // no tokens yet: they depend on what follows
    if (desk.memory !== memory || desk.passages.length || desk.writing || !text || !memory.ending.endsWith(shown)) return;
    desk.passages.push({ at, end: memory.tokens, before: memory.ending.slice(0, -shown.length), tokens, after: memory.held });
    return draw();
  }
}

const bitsAt = (bits, i) => Object.fromEntries(Object.entries(bits).map(([name, values]) => [name, values[i]]));

function draw() {
  hideTip();
  const shown = desk.passages.length ? desk.passages[0].before : desk.memory.ending;
  $("text").replaceChildren(element("span", { class: "ending" }, shown.slice(-600)));
  desk.passages.forEach((passage, p) => $("text").append(...passage.tokens.map((token, t) => span(token, p, t)), passage.after ?? ""));
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

// Another memory may be opened meanwhile.
async function write(prompt, { into = desk.memory.name, from = desk.memory.name, at = desk.memory.tokens } = {}) {
  const { memory, passages } = desk;
  const passage = { at, end: Infinity, before: passages.length ? passages[0].before : memory.ending, tokens: [] };
  const caret = element("span", { class: "caret" });
  const show = (token) => {
    passage.tokens.push(token);
    if (caret.isConnected) caret.before(span(token, passages.indexOf(passage), passage.tokens.length - 1));
    if (caret.isConnected) $("text").scrollTop = $("text").scrollHeight;
  };
  passages.push(passage);
  $("text").append(caret);
  desk.writing = new AbortController();
  buttons(true);
  try {
    for (const token of await tokensOf(prompt, from)) show(token);
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
      show({ id: choice.token_ids[0], text: choice.text, top: choice.logprobs.top_logprobs[0] });
      written++;
      told(`${count(written)} tokens, ${(written / ((performance.now() - began) / 1000)).toFixed(0)} a second, seed ${event.seed}`);
    }
    kept.set(memory.id, passages);
    await desk.refresh(desk.memory.name);
    await score(passage, from.includes("@") ? from.split("@")[1] : at, into);
  } catch (error) {
    if (passages.includes(passage)) passages.splice(passages.indexOf(passage), 1);
    told(error.name === "AbortError" ? "Stopped: the memory is unchanged." : error.message, error.name !== "AbortError");
  } finally {
    buttons(false);
    draw();
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

async function score(passage, place, name) {
  if (!passage.tokens.length) return;
  const { bits } = await json("POST", "/v1/score", { memory: `${name}@${place}`, token_ids: passage.tokens.map((token) => token.id) });
  passage.tokens.forEach((token, i) => (token.bits = bitsAt(bits, i)));
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

const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣").replace(/(?<=\S)␣(?=\S)/g, " ");

let current = null;

function showTip(target) {
  const { passage, t, token } = tokenAt(target);
  if (!token) return;
  choose(target);
  const rows = Object.entries(token.top ?? {}).map(([text, logProbability]) => {
    const taken = text === token.text, other = !taken && !text.startsWith("bytes:");
    const row = element("tr", taken ? { class: "taken" } : { "data-token": text });
    const share = element("i", { class: "share" });
    share.style.width = `${(100 * Math.exp(logProbability)).toFixed(1)}%`;
    row.append(element("td", {}, visible(text)), element("td", {}, share), element("td", {}, `${(100 * Math.exp(logProbability)).toFixed(1)} %`));
    if (other) {
      row.tabIndex = -1;
      row.title = "Continue from here with this token, in a new branch";
      const take = () => branch(passage, t, text).catch((error) => told(error.message, true));
      row.addEventListener("click", take);
      row.addEventListener("keydown", (event) => event.key === "Enter" && take());
    }
    return row;
  });
  $("tip").replaceChildren(...(rows.length ? [element("table", {}, ...rows)] : []));
  if (token.bits) {
    const line = element("p");
    line.append(element("b", {}, `${token.bits.memory.toFixed(2)} bits`), " with the memory");
    if (token.bits.cleared !== undefined) line.append(element("br"), element("b", {}, `${token.bits.cleared.toFixed(2)}`), " with its state cleared");
    line.append(element("br"), element("b", {}, `${token.bits.empty.toFixed(2)}`), " with an empty memory");
    $("tip").append(line);
  }
  $("tip").hidden = !$("tip").textContent;
  placeTip();
}

function placeTip() {
  if ($("tip").hidden || !current) return;
  const at = current.getBoundingClientRect(), own = $("tip").getBoundingClientRect(), pane = $("text").getBoundingClientRect();
  if (at.bottom < pane.top || at.top > pane.bottom) return hideTip();
  $("tip").style.left = `${Math.max(6, Math.min(at.left, innerWidth - own.width - 6))}px`;
  $("tip").style.top = `${at.bottom + own.height + 8 > innerHeight ? Math.max(6, at.top - own.height - 6) : at.bottom + 6}px`;
}

function choose(target) {
  current?.classList.remove("chosen");
  current = target;
  current?.classList.add("chosen");
}

function hideTip() {
  $("tip").hidden = true;
  choose(null);
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
document.addEventListener("scroll", placeTip, true);
// By keyboard: from token to token, and into the alternatives.
$("text").addEventListener("keydown", (event) => {
  const tokens = [...$("text").querySelectorAll("[data-i]")].filter((token) => token.textContent), at = tokens.indexOf(current);
  const to = { ArrowLeft: at < 0 ? tokens.length - 1 : at - 1, ArrowRight: at < 0 ? 0 : at + 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (event.key === "Enter" && current) $("tip").querySelector("[data-token][tabindex]")?.focus();
  else if (to !== undefined && tokens[to]) {
    tokens[to].scrollIntoView({ block: "nearest" });
    showTip(tokens[to]);
  } else return;
  event.preventDefault();
});
$("tip").addEventListener("keydown", (event) => {
  const rows = [...$("tip").querySelectorAll("[data-token][tabindex]")], step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape" || event.key === "Tab") $("text").focus();
  if (!step) return;
  event.preventDefault();
  rows[rows.indexOf(document.activeElement) + step]?.focus();
});
document.addEventListener("click", (event) => {
  if (event.target.closest("#tip")) return;
  clearTimeout(leaving); // a finger leaves before it clicks
  if (tokenAt(event.target)) showTip(event.target);
  else hideTip();
});
