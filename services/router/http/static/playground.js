// The playground: sends the form's request twice, with drafts and without, and shows the race, trees and times.
// Only textContent and SVG attributes carry what the server sends.

import { ApiError, apiKey, complete, getJson, ServerGone } from "./api.js";
import { watchCluster } from "./cluster.js";
import { conversation } from "./conversation.js";
import { canKill, Death } from "./drafter.js";
import { standalone, treeText } from "./drawing.js";
import { count, number, time } from "./format.js";
import { forgetOrigins, legend, tokenSpan } from "./origins.js";
import { paceText, Race } from "./race.js";
import { difference, exported, Run, speedup, whySlower } from "./run.js";
import { copy, curlOf, linkTo, readLink, save } from "./share.js";
import * as steps from "./steps.js";

const $ = (id) => document.getElementById(id);
const EXAMPLE = `class Cache:
    """A mapping that forgets its oldest entries."""

    def __init__(self, size):
        self.size = size
        self.entries = {}

    def __getitem__(self, key):
        return self.entries[key]

    def __setitem__(self, key, value):
`;
const DRAW_EVERY_MS = 120;
const RETRY_MS = 2000;
const KILL_AFTER_STEPS = 6;
const KILL_TOKENS = 3000; // of a run that the button starts: long enough for a new drafter to load
const HELP = "Run a prompt to see which tokens were drafted.";

const race = new Race();
const state = { run: new Run(), plain: new Run(), endpoint: "", body: null, abort: null, drawAt: 0, death: null, models: [] };

const pause = (ms, signal) =>
  new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });

// Figures

function showFigures() {
  const { run, plain, body } = state;
  const gain = speedup(run, plain);
  const isDone = run.isWhole && plain.isWhole && gain !== null;
  $("speedup").textContent = isDone ? `${number(gain, 2)} ×` : "–";
  $("tau").textContent = number(run.tau, 2);
  $("tau-note").textContent = run.steps.length ? `in ${count(run.steps.length, "step")}` : "\u00a0";
  for (const [name, one] of [["speculative", run], ["plain", plain]]) {
    $(`speed-${name}`).textContent = number(one.rate);
    $(`speed-${name}-note`).textContent = one.rate ? `tokens/s, ${time(one.ms)}` : "tokens/s";
  }
  const why = isDone ? whySlower(run, plain, body) : "";
  $("why").textContent = why;
  $("why").hidden = !why;
  $("legend").replaceChildren(...(run.tokens.length ? legend(run.tokens) : []));
}

function showVerdict(text, note, kind) {
  $("same").textContent = text;
  $("same-note").textContent = note;
  $("verdict").className = `verdict ${kind}`;
}

/** Compare both runs token by token. */
function compare() {
  const { run, plain } = state;
  const place = difference(run, plain);
  const length = Math.max(run.tokens.length, plain.tokens.length);
  if (place < 0) return showVerdict("✓ identical", `${length} of ${length} tokens`, "same");
  const quoted = [run, plain].map(({ tokens }) => (tokens[place] ? JSON.stringify(tokens[place].text) : "the end"));
  const note = `from token ${place + 1}: ${quoted[0]}, plain ${quoted[1]}. Expected only under acceptance: rejection, or below float32.`;
  race.lanes.drafted.spans[place]?.classList.add("different");
  return showVerdict("✗ different", note, "different");
}

// Lanes

/** Add the tokens of some steps to a lane. */
function fill(lane, run, found) {
  for (const step of found) {
    const index = lane === race.lanes.drafted ? run.steps.indexOf(step) : -1;
    const before = run.tokens.indexOf(step.tokens[0]);
    step.tokens.forEach((token, place) => lane.append(tokenSpan(token, index), run.at[before + place]));
  }
}

function mark(text, kind) {
  const made = document.createElement("span");
  made.className = `mark ${kind}`;
  made.textContent = text;
  race.lanes.drafted.mark(made);
}

/** Say on the lanes how both runs ended. */
function showWinner() {
  const gain = speedup(state.run, state.plain);
  if (gain === null) return;
  race.lanes.drafted.finish(gain >= 1 ? `${number(gain, 2)} × faster` : `${number(gain, 2)} × as fast`, gain >= 1 ? "wins" : "");
  race.lanes.plain.finish("", "");
}

function replay() {
  race.stop();
  const slower = Number($("pace").value) || race.fittingPace;
  const source = state.isRecorded ? "recorded" : "the server's";
  $("race-caption").textContent = `Each ran alone; replayed together ${paceText(slower)}, by ${source} step times.`;
  Object.values(race.lanes).forEach((lane) => lane.finish("", ""));
  $("replay").textContent = "Skip";
  race.replay(slower, () => {
    $("replay").textContent = "Replay";
    showWinner();
  });
}

/** Let the visitor replay the race; start with it unless motion is unwelcome. */
function offerReplay() {
  $("replay").disabled = $("pace").disabled = false;
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) showWinner();
  else replay();
}

// Runs

function formValues() {
  return Object.fromEntries([...new FormData($("form"))].map(([name, value]) => [name, String(value)]));
}

function requestBody(values, seed) {
  const stop = values.stop.split("\n").filter(Boolean);
  const isChat = values.endpoint === "chat/completions";
  return {
    model: values.model,
    ...(isChat ? { messages: conversation.with(values.prompt) } : { prompt: values.prompt }),
    temperature: Number(values.temperature),
    top_p: Number(values.top_p),
    max_tokens: Number(values.max_tokens),
    seed,
    ...(stop.length && { stop }),
    ...(values.num_draft_tokens && { num_draft_tokens: Number(values.num_draft_tokens) }),
    ...(values.drafter && { drafter: values.drafter }),
    stream: true,
    return_speculation: true,
    return_verify_steps: true,
  };
}

/** Forget the run before this one, in all that the page shows. */
function clear(prompt, length = 0) {
  forgetOrigins();
  Object.assign(state, { run: new Run(), plain: new Run(), death: null, isRecorded: false });
  race.clear(prompt, length);
  steps.showRun(state.run, state.plain);
  for (const id of ["problem", "recorded", "death", "why"]) $(id).hidden = true;
  for (const id of ["replay", "pace", "save-run"]) $(id).disabled = true;
  $("race-caption").textContent = "";
  for (const id of ["shared", "tree-shared"]) $(id).textContent = "";
  showVerdict("–", "not compared", "");
  showFigures();
}

async function stream(run, lane, body, onSteps = () => {}) {
  const started = performance.now();
  for await (const event of complete(state.endpoint, body, state.abort.signal)) {
    const found = run.add(event);
    run.firstTokenMs ??= run.tokens.length ? performance.now() - started : null;
    fill(lane, run, found);
    onSteps(found);
    if (run === state.run) state.death?.take(found);
    if (performance.now() > state.drawAt) {
      const began = performance.now();
      lane.follow();
      showFigures();
      steps.follow();
      // Drawing takes a fifth of the time at most, however long the run and slow the machine.
      state.drawAt = performance.now() + Math.max(DRAW_EVERY_MS, 4 * (performance.now() - began));
    }
  }
  run.isWhole = true;
  lane.follow();
  lane.finish(`first token after ${time(run.firstTokenMs)}`, "");
}

/** Run the request both ways. Raises what the server answers with. onSteps: called with the drafted run's steps. */
async function runBoth(body, onSteps) {
  clear(body.prompt ?? body.messages.at(-1).content, body.max_tokens);
  $("race-caption").textContent = "Drafted: as the tokens arrive.";
  await stream(state.run, race.lanes.drafted, body, onSteps);
  steps.chooseBest();
  showFigures();
  if (!$("compare").checked || body.drafter === "none") return;
  showVerdict("…", "plain run, same seed", "");
  $("race-caption").textContent = "Plain: the same request with the same seed, without drafts.";
  await stream(state.plain, race.lanes.plain, { ...body, drafter: "none" });
  compare();
}

/** Run the request; after a server that has gone is back, once more from the start. */
async function runUntilAnswered(body, onSteps) {
  for (;;) {
    try {
      return await runBoth(body, onSteps);
    } catch (error) {
      if (!(error instanceof ServerGone)) throw error;
      clear("");
      await untilBack(error, state.abort.signal);
    }
  }
}

/** Say that the server does not answer, and ask until it does. */
async function untilBack(error, signal) {
  for (;;) {
    showProblem(`${error.message} Trying again every ${RETRY_MS / 1000} s.`);
    await pause(RETRY_MS, signal);
    try {
      showModels((await getJson("models")).data);
      if (state.models.length) break;
    } catch (again) {
      if (!(again instanceof ServerGone)) throw again;
    }
  }
  $("problem").hidden = true;
}

async function run({ maxTokens = 0, onSteps = () => {} } = {}) {
  const values = formValues();
  const seed = values.seed === "" ? Math.floor(Math.random() * 2 ** 32) : Number(values.seed);
  const body = { ...requestBody(values, seed), ...(maxTokens && { max_tokens: maxTokens }) };
  Object.assign(state, { endpoint: values.endpoint, body, abort: new AbortController() });
  setRunning(true);
  say("Running");
  try {
    await runUntilAnswered(body, onSteps).finally(() => keepAnswer(values));
    showLink(values, seed);
    $("save-run").disabled = false;
    say(`Done: ${count(state.run.tokens.length, "token")} in ${count(state.run.steps.length, "verify step")} with seed ${seed}. ${$("same").textContent}`);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    if (!isStopped) {
      clear("");
      showProblem(error.message, error.status);
    }
    showVerdict("–", isStopped ? "stopped" : "not compared", "");
    say("Stopped");
  }
  setRunning(false);
  showFigures();
  steps.redraw();
  $("race-caption").textContent = "";
  if (state.plain.isWhole) offerReplay();
}

/** Take a chat's whole answer into the conversation, even if the plain run after it was stopped. */
function keepAnswer(values) {
  if (values.endpoint !== "chat/completions" || !state.run.isWhole) return;
  conversation.add(values.prompt, state.run.content);
  $("prompt").value = "";
  showForget();
}

function setRunning(isRunning) {
  $("run").disabled = isRunning;
  $("halt").hidden = !isRunning;
}

const say = (text) => void ($("status").textContent = text);

function showProblem(message, status) {
  const needsKey = status === 401;
  $("problem").textContent = message;
  $("problem").hidden = false;
  if (needsKey) {
    document.querySelector(".key").open = true;
    $("key").focus();
  }
}

// Killing the drafter

/** Kill the drafter in the run that goes on; without one, start a long run first. */
async function kill() {
  $("kill").disabled = true;
  const isRunning = !$("halt").hidden;
  const death = new Death(showDeath, mark);
  let dying = null;
  const happen = () => {
    state.death = death;
    return death.happen().catch((error) => showProblem(error.message, error.status));
  };
  const onSteps = () => {
    if (!dying && state.run.steps.length >= KILL_AFTER_STEPS) dying = happen();
  };
  if (isRunning) await happen();
  else {
    const room = (state.models.find(({ id }) => id === $("model").value)?.max_model_len ?? KILL_TOKENS) - $("prompt").value.length / 2;
    await run({ maxTokens: Math.max(Math.min(KILL_TOKENS, Math.floor(room)), 16), onSteps });
    if (!dying && $("problem").hidden) showProblem(`The run ended within ${KILL_AFTER_STEPS} steps, so the drafter was left alone. Try another prompt.`);
    await dying;
  }
  $("kill").disabled = false;
}

function showDeath(text, kind) {
  $("death").textContent = text;
  $("death").className = `notice death ${kind}`;
  $("death").hidden = false;
}

// Sharing

/** Put the request with its seed into the address of this page. */
function showLink(values, seed) {
  const link = linkTo({ ...values, model: linkedModel(), seed: String(seed) }, values.endpoint === "chat/completions" ? state.body.messages.slice(0, -1) : []);
  history.replaceState(null, "", link || location.pathname);
  state.link = link;
}

/** The model that a link names: the chosen one of several. */
const linkedModel = () => (state.models.length > 1 ? $("model").value : "");

function fillForm({ values: { model, ...values }, messages }) {
  state.linkedModel = model;
  if (state.models.length) showModels(state.models);
  for (const [name, value] of Object.entries(values)) $("form").elements[name].value = value;
  conversation.set(values.endpoint === "chat/completions" ? messages : []);
  document.querySelector(".settings").open = false;
  showSettings();
  showForget();
}

/** Take the request of a link. It is not run: a link from elsewhere shall cost nothing before its reader wants it. */
function takeLink() {
  const link = readLink();
  if (!link) return false;
  state.abort?.abort();
  fillForm(link);
  clear(link.values.prompt);
  showNotice("This link holds a prompt and its settings. Run it to see the race.");
  return true;
}

function showNotice(text) {
  $("recorded").textContent = text;
  $("recorded").hidden = false;
}

/** Do what a button asks, and say so next to it. */
function offer(id, place, what, action) {
  $(id).addEventListener("click", async () => {
    try {
      await action();
      $(place).textContent = what;
    } catch (error) {
      $(place).textContent = error.message;
    }
  });
}

function currentLink() {
  const link = linkTo({ ...formValues(), model: linkedModel() }, $("form").endpoint.value === "chat/completions" ? conversation.messages : []);
  if (!link) throw new Error("This prompt is too long for a link; copy it as curl.");
  return link;
}

const currentTree = () => JSON.stringify(steps.selectedStep(), null, 1);
const currentDrawing = () => standalone($("tree").querySelector("svg"));

function startSharing() {
  offer("copy-link", "shared", "The link is copied.", () => copy($("prompt").value || !state.link ? currentLink() : state.link));
  offer("copy-curl", "shared", "The command is copied.", () => copy(curlOf(...lastRequest(), apiKey.get() !== "")));
  offer("save-run", "shared", "Both runs are saved as JSON.", () =>
    save("eyas-race.json", JSON.stringify(exported(state.run, state.plain, state.endpoint, state.body)), "application/json"));
  offer("tree-text", "tree-shared", "The tree is copied as text.", () => copy(treeText(steps.selectedStep())));
  offer("tree-svg", "tree-shared", "The drawing is copied as SVG.", () => copy(currentDrawing()));
  offer("tree-json", "tree-shared", "The tree is copied as JSON.", () => copy(currentTree()));
  offer("save-svg", "tree-shared", "The drawing is saved.", () => save("eyas-tree.svg", currentDrawing(), "image/svg+xml"));
  offer("save-json", "tree-shared", "The tree is saved.", () => save("eyas-tree.json", currentTree(), "application/json"));
}

/**
 * The form's endpoint and request with its seed, or the one that the last run drew. A chat's question leaves the form once it is
 * answered; then this is the last request itself.
 */
function lastRequest() {
  const values = formValues();
  if (!values.prompt && state.body) return [state.endpoint, state.body];
  return [values.endpoint, requestBody(values, values.seed === "" ? state.body?.seed : Number(values.seed))];
}

// Page

function showModels(models) {
  const [chosen, options] = [state.linkedModel || $("model").value, models.map(({ id }) => new Option(id, id))];
  $("model").replaceChildren(...(options.length ? options : [new Option("no model is served now", "")]));
  if (models.some(({ id }) => id === chosen)) $("model").value = chosen;
  if (models.length) state.linkedModel = "";
  state.models = models;
}

/** Show the models; ask again while the server does not answer or serves none. */
async function loadModels() {
  try {
    showModels((await getJson("models")).data);
    if (!state.models.length) await untilBack(new ApiError("No model is served here now.", 0));
  } catch (error) {
    $("model").replaceChildren(new Option("not known", ""));
    if (!(error instanceof ServerGone)) return showProblem(error.message, error.status);
    return untilBack(error).catch((again) => showProblem(again.message, again.status));
  }
  return undefined;
}

/** Show the recorded run, so that the first sight is a race. */
async function showRecorded() {
  const recorded = await (await fetch(new URL("playground/recorded.json", document.baseURI))).json();
  if (state.body) return; // a run has begun
  clear(recorded.request.prompt);
  Object.assign(state, { run: Run.of(recorded.drafted), plain: Run.of(recorded.plain), body: recorded.request, endpoint: recorded.endpoint, isRecorded: true });
  steps.showRun(state.run, state.plain);
  fill(race.lanes.drafted, state.run, recorded.drafted);
  fill(race.lanes.plain, state.plain, recorded.plain);
  showNotice(`A recorded run: ${recorded.machine}, ${recorded.date}. Press Run for one of this server.`);
  showFigures();
  compare();
  steps.chooseBest();
  offerReplay();
}

function showKey() {
  $("key-state").textContent = apiKey.get() ? "API key set" : "No API key";
}

function showSettings() {
  const { temperature, max_tokens: length, seed, drafter, num_draft_tokens: size } = formValues();
  const parts = [`temperature ${temperature}`, `${length} tokens`, seed && `seed ${seed}`, drafter && "no drafts", size && `trees of ${size}`];
  $("settings-summary").textContent = parts.filter(Boolean).join(" · ");
}

function showForget() {
  const isChat = $("form").endpoint.value === "chat/completions";
  $("forget").hidden = !(isChat && conversation.messages.length);
  $("conversation").hidden = $("forget").hidden;
  $("prompt").placeholder = isChat ? "Write a message" : HELP;
}

function chooseTab(tab) {
  for (const one of document.querySelectorAll("[role=tab]")) {
    const isChosen = one === tab;
    one.setAttribute("aria-selected", isChosen);
    one.tabIndex = isChosen ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !isChosen;
  }
  if (tab.id === "tab-cluster") watchCluster();
  else steps.showTimeline();
}

function startTabs() {
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
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").value = theme;
  localStorage.setItem("eyas-theme", theme);
}

function startForm() {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!$("run").disabled) run();
  });
  $("form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !$("run").disabled) $("form").requestSubmit();
  });
  $("form").addEventListener("input", showSettings);
  $("form").addEventListener("invalid", () => (document.querySelector(".settings").open = true), true);
  for (const radio of $("form").elements.endpoint) radio.addEventListener("change", showForget);
  $("forget").addEventListener("click", () => {
    conversation.set([]);
    showForget();
    $("prompt").focus();
  });
  $("halt").addEventListener("click", () => state.abort.abort());
  $("kill").hidden = !canKill();
  $("kill").addEventListener("click", kill);
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
  $("replay").addEventListener("click", () => (race.isReplaying ? race.stop() : replay()));
  $("pace").addEventListener("change", replay);
  addEventListener("hashchange", takeLink);
  startForm();
  startSharing();
  startTabs();
  steps.start();
  showSettings();
  showForget();
  loadModels();
  if (!takeLink()) showRecorded();
}

start();
