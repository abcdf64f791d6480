// Numbers as the page writes them.

/** A length of time: 6.2 ms, 412 ms, 65.0 s. */
export function time(ms) {
  if (ms === null || !Number.isFinite(ms)) return "–";
  if (Math.round(ms) >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return ms < 9.95 ? `${ms.toFixed(1)} ms` : `${Math.round(ms)} ms`;
}

/** A number with as many decimals as asked for, and a dash for one that is not known. */
export const number = (value, digits = 0) => (value === null || !Number.isFinite(value) ? "–" : value.toFixed(digits));

export const count = (value, noun) => `${value.toLocaleString("en")} ${noun}${value === 1 ? "" : "s"}`;
