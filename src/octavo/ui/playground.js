// The playground: sends what is typed, shows the answer as it streams and how fast it came.

import { ServerError, getApiKey, setApiKey, stream } from "./api.js";

const $ = (id) => document.getElementById(id);

const log = $("log");
const prompt = $("prompt");
const MODES = {
  chat: { path: "/v1/chat/completions", label: "Message", send: "Send", who: "Model" },
  completion: { path: "/v1/completions", label: "Text to continue", send: "Continue", who: "Completion" },
};

let history = []; // messages of the conversation so far
let running = null; // the AbortController of the answer being streamed

function mode() { return document.querySelector("input[name=mode]:checked").value; }

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** A turn in the log. Text only ever enters the page through text nodes. */
function addTurn(kind, who, text = "") {
  $("empty").hidden = true;
  const turn = element("article", `turn ${kind}`);
  turn.append(element("h3", "who", who));
  const body = element("div", "text", text);
  turn.append(body);
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return { turn, body };
}

function showError(turn, error) {
  const status = error instanceof ServerError && error.status ? `Error ${error.status}` : "Error";
  const box = element("div", "problem");
  box.setAttribute("role", "alert");
  box.append(element("strong", "", status), element("span", "", error.message));
  turn.append(box);
  log.scrollTop = log.scrollHeight;
  if (error.status === 401) {
    $("settings").open = true;
    $("api-key").focus();
  }
}

/** Numbers that were given; an empty field is left to the server's default. */
function parameters() {
  const values = {};
  const fields = { temperature: "temperature", max_tokens: "max-tokens", top_p: "top-p", seed: "seed" };
  for (const [name, id] of Object.entries(fields)) {
    const text = $(id).value.trim();
    if (text !== "") values[name] = Number(text);
  }
  if ($("model").value) values.model = $("model").value;
  return values;
}

function seconds(value) { return value < 0.9995 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`; }

/** The line under an answer: time to first token, speed, tokens, why it ended. */
function showMeasures(turn, measured) {
  const { start, first, last, usage, reason, deltas } = measured;
  const tokens = usage?.completion_tokens ?? deltas;
  const facts = [];
  if (first !== null) facts.push(["TTFT", seconds((first - start) / 1000)]);
  if (first !== null && last > first && tokens > 1) {
    facts.push(["Speed", `${(((tokens - 1) * 1000) / (last - first)).toFixed(1)} tokens/s`]);
  }
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    facts.push(["Prompt", `${usage.prompt_tokens} tokens${cached ? `, ${cached} cached` : ""}`]);
  }
  facts.push(["Answer", `${tokens} ${tokens === 1 ? "token" : "tokens"}`]);
  if (reason) facts.push(["Ended by", reason]);
  const list = element("dl", "measures");
  for (const [name, value] of facts) {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", value));
    list.append(pair);
  }
  turn.append(list);
}

function setRunning(controller) {
  running = controller;
  $("stop").hidden = controller === null;
  $("send").hidden = controller !== null;
  log.setAttribute("aria-busy", String(controller !== null));
}

async function generate(text) {
  const current = mode();
  const { path, who } = MODES[current];
  const body = { ...parameters(), stream: true, stream_options: { include_usage: true } };
  let answer;
  if (current === "chat") {
    addTurn("user", "You", text);
    history.push({ role: "user", content: text });
    const system = $("system").value;
    body.messages = system.trim() ? [{ role: "system", content: system }, ...history] : history;
    answer = addTurn("model", who);
  } else {
    body.prompt = text;
    answer = addTurn("model completion", who);
    answer.body.append(element("span", "given", text));
  }
  const written = document.createTextNode("");
  answer.body.append(written);
  answer.turn.classList.add("writing");

  const controller = new AbortController();
  setRunning(controller);
  const measured = { start: performance.now(), first: null, last: 0, usage: null, reason: null, deltas: 0 };
  let error = null;
  try {
    for await (const event of stream(path, body, controller.signal)) {
      if (event.usage) measured.usage = event.usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      if (choice.finish_reason) measured.reason = choice.finish_reason;
      const delta = current === "chat" ? choice.delta?.content : choice.text;
      if (!delta) continue;
      measured.last = performance.now();
      measured.first ??= measured.last;
      measured.deltas += 1;
      const following = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      written.appendData(delta);
      if (following) log.scrollTop = log.scrollHeight;
    }
  } catch (caught) {
    if (controller.signal.aborted) measured.reason = "stop button";
    else error = caught;
  }
  answer.turn.classList.remove("writing");
  setRunning(null);
  if (current === "chat") {
    if (written.data) {
      history.push({ role: "assistant", content: written.data });
    } else {
      history.pop(); // a message that got no answer is not part of the conversation
      if (error && !prompt.value) prompt.value = text;
    }
  }
  if (error) {
    if (!written.data) answer.body.previousSibling.remove(); // it is not the model that speaks
    showError(answer.turn, error);
  }
  if (!error || measured.deltas) showMeasures(answer.turn, measured);
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

function clear() {
  running?.abort();
  history = [];
  for (const turn of log.querySelectorAll(".turn")) turn.remove();
  $("empty").hidden = false;
  prompt.focus();
}

function applyMode() {
  const { label, send } = MODES[mode()];
  $("prompt-label").textContent = label;
  prompt.placeholder = label;
  $("send").textContent = send;
  $("system-field").hidden = mode() !== "chat";
  clear();
}

/** Wire the playground up; `keyChanged` is called when another API key was given. */
export function startPlayground(keyChanged) {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || !prompt.value.trim()) return;
    if (!$("parameters").reportValidity()) return;
    const text = prompt.value;
    prompt.value = "";
    generate(text);
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  $("stop").addEventListener("click", () => {
    running?.abort();
    prompt.focus();
  });
  $("clear").addEventListener("click", clear);
  for (const radio of document.querySelectorAll("input[name=mode]")) radio.addEventListener("change", applyMode);
  $("parameters").addEventListener("submit", (event) => event.preventDefault());
  $("api-key").value = getApiKey();
  $("api-key").addEventListener("change", () => {
    setApiKey($("api-key").value);
    keyChanged();
  });
  if (matchMedia("(max-width: 52rem)").matches) $("settings").open = false;
}
