"use strict";
// Draws the figures and handles the legend, the axis switches, table sorting and, on a live page, updates.

const figures = JSON.parse(document.getElementById("figures").textContent);
const hidden = new Set();
const axis = { x: "step", y: "val_loss" };
// Drag to zoom, double-click to reset. The mode bar is off because some of its buttons use the network.
const config = { responsive: true, displayModeBar: false };
const isTouch = matchMedia("(pointer: coarse)").matches;
let drawings = Promise.resolve();

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Colors come from the style sheet, so that figures follow its dark mode.
function themed(layout) {
  const line = { gridcolor: color("line"), zerolinecolor: color("line"), linecolor: color("line") };
  return {
    ...layout,
    xaxis: { ...line, ...layout.xaxis },
    yaxis: { ...line, ...layout.yaxis },
    shapes: (layout.shapes || []).map((s) => ({ ...s, line: { ...s.line, color: color("quiet") } })),
    font: { color: color("ink"), family: "system-ui, sans-serif", size: 13 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 50, r: 12, t: 12, b: 44 },
    showlegend: false,
    hovermode: "closest",
    hoverlabel: { bgcolor: color("panel"), font: { color: color("ink") } },
    dragmode: isTouch ? false : "zoom",
    uirevision: "kept", // keep the zoom across updates; the loss axes have their own revision
  };
}

function draw() {
  const drawn = { ...figures };
  if (figures.loss) drawn.loss = (figures.loss[axis.y] || figures.loss.val_loss)[axis.x];
  for (const [id, figure] of Object.entries(drawn)) {
    const place = document.getElementById(id);
    if (!figure) continue;
    place.closest("section").hidden = false;
    const data = figure.data.map((trace) => ({ ...trace, visible: !hidden.has(trace.meta) }));
    const layout = themed(figure.layout);
    drawings = drawings.then(() => Plotly.react(place, data, layout, config));
  }
  drawings.then(() => { document.body.dataset.drawn = Number(document.body.dataset.drawn || 0) + 1; });
}

function toggleLabel(button) {
  const wasShown = button.getAttribute("aria-pressed") === "true";
  button.setAttribute("aria-pressed", String(!wasShown));
  if (wasShown) hidden.add(button.dataset.label);
  else hidden.delete(button.dataset.label);
  draw();
}

function chooseAxis(button) {
  for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
  axis[button.dataset.axis] = button.dataset.value;
  draw();
}

function sortBy(header) {
  const order = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  const column = [...header.parentElement.children].indexOf(header);
  for (const other of header.parentElement.children) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", order);
  const body = header.closest("table").tBodies[0];
  const key = (row) => row.cells[column].dataset.value;
  const rows = [...body.rows].sort((a, b) => compare(key(a), key(b), order === "ascending" ? 1 : -1));
  body.append(...rows);
}

function compare(a, b, sign) {
  if (a === "" || b === "") return (a === "") - (b === ""); // unknown values last in both directions
  const [x, y] = [parseNumber(a), parseNumber(b)];
  return sign * (Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y);
}

function parseNumber(text) {
  return text === "inf" ? Infinity : Number(text);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.label !== undefined) toggleLabel(button);
  else if (button.dataset.axis) chooseAxis(button);
  else if (button.closest(".sortable thead")) sortBy(button.closest("th"));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();

// A live page polls its server, which answers 204 if nothing changed.
const live = document.body.dataset.live;
const status = document.getElementById("status");
const shown = {};
let version = "";

function place(fragments) {
  for (const element of document.querySelectorAll("[data-fragment]")) {
    const html = fragments[element.dataset.fragment];
    if (shown[element.dataset.fragment] === html) continue;
    shown[element.dataset.fragment] = html;
    const open = new Set([...element.querySelectorAll("details[open]")].map((d) => d.dataset.key));
    const sorted = [...element.querySelectorAll("th[aria-sort]")].map((h) => h.getAttribute("aria-sort"));
    element.innerHTML = html;
    for (const d of element.querySelectorAll("details")) d.open = d.open || open.has(d.dataset.key);
    element.querySelectorAll("th[aria-sort]").forEach((header, i) => {
      if (sorted[i] === "none" || !sorted[i]) return;
      sortBy(header);
      if (sorted[i] === "descending") sortBy(header);
    });
  }
}

async function refresh() {
  try {
    const answer = await fetch(`${live}?version=${encodeURIComponent(version)}`);
    if (answer.status === 200) {
      const update = await answer.json();
      if (update.error) throw new Error(update.error);
      version = update.version;
      Object.assign(figures, update.figures);
      place(update.fragments);
      draw();
    }
    status.textContent = "Live: updates while the run trains.";
  } catch (error) {
    status.textContent = `Not updating: ${error.message}`;
  }
  setTimeout(refresh, 1000);
}

if (live) refresh();
