"use strict";
// Draws the figures as the reader's choices in `view` have them. Figures over the run's axis (the loss and the
// panels) share it: its unit, scale and zoom. Others are drawn as they are.

const figures = JSON.parse(document.getElementById("figures").textContent);
const view = {
  x: "step",
  y: "val_loss",
  logX: false,
  logY: false,
  smoothing: 0, // of the axis: the standard deviation of the averaging window
  last: 1, // the part of the run that is shown, from its end
  zoom: null, // [from, to] in units of the axis, instead of `last`
  zoomY: {}, // {figure: [from, to]}, where the reader dragged
  hidden: new Set(), // labels
};
const SMOOTHINGS = [0, 0.01, 0.02, 0.05, 0.1];
const VALUE = ",.7~r"; // seven significant digits: what float32 holds, and six decimals of a loss
// Drag to zoom, double-click to reset. The mode bar is off because some of its buttons use the network.
const CONFIG = { responsive: true, displayModeBar: false, doubleClick: false };
const isTouch = matchMedia("(pointer: coarse)").matches;
let drawings = Promise.resolve();
let saying;

// {figure: Plotly's data and layout}, first of those that share their x axis, and then of the others.
function chosen() {
  const { loss, panels, ...others } = figures;
  const shared = {};
  if (loss !== undefined) shared.loss = loss && (loss[view.y] || loss.val_loss)[view.x];
  for (const [id, byAxis] of Object.entries(panels || {})) shared[id] = byAxis && byAxis[view.x];
  return [shared, others];
}

function draw() {
  const [shared, others] = chosen();
  for (const button of document.querySelectorAll("[data-axis=y]")) {
    button.hidden = !!figures.loss && !(button.dataset.value in figures.loss);
  }
  const range = shared.loss && rangeOf(shared.loss);
  for (const [id, figure] of Object.entries(shared)) show(id, figure && drawnOver(range, id, figure));
  for (const [id, figure] of Object.entries(others)) {
    show(id, figure && { data: figure.data.map(visible), layout: { ...themed(figure.layout), uirevision: "kept" } });
  }
  hideEmptySections();
  drawings = drawings.then(() => { document.body.dataset.drawn = Number(document.body.dataset.drawn || 0) + 1; });
}

function show(id, figure) {
  const place = document.getElementById(id);
  place.closest("figure").hidden = !figure;
  if (!figure) return;
  place.closest("section").hidden = false; // Plotly measures it
  drawings = drawings.then(async () => {
    await Plotly.react(place, figure.data, figure.layout, CONFIG);
    if (!place.dataset.listens) listen(id, place);
    place.dataset.listens = "yes";
  });
}

function hideEmptySections() {
  for (const section of document.querySelectorAll("main section")) {
    const parts = [...section.querySelectorAll("[data-fragment], figure")];
    if (parts.length) section.hidden = parts.every((p) => (p.tagName === "FIGURE" ? p.hidden : !p.innerHTML));
  }
}

function visible(trace) {
  return { ...trace, visible: !view.hidden.has(trace.meta) };
}

// The shown part of the axis in its unit; null for all of it.
function rangeOf(figure) {
  if (view.zoom || view.last === 1) return view.zoom;
  const xs = figure.data.filter((t) => !view.hidden.has(t.meta)).flatMap((t) => t.x);
  if (!xs.length) return null;
  const [first, end] = [Math.min(...xs), Math.max(...xs)];
  return [end - view.last * (end - first), end];
}

function drawnOver(range, id, figure) {
  const data = figure.data.flatMap(smoothed).map(visible);
  const layout = themed(figure.layout);
  const logY = id === "loss" && view.logY;
  const rangeY = view.zoomY[id] || (range ? fitted(data, range) : figure.layout.yaxis.range);
  Object.assign(layout.xaxis, scaled(range, view.logX), { showspikes: true, spikemode: "across", spikesnap: "data" });
  Object.assign(layout.xaxis, { spikethickness: 1, spikedash: "dot", spikecolor: color("quiet") });
  Object.assign(layout.yaxis, scaled(rangeY, logY));
  Object.assign(layout, { hovermode: "x unified", hoverdistance: -1 }); // of each curve the nearest point
  return { data: withOwnX(data), layout };
}

// Where curves have points at different x, the hover text says at which x each value is.
function withOwnX(data) {
  const curves = data.filter((t) => t.visible && t.hoverinfo !== "skip");
  if (curves.every((t) => String(t.x) === String(curves[0].x))) return data;
  return data.map((t) => ({ ...t, hovertemplate: t.hovertemplate?.replace("<extra>", " at %{x}<extra>") }));
}

// An axis with a range in its unit. A logarithmic axis that begins at zero or below shows all that it can.
function scaled(range, isLog) {
  const type = isLog ? "log" : "linear";
  if (!range || (isLog && range[0] <= 0)) return { type, range: undefined, autorange: true };
  return { type, range: isLog ? range.map(Math.log10) : range, autorange: false };
}

// The range of y that curves have over a range of x, with a margin.
function fitted(data, [from, to]) {
  const shown = data.filter((t) => t.visible && (t.hoverinfo !== "skip" || t.fill)); // no faint line
  const ys = shown.flatMap((t) => t.y.filter((y, i) => y !== null && t.x[i] >= from && t.x[i] <= to));
  if (!ys.length) return undefined;
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const margin = 0.05 * (high - low) || 0.01 * Math.abs(high) || 1;
  return [low - margin, high + margin];
}

// A trace as it is drawn: its band and, below a smoothed line, the values it was made of.
function smoothed(trace) {
  const { low, high, ...line } = trace;
  const drawn = { hovertemplate: `%{y:${VALUE}}<extra>${trace.name}</extra>`, ...line };
  const isLine = trace.mode === "lines";
  const smooth = (ys) => (view.smoothing && isLine ? averaged(trace.x, ys) : ys);
  const traces = [drawn];
  if (low) {
    const band = { ...line, x: [...line.x, ...line.x.toReversed()], y: [...smooth(high), ...smooth(low).toReversed()] };
    const fillcolor = `${line.line.color}2e`;
    traces.unshift({ ...band, mode: "lines", fill: "toself", fillcolor, line: { width: 0 }, hoverinfo: "skip" });
    drawn.customdata = low.map((value, i) => [value, high[i], line.y[i]]);
    drawn.hovertemplate = `%{y:${VALUE}} (%{customdata[0]:${VALUE}} to %{customdata[1]:${VALUE}})<extra>${trace.name}</extra>`;
  }
  if (view.smoothing && isLine) {
    drawn.y = smooth(line.y);
    drawn.customdata = line.y.map((y) => [y]);
    drawn.hovertemplate = `%{y:${VALUE}}, unsmoothed %{customdata[0]:${VALUE}}<extra>${trace.name}</extra>`;
    if (!low) traces.unshift({ ...line, opacity: 0.25, line: { ...line.line, width: 1 }, hoverinfo: "skip" });
  }
  return traces;
}

// Weighted by a normal distribution of the distance along the axis, on both sides: a smoothed curve does not lag.
function averaged(xs, ys) {
  const at = view.logX ? xs.map((x) => Math.log10(Math.max(x, 1e-9))) : xs;
  const width = view.smoothing * (at.at(-1) - at[0]) || 1;
  let first = 0;
  return ys.map((_, i) => {
    while (at[i] - at[first] > 3 * width) first += 1;
    let [sum, weights] = [0, 0];
    for (let j = first; j < at.length && at[j] - at[i] <= 3 * width; j += 1) {
      const weight = Math.exp(-(((at[j] - at[i]) / width) ** 2) / 2);
      sum += weight * ys[j];
      weights += weight;
    }
    return sum / weights;
  });
}

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
    paper_bgcolor: color("ground"),
    plot_bgcolor: color("ground"),
    margin: { l: 50, r: 12, t: 12, b: 44 },
    showlegend: false,
    hovermode: "closest",
    hoverlabel: { bgcolor: color("panel"), bordercolor: color("line"), font: { color: color("ink") } },
    dragmode: isTouch ? false : "zoom",
  };
}

function listen(id, place) {
  place.on("plotly_relayout", (change) => {
    if (!Object.keys(change).some((key) => /^[xy]axis/.test(key)) || !(id in chosen()[0])) return;
    const { xaxis, yaxis } = place.layout;
    view.zoom = xaxis.autorange ? null : xaxis.range.map((v) => (view.logX ? 10 ** v : v));
    const isLogY = id === "loss" && view.logY;
    if (Object.keys(change).some((key) => /^yaxis.range/.test(key))) {
      view.zoomY[id] = yaxis.range.map((v) => (isLogY ? 10 ** v : v));
    }
    draw();
  });
  place.on("plotly_doubleclick", () => { zoomOut(1); });
}

// Back to the last part of the run, or all of it.
function zoomOut(last) {
  view.last = last;
  view.zoom = null;
  view.zoomY = {};
  draw();
}

// Shows the values at the next point of the first visible curve, and says them.
function step(place, key) {
  const curve = place.data.find((t) => t.visible && t.hoverinfo !== "skip");
  if (!curve) return;
  const count = curve.x.length;
  const at = Number(place.dataset.at ?? (key === "ArrowLeft" ? count : -1));
  const target = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: count - 1 }[key];
  const index = Math.min(Math.max(target, 0), count - 1);
  place.dataset.at = index;
  Plotly.Fx.hover(place, { xval: curve.x[index] }, "xy");
  clearTimeout(saying);
  saying = setTimeout(say, 100, place); // Plotly shows one text in 50 ms
}

function say(place) {
  const texts = [...place.querySelectorAll(".hoverlayer text")].map((text) => text.textContent);
  document.getElementById("readout").textContent = texts.join(", ");
}

// The loss figure as it is on the page, with title, size and hardware.
function picture() {
  const place = document.getElementById("loss");
  const title = document.querySelector("h1").textContent;
  const setting = document.querySelector("[data-fragment=setting]").textContent;
  const layout = {
    ...place.layout,
    title: { text: escaped(title), subtitle: { text: escaped(setting), font: { color: color("quiet") } }, x: 0.02 },
    margin: { l: 70, r: 30, t: 90, b: 60 },
    showlegend: true,
    legend: { orientation: "h", yanchor: "bottom", y: 1, x: 1, xanchor: "right" },
    autosize: false,
  };
  const data = place.data.map((t) => ({ ...t, showlegend: t.hoverinfo !== "skip" && t.name !== "best" }));
  return { data, layout };
}

async function savePicture() {
  const title = document.querySelector("h1").textContent;
  const link = document.createElement("a");
  link.href = await Plotly.toImage(picture(), { format: "png", width: 1200, height: 675, scale: 2 });
  link.download = `${title.replace(/[^\p{L}\p{N}._-]+/gu, "-")}.png`;
  link.click();
}

// Plotly interprets markup in text.
function escaped(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}
