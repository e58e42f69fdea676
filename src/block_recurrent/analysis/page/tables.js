"use strict";
// Everything around the book: headline numbers, tables of top tokens, curves, the memory, definitions, configurations.

const SERIES_COLORS = ["--a", "--b", "--c", "--d", "--e", "--f"];

function showComparison(data, report) {
  for (const card of data.cards) {
    $("cards").append(
      element("div", { className: "card number" },
        element("span", { className: "label", textContent: card.label }),
        element("strong", { className: card.tone || "", textContent: card.value }),
        element("span", { className: "note", textContent: card.note }),
      ),
    );
  }
  data.documents.forEach((d, i) => {
    const label = `${d.name}  (${d.tokens.toLocaleString("en")} tokens${d.packed ? "" : "; not in this file"})`;
    $("document").append(element("option", { value: String(i), textContent: label, disabled: !d.packed }));
  });
  $("key-a").textContent = data.a.label;
  $("key-b").textContent = data.b.label;
  const open = (top) => {
    report.open(data.documents.findIndex((d) => d.name === top.document), top.index);
    $("book").scrollIntoView({ behavior: "smooth" });
  };
  showTop($("top-a"), data.top_a, data, open);
  showTop($("top-b"), data.top_b, data, open);
  $("top-a-note").textContent = data.top_a_note;
  $("top-b-note").textContent = data.top_b_note;
  barChart($("distances"), {
    labels: data.by_distance.map((bucket) => bucket.label),
    values: data.by_distance.map((bucket) => bucket.mean_difference),
    notes: data.by_distance.map((bucket) => `${short(bucket.tokens)} tokens`),
    xLabel: "tokens back to the last mention of the word", yLabel: "bits saved by A per token", up: "--a", down: "--b",
  });
  showHeadroom(data);
  lineChart($("cumulative"), cumulativeSpec(data.curves));
  legend($("cumulative-legend"), data.curves.map((curve) => curve.label));
  showDocuments(data);
  for (const [term, text] of Object.entries(data.definitions))
    $("definitions").append(element("dt", { textContent: term }), element("dd", { textContent: text }));
  for (const side of [data.a, data.b]) $("configurations").append(configuration(side));
}

function cumulativeSpec(curves) {
  return {
    series: curves.map((c, i) => ({ label: c.label, x: c.positions, y: c.bits_per_token, color: SERIES_COLORS[i % 6] })),
    counts: { label: "documents", x: curves[0].positions, y: curves[0].documents },
    xLabel: "position", yLabel: "mean bits per token up to here", xLog: true,
  };
}

function showHeadroom(data) {
  if (!data.headroom.a) return $("headroom").remove();
  const columns = [];
  for (const kind of ["bigram", "unigram"])
    for (const side of ["a", "b"]) columns.push({ kind, side, label: `${data[side].label}, ${kind}`, color: SERIES_COLORS[columns.length] });
  lineChart($("headroom-distances"), {
    series: columns.map(({ kind, side, label, color }) => {
      const bands = data.headroom[side].by_distance;
      return { label, color, x: bands.map((band) => band.high), y: bands.map((band) => band[kind]), points: true, dashed: kind === "unigram" };
    }),
    xLabel: "distance in tokens (each point: up to this, and more than half of it)", yLabel: "bits saved per token", xLog: true,
  });
  legend($("headroom-legend"), columns.map((column) => column.label));
  const [near, far] = [data.headroom.a.window, data.headroom.a.reach].map((size) => size.toLocaleString("en"));
  const ranges = { all: "all", window: `window, up to ${near}`, reach: `reach, up to ${far}`, beyond: `beyond ${far}` };
  const head = ["tokens back", ...columns.map((column) => column.label)];
  const rows = data.headroom.a.bands.map((band, i) => element("tr", {},
    element("td", { textContent: ranges[band.label] }),
    ...columns.map(({ kind, side }) => element("td", { className: "num", textContent: data.headroom[side].bands[i][kind].toFixed(4) }))));
  $("headroom-bands").append(
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { textContent: text })))), element("tbody", {}, ...rows));
}

function legend(place, labels) {
  labels.forEach((label, i) => {
    const swatch = element("i");
    swatch.style.background = `var(${SERIES_COLORS[i % 6]})`;
    place.append(element("span", { className: "key" }, swatch, label));
  });
}

function showTop(table, tops, data, open) {
  const head = ["", "token", data.a.label, data.b.label, "difference", "last mention", "excerpt"];
  table.append(element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { textContent: text })))));
  const body = element("tbody");
  tops.forEach((top, rank) => {
    const cell = (text, className = "") => element("td", { className, textContent: text });
    const excerpt = element("td", { className: "excerpt" },
      top.before.slice(-80), element("mark", { className: top.difference > 0 ? "a" : "b", textContent: top.token }), top.after.slice(0, 40));
    if (top.proper_name) excerpt.append(" ", element("span", { className: "badge name", textContent: "name" }));
    const mention = element("td", {}, element("span", { className: `badge ${top.where}`, textContent: top.distance === null ? "never" : top.distance.toLocaleString("en"), title: WHERE_WORDS[top.where] }));
    const row = element("tr", { tabIndex: 0, title: top.document },
      cell(String(rank + 1), "rank"), cell(top.index.toLocaleString("en"), "num"), cell(top.bits_a.toFixed(2), "num"),
      cell(top.bits_b.toFixed(2), "num"), cell((top.difference > 0 ? "+" : "−") + Math.abs(top.difference).toFixed(2), `num ${top.difference > 0 ? "better-a" : "better-b"}`),
      mention, excerpt);
    row.addEventListener("click", () => open(top));
    row.addEventListener("keydown", (event) => event.key === "Enter" && open(top));
    body.append(row);
  });
  table.append(body);
}

function showDocuments(data) {
  const head = ["document", "tokens", `${data.a.label}, bits/token`, `${data.b.label}, bits/token`, "difference"];
  $("documents").append(element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { textContent: text })))));
  const body = element("tbody");
  for (const d of data.documents) {
    const gain = d.bits_b - d.bits_a;
    body.append(element("tr", {},
      element("td", { textContent: d.name }), element("td", { className: "num", textContent: d.tokens.toLocaleString("en") }),
      element("td", { className: "num", textContent: d.bits_a.toFixed(4) }), element("td", { className: "num", textContent: d.bits_b.toFixed(4) }),
      element("td", { className: `num ${gain >= 0 ? "better-a" : "better-b"}`, textContent: (gain >= 0 ? "+" : "−") + Math.abs(gain).toFixed(4) })));
  }
  $("documents").append(body);
}

function configuration(side) {
  const rows = Object.entries(side.config).map(([key, value]) =>
    element("tr", {}, element("td", { textContent: key }), element("td", { className: "num", textContent: JSON.stringify(value) })));
  return element("details", {}, element("summary", { textContent: `${side.label}: ${side.about}` }), element("table", {}, element("tbody", {}, ...rows)));
}

/** A chart of its own page or of the report: {id, title, note, kind: "line", ...lineChart's spec} */
function showChart(spec) {
  const canvas = element("canvas", { className: "chart tall", role: "img", ariaLabel: spec.title });
  const keys = element("p", { className: "legend" });
  const title = spec.title === document.title ? [] : [element("h2", { textContent: spec.title })];
  $("charts").append(element("section", { className: "card" }, ...title, element("p", { className: "note", textContent: spec.note }), keys, canvas));
  spec.series.forEach((s, i) => (s.color = s.color || SERIES_COLORS[i % 6]));
  legend(keys, spec.series.map((s) => s.label));
  lineChart(canvas, spec);
}

async function showMemory(inspections) {
  if (!inspections.length) return $("memory")?.remove();
  for (const inspection of inspections)
    for (const layer of inspection.layers) await showLayer(inspection, layer);
}

async function showLayer(inspection, layer) {
  const figure = (title, note, height = "chart") => {
    const canvas = element("canvas", { className: height, role: "img", ariaLabel: title });
    return [element("figure", {}, element("figcaption", {}, element("strong", { textContent: title }), ` ${note}`), canvas), canvas];
  };
  const [gates, gatesCanvas] = figure("Gates", "mean activation by block");
  const [change, changeCanvas] = figure("Change", "share of the state replaced by each block");
  const [length, lengthCanvas] = figure("Norm", "mean norm of a state vector");
  const [read, readCanvas] = figure("Read", "attention of the tokens on each state vector");
  const [written, writtenCanvas] = figure("Written", "change of each state vector");
  const blocks = layer.change.map((_, i) => i * layer.blocks_per_point);
  $("inspections").append(
    element("h3", { textContent: `${inspection.name}, layer ${layer.layer}` }),
    element("p", { className: "note", textContent: layer.note }),
    element("div", { className: "three" }, gates, change, length), element("div", { className: "pair" }, read, written),
    element("p", { className: "note", textContent: layer.most_changed_note }), ablationTable(layer));
  const names = Object.keys(layer.gates);
  if (names.length > 1) {
    const keys = element("p", { className: "legend" });
    legend(keys, names);
    gates.querySelector("figcaption").append(keys);
  } else gates.querySelector("figcaption").append(` (${names[0]})`);
  lineChart(gatesCanvas, {
    series: Object.entries(layer.gates).map(([label, y], i) => ({ label, x: blocks, y, color: SERIES_COLORS[i % 6] })),
    xLabel: "block", yLabel: "open", yFrom: 0, yTo: 1,
  });
  lineChart(changeCanvas, {
    series: [{ label: "change", x: blocks, y: layer.change, color: "--b" }],
    xLabel: "block", yLabel: "share replaced", yFrom: 0,
  });
  lineChart(lengthCanvas, {
    series: [{ label: "length", x: blocks, y: layer.state_norm, color: "--c" }],
    xLabel: "block", yLabel: "length", yFrom: 0,
  });
  for (const [canvas, packed] of [[readCanvas, layer.read], [writtenCanvas, layer.written]])
    heatMap(canvas, { values: await unpack(packed), columns: layer.columns, rows: layer.states, xLabel: "block", yLabel: "state vector", xTo: layer.blocks });
}

function ablationTable(layer) {
  if (!layer.ablation.length) return "";
  const head = ["ablated state vectors", "most read: bits per token", "change", "least read: bits per token", "change"];
  const signed = (x) => (x >= 0 ? "+" : "−") + Math.abs(x).toFixed(4);
  const rows = layer.ablation.map((r) => element("tr", {}, ...[r.count, r.most_read.toFixed(4), signed(r.most_read - r.normal), r.least_read.toFixed(4), signed(r.least_read - r.normal)]
    .map((text) => element("td", { className: "num", textContent: String(text) }))));
  const titles = element("tr", {}, ...head.map((text) => element("th", { textContent: text })));
  return element("div", { className: "ablation" }, element("table", {}, element("thead", {}, titles), element("tbody", {}, ...rows)));
}
