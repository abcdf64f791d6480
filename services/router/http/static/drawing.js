// Drawings in SVG: a draft tree, and the time line of verify steps. Text is set as text, never as markup.

import { time } from "./format.js";
import { hasTree, stepMs, totalMs } from "./run.js";

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

/** A tree as lines of text, with the drafter's confidence and a tick at each accepted node. */
export function treeText(step) {
  const { nodes } = layout(step);
  const lines = [];
  const write = (node, indent, isLast) => {
    const branch = node.depth === 0 ? "" : indent + (isLast ? "└─ " : "├─ ");
    const notes = [node.percent, node.kind === "bonus" ? "the target's own" : node.depth && node.accepted ? "✓" : ""];
    lines.push(branch + [node.label, ...notes].filter(Boolean).join("  "));
    const below = node.depth === 0 ? "" : indent + (isLast ? "   " : "│  ");
    node.children.forEach((child, place) => write(child, below, place === node.children.length - 1));
  };
  write(nodes[0], "", true);
  return lines.join("\n");
}

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor"];

/** The markup of a drawing that looks the same outside this page: with its styles, on the page's background. */
export function standalone(drawing) {
  const copy = drawing.cloneNode(true);
  const [shown, copied] = [[...drawing.querySelectorAll("*")], [...copy.querySelectorAll("*")]];
  shown.forEach((one, place) => {
    const style = getComputedStyle(one);
    if (style.display === "none") return copied[place].remove();
    copied[place].removeAttribute("class");
    if (["g", "title"].includes(one.tagName)) return undefined;
    for (const name of STYLES) copied[place].setAttribute(name, style.getPropertyValue(name).replaceAll('"', "'"));
    return undefined;
  });
  copy.prepend(element("rect", { width: "100%", height: "100%", fill: getComputedStyle(drawing.closest(".panel")).backgroundColor }));
  copy.removeAttribute("aria-hidden");
  return new XMLSerializer().serializeToString(copy);
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

/** A step's times of each lane, in ms. They add up to the step: a wait is split as the round trip to the drafter was. */
function laneMs(step) {
  const [wait, trip] = [step.wait_ms ?? 0, (step.draft_ms ?? 0) + (step.wire_ms ?? 0)];
  const draft = trip > 0 ? (wait * (step.draft_ms ?? 0)) / trip : 0;
  return [draft, wait - draft, step.verify_ms ?? 0];
}

/** Draw the time line of the speculative steps and, below, of the plain ones, on one scale. */
export function drawTimeline(steps, plain, selected, width, select) {
  const total = Math.max(totalMs(steps), totalMs(plain), 1);
  const scale = (width - LEFT - 12) / total;
  const lanes = plain.length ? [...LANES, ["plain", "plain"]] : LANES;
  const height = lanes.length * LANE + 26;
  const label = `Drafted: ${steps.length} verify steps in ${time(totalMs(steps))}` +
    (plain.length ? `. Plain: ${plain.length} in ${time(totalMs(plain))}` : "");
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
    const length = stepMs(step);
    const span = { x: LEFT + start * scale, width: Math.max(length * scale, 1), y: 0, height: LANES.length * LANE };
    group.append(element("rect", { ...span, class: "hit" }));
    let at = start;
    laneMs(step).forEach((ms, lane) => {
      if (ms > 0) group.append(bar(at, ms, scale, lane, LANES[lane][0]));
      at += ms;
    });
    group.addEventListener("click", () => select(index));
    const title = element("title");
    const trip = hasTree(step) ? `draft ${time(step.draft_ms)}, wire ${time(step.wire_ms)}, of these waited ` : "no tree, waited ";
    title.textContent = `step ${index + 1}: ${trip}${time(step.wait_ms)}, verify ${time(step.verify_ms)}, ${step.tokens.length} tokens`;
    group.append(title);
    drawing.append(group);
    start += length;
  });
  start = 0;
  for (const step of plain) {
    drawing.append(bar(start, stepMs(step), scale, LANES.length, "plain"));
    start += stepMs(step);
  }
  return drawing;
}

function bar(start, ms, scale, lane, name) {
  const width = Math.max(ms * scale - 0.75, 0.75);
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
    text.textContent = total >= 2000 ? `${+(at / 1000).toFixed(1)} s` : `${+at.toFixed(1)} ms`;
    drawing.append(text);
  }
}
