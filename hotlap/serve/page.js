"use strict";
// Asks this page's own server to go on with a text, and shows each token with its probability.

const ALTERNATIVES = 8;
const byId = (id) => document.getElementById(id);
const [prompt, status_, columns, tooltip] = ["prompt", "status", "columns", "alternatives"].map(byId);
let models = [];
let running = null; // an AbortController while texts are being written
let last = null; // the last request, for Regenerate
let shown = null; // the token whose alternatives are shown

// A link may bring the token behind its #, which no browser sends to any server.
const inLink = new URLSearchParams(location.hash.slice(1)).get("token");
if (inLink) {
  sessionStorage.setItem("token", inLink);
  history.replaceState(null, "", location.pathname);
}

function headers() {
  const token = sessionStorage.getItem("token");
  return { "Content-Type": "application/json", ...(token ? { Authorization: `Bearer ${token}` } : {}) };
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers() });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Refused(answer.status, told?.error?.message ?? `the server answered ${answer.status}`);
}

function tell(text, failed = false) {
  status_.textContent = text;
  status_.classList.toggle("failed", failed);
}

function tellFailure(error) {
  if (error.status === 401) {
    byId("token-field").hidden = false;
    byId("token").focus();
    tell("This server wants a token.", true);
  } else {
    tell(error instanceof Refused ? error.message : "The server cannot be reached.", true);
  }
}

async function loadModels() {
  models = (await (await ask("/v1/models")).json()).data;
  const field = byId("models");
  field.querySelectorAll("label").forEach((label) => label.remove());
  models.forEach((model, number) => {
    const label = document.createElement("label");
    const box = document.createElement("input");
    Object.assign(box, { type: "checkbox", value: model.id, checked: number < 2 });
    label.append(box, ` ${model.id}`);
    field.append(label);
  });
  field.hidden = models.length < 2;
  byId("top_k").max = Math.min(100, Math.max(...models.map((model) => model.vocab_size)));
  const longest = Math.max(...models.map((model) => model.context_tokens));
  byId("max_tokens").max = Math.min(2000, Math.max(10, Math.floor((longest - 2) / 10) * 10));
  showSliders();
  document.title = models.map((model) => model.id).join(", ");
  document.querySelector("h1").textContent = models.length > 1 ? "Play with these models" : models[0].id;
  byId("token-field").hidden = true;
  tell("");
  document.body.dataset.ready = "yes";
}

function chosenModels() {
  const ticked = [...byId("models").querySelectorAll("input:checked")].map((box) => box.value);
  return models.filter((model) => models.length === 1 || ticked.includes(model.id));
}

function showSliders() {
  for (const id of ["temperature", "top_k", "max_tokens"]) {
    const value = Number(byId(id).value);
    byId(`${id}-shown`).textContent =
      id === "temperature" ? value.toFixed(2) : id === "top_k" && value === 0 ? "all" : value;
  }
}

// One model's text while it is written.
class Column {
  constructor(model, request) {
    this.request = { ...request, model: model.id };
    this.characters = []; // of the text; offsets count characters as the server does, not UTF-16 units
    this.tokens = []; // {offset, logprob, likeliest, text}
    const section = document.createElement("section");
    const heading = document.createElement("h2");
    heading.append(model.id, " ", Object.assign(document.createElement("small"), { textContent: `step ${model.step}` }));
    this.place = Object.assign(document.createElement("div"), { className: "text" });
    this.place.setAttribute("role", "group");
    this.place.setAttribute("aria-label", `Text of ${model.id}`);
    this.place.setAttribute("aria-busy", "true");
    this.figures = Object.assign(document.createElement("p"), { className: "figures" });
    this.place.append(Object.assign(document.createElement("span"), { className: "given", textContent: request.prompt }));
    section.append(heading, this.place, this.figures);
    columns.append(section);
  }

  async write(signal) {
    const started = performance.now();
    let ending = "stopped";
    try {
      const answer = await ask("/v1/completions", { method: "POST", body: JSON.stringify(this.request), signal });
      for await (const chunk of events(answer.body)) {
        if (chunk.error) throw new Refused(500, chunk.error.message);
        for (const choice of chunk.choices) {
          this.add(choice);
          ending = { stop: "the text ended", length: "as many as asked for" }[choice.finish_reason] ?? ending;
        }
        this.showFigures(started, "");
      }
      this.showFigures(started, ending);
    } catch (error) {
      if (error.name === "AbortError") {
        this.showFigures(started, "stopped");
      } else {
        this.figures.textContent = error instanceof Refused ? error.message : "The server cannot be reached.";
        this.figures.classList.add("failed");
        if (error.status === 401) tellFailure(error);
      }
    } finally {
      this.place.setAttribute("aria-busy", "false");
    }
  }

  add(choice) {
    this.characters.push(...choice.text);
    const told = choice.logprobs;
    told.tokens.forEach((_, i) => {
      const token = {
        offset: told.text_offset[i],
        logprob: told.token_logprobs[i],
        likeliest: Object.entries(told.top_logprobs[i]),
        drawn: told.tokens[i],
        element: document.createElement("span"),
      };
      token.element.className = "token";
      token.element.tabIndex = this.tokens.length ? -1 : 0; // one stop for Tab; arrow keys do the rest
      token.element.style.setProperty("--surprise", Math.min(1, -token.logprob / 6).toFixed(3));
      token.element.addEventListener("mouseenter", () => showAlternatives(token));
      token.element.addEventListener("mouseleave", hideAlternatives);
      token.element.addEventListener("focus", () => showAlternatives(token));
      token.element.addEventListener("blur", hideAlternatives);
      token.element.addEventListener("click", () => token.element.focus());
      this.tokens.push(token);
      this.place.append(token.element);
    });
    const from = Math.max(0, this.tokens.length - told.tokens.length - 1);
    for (let i = from; i < this.tokens.length; i++) {
      const end = this.tokens[i + 1]?.offset ?? this.characters.length;
      this.tokens[i].element.textContent = this.characters.slice(this.tokens[i].offset, end).join("");
    }
  }

  showFigures(started, ending) {
    const seconds = (performance.now() - started) / 1000;
    const count = this.tokens.length;
    const mean = this.tokens.reduce((sum, token) => sum + token.logprob, 0) / Math.max(1, count);
    const figures = [`${count} tokens`, `${(count / seconds).toFixed(0)} per second`, `mean probability ${percent(Math.exp(mean))}`];
    this.figures.textContent = [...figures, `seed ${this.request.seed}`, ending].filter(Boolean).join(" · ");
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const content = part.replace(/^data: /, "");
      if (content !== "[DONE]") yield JSON.parse(content);
    }
  }
}

function percent(probability) {
  const shown = 100 * probability;
  return `${shown >= 99.95 ? "100" : shown >= 0.1 ? shown.toFixed(1) : shown.toPrecision(1)} %`;
}

function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

function showAlternatives(token) {
  hideAlternatives();
  shown = token;
  token.element.classList.add("shown");
  const table = document.createElement("table");
  const drawn = [token.drawn, token.logprob];
  const others = token.likeliest.filter(([text]) => text !== token.drawn);
  const rows = [drawn, ...others].sort((a, b) => b[1] - a[1]);
  for (const [text, logprob] of rows) {
    const row = table.insertRow();
    if (text === token.drawn) row.className = "drawn";
    row.insertCell().textContent = visible(text);
    row.insertCell().textContent = percent(Math.exp(logprob));
    const meter = document.createElement("meter");
    meter.value = Math.exp(logprob);
    row.insertCell().append(meter);
  }
  tooltip.replaceChildren(table);
  tooltip.hidden = false;
  token.element.setAttribute("aria-describedby", tooltip.id);
  placeAlternatives();
}

// Below the token, or above it where there is no room; also while the page scrolls.
function placeAlternatives() {
  if (!shown) return;
  const [box, own] = [shown.element.getBoundingClientRect(), tooltip.getBoundingClientRect()];
  const left = Math.max(8, Math.min(box.left, innerWidth - own.width - 8));
  const below = box.bottom + 6 + own.height <= innerHeight || box.top < own.height + 6;
  tooltip.style.left = `${left}px`;
  tooltip.style.top = `${below ? box.bottom + 6 : box.top - own.height - 6}px`;
}

function hideAlternatives() {
  shown = null;
  tooltip.hidden = true;
  for (const element of document.querySelectorAll(".token.shown")) {
    element.classList.remove("shown");
    element.removeAttribute("aria-describedby");
  }
}

// Arrow keys, Home and End go through the tokens of a text.
columns.addEventListener("keydown", (event) => {
  const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  if (!(event.key in moves) || !event.target.classList.contains("token")) return;
  const every = [...event.target.parentElement.querySelectorAll(".token")];
  const to = Math.max(0, Math.min(every.length - 1, every.indexOf(event.target) + moves[event.key]));
  event.target.tabIndex = -1;
  every[to].tabIndex = 0;
  every[to].focus();
  event.preventDefault();
});

async function write(request) {
  const chosen = chosenModels();
  if (!chosen.length) {
    tell("Choose at least one model.", true);
    return;
  }
  running?.abort();
  const own = (running = new AbortController());
  last = request;
  hideAlternatives();
  tell("");
  columns.replaceChildren();
  byId("hint").hidden = false;
  for (const id of ["again", "stop"]) byId(id).disabled = false;
  await Promise.all(chosen.map((model) => new Column(model, request).write(own.signal)));
  if (running === own) {
    running = null;
    byId("stop").disabled = true;
    document.body.dataset.written = Number(document.body.dataset.written || 0) + 1;
  }
}

function asked() {
  const seed = byId("seed").value.trim();
  return {
    prompt: prompt.value,
    temperature: Number(byId("temperature").value),
    top_k: Number(byId("top_k").value),
    max_tokens: Number(byId("max_tokens").value),
    seed: /^[0-9]{1,15}$/.test(seed) ? Number(seed) : newSeed(),
    logprobs: ALTERNATIVES,
    stream: true,
  };
}

const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];
// Another text of the same start, with the sliders as they are now.
const again = () => last && write({ ...asked(), prompt: last.prompt, seed: newSeed() });
const stop = () => running?.abort();

byId("controls").addEventListener("submit", async (event) => {
  event.preventDefault();
  const token = byId("token").value;
  if (token) sessionStorage.setItem("token", token);
  try {
    if (!models.length) await loadModels();
    await write(asked());
  } catch (error) {
    tellFailure(error);
  }
});
byId("controls").addEventListener("input", showSliders);
byId("again").addEventListener("click", again);
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("controls").requestSubmit();
  else if (event.key === "Escape") running ? stop() : hideAlternatives();
  else if (event.altKey && event.key.toLowerCase() === "r") again();
  else return;
  event.preventDefault();
});
addEventListener("scroll", placeAlternatives, { passive: true });

loadModels().catch(tellFailure);
