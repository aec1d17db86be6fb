/*
 * The canvases of the Live tab: a map of blocks, and a timeline of steps. Colours come from the style sheet, so
 * light and dark themes need no code here; the hue of a request comes from live_model.js.
 */

import { CACHED, FREE, SHARED, UNLISTED } from "/ui/live_model.js";

const MAX_CELL = 14; // pixels
const MIN_CELL = 3;
const LANES = { tokens: [14, 78], time: [110, 44], events: [160, 14], graph: [178, 6] }; // top and height
const STEPS_HEIGHT = 186;

/** The current colours, by name. */
export function readColours(element) {
  const style = getComputedStyle(element);
  const names = ["free", "cached", "shared", "decode", "prompt", "accepted", "refused", "fork", "preempted", "moved", "graph", "text", "line", "accent"];
  const colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--live-${name}`).trim()]));
  return { ...colours, request: (hue) => `hsl(${hue} ${style.getPropertyValue("--live-vivid").trim()})` };
}

/** Fit a canvas to its element, sharp on every screen; returns a context that draws in CSS pixels. */
function prepare(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** The number of cells in a row, and the size of a cell. */
export function layOut(width, numCells, room) {
  const size = Math.max(MIN_CELL, Math.min(MAX_CELL, Math.floor(Math.sqrt((width * room) / Math.max(numCells, 1)))));
  const columns = Math.max(Math.floor(width / size), 1);
  return { size, columns, height: Math.max(Math.ceil(numCells / columns), 1) * size };
}

export function drawBlocks(canvas, model, cells, cursor, room) {
  const width = canvas.clientWidth;
  const { size, columns, height } = layOut(width, cells.length, room);
  const context = prepare(canvas, width, height);
  const colours = readColours(canvas);
  const fixed = { [FREE]: colours.free, [CACHED]: colours.cached, [SHARED]: colours.shared, [UNLISTED]: colours.text };
  const gap = size > 4 ? 1 : 0;
  cells.forEach((code, place) => {
    const [x, y] = [(place % columns) * size, Math.floor(place / columns) * size];
    const owner = model.owner(code);
    context.fillStyle = owner ? colours.request(model.hue(owner.id)) : fixed[code] ?? colours.text;
    context.fillRect(x, y, size - gap, size - gap);
    if (code === SHARED && size > 4) { // visible without colour, too
      context.strokeStyle = colours.free;
      context.beginPath();
      context.moveTo(x, y + size - gap);
      context.lineTo(x + size - gap, y);
      context.stroke();
    }
  });
  if (cursor !== null && cursor < cells.length) outline(context, colours, (cursor % columns) * size, Math.floor(cursor / columns) * size, size - gap, size - gap);
}

/** The number of the cell at a point; null: none. */
export function cellAt(canvas, numCells, x, y, room) {
  const { size, columns } = layOut(canvas.clientWidth, numCells, room);
  const [column, row] = [Math.floor(x / size), Math.floor(y / size)];
  const place = row * columns + column;
  return column >= 0 && column < columns && row >= 0 && place < numCells ? place : null;
}

const stepWidth = (canvas, numSteps) => Math.max(2, Math.min(8, canvas.clientWidth / Math.max(numSteps, 1)));

/** The steps that fit on a canvas, the newest at its right edge. */
function shown(canvas, steps) {
  const width = stepWidth(canvas, steps.length);
  const first = Math.max(steps.length - Math.floor(canvas.clientWidth / width), 0);
  return { width, first, left: canvas.clientWidth - (steps.length - first) * width };
}

export function drawSteps(canvas, model, cursor) {
  const { steps } = model;
  const context = prepare(canvas, canvas.clientWidth, STEPS_HEIGHT);
  const colours = readColours(canvas);
  const { width, first, left } = shown(canvas, steps);
  const visible = steps.slice(first);
  const tokens = (step) => step.decodeRows + step.drafts + step.promptTokens;
  const mostTokens = Math.max(...visible.map(tokens), 1);
  const longest = Math.max(...visible.map((step) => step.microseconds), 1);
  const [top, room] = LANES.tokens;
  const [timeTop, timeRoom] = LANES.time;
  const bar = Math.max(width - (width > 3 ? 1 : 0), 1);
  context.fillStyle = colours.line;
  for (const [laneTop, height] of [LANES.tokens, LANES.time]) context.fillRect(0, laneTop + height, canvas.clientWidth, 1);
  visible.forEach((step, place) => {
    const x = left + place * width;
    let done = 0;
    for (const [value, colour] of [
      [step.decodeRows, colours.decode],
      [step.accepted, colours.accepted],
      [step.drafts - step.accepted, colours.refused],
      [step.promptTokens, colours.prompt],
    ]) {
      const [from, to] = [height(done, mostTokens, room), height(done + value, mostTokens, room)];
      context.fillStyle = colour;
      if (value) context.fillRect(x, top + room - to, bar, Math.max(to - from, 1));
      done += value;
    }
    context.fillStyle = colours.text;
    const tall = Math.max((step.microseconds / longest) * timeRoom, 1);
    context.fillRect(x, timeTop + timeRoom - tall, bar, tall);
    drawMarks(context, colours, step, x + bar / 2);
    if (step.inGraph) {
      context.fillStyle = colours.graph;
      context.fillRect(x, LANES.graph[0], width, LANES.graph[1]);
    }
  });
  context.fillStyle = colours.text;
  context.font = "11px system-ui, sans-serif";
  context.fillText(`up to ${mostTokens.toLocaleString("en")} tokens`, 0, top - 4);
  context.fillText(`up to ${(longest / 1000).toFixed(1)} ms`, 0, timeTop - 4);
  if (cursor !== null && cursor >= first && cursor < steps.length) outline(context, colours, left + (cursor - first) * width, 0, bar, STEPS_HEIGHT - 1);
}

/** The height of a bar of tokens: on a square-root scale, so that one row is visible next to a long chunk. */
const height = (value, most, room) => Math.sqrt(value / most) * room;

/** The events of sequences in a step: a circle for a fork, a triangle for a preemption, a square for moved blocks. */
function drawMarks(context, colours, { forks, preemptions, transfers }, x) {
  const y = LANES.events[0] + 7;
  if (transfers) {
    context.fillStyle = colours.moved;
    context.fillRect(x - 2, y + 2, 4, 4);
  }
  if (forks) {
    context.fillStyle = colours.fork;
    context.beginPath();
    context.arc(x, y - 3, 3, 0, 7);
    context.fill();
  }
  if (preemptions) {
    context.fillStyle = colours.preempted;
    context.beginPath();
    context.moveTo(x, y - 7);
    context.lineTo(x + 4, y + 1);
    context.lineTo(x - 4, y + 1);
    context.fill();
  }
}

/** The index of the step at a point; null: none. */
export function stepAt(canvas, numSteps, x) {
  const { width, first, left } = shown(canvas, { length: numSteps });
  const place = first + Math.floor((x - left) / width);
  return x >= left && place < numSteps ? place : null;
}

function outline(context, colours, x, y, width, height) {
  context.strokeStyle = colours.accent;
  context.lineWidth = 2;
  context.strokeRect(x, y, Math.max(width, 2), height);
  context.lineWidth = 1;
}
