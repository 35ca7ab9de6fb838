// Draws each plot when it comes into sight, keeps their steps together, and moves the slider of experts.
"use strict";

const data = name => JSON.parse(document.querySelector(`script[data-name="${CSS.escape(name)}"]`).textContent);
const element = id => document.getElementById(id);
const runs = data("runs");
const shown = runs.map(() => true);
const drawn = [];
let linking = false;

Bokeh.logger.set_level("error");

// --- curves ----------------------------------------------------------------------------------------------------------

async function embed(item, place) {
  const views = await Bokeh.embed.embed_item(item, place);
  return views.roots[0].model;
}

async function draw(place) {
  const plot = await embed(data(`plot:${place.dataset.plot}`), place);
  const home = [plot.x_range.start, plot.x_range.end];
  drawn.push(plot);
  show(plot);
  plot.x_range.connect(plot.x_range.change, () => link(plot, home));
}

function show(plot) {
  for (const renderer of plot.renderers)
    renderer.view.filter.booleans = Array.from(renderer.data_source.data.index, run => shown[run]);
}

function link(from, home) {
  if (linking) return;
  linking = true;
  for (const plot of drawn)
    if (plot !== from) plot.x_range.setv({start: from.x_range.start, end: from.x_range.end});
  linking = false;
}

for (const box of document.querySelectorAll(".legend input"))
  box.addEventListener("change", () => {
    shown[box.dataset.run] = box.checked;
    drawn.forEach(show);
  });

// --- experts ---------------------------------------------------------------------------------------------------------

const viewer = data("viewer");
let heat = null, layer = null, loads = null;

function choose(select, names) {
  select.replaceChildren(...names.map((name, index) => new Option(name, index)));
  select.selectedIndex = 0;
}

function chooseRun() {
  choose(element("layer"), viewer[element("run").value].layers.map(found => found.name));
  chooseLayer();
}

function chooseLayer() {
  layer = viewer[element("run").value].layers[element("layer").value];
  loads = Uint8Array.from(atob(layer.loads), letter => letter.charCodeAt(0));
  const x = [], y = [], w = [], share = [], end = [];
  layer.steps.forEach((step, position) => {
    const before = position ? layer.steps[position - 1] : 0;
    const active = new Set(placementAt(step).ranks.flat());
    for (let expert = 0; expert < layer.experts; expert++) {
      if (!load(position, expert) && !active.has(expert)) continue;
      x.push((before + step) / 2);
      w.push(step - before);
      y.push(expert);
      share.push(load(position, expert));
      end.push(step);
    }
  });
  const fair = 1 / countActive(layer.steps.length - 1);
  const find = name => heat.document.get_model_by_name(name);
  find("loads").data = {x, y, w, share, end};
  find("shares").setv({low: 0, high: 2 * fair});
  heat.x_range.setv({start: 0, end: layer.steps.at(-1)});
  heat.y_range.setv({start: -0.5, end: Math.max(...y) + 0.5});
  element("step").max = layer.steps.length - 1;
  element("step").value = layer.steps.length - 1;
  move();
}

const load = (position, expert) => loads[position * layer.experts + expert] / 255 * layer.peak;

// The placement in force at a step: the last one noted up to it, or the first one.
function placementAt(step) {
  const before = layer.placements.filter(found => found.step <= step);
  return before.at(-1) ?? layer.placements[0] ?? {ranks: [[...Array(layer.experts).keys()]], uids: null};
}

function countActive(position) {
  const experts = new Set(placementAt(layer.steps[position]).ranks.flat());
  return experts.size || layer.experts;
}

function move() {
  const position = Number(element("step").value);
  const step = layer.steps[position];
  element("at").value = step.toLocaleString("en");
  for (const line of ["now", "now-border"])
    heat.document.get_model_by_name(line).location = (step + (layer.steps[position - 1] ?? 0)) / 2;
  const now = placementAt(step);
  const former = position ? placementAt(layer.steps[position - 1]) : now;
  const replicas = new Map();
  for (const expert of now.ranks.flat()) replicas.set(expert, (replicas.get(expert) ?? 0) + 1);
  const fair = 1 / countActive(position);
  const sums = now.ranks.map(row => row.reduce((sum, expert) => sum + load(position, expert) / replicas.get(expert), 0));
  const most = Math.max(...sums, 1e-9);
  const all = sums.reduce((sum, one) => sum + one, 0) || 1;  // 1, but for the rounding of loads to bytes
  element("placement").replaceChildren(...now.ranks.map((row, rank) => {
    const line = make("div", "rank");
    const chips = make("div", "chips");
    for (const expert of row) chips.append(chip(expert, rank, load(position, expert), fair, now, former));
    const bar = make("div", "bar");
    const filled = make("span", "", `${(100 * sums[rank] / all).toFixed(1)} %`);
    filled.style.width = `${100 * sums[rank] / most}%`;
    bar.append(filled);
    line.append(make("span", "", `rank ${rank}`), chips, bar);
    return line;
  }));
}

function chip(expert, rank, share, fair, now, former) {
  const came = !(former.ranks[rank] ?? []).includes(expert);
  const found = make("span", came ? "chip moved" : "chip", String(expert));
  const excess = Math.max(-1, Math.min(1, share / fair - 1));
  const [red, green, blue] = excess > 0 ? [178, 24, 43] : [33, 102, 172];
  const mix = channel => Math.round(247 + (channel - 247) * Math.abs(excess));
  found.style.background = `rgb(${mix(red)}, ${mix(green)}, ${mix(blue)})`;
  found.style.color = Math.abs(excess) > 0.55 ? "#fff" : "#222";
  const uid = now.uids ? `, uid ${now.uids[expert]}` : "";
  found.title = `expert ${expert}${uid}: ${(100 * share).toFixed(2)} % of assignments`;
  return found;
}

function make(kind, name, text = "") {
  const found = document.createElement(kind);
  found.className = name;
  found.textContent = text;
  return found;
}

function goTo(run, step) {
  const index = viewer.findIndex(found => found.run === run);
  if (index < 0 || !heat) return;
  element("run").value = index;
  chooseRun();
  const position = layer.steps.findIndex(found => found >= step);
  element("step").value = position < 0 ? layer.steps.length - 1 : position;
  move();
  element("experts").scrollIntoView({behavior: "smooth"});
}

async function drawExperts(place) {
  heat = await embed(data("heat"), place);
  choose(element("run"), viewer.map(found => runs[found.run].name));
  element("run").addEventListener("change", chooseRun);
  element("layer").addEventListener("change", chooseLayer);
  element("step").addEventListener("input", move);
  chooseRun();
}

for (const row of document.querySelectorAll("tr[data-step]"))
  row.addEventListener("click", () => goTo(Number(row.dataset.run), Number(row.dataset.step)));

// --- drawing what is in sight ----------------------------------------------------------------------------------------

let waiting = 0;
const sight = new IntersectionObserver(entries => {
  for (const entry of entries.filter(found => found.isIntersecting)) {
    sight.unobserve(entry.target);
    waiting += 1;
    (entry.target.id === "heat" ? drawExperts : draw)(entry.target).then(() => {
      waiting -= 1;
      if (!waiting) document.body.dataset.drawnAfter = Math.round(performance.now());
      document.body.dataset.plots = drawn.length + (heat ? 1 : 0);
    });
  }
}, {rootMargin: "300px"});
document.querySelectorAll(".plot").forEach(place => sight.observe(place));
