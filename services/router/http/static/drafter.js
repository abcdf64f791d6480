// The button that kills the drafter: a real process dies, plain decoding goes on, and a new process drafts again.

import { getJson, request } from "./api.js";
import { time } from "./format.js";
import { hasTree } from "./run.js";

const POLL_MS = 500;
const GIVE_UP_MS = 120000;
// Steps without a tree in a row that show that no tree is on its way any more.
const NUM_PLAIN_STEPS = 3;

/** Whether this server lets the page kill its drafter: `eyas serve --demo`. */
export const canKill = () => "canKill" in document.documentElement.dataset;

/** Ids of the draft services that a verifier has a stream to; null where the state may not be read. */
async function connected() {
  try {
    const { workers } = await getJson("cluster");
    return new Set(workers.flatMap((worker) => worker.drafters ?? []).filter((one) => one.connected).map((one) => one.id));
  } catch {
    return null;
  }
}

/** One death of the drafter and its return. say: shows a sentence, with a kind. mark: shows a mark in the text. */
export class Death {
  constructor(say, mark) {
    Object.assign(this, { say, mark, numPlain: 0, inARow: 0, isGone: false, isBack: false, started: performance.now() });
  }

  /** Kill the drafter, then watch for another one; returns when that is connected, or at once where the state may not be read. */
  async happen() {
    const before = await connected();
    this.name = [...(before ?? [])][0] ?? "";
    await request("playground/drafter", { method: "DELETE" });
    this.started = performance.now();
    this.isGone = true;
    this.mark("✕ drafter killed", "killed");
    this.show();
    if (before === null) return; // without the cluster's state only verify steps can show that a new one drafts
    const deadline = performance.now() + GIVE_UP_MS;
    for (;;) {
      if (performance.now() > deadline) {
        this.say(`No drafter came back in ${time(GIVE_UP_MS)}; the logs of eyas serve say why. Text goes on without drafts.`, "killed");
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      const now = await connected();
      this.next = [...(now ?? [])].find((id) => !before.has(id));
      if (now === null) return;
      if (this.next || this.isBack) break;
      this.show();
    }
    this.isBack = true;
    this.ms ??= performance.now() - this.started;
    this.show();
  }

  /** Take the verify steps that arrive. */
  take(steps) {
    if (!this.isGone) return;
    for (const step of steps.filter((one) => one.verify_ms !== null)) {
      if (!hasTree(step)) {
        this.inARow += 1;
        this.numPlain += this.isMarked ? 0 : step.tokens.length;
      } else if (this.inARow >= NUM_PLAIN_STEPS && !this.isMarked) {
        this.isMarked = this.isBack = true;
        this.ms ??= performance.now() - this.started;
        this.mark("↻ drafting again", "back");
      } else this.inARow = 0;
    }
    this.show();
  }

  show() {
    const name = this.name ? ` ${this.name}` : "";
    const plain = this.numPlain ? `${this.numPlain} tokens came from the target alone` : "the target goes on alone";
    if (!this.isBack) return this.say(`The drafter${name} was killed with SIGKILL; ${plain}. A new process is loading: ${time(performance.now() - this.started)}.`, "killed");
    const next = this.next ? ` ${this.next}` : "";
    return this.say(`The drafter${name} was killed; ${plain}. A new one${next} drafts again after ${time(this.ms)}.`, "back");
  }
}
