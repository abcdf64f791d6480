// The playground: sends the form's request twice, with drafts and without, and shows tokens, trees and times as they come.
// Only textContent and SVG attributes carry what the server sends.

import { apiKey, complete, getJson } from "./api.js";
import { watchCluster } from "./cluster.js";
import { drawTimeline, drawTree, duration, layout, waited } from "./drawing.js";

const $ = (id) => document.getElementById(id);
const EXAMPLE = `class Queue:
    """A first-in, first-out queue."""

    def __init__(self):
        self.items = []

    def push(self, item):
`;
const DRAW_EVERY_MS = 120;
const LEVEL_MS = 130;
const VERDICT_MS = 900;

/** One run of the request. steps: verify steps, without the prefill's own. */
class Run {
  constructor() {
    this.tokens = [];
    this.steps = [];
    this.started = performance.now();
    this.times = [];
    this.tau = null;
  }

  /** Take an event; returns its verify steps. */
  add(event) {
    this.tau = event.metrics?.speculative_decoding?.mean_acceptance_length ?? this.tau;
    const found = (event.choices ?? []).flatMap((choice) => choice.verify_steps ?? []);
    for (const step of found) {
      this.tokens.push(...step.tokens);
      if (step.nodes.length) this.steps.push(step);
      this.times.push([performance.now(), step.tokens.length]);
    }
    return found;
  }

  /** Tokens per second after the first event, as this page sees them; null for one event alone. */
  get speed() {
    const [first, last] = [this.times[0], this.times.at(-1)];
    return this.times.length > 1 && last[0] > first[0] ? ((this.tokens.length - first[1]) * 1000) / (last[0] - first[0]) : null;
  }

  get firstTokenMs() {
    return this.times.length ? this.times[0][0] - this.started : null;
  }
}

const state = { run: new Run(), plain: new Run(), selected: -1, follows: true, abort: null, player: 0, drawn: 0 };

// Origins: each drafter gets a colour and an underline in the order of its appearance.

const origins = new Map();
const STYLES = ["d1", "d2", "d3", "d4"];

function classOf(drafter) {
  if (!origins.has(drafter)) {
    const style = drafter.includes("+") ? "both" : STYLES[[...origins.values()].filter((one) => one !== "both").length] ?? "d4";
    origins.set(drafter, style);
  }
  return origins.get(drafter);
}

function showLegend() {
  const counts = new Map([[null, 0], ...[...origins.keys()].sort((one, other) => one.length - other.length).map((name) => [name, 0])]);
  for (const { drafter } of state.run.tokens) counts.set(drafter, (counts.get(drafter) ?? 0) + 1);
  const entries = [...counts].map(([drafter, number]) => {
    const item = document.createElement("li");
    const sample = document.createElement("span");
    sample.className = `token ${drafter === null ? "own" : classOf(drafter)}`;
    sample.textContent = drafter === null ? "the target's own" : drafter.replace("+", " and ");
    item.append(sample, ` ${number}`);
    return item;
  });
  $("legend").replaceChildren(...(state.run.tokens.length ? entries : []));
}

// Text

function showTokens(steps) {
  for (const step of steps) {
    const index = step.nodes.length ? state.run.steps.indexOf(step) : -1;
    for (const token of step.tokens) {
      const span = document.createElement("span");
      span.className = `token ${token.drafter === null ? "own" : classOf(token.drafter)}`;
      span.textContent = token.text;
      span.title = token.drafter === null ? "the target's own token" : `drafted by ${token.drafter}`;
      if (index >= 0) {
        span.dataset.step = index;
        span.title += `, step ${index + 1}`;
      }
      $("output").append(span);
    }
  }
  $("output").scrollTop = $("output").scrollHeight;
}

// Steps

function select(index, follows = false) {
  const { steps } = state.run;
  if (!steps.length) return;
  state.selected = Math.max(0, Math.min(index, steps.length - 1));
  state.follows = follows;
  showStep();
}

function showStep(levels = Infinity, judged = true) {
  const { steps } = state.run;
  const step = steps[state.selected];
  if (!step) return;
  $("step").max = steps.length - 1;
  $("step").value = state.selected;
  $("step").setAttribute("aria-valuetext", `step ${state.selected + 1} of ${steps.length}`);
  for (const id of ["step", "previous", "next", "play"]) $(id).disabled = false;
  $("tree").replaceChildren(drawTree(step, classOf, $("tree").clientWidth - 6, levels, judged));
  $("caption").textContent = describe(step);
  document.querySelectorAll("#output .current").forEach((span) => span.classList.remove("current"));
  document.querySelectorAll(`#output [data-step="${state.selected}"]`).forEach((span) => span.classList.add("current"));
  showTable(step);
  showTimeline();
}

function describe(step) {
  const sent = step.nodes.length - 1;
  const accepted = step.nodes.filter((node) => node.accepted).length - 1;
  const where = `Step ${state.selected + 1} of ${state.run.steps.length}`;
  if (!sent) {
    const late = waited(step) >= 1 ? ` came within ${waited(step).toFixed(0)} ms` : "";
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

function showTimeline() {
  const { run, plain } = state;
  if (!run.steps.length) return $("timeline").replaceChildren();
  const needed = Math.max(run.steps.length * 9 + 80, 280);
  const width = Math.min(Math.max($("timeline").clientWidth, needed), 8000);
  $("timeline").replaceChildren(drawTimeline(run.steps, plain.steps, state.selected, width, (index) => halt(select, index)));
  const served = `${run.steps.length} steps in ${duration(run.steps).toFixed(0)} ms`;
  const alone = plain.steps.length ? `; plain: ${plain.steps.length} in ${duration(plain.steps).toFixed(0)} ms` : "";
  $("time-caption").textContent = `Measured by the server, laid end to end: ${served}${alone}.`;
}

/** Stop the player, then call. */
function halt(call, ...given) {
  clearTimeout(state.player);
  state.player = 0;
  $("play").textContent = "Play";
  $("play").setAttribute("aria-pressed", "false");
  return call(...given);
}

function play() {
  if (state.player) return halt(showStep);
  if (state.selected >= state.run.steps.length - 1) state.selected = 0;
  $("play").textContent = "Pause";
  $("play").setAttribute("aria-pressed", "true");
  grow(0);
}

/** Show the tree of the selected step up to a level, then its verdict, then the next step. */
function grow(level) {
  const step = state.run.steps[state.selected];
  const isJudged = level > layout(step).depth;
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  showStep(isStill ? Infinity : level, isJudged || isStill);
  state.player = setTimeout(() => {
    if (!isJudged && !isStill) return grow(level + 1);
    if (state.selected >= state.run.steps.length - 1) return halt(showStep);
    state.selected += 1;
    return grow(0);
  }, isJudged || isStill ? VERDICT_MS : LEVEL_MS);
}

// Figures

const rounded = (value, digits = 0) => (value === null || !Number.isFinite(value) ? "–" : value.toFixed(digits));

function showFigures() {
  const { run, plain } = state;
  $("tau").textContent = rounded(run.tau ?? (run.steps.length ? (run.tokens.length - 1) / run.steps.length : null), 2);
  const size = run.steps.length ? `\n${run.tokens.length} tokens, ${run.steps.length} steps` : "";
  $("tau-note").textContent = `tokens per step${size}`;
  for (const [name, one] of [["speculative", run], ["plain", plain]]) {
    $(`speed-${name}`).textContent = rounded(one.speed);
    const first = one.firstTokenMs === null ? "" : `\nfirst after ${rounded(one.firstTokenMs)} ms`;
    $(`speed-${name}-note`).textContent = `tokens/s${first}`;
  }
  const isDone = plain.tau !== null && run.speed && plain.speed;
  $("speedup").textContent = isDone ? `${(run.speed / plain.speed).toFixed(2)} ×` : "–";
}

function showVerdict(text, note, kind) {
  $("same").textContent = text;
  $("same-note").textContent = note;
  $("verdict").className = `verdict ${kind}`;
}

/** Compare both runs token by token. */
function compare() {
  const [one, other] = [state.run.tokens, state.plain.tokens];
  const length = Math.max(one.length, other.length);
  const place = Array.from({ length }, (_, index) => index).find((index) => one[index]?.id !== other[index]?.id);
  if (place === undefined) return showVerdict("✓ identical", `${length} of ${length} tokens`, "same");
  const quoted = [one, other].map((tokens) => (tokens[place] ? JSON.stringify(tokens[place].text) : "the end"));
  const note = `from token ${place + 1}: ${quoted[0]}, plain ${quoted[1]}. Expected only under acceptance: rejection, or below float32.`;
  document.querySelectorAll("#output .token")[place]?.classList.add("different");
  return showVerdict("✗ different", note, "different");
}

// Runs

function requestBody(form, seed) {
  const values = Object.fromEntries(new FormData(form));
  const stop = values.stop.split("\n").filter(Boolean);
  const isChat = values.endpoint === "chat/completions";
  return {
    model: values.model,
    ...(isChat ? { messages: [{ role: "user", content: values.prompt }] } : { prompt: values.prompt }),
    temperature: Number(values.temperature),
    top_p: Number(values.top_p),
    max_tokens: Number(values.max_tokens),
    seed,
    ...(stop.length && { stop }),
    ...(values.num_draft_tokens && { num_draft_tokens: Number(values.num_draft_tokens) }),
    drafter: values.drafter,
    stream: true,
    return_speculation: true,
    return_verify_steps: true,
  };
}

async function stream(run, endpoint, body, onSteps) {
  run.started = performance.now();
  for await (const event of complete(endpoint, body, state.abort.signal)) {
    onSteps(run.add(event));
    if (performance.now() - state.drawn > DRAW_EVERY_MS) {
      state.drawn = performance.now();
      showFigures();
      showLegend();
      if (state.follows) select(state.run.steps.length - 1, true);
      else showTimeline();
    }
  }
}

function clear(body) {
  halt(() => {});
  origins.clear();
  Object.assign(state, { run: new Run(), plain: new Run(), selected: -1, follows: true, abort: new AbortController() });
  const prompt = document.createElement("span");
  prompt.className = "prompt";
  prompt.textContent = body.prompt ?? "";
  $("output").replaceChildren(prompt);
  $("tree").replaceChildren();
  $("nodes").replaceChildren();
  $("problem").hidden = true;
  showVerdict("–", "not compared", "");
  setRunning(true);
}

function setRunning(isRunning) {
  $("run").disabled = isRunning;
  $("halt").hidden = !isRunning;
}

async function run(form) {
  const seed = form.seed.value === "" ? Math.floor(Math.random() * 2 ** 32) : Number(form.seed.value);
  const body = requestBody(form, seed);
  const endpoint = form.endpoint.value;
  clear(body);
  say("Running");
  if ($("results").getBoundingClientRect().top > innerHeight / 2) $("results").scrollIntoView();
  try {
    await stream(state.run, endpoint, body, showTokens);
    if (state.follows) select(longest(), true);
    state.follows = false;
    if ($("compare").checked && body.drafter !== "none") {
      showVerdict("…", "plain run, same seed", "");
      await stream(state.plain, endpoint, { ...body, drafter: "none" }, () => {});
      compare();
    }
    say(`Done: ${state.run.tokens.length} tokens in ${state.run.steps.length} verify steps with seed ${seed}. ${$("same").textContent}`);
  } catch (error) {
    if (error.name !== "AbortError") showProblem(error);
    showVerdict("–", error.name === "AbortError" ? "stopped" : "not compared", "");
    say("Stopped");
  }
  setRunning(false);
  showFigures();
  showLegend();
  showStep();
}

/** The step with the most tokens, the first of them. */
function longest() {
  const sizes = state.run.steps.map((step) => step.tokens.length);
  return sizes.indexOf(Math.max(...sizes));
}

function say(text) {
  $("status").textContent = text;
}

function showProblem(error) {
  const needsKey = error.status === 401;
  $("problem").textContent = needsKey ? "This server needs an API key that it knows. Type one in at the top." : error.message;
  $("problem").hidden = false;
  if (needsKey) askForKey();
}

// Page

function askForKey() {
  document.querySelector(".key").open = true;
  $("key").focus();
}

async function loadModels() {
  try {
    const { data } = await getJson("models");
    const options = data.map(({ id }) => new Option(id, id));
    $("model").replaceChildren(...(options.length ? options : [new Option("no model is served now", "")]));
    $("problem").hidden = true;
  } catch (error) {
    $("model").replaceChildren(new Option("not known", ""));
    showProblem(error);
  }
}

function showKey() {
  $("key-state").textContent = apiKey.get() ? "API key set" : "No API key";
}

function chooseTab(tab) {
  for (const one of document.querySelectorAll("[role=tab]")) {
    const isChosen = one === tab;
    one.setAttribute("aria-selected", isChosen);
    one.tabIndex = isChosen ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !isChosen;
  }
  if (tab.id === "tab-cluster") watchCluster();
  else showTimeline();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").value = theme;
  localStorage.setItem("eyas-theme", theme);
}

function onKey(event) {
  const moves = { ArrowLeft: state.selected - 1, ArrowRight: state.selected + 1, Home: 0, End: Infinity };
  if (event.key in moves) {
    event.preventDefault();
    halt(select, moves[event.key]);
  }
}

function start() {
  setTheme(localStorage.getItem("eyas-theme") ?? "");
  $("prompt").value = EXAMPLE;
  $("key").value = apiKey.get();
  showKey();
  $("theme").addEventListener("change", (event) => setTheme(event.target.value));
  $("key").addEventListener("change", (event) => {
    apiKey.set(event.target.value.trim());
    showKey();
    loadModels();
  });
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    run(event.target);
  });
  $("form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !$("run").disabled) $("form").requestSubmit();
  });
  $("halt").addEventListener("click", () => state.abort.abort());
  $("step").addEventListener("input", (event) => halt(select, Number(event.target.value)));
  $("previous").addEventListener("click", () => halt(select, state.selected - 1));
  $("next").addEventListener("click", () => halt(select, state.selected + 1));
  $("play").addEventListener("click", play);
  $("tree").addEventListener("keydown", onKey);
  $("output").addEventListener("click", (event) => {
    const step = event.target.dataset?.step;
    if (step !== undefined) halt(select, Number(step));
  });
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => chooseTab(tab));
    tab.addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
      other.focus();
      chooseTab(other);
    });
  }
  addEventListener("resize", () => state.player || showStep());
  loadModels();
}

start();
