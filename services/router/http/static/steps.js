// The verify steps of a run: one draft tree at a time, its nodes as a table, and the time line of all steps.

import { drawTimeline, drawTree, layout } from "./drawing.js";
import { time } from "./format.js";
import { classOf } from "./origins.js";
import { hasTree, Run, totalMs } from "./run.js";

const LEVEL_MS = 130;
const VERDICT_MS = 900;
const MAX_LIVE_STEPS = 200; // in the time line of a run that goes on; all are drawn at its end
const $ = (id) => document.getElementById(id);

const view = { run: new Run(), plain: new Run(), selected: -1, follows: true, player: 0, drawn: "" };

/** Show the steps of another run; none at first. */
export function showRun(run, plain) {
  pause();
  Object.assign(view, { run, plain, selected: -1, follows: true, drawn: "" });
  for (const id of ["tree", "nodes", "timeline"]) $(id).replaceChildren();
  for (const id of ["step", "previous", "next", "play"]) $(id).disabled = true;
  $("caption").textContent = "In each verify step the target checks one tree of guesses in a single forward pass.";
  $("time-caption").textContent = "Times of drafter, wire and target in each step, measured by the server.";
}

/** The step that is shown; undefined without one. */
export const selectedStep = () => view.run.steps[view.selected];

/** Show the newest step of a run that goes on, unless another one was chosen. */
export function follow() {
  if (view.follows) show(view.run.steps.length - 1);
  else showTimeline();
}

/** Choose the step that shows most, unless another one was chosen: some tokens, and a tree with branches. */
export function chooseBest() {
  const worth = view.run.steps.map(({ nodes, tokens }) => {
    const numRejected = nodes.filter((node) => !node.accepted).length;
    return tokens.length > 1 ? Math.min(tokens.length, 8) + Math.min(numRejected, 8) : 0;
  });
  if (view.follows) show(worth.indexOf(Math.max(...worth)));
  view.follows = false;
}

export function select(index) {
  pause();
  view.follows = false;
  show(index);
}

function show(index) {
  if (!view.run.steps.length) return;
  view.selected = Math.max(0, Math.min(index, view.run.steps.length - 1));
  redraw();
}

/** Draw the chosen step. levels: of its tree that are shown. judged: whether the target has verified it. */
export function redraw(levels = Infinity, judged = true) {
  const { steps } = view.run;
  const step = steps[view.selected];
  if (!step) return;
  $("step").max = steps.length - 1;
  $("step").value = view.selected;
  $("step").setAttribute("aria-valuetext", `step ${view.selected + 1} of ${steps.length}`);
  for (const id of ["step", "previous", "next", "play"]) $(id).disabled = false;
  $("tree").replaceChildren(drawTree(step, classOf, $("tree").clientWidth - 6, levels, judged));
  $("caption").textContent = describe(step);
  document.querySelectorAll("#output .current").forEach((span) => span.classList.remove("current"));
  document.querySelectorAll(`#output [data-step="${view.selected}"]`).forEach((span) => span.classList.add("current"));
  showTable(step);
  showTimeline();
}

function describe(step) {
  const sent = step.nodes.length - 1;
  const accepted = step.nodes.filter((node) => node.accepted).length - 1;
  const where = `Step ${view.selected + 1} of ${view.run.steps.length}`;
  if (!hasTree(step)) {
    const late = step.wait_ms >= 1 ? ` came within ${time(step.wait_ms)}` : "";
    return `${where}: no tree${late}, so the target decodes one token.`;
  }
  const gain = `${step.tokens.length} ${step.tokens.length === 1 ? "token" : "tokens"}`;
  return `${where}: ${sent} nodes sent, ${accepted} accepted. One forward pass of ${step.rows} rows gives ${gain}.`;
}

function showTable(step) {
  const rows = step.nodes.map((node, index) => {
    const row = document.createElement("tr");
    const result = index === 0 ? "last committed token" : node.accepted ? "accepted" : "rejected";
    const prob = node.prob === null ? "" : `${(node.prob * 100).toFixed(1)} %`;
    for (const text of [index, JSON.stringify(node.token), node.parent ?? "", node.drafter ?? "", prob, result]) {
      row.insertCell().textContent = text;
    }
    return row;
  });
  $("nodes").replaceChildren(...rows);
}

export function showTimeline() {
  const { run, plain } = view;
  if (!run.steps.length || (!run.isWhole && run.steps.length > MAX_LIVE_STEPS)) return;
  const drawn = [run.steps.length, plain.isWhole || plain.steps.length <= MAX_LIVE_STEPS ? plain.steps.length : 0, $("timeline").clientWidth].join();
  if (drawn === view.drawn) return markSelected();
  view.drawn = drawn;
  const needed = Math.max(run.steps.length * 9 + 80, 280);
  const width = Math.min(Math.max($("timeline").clientWidth - 4, needed), 8000);
  $("timeline").replaceChildren(drawTimeline(run.steps, plain.steps, view.selected, width, select));
  const drafted = `${run.steps.length} steps in ${time(totalMs(run.steps))}`;
  const alone = plain.steps.length ? `; plain: ${plain.steps.length} in ${time(totalMs(plain.steps))}` : "";
  $("time-caption").textContent = `Measured by the server, laid end to end: ${drafted}${alone}.`;
  return undefined;
}

function markSelected() {
  $("timeline").querySelectorAll(".time").forEach((group, index) => group.classList.toggle("selected", index === view.selected));
}

// The player

function pause() {
  clearTimeout(view.player);
  view.player = 0;
  $("play").textContent = "Play";
  $("play").setAttribute("aria-pressed", "false");
}

function play() {
  if (view.player) {
    pause();
    return redraw();
  }
  if (view.selected >= view.run.steps.length - 1) view.selected = 0;
  view.follows = false;
  $("play").textContent = "Pause";
  $("play").setAttribute("aria-pressed", "true");
  return grow(0);
}

/** Show the tree of the selected step up to a level, then its verdict, then the next step. */
function grow(level) {
  const isJudged = level > layout(view.run.steps[view.selected]).depth;
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  redraw(isStill ? Infinity : level, isJudged || isStill);
  view.player = setTimeout(() => {
    if (!isJudged && !isStill) return grow(level + 1);
    if (view.selected >= view.run.steps.length - 1) {
      pause();
      return redraw();
    }
    view.selected += 1;
    return grow(0);
  }, isJudged || isStill ? VERDICT_MS : LEVEL_MS);
}

function onKey(event) {
  const moves = { ArrowLeft: view.selected - 1, ArrowRight: view.selected + 1, Home: 0, End: Infinity };
  if (event.key in moves) {
    event.preventDefault();
    select(moves[event.key]);
  }
}

/** Connect the panel's controls. */
export function start() {
  $("step").addEventListener("input", (event) => select(Number(event.target.value)));
  $("previous").addEventListener("click", () => select(view.selected - 1));
  $("next").addEventListener("click", () => select(view.selected + 1));
  $("play").addEventListener("click", play);
  $("tree").addEventListener("keydown", onKey);
  $("output").addEventListener("click", (event) => {
    const step = event.target.dataset?.step;
    if (step !== undefined) select(Number(step));
  });
  addEventListener("resize", () => view.player || redraw());
}
