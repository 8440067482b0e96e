"use strict";
// A live page polls its server, which answers 204 if nothing changed, and replaces what did. On the page of a
// folder the reader ticks the runs to draw; its address says which, so that a reload or a bookmark keeps them.

const status = document.getElementById("status");
const filter = document.getElementById("filter");
const byRecipe = document.getElementById("by-recipe");
const placed = {}; // {fragment: its HTML}
let asked = new URLSearchParams(location.search);
let version = "";
let requests = 0;
let timer;

function place(fragments) {
  for (const element of document.querySelectorAll("[data-fragment]")) {
    const html = fragments[element.dataset.fragment];
    if (html === undefined || placed[element.dataset.fragment] === html) continue;
    placed[element.dataset.fragment] = html;
    replaceContent(element, html);
  }
  pressLegend();
  if (filter) listMatching();
}

// Keeps what is open, how tables are sorted and scrolled, and the focus.
function replaceContent(element, html) {
  const every = (selector) => [...element.querySelectorAll(selector)];
  const open = new Set(every("details[open]").map((d) => d.dataset.key));
  const sorted = every("th[aria-sort]").map((h) => h.getAttribute("aria-sort"));
  const scrolled = every(".scroll").map((s) => [s.scrollLeft, s.scrollTop]);
  const focusable = () => every("button, input, summary, [tabindex]");
  const focused = focusable().indexOf(document.activeElement);
  const run = document.activeElement.dataset.run;
  element.innerHTML = html;
  for (const d of every("details")) d.open = d.open || open.has(d.dataset.key);
  every("th[aria-sort]").forEach((header, i) => {
    if (sorted[i] === "none" || !sorted[i]) return;
    sortBy(header);
    if (sorted[i] === "descending") sortBy(header);
  });
  every(".scroll").forEach((s, i) => s.scrollTo(...(scrolled[i] || [0, 0])));
  if (focused < 0) return;
  const same = run === undefined ? focusable()[focused] : focusable().find((e) => e.dataset.run === run);
  same?.focus({ preventScroll: true });
}

async function refresh() {
  clearTimeout(timer);
  requests += 1;
  const [request, started] = [requests, performance.now()];
  try {
    const query = new URLSearchParams([...asked, ["version", version]]);
    const answer = await fetch(`${document.body.dataset.live}?${query}`);
    const update = answer.status === 200 ? await answer.json() : null;
    if (request !== requests) return; // the reader has ticked other runs meanwhile
    if (update?.error) throw new Error(update.error);
    if (update) {
      version = update.version;
      Object.assign(figures, update.figures);
      place(update.fragments);
      draw();
    }
    status.textContent = "Live: updates while training goes on.";
  } catch (error) {
    if (request !== requests) return;
    status.textContent = `Not updating: ${error.message}`;
  }
  // The machine is busy training: reading takes a small part of the time, however much there is to read.
  timer = setTimeout(refresh, Math.max(1000, 10 * (performance.now() - started)));
}

function boxes() {
  return [...document.querySelectorAll("[data-run]")];
}

function askForTicked() {
  const names = boxes().filter((box) => box.checked).map((box) => box.dataset.run);
  asked = new URLSearchParams((names.length ? names : [""]).map((name) => ["run", name]));
  if (byRecipe.checked) asked.append("by", "recipe");
  history.replaceState(null, "", `?${asked}`);
  refresh();
}

function listMatching() {
  const part = filter.value.toLowerCase();
  for (const box of boxes()) {
    const row = box.closest("tr");
    row.hidden = !row.textContent.toLowerCase().includes(part);
  }
}

function tick(which) {
  for (const box of boxes().filter((b) => !b.disabled)) {
    box.checked = which === "listed" && (box.checked || !box.closest("tr").hidden);
  }
  askForTicked();
}

if (filter) {
  byRecipe.checked = asked.get("by") === "recipe";
  filter.addEventListener("input", listMatching);
  document.addEventListener("change", (event) => {
    if (event.target === byRecipe || event.target.dataset.run !== undefined) askForTicked();
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-tick]");
    if (button) tick(button.dataset.tick);
  });
}
refresh();
