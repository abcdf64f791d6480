// What leaves the page: links to a request, curl commands, texts for the clipboard, files.

/** Settings of the form that a link carries, with the values that it leaves out. */
const DEFAULTS = { model: "", endpoint: "completions", temperature: "0", top_p: "1", max_tokens: "128", seed: "", drafter: "", num_draft_tokens: "", stop: "" };
const MAX_LINK = 16000;

/**
 * The address of this page with a request in its fragment, which browsers never send to a server. values: of the form.
 * history: earlier messages of a conversation. Returns the empty text for more than a link can hold.
 */
export function linkTo(values, history) {
  const parameters = new URLSearchParams({ prompt: values.prompt });
  if (history.length) parameters.set("messages", JSON.stringify(history));
  for (const [name, usual] of Object.entries(DEFAULTS)) if ((values[name] ?? usual) !== usual) parameters.set(name, values[name]);
  const url = new URL(location.href);
  url.hash = parameters.toString();
  return url.href.length > MAX_LINK ? "" : url.href;
}

/** The request in this page's address: values of the form and `messages`; null without one. */
export function readLink() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  if (!parameters.has("prompt")) return null;
  const values = { ...DEFAULTS, prompt: parameters.get("prompt") };
  for (const name of Object.keys(DEFAULTS)) if (parameters.has(name)) values[name] = parameters.get(name);
  return { values, messages: messagesOf(parameters.get("messages")) };
}

function messagesOf(text) {
  try {
    const isMessage = (one) => ["user", "assistant", "system"].includes(one?.role) && typeof one.content === "string";
    const found = JSON.parse(text ?? "[]");
    return Array.isArray(found) ? found.filter(isMessage).map(({ role, content }) => ({ role, content })) : [];
  } catch {
    return [];
  }
}

/** A command that sends the request from a shell and prints its text at once. hasKey: the server needs an API key. */
export function curlOf(endpoint, body, hasKey) {
  const { stream, return_speculation, return_verify_steps, ...request } = body;
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const headers = ["Content-Type: application/json"].map((header) => `-H ${quote(header)}`);
  if (hasKey) headers.push('-H "Authorization: Bearer $EYAS_API_KEY"');
  return `curl ${quote(new URL(`v1/${endpoint}`, document.baseURI).href)} ${headers.join(" ")} -d ${quote(JSON.stringify(request))}`;
}

/** Put a text on the clipboard. Pages that are not on this machine and without TLS have no other way than a selection. */
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      return await navigator.clipboard.writeText(text);
    } catch {
      // without the permission
    }
  }
  const field = document.createElement("textarea");
  field.className = "hidden";
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  if (!isCopied) throw new Error("The browser does not let this page use the clipboard.");
}

/** Offer a text as a file. */
export function save(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
