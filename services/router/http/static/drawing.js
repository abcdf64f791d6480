// Drawings in SVG: a draft tree, and the time line of verify steps. Text is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const CHARACTER = 7.3; // px, of the monospaced font at 12 px
const ROW = 32;
const HEIGHT = 24;
const GAP = 28;
const MARGIN = 6; // around the drawing, for ticks and thick lines
const MAX_LABEL = 18;
const SMALLEST = 0.78; // scale of a tree that is wider than its room; beyond it scrolls

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A token as one visible line; four spaces and more as their number. */
export function visible(text) {
  const short = text.replace(/ {4,}/g, (spaces) => `·×${spaces.length}`);
  const shown = short.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
  return shown.length > MAX_LABEL ? `${shown.slice(0, MAX_LABEL - 1)}…` : shown;
}

/** The nodes of a verify step with the target's own token, each with its place: column x, row y, width. */
export function layout(step) {
  const nodes = step.nodes.map((node, index) => ({ ...node, index, children: [], kind: "node" }));
  const last = nodes.findLast((node) => node.accepted);
  const own = step.tokens.at(-1);
  nodes.slice(1).forEach((node) => nodes[node.parent].children.push(node));
  if (own && own.drafter === null) {
    const bonus = { token: own.text || own.name || "", kind: "bonus", accepted: true, prob: null, children: [], parent: last.index };
    last.children.push(bonus);
    nodes.push(bonus);
  }
  const place = (node, depth, row) => {
    const percent = node.prob === null ? "" : `${Math.round(node.prob * 100)}%`;
    Object.assign(node, { depth, row, label: visible(node.token), percent });
    node.width = Math.max(node.label.length * CHARACTER + (percent ? percent.length * 6.2 + 8 : 0) + 18, 34);
    const rank = (child) => (child.accepted ? 2 : 0) + (child.prob ?? 0);
    node.children.sort((one, other) => rank(other) - rank(one));
    let next = row;
    for (const child of node.children) next = place(child, depth + 1, next);
    return Math.max(next, row + 1);
  };
  const rows = place(nodes[0], 0, 0);
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const starts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, MARGIN));
  for (const node of nodes) Object.assign(node, { x: starts[node.depth], y: MARGIN + node.row * ROW + ROW / 2 });
  const width = starts.at(-1) + widths.at(-1) + MARGIN;
  return { nodes, width, height: rows * ROW + 2 * MARGIN, depth: widths.length - 1 };
}

/** Draw a tree. room: width to fit it in, if it gets not too small. levels: number of levels to show; judged: whether the
 * target has verified them. */
export function drawTree(step, classOf, room, levels = Infinity, judged = true) {
  const { nodes, width, height } = layout(step);
  const scale = Math.max(Math.min(room / width, 1), SMALLEST);
  const size = { width: Math.floor(width * scale), height: height * scale };
  const drawing = element("svg", { ...size, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const shown = nodes.filter((node) => node.depth <= levels && (judged || node.kind !== "bonus"));
  for (const node of shown.filter((one) => one.depth > 0)) {
    const parent = nodes[node.parent];
    const [x, y] = [parent.x + parent.width, parent.y];
    const middle = (x + node.x) / 2;
    const path = `M${x} ${y}C${middle} ${y} ${middle} ${node.y} ${node.x} ${node.y}`;
    drawing.append(element("path", { d: path, class: `edge ${state(node, judged)}` }));
  }
  for (const node of shown) drawing.append(drawNode(node, classOf, judged));
  return drawing;
}

function state(node, judged) {
  if (node.depth === 0) return "root";
  if (node.kind === "bonus") return "bonus";
  if (!judged) return "sent";
  return node.accepted ? "accepted" : "rejected";
}

function drawNode(node, classOf, judged) {
  const kind = state(node, judged);
  const top = node.y - HEIGHT / 2;
  const group = element("g", { class: `at-${kind} ${node.drafter ? classOf(node.drafter) : "own"}` });
  const box = { x: node.x, y: top, width: node.width, height: HEIGHT, rx: kind === "bonus" ? 12 : 6, class: `node ${kind}` };
  group.append(element("rect", box));
  const text = element("text", { x: node.x + 9, y: node.y + 4, class: "label" });
  text.textContent = node.label;
  group.append(text);
  if (node.percent) {
    const percent = element("text", { x: node.x + node.width - 8, y: node.y + 3.5, class: "percent" });
    percent.textContent = node.percent;
    group.append(percent);
  }
  if (node.drafter) {
    const line = { x1: node.x + 9, x2: node.x + 9 + node.label.length * CHARACTER, class: "origin" };
    group.append(element("line", { ...line, y1: top + HEIGHT - 4.5, y2: top + HEIGHT - 4.5 }));
    group.append(element("line", { ...line, y1: top + HEIGHT - 2, y2: top + HEIGHT - 2, class: "origin second" }));
  }
  if (kind === "accepted") group.append(element("path", { d: `M${node.x + node.width - 5} ${top - 1}l3 3 6 -7`, class: "tick" }));
  const title = element("title");
  title.textContent = [node.token, node.drafter, kind].filter(Boolean).join(", ");
  group.append(title);
  return group;
}

const LANES = [
  ["draft", "draft"],
  ["wire", "wire"],
  ["verify", "verify"],
];
const LANE = 18;
const LEFT = 58;

/** How long the verifier waited for a tree that did not come in time, in ms; 0 with a tree. */
export const waited = (step) => (step.method === null ? step.wait_ms ?? 0 : 0);

const seconds = (step) => [step.draft_ms ?? 0, step.wire_ms ?? waited(step), step.verify_ms ?? 0];

/** Total of the server's measured times of some steps, in ms. */
export const duration = (steps) => steps.reduce((sum, step) => sum + seconds(step).reduce((one, other) => one + other), 0);

/** Draw the time line of the speculative steps and, below, of the plain ones, on one scale. */
export function drawTimeline(steps, plain, selected, width, select) {
  const total = Math.max(duration(steps), duration(plain), 1);
  const scale = (width - LEFT - 12) / total;
  const lanes = plain.length ? [...LANES, ["plain", "plain"]] : LANES;
  const height = lanes.length * LANE + 26;
  const label = `Speculative: ${steps.length} verify steps in ${duration(steps).toFixed(0)} ms` +
    (plain.length ? `. Plain: ${plain.length} in ${duration(plain).toFixed(0)} ms` : "");
  const drawing = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  drawAxis(drawing, total, scale, height, Math.max(Math.floor(width / 110), 2));
  lanes.forEach(([, name], lane) => {
    const text = element("text", { x: 0, y: lane * LANE + 13, class: "lane" });
    text.textContent = name;
    drawing.append(text);
  });
  let start = 0;
  steps.forEach((step, index) => {
    const group = element("g", { class: index === selected ? "time selected" : "time" });
    const length = duration([step]);
    const span = { x: LEFT + start * scale, width: Math.max(length * scale, 1), y: 0, height: LANES.length * LANE };
    group.append(element("rect", { ...span, class: "hit" }));
    let at = start;
    seconds(step).forEach((time, lane) => {
      if (time > 0) group.append(bar(at, time, scale, lane, LANES[lane][0]));
      at += time;
    });
    group.addEventListener("click", () => select(index));
    const [draft, wire, verify] = seconds(step).map((time) => time.toFixed(1));
    const title = element("title");
    const before = waited(step) ? `no tree within ${wire} ms` : `draft ${draft} ms, wire ${wire} ms`;
    title.textContent = `step ${index + 1}: ${before}, verify ${verify} ms, ${step.tokens.length} tokens`;
    group.append(title);
    drawing.append(group);
    start += length;
  });
  start = 0;
  for (const step of plain) {
    drawing.append(bar(start, duration([step]), scale, LANES.length, "plain"));
    start += duration([step]);
  }
  return drawing;
}

function bar(start, time, scale, lane, name) {
  const width = Math.max(time * scale - 0.75, 0.75);
  return element("rect", { x: LEFT + start * scale, y: lane * LANE + 3, width, height: LANE - 5, rx: 1.5, class: `bar-${name}` });
}

function drawAxis(drawing, total, scale, height, numTicks) {
  const raw = total / numTicks;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= raw);
  for (let at = 0; at <= total; at += step) {
    const x = LEFT + at * scale;
    drawing.append(element("line", { x1: x, x2: x, y1: 0, y2: height - 18, class: "tick-line" }));
    const text = element("text", { x, y: height - 5, class: "tick-label" });
    text.textContent = step >= 1000 || total >= 5000 ? `${+(at / 1000).toFixed(1)} s` : `${+at.toFixed(1)} ms`;
    drawing.append(text);
  }
}
