// The tab of the cluster's state: one card for each worker, read again every two seconds while the tab is shown.

import { getJson } from "./api.js";

const INTERVAL_MS = 2000;
const $ = (id) => document.getElementById(id);

function make(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const percent = (share) => `${Math.round(share * 100)} %`;
const count = (value) => value.toLocaleString("en");

/** A value with a bar of its share; the text alone says all. */
function gauge(label, text, share) {
  const bar = make("meter");
  Object.assign(bar, { min: 0, max: 1, value: Math.min(share, 1) });
  bar.setAttribute("aria-label", `${label}: ${text}`);
  return make("div", "wide", make("dt", "", label), make("dd", "", text, bar));
}

const fact = (label, text, className = "") => make("div", className, make("dt", "", label), make("dd", "", text));

const HEALTH = { healthy: "● healthy", unhealthy: "▲ unhealthy", unreachable: "▲ unreachable" };
const CIRCUIT = { closed: "● closed", "half-open": "◐ half-open", open: "▲ open" };

function card(worker) {
  const title = make("h3", "", worker.role === "verifier" ? "Verifier " : "Draft service ", make("code", "", worker.id));
  const health = make("span", `badge ${worker.health}`, HEALTH[worker.health] ?? worker.health);
  const facts = make("dl", "facts", fact("Model", worker.model));
  if (worker.address) facts.append(fact("Address", worker.address));
  if (worker.zone) facts.append(fact("Zone", worker.zone));
  if (worker.role === "verifier") {
    const { tokens, free_tokens: free } = worker.kv_cache;
    const used = tokens ? (tokens - free) / tokens : 0;
    const most = worker.max_running || 1;
    facts.append(gauge("Running", `${worker.running} of ${worker.max_running || "any number"}`, worker.running / most));
    facts.append(fact("Queue", `${worker.waiting} waiting`));
    facts.append(gauge("KV cache in use", `${percent(used)} of ${count(tokens)} tokens`, used));
    const { hit_rate: rate, cached_tokens: cached, prompt_tokens: prompt } = worker.prefix_cache;
    const text = rate === null ? "no prompt yet" : `${percent(rate)}, ${count(cached)} of ${count(prompt)} prompt tokens`;
    facts.append(gauge("Prefix cache hits", text, rate ?? 0));
  } else {
    facts.append(fact("Sessions", count(worker.running)), fact("Queue", `${worker.waiting} waiting`));
  }
  return make("article", "panel card", make("header", "", title, health), facts, ...drafters(worker.drafters ?? []));
}

function drafters(clients) {
  return clients.map((client) => {
    const share = client.drafted_tokens ? percent(client.accepted_tokens / client.drafted_tokens) : "–";
    const name = make("h4", "", "Drafts from ", make("code", "", client.id ?? client.address ?? "a drafter that has gone"));
    const facts = make("dl", "facts",
      fact("Method", client.method ?? "not connected yet", "wide"),
      fact("Circuit breaker", make("span", `badge ${client.circuit_breaker}`, CIRCUIT[client.circuit_breaker] ?? "–")),
      fact("Stream", client.connected ? "● open" : "▲ closed"),
      fact("Sessions", count(client.sessions)),
      fact("Trees", `${count(client.answered)} answered, ${count(client.lost)} lost`),
      fact("Accepted nodes", share));
    return make("section", "", name, facts);
  });
}

function show(state) {
  const { router, workers } = state;
  const verifiers = workers.filter((worker) => worker.role === "verifier");
  const waiting = verifiers.reduce((sum, worker) => sum + worker.waiting, 0);
  const running = verifiers.reduce((sum, worker) => sum + worker.running, 0);
  const health = router.reason ? `▲ ${router.reason}` : "● can serve requests";
  const several = (number, name) => `${number} ${name}${number === 1 ? "" : "s"}`;
  const numbers = `${several(verifiers.length, "verifier")}, ${several(workers.length - verifiers.length, "drafter")}`;
  $("cluster-summary").textContent = `Router ${health} · ${numbers} · ${running} running, ${waiting} waiting`;
  $("workers").replaceChildren(...workers.map(card));
}

let timer = 0;

async function refresh() {
  clearTimeout(timer);
  try {
    show(await getJson("cluster"));
    $("cluster-problem").hidden = true;
  } catch (error) {
    $("cluster-problem").textContent = error.message;
    $("cluster-problem").hidden = false;
    $("cluster-summary").textContent = "The state is not known.";
    $("workers").replaceChildren();
  }
  if (!$("view-cluster").hidden) timer = setTimeout(refresh, INTERVAL_MS);
}

/** Begin to show the state; it goes on while the tab's panel is not hidden. */
export const watchCluster = () => void refresh();
