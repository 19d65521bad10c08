// Talks to the server: requests with the API key, OpenAI's errors as exceptions, server-sent events as objects.

const KEY = "octavo-api-key";
let apiKey = "";
try { apiKey = sessionStorage.getItem(KEY) ?? ""; } catch { /* kept in memory only */ }

export function getApiKey() { return apiKey; }

export function setApiKey(value) {
  apiKey = value.trim();
  try {
    if (apiKey) sessionStorage.setItem(KEY, apiKey);
    else sessionStorage.removeItem(KEY);
  } catch { /* kept in memory only */ }
}

/** An answer that is an error; `message` can be shown as it stands. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The sentence in an error body of the OpenAI dialect, or what is there instead. */
function errorMessage(body, fallback) {
  const error = body?.error;
  if (typeof error === "string") return error;
  return error?.message ?? body?.message ?? fallback;
}

async function failure(response) {
  const text = await response.text();
  let body = null;
  try { body = JSON.parse(text); } catch { /* not JSON: shown as text */ }
  let message = errorMessage(body, text.trim().slice(0, 500) || response.statusText || "no explanation was given");
  const wait = response.headers.get("retry-after");
  if (wait) message += ` Try again in ${wait} s.`;
  return new ServerError(response.status, message);
}

export async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const response = await fetch(path, { cache: "no-store", ...options, headers });
  if (!response.ok) throw await failure(response);
  return response;
}

/** The data of each event of a stream; comments and other fields are passed over. */
async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      // A lone CR at the end may be half of a CRLF that the next chunk completes.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // aborts the request when the caller leaves early
  }
}

/** Post a request for a stream and give its events as objects until [DONE]; an error event is thrown. */
export async function* stream(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.code ?? 500, errorMessage(event, "the server gave no reason"));
    yield event;
  }
  throw new ServerError(0, "The connection ended before the answer did.");
}
