// One run of a request: its tokens, its verify steps, and the time that the server took for them.

import { count, number, time } from "./format.js";

/** How long the server worked on a verify step, in ms: its wait for a tree, then the forward pass and the commit. */
export const stepMs = (step) => (step.wait_ms ?? 0) + (step.verify_ms ?? 0);

export const totalMs = (steps) => steps.reduce((sum, step) => sum + stepMs(step), 0);

export const hasTree = (step) => step.nodes.length > 1;

/**
 * Tokens and steps as they arrive. Only the server's own times count: events come in bursts, so that the browser's clock
 * says nothing about speed. steps: verify steps, without the prefill. at: for each token the time in ms since the first one.
 */
export class Run {
  constructor() {
    this.tokens = [];
    this.steps = [];
    this.at = [];
    this.ms = 0;
    this.numDecoded = 0;
    this.content = "";
    this.firstTokenMs = null;
    this.isWhole = false;
    this.reportedTau = null;
  }

  static of(steps) {
    const run = new Run();
    steps.forEach((step) => run.addStep(step));
    run.isWhole = true;
    return run;
  }

  /** Take an event of a stream; returns its verify steps. */
  add(event) {
    this.reportedTau = event.metrics?.speculative_decoding?.mean_acceptance_length ?? this.reportedTau;
    const choices = event.choices ?? [];
    this.content += choices.map((choice) => choice.delta?.content ?? choice.text ?? "").join("");
    const found = choices.flatMap((choice) => choice.verify_steps ?? []);
    found.forEach((step) => this.addStep(step));
    return found;
  }

  addStep(step) {
    const isVerify = step.verify_ms !== null;
    if (isVerify) {
      this.ms += stepMs(step);
      this.numDecoded += step.tokens.length;
      this.steps.push(step);
    }
    for (const token of step.tokens) {
      this.tokens.push(token);
      this.at.push(this.ms);
    }
  }

  /** Tokens per second of verify steps, by the server's times; null before the first. */
  get rate() {
    return this.ms > 0 && this.numDecoded ? (this.numDecoded * 1000) / this.ms : null;
  }

  /** Mean number of tokens of a verify step. */
  get tau() {
    return this.reportedTau ?? (this.steps.length ? this.numDecoded / this.steps.length : null);
  }
}

/** Speed of a drafted run over a plain one; null while one of them is missing. */
export const speedup = (run, plain) => (run.rate && plain.rate ? run.rate / plain.rate : null);

/** The first place at which two runs differ; -1 if they are equal. */
export function difference(run, plain) {
  const length = Math.max(run.tokens.length, plain.tokens.length);
  return Array.from({ length }, (_, place) => place).findIndex((place) => run.tokens[place]?.id !== plain.tokens[place]?.id);
}

/** Say in words why drafts did not pay; the empty text where they did. request: the body that was sent. */
export function whySlower(run, plain, request) {
  const gain = speedup(run, plain);
  if (gain === null || Number(number(gain, 2)) >= 1) return "";
  const [step, alone] = [run.ms / run.steps.length, plain.ms / plain.steps.length];
  const reasons = [
    `Drafting did not pay here. A verify step took ${time(step)}, ${number(step / alone, 1)} times a plain step of ${time(alone)}, ` +
      `and gave ${number(run.numDecoded / run.steps.length, 1)} tokens.`,
  ];
  const waitMs = run.steps.reduce((sum, one) => sum + (one.wait_ms ?? 0), 0);
  if (waitMs > run.ms / 3) reasons.push(`The verifier waited for its drafter in ${Math.round((100 * waitMs) / run.ms)} % of that time.`);
  const without = run.steps.filter((one) => !hasTree(one)).length;
  if (without > run.steps.length / 3) {
    reasons.push(`${count(without, "step")} of ${run.steps.length} had no tree: none came in time, or the draft budget expected none to pay.`);
  }
  const shared = run.steps.concat(plain.steps).filter((one) => one.rows > one.nodes.length).length;
  if (shared) reasons.push(`Other requests shared ${count(shared, "step")}, so neither run had the machine alone.`);
  if (request.temperature > 0) reasons.push("Above temperature 0 the target draws more tokens that no drafter foresees; try temperature 0.");
  if (plain.ms / plain.steps.length < 20) reasons.push("A plain step of a small model is cheap; with a large one drafts have more time to pay.");
  return reasons.join(" ");
}

/** Both runs with their request as data for a file. about: further fields, such as the date. */
export function exported(run, plain, endpoint, request, about = {}) {
  return { object: "eyas.race", ...about, endpoint, request, drafted: stepsOf(run), plain: stepsOf(plain) };
}

/** The steps of a run, those without times included. */
function stepsOf(run) {
  const first = run.tokens.slice(0, run.tokens.length - run.numDecoded);
  const prefill = { index: 0, tokens: first, nodes: [], method: null, draft_ms: null, wire_ms: null, wait_ms: null, verify_ms: null, rows: null };
  return first.length ? [prefill, ...run.steps] : run.steps;
}
