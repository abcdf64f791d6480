// Where a token comes from: each drafter gets a colour and an underline in the order of its appearance.

const STYLES = ["d1", "d2", "d3", "d4"];
const origins = new Map();

export function classOf(drafter) {
  if (drafter === null) return "own";
  if (!origins.has(drafter)) {
    const style = drafter.includes("+") ? "both" : STYLES[[...origins.values()].filter((one) => one !== "both").length] ?? "d4";
    origins.set(drafter, style);
  }
  return origins.get(drafter);
}

export const forgetOrigins = () => origins.clear();

/** A token of the output. step: index of its verify step; negative for the prefill. */
export function tokenSpan(token, step) {
  const span = document.createElement("span");
  span.className = `token ${classOf(token.drafter)}`;
  span.textContent = token.text;
  span.title = token.drafter === null ? "the target's own token" : `drafted by ${token.drafter}`;
  if (step >= 0) {
    span.dataset.step = step;
    span.title += `, step ${step + 1}`;
  }
  return span;
}

/** The legend's entries for the tokens of a run. */
export function legend(tokens) {
  const counts = new Map([[null, 0], ...[...origins.keys()].sort((one, other) => one.length - other.length).map((name) => [name, 0])]);
  for (const { drafter } of tokens) counts.set(drafter, (counts.get(drafter) ?? 0) + 1);
  return [...counts].map(([drafter, number]) => {
    const item = document.createElement("li");
    const sample = document.createElement("span");
    sample.className = `token ${classOf(drafter)}`;
    sample.textContent = drafter === null ? "the target's own" : drafter.replace("+", " and ");
    item.append(sample, ` ${number}`);
    return item;
  });
}
