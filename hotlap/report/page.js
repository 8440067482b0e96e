"use strict";
// Buttons, tables, theme and keys of a page, and its first drawing.

const THEME_KEY = "hotlap-theme";
const systemTheme = matchMedia("(prefers-color-scheme: dark)");

function press(buttons, isPressed) {
  for (const button of buttons) button.setAttribute("aria-pressed", String(isPressed(button)));
}

function within(button, selector) {
  return button.parentElement.querySelectorAll(selector);
}

function toggleLabel(label) {
  if (!view.hidden.delete(label)) view.hidden.add(label);
  pressLegend();
  draw();
}

function pressLegend() {
  press(document.querySelectorAll(".legend [data-label]"), (b) => !view.hidden.has(b.dataset.label));
}

function chooseAxis(button) {
  press(within(button, "[data-axis]"), (other) => other === button);
  view[button.dataset.axis] = button.dataset.value;
  if (button.dataset.axis === "x") view.zoom = null; // of another unit
  view.zoomY = {};
  draw();
}

function toggleLog(button) {
  const name = button.dataset.log === "x" ? "logX" : "logY";
  view[name] = !view[name];
  press([button], () => view[name]);
  draw();
}

function chooseLast(button) {
  press(within(button, "[data-last]"), (other) => other === button);
  zoomOut(Number(button.dataset.last));
}

function chooseSmoothing(slider) {
  view.smoothing = SMOOTHINGS[slider.value];
  const words = view.smoothing ? `${100 * view.smoothing} %` : "off";
  document.getElementById("smoothing-width").textContent = words;
  draw();
}

function toggleMarks(button) {
  const isOn = button.closest("section").classList.toggle("marked");
  press([button], () => isOn);
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

// The system's theme, unless the reader chose the other. A browser may refuse to remember that.
function rememberedTheme() {
  try {
    return localStorage.getItem(THEME_KEY);
  } catch {
    return null;
  }
}

function setTheme(chosenTheme) {
  const theme = chosenTheme || (systemTheme.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  press(document.querySelectorAll("[data-theme-toggle]"), () => theme === "dark");
}

function toggleTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  const isOfSystem = (theme === "dark") === systemTheme.matches;
  try {
    if (isOfSystem) localStorage.removeItem(THEME_KEY);
    else localStorage.setItem(THEME_KEY, theme);
  } catch {
    // Then it holds until the page is closed.
  }
  setTheme(theme);
  draw();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const data = button.dataset;
  if (data.label !== undefined) toggleLabel(data.label);
  else if (data.axis) chooseAxis(button);
  else if (data.log) toggleLog(button);
  else if (data.last) chooseLast(button);
  else if (data.marks !== undefined) toggleMarks(button);
  else if (data.savePicture !== undefined) savePicture();
  else if (data.themeToggle !== undefined) toggleTheme();
  else if (button.closest(".sortable thead")) sortBy(button.closest("th"));
});
document.addEventListener("input", (event) => {
  if (event.target.id === "smoothing") chooseSmoothing(event.target);
});
document.addEventListener("keydown", (event) => {
  const place = event.target.closest(".plot[tabindex]");
  if (!place) return;
  if (["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) step(place, event.key);
  else if (event.key === "Escape") Plotly.Fx.unhover(place);
  else return;
  event.preventDefault();
});
systemTheme.addEventListener("change", () => {
  setTheme(rememberedTheme());
  draw();
});
setTheme(rememberedTheme());
draw();
