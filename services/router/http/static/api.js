// The server's API: the key of this tab, JSON requests, and streams of completions.

const KEY = "eyas-api-key";
const NEEDS_KEY = "This server needs an API key that it knows. Type one in at the top.";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** An answer of the server that is no success. status: of HTTP; 0 for an error within a stream. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** No answer at all, or one that broke off: the server has ended, or the network has. */
export class ServerGone extends Error {
  constructor() {
    super(`The server at ${new URL(document.baseURI).host} does not answer. It may have been stopped, or the network is down.`);
  }
}

/** Headers carry visible ASCII alone. */
const isSendable = (key) => /^[!-~]*$/.test(key);

/** What a fetch or a read throws, as an error of this page. */
const named = (error) => (error instanceof TypeError ? new ServerGone() : error);

export async function request(path, options = {}) {
  const key = apiKey.get();
  if (!isSendable(key)) throw new ApiError("The API key holds a space or another character that no key can have. Type it in again at the top.", 401);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  // The address is relative to the page, which may lie below a path prefix.
  const response = await fetch(new URL(path, document.baseURI), { ...options, headers }).catch((error) => {
    throw named(error);
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  if (response.status === 401) throw new ApiError(NEEDS_KEY, 401);
  throw new ApiError(body?.error?.message ?? `The server answered with status ${response.status}.`, response.status);
}

export const getJson = async (path) => (await request(`v1/${path}`)).json();

/** Yields the events of a streamed completion. Comments, which keep the connection open, are left out. */
export async function* complete(endpoint, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await request(`v1/${endpoint}`, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw named(error);
    });
    if (done) throw new ServerGone();
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts.filter((one) => one.startsWith("data: "))) {
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 0);
      yield event;
    }
  }
}
