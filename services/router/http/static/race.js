// The race: two lanes of text that fill side by side, first as the tokens arrive, then again at the server's recorded pace.

import { time } from "./format.js";

const SLOWER = [1, 2, 4, 8, 16];
const FASTER = [1 / 2, 1 / 4, 1 / 8, 1 / 16];
// Of a replay at a pace that the page chooses.
const SHORTEST_MS = 3500;
const LONGEST_MS = 15000;

/** One lane. Its elements have ids that end with its name. */
class Lane {
  constructor(name, pane) {
    this.pane = pane;
    [this.clock, this.fill, this.note] = ["clock", "fill", "note"].map((part) => document.getElementById(`${part}-${name}`));
    this.clear("", 0);
  }

  /** Begin with a prompt. length: number of tokens that may come, for the bar. */
  clear(prompt, length) {
    this.length = length;
    this.spans = [];
    this.at = [];
    this.shown = 0;
    this.ms = 0;
    const text = document.createElement("span");
    text.className = "prompt";
    text.textContent = prompt;
    this.pane.replaceChildren(text);
    this.finish("", "");
    this.clock.textContent = "";
    this.fill.style.width = "0";
  }

  /** Show a token that has arrived at a time of the server. */
  append(span, ms) {
    this.spans.push(span);
    this.at.push(ms);
    this.shown = this.spans.length;
    this.ms = ms;
    this.pane.append(span);
    this.clock.textContent = time(ms);
    this.fill.style.width = `${Math.min((100 * this.shown) / Math.max(this.length, this.shown), 100)}%`;
  }

  /** Keep the end of the text in sight. */
  follow() {
    this.pane.scrollTop = this.pane.scrollHeight;
  }

  mark(element) {
    this.pane.append(element);
  }

  finish(text, kind) {
    this.note.textContent = text;
    this.note.className = `lane-note ${kind}`;
  }

  /** Show what was there at a time of the server; tokens that came later are kept, unseen. */
  showAt(ms) {
    while (this.shown < this.spans.length && this.at[this.shown] <= ms) this.spans[this.shown++].classList.remove("ahead");
    this.clock.textContent = time(Math.min(ms, this.ms));
    this.fill.style.width = `${this.spans.length ? (100 * this.shown) / this.spans.length : 0}%`;
    const last = this.spans[this.shown - 1];
    if (last) this.pane.scrollTop = last.offsetTop + last.offsetHeight - this.pane.clientHeight + 12;
  }

  rewind() {
    this.spans.forEach((span) => span.classList.add("ahead"));
    this.shown = 0;
    this.pane.scrollTop = 0;
  }
}

/** The race of two lanes. onEnd: called when a replay has ended, or is cut short. */
export class Race {
  constructor() {
    this.lanes = { drafted: new Lane("drafted", document.getElementById("output")), plain: new Lane("plain", document.getElementById("plain-output")) };
    this.frame = 0;
    this.onEnd = () => {};
  }

  clear(prompt, length) {
    this.stop();
    Object.values(this.lanes).forEach((lane) => lane.clear(prompt, length));
  }

  get isReplaying() {
    return this.frame !== 0;
  }

  /** The pace at which a replay is neither too short to follow nor too long to wait for. */
  get fittingPace() {
    const longest = Math.max(this.lanes.drafted.ms, this.lanes.plain.ms);
    if (longest > LONGEST_MS) return FASTER.find((pace) => longest * pace <= LONGEST_MS) ?? FASTER.at(-1);
    return SLOWER.find((pace) => longest * pace >= SHORTEST_MS) ?? SLOWER.at(-1);
  }

  /** Fill both lanes again from their start, `slower` times as slow as the server was. */
  replay(slower, onEnd = () => {}) {
    this.stop();
    const lanes = Object.values(this.lanes);
    lanes.forEach((lane) => lane.rewind());
    const [started, last] = [performance.now(), Math.max(...lanes.map((lane) => lane.ms))];
    this.onEnd = onEnd;
    const draw = (now) => {
      const ms = Math.max(now - started, 0) / slower;
      lanes.forEach((lane) => lane.showAt(ms));
      this.frame = ms < last ? requestAnimationFrame(draw) : 0;
      if (!this.frame) this.stop();
    };
    this.frame = requestAnimationFrame(draw);
  }

  /** End a replay: show all of both lanes. */
  stop() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    Object.values(this.lanes).forEach((lane) => lane.showAt(Infinity));
    const ended = this.onEnd;
    this.onEnd = () => {};
    ended();
  }
}

/** How a replay is paced, in words. */
export const paceText = (slower) =>
  slower === 1 ? "in real time" : slower > 1 ? `${slower} times slower` : `${1 / slower} times faster`;
