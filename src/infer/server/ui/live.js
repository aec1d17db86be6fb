/*
 * The Live tab: an engine at work, from the events of /admin/live.
 *
 *   api.js ── events ──► live_model.js   numbers and sentences
 *                             └──► live.js   figures, tables, texts      live_draw.js   the canvases
 *
 * The stream runs only while the tab is shown, the page is visible and nothing is paused; without a stream the
 * engine records no steps. Canvases are drawn at most once per frame, or once a second with reduced motion.
 * Everything on a canvas is also text: a sentence below it, and the arrow keys walk through its items.
 */

import { getText, streamLive } from "/ui/api.js";
import { cellAt, drawBlocks, drawSteps, layOut, readColours, stepAt } from "/ui/live_draw.js";
import { clientId, LiveModel, quantilesSince, readMetrics, spell, whyItWaits } from "/ui/live_model.js";

const $ = (id) => document.getElementById(id);
const METRICS_MS = 5000; // between two requests to /metrics
const RETRY_MS = 2000; // after a stream that failed
const CALM_MS = 1000; // between two drawings with reduced motion
const ROOM = { blocks: 230, host: 60 }; // height in pixels that cells should fit into

export const model = new LiveModel();
const view = {
  isShown: false,
  isPaused: false,
  stream: null, // controller of the running stream
  engine: null, // the engine that is shown, as [model, replica]; null: the server's choice
  retry: 0,
  drawnAt: 0,
  drawing: 0, // a frame or a timer that will draw
  buckets: null, // the histograms of /metrics when the tab was opened
  cursors: { blocks: null, host: null, steps: null },
  asked: null, // the request whose story is shown
};

// -- the stream ---------------------------------------------------------------------------------------

/** Show or leave the tab; a stream runs only while it is shown. */
export function showLive(isShown) {
  view.isShown = isShown;
  follow();
}

const isWatching = () => view.isShown && !view.isPaused && !document.hidden;

function follow() {
  clearTimeout(view.retry);
  if (!isWatching()) {
    view.stream?.abort();
    view.stream = null;
  } else if (!view.stream) {
    watch();
  }
}

function restart() {
  view.stream?.abort();
  view.stream = null;
  follow();
}

async function watch() {
  const stream = (view.stream = new AbortController());
  say(model.event ? "" : "Connecting …");
  let complaint = "the server ended the view";
  try {
    for await (const event of streamLive(view.engine, $("live-key").value || $("key").value, stream.signal)) {
      complain("");
      model.take(event);
      listEngines(event);
      drawSoon();
    }
  } catch (error) {
    if (stream.signal.aborted) return;
    if (error.status === 401) return askForKey();
    complaint = error.message;
    if (error.status === 404) return complain(complaint); // the route or the model does not exist: no retry
  }
  if (view.stream !== stream) return;
  view.stream = null;
  complain(complaint);
  view.retry = setTimeout(follow, RETRY_MS);
}

function askForKey() {
  const hasKey = Boolean($("live-key").value);
  $("live-key-form").hidden = false;
  complain(hasKey ? "The server does not know this key." : "This server wants its admin key.");
  if (document.activeElement === $("live-tab") || hasKey) $("live-key").focus();
}

function complain(message) {
  $("live-error").hidden = !message;
  if ($("live-error").textContent !== message) $("live-error").textContent = message;
  if (!message && !$("live-key-form").hidden) $("live-key-form").hidden = true;
}

function say(text) {
  if ($("live-status").textContent !== text) $("live-status").textContent = text;
}

/** List every engine of the server. */
function listEngines({ models, model: name, replica }) {
  const wanted = Object.entries(models).flatMap(([id, number]) => Array.from({ length: number }, (_, place) => JSON.stringify([id, place])));
  const select = $("live-engine");
  if (wanted.join() !== [...select.options].map(({ value }) => value).join()) {
    select.replaceChildren(...wanted.map((value) => {
      const [id, place] = JSON.parse(value);
      return new Option(models[id] > 1 ? `${id}, replica ${place}` : id, value);
    }));
    select.disabled = false;
  }
  const shown = JSON.stringify([name, replica]);
  if (select.value !== shown) select.value = shown;
}

/** Read latencies and the GPU's figures; they stay unknown without permission. */
async function readTimes() {
  if (!isWatching() || !model.event) return;
  const { model: name, replica } = model.event;
  try {
    const found = readMetrics(await getText("/metrics", $("key").value), name, replica);
    view.buckets ??= found;
    const since = (kind) => quantilesSince(found[kind], view.buckets[kind]);
    model.latencies = { ...found, ttft: since("ttft"), itl: since("itl") };
    drawSoon();
  } catch {
    model.latencies = null;
  }
}

// -- drawing ------------------------------------------------------------------------------------------

const wantsCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function drawSoon() {
  if (view.drawing) return;
  const wait = wantsCalm() ? view.drawnAt + CALM_MS - performance.now() : 0;
  view.drawing = wait > 0 ? setTimeout(draw, wait) : requestAnimationFrame(draw);
}

function draw() {
  view.drawing = 0;
  view.drawnAt = performance.now();
  if (!model.event || $("live").hidden) return;
  $("live-body").hidden = false;
  say(view.isPaused ? "Paused" : `Step ${spell(model.event.step)}`);
  drawFigures();
  drawMaps();
  drawRequests();
  drawBranches();
}

function drawMaps() {
  drawBlocks($("live-blocks"), model, model.cells, view.cursors.blocks, ROOM.blocks);
  $("live-blocks").setAttribute("aria-label", `Map of the KV cache. ${model.describeBlocks()}`);
  $("live-blocks-text").textContent = pointed("blocks") ?? model.describeBlocks();
  $("live-scale").textContent = model.event.blocks_per_cell > 1 ? `Each cell stands for ${model.event.blocks_per_cell} blocks, and shows what most of them are.` : "";
  const hasHost = model.event.num_host_blocks > 0;
  $("live-host-place").hidden = !hasHost;
  if (hasHost) {
    drawBlocks($("live-host"), model, model.hostCells, view.cursors.host, ROOM.host);
    $("live-host").setAttribute("aria-label", `Map of host memory: ${spell(model.event.num_host_blocks)} blocks, ${spell(model.numHostUsed)} in use.`);
    $("live-host-text").textContent = pointed("host") ?? `${spell(model.numHostUsed)} of ${spell(model.event.num_host_blocks)} blocks in use by sequences that were swapped out`;
  }
  drawSteps($("live-steps"), model, placeOf(view.cursors.steps));
  $("live-steps").setAttribute("aria-label", `Timeline of steps. ${model.describeSteps()}`);
  $("live-steps-text").textContent = pointed("steps") ?? model.describeSteps();
}

/** The index of a step that may have moved; null: it is gone. */
function placeOf(number) {
  const place = number === null ? -1 : model.steps.findIndex(({ step }) => step === number);
  return place < 0 ? null : place;
}

/** The text for the item that is pointed at; undefined: nothing. */
function pointed(kind) {
  const cursor = view.cursors[kind];
  if (cursor === null || !model.event) return undefined;
  if (kind === "steps") return placeOf(cursor) === null ? undefined : model.describeStep(model.steps[placeOf(cursor)]);
  const cells = kind === "host" ? model.hostCells : model.cells;
  return cursor < cells.length ? model.describeCell(cursor, kind === "host") : undefined;
}

function drawFigures() {
  const figures = model.figures();
  const list = $("live-figures");
  while (list.children.length > figures.length) list.lastElementChild.remove();
  figures.forEach(([label, value, title], place) => {
    let figure = list.children[place];
    if (!figure) {
      figure = document.createElement("div");
      figure.append(document.createElement("dt"), document.createElement("dd"));
      list.append(figure);
    }
    setText(figure.firstChild, label);
    setText(figure.lastChild, value);
    figure.title = title;
  });
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A row per request; rows of listed requests are reused, so that a button keeps its focus. */
function drawRequests() {
  const body = $("live-requests");
  const rows = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  const colours = readColours(body);
  let before = null;
  for (const request of model.requests) {
    const row = rows.get(request.id) ?? newRow(request.id);
    rows.delete(request.id);
    const { state, waitsFor, sequences, prompt, output, computed, cached, blocks, hostBlocks } = request;
    const told = [state, whyItWaits(waitsFor), sequences, prompt, cached, computed, output, hostBlocks ? `${spell(blocks)} + ${spell(hostBlocks)} host` : blocks];
    told.forEach((value, place) => setText(row.cells[place + 1], typeof value === "number" ? spell(value) : value));
    row.dataset.state = state;
    row.dataset.waitsFor = waitsFor;
    row.querySelector(".swatch").style.background = colours.request(model.hue(request.id));
    const place = before ? before.nextSibling : body.firstChild;
    if (place !== row) body.insertBefore(row, place);
    before = row;
  }
  for (const row of rows.values()) row.remove();
  $("live-queue").textContent = model.describeQueue();
  $("live-requests-table").hidden = !model.requests.length;
}

function newRow(id) {
  const row = document.createElement("tr");
  row.dataset.id = id;
  const head = document.createElement("th");
  head.scope = "row";
  const button = Object.assign(document.createElement("button"), { type: "button", className: "request", title: id });
  button.append(Object.assign(document.createElement("span"), { className: "swatch" }), clientId(id));
  button.addEventListener("click", () => tell(id));
  head.append(button);
  row.append(head);
  for (let cell = 0; cell < 8; cell += 1) row.append(document.createElement("td"));
  for (const place of [3, 4, 5, 6, 7, 8]) row.cells[place].className = "right";
  return row;
}

function drawBranches() {
  const most = Math.max(...model.branches.map(({ hits }) => hits), 1);
  const depths = [];
  const items = model.branches.map((branch, place) => {
    depths[place] = branch.parent < 0 ? 0 : depths[branch.parent] + 1;
    const item = document.createElement("li");
    item.style.marginLeft = `${Math.min(depths[place], 6) * 1.2}rem`;
    const bar = Object.assign(document.createElement("meter"), { max: most, value: branch.hits });
    bar.setAttribute("aria-hidden", "true");
    item.append(bar, ` ${model.describeBranch(branch)}`);
    return item;
  });
  $("live-branches").replaceChildren(...items);
  $("live-no-branches").hidden = items.length > 0;
}

// -- the story of a request ---------------------------------------------------------------------------

/** Show the server's explanation of a request, next to the canvases. */
async function tell(id) {
  view.asked = id;
  $("live-story").hidden = false;
  $("live-story-title").textContent = `Request ${clientId(id)}`;
  $("live-story-text").textContent = "…";
  $("live-story-title").focus();
  let text;
  try {
    const key = $("live-key").value || $("key").value; // the admin key sees every request
    text = await getText(`/explain/${encodeURIComponent(clientId(id))}`, key, "text/plain");
  } catch (error) {
    text = error.status === 404 ? "no story kept" : error.message;
  }
  if (view.asked === id) $("live-story-text").textContent = text;
}

function closeStory() {
  const row = [...$("live-requests").rows].find(({ dataset }) => dataset.id === view.asked);
  view.asked = null;
  $("live-story").hidden = true;
  (row?.querySelector("button") ?? $("live-blocks")).focus();
}

// -- pointer and keys ---------------------------------------------------------------------------------

/** Let a map be explored with the mouse and with keys; `at` finds the item at a point. */
function listen(kind, canvas, at, find) {
  const set = (cursor) => {
    if (view.cursors[kind] === cursor) return;
    view.cursors[kind] = cursor;
    if (model.event) drawMaps();
  };
  canvas.addEventListener("pointermove", (event) => model.event && set(at(event.offsetX, event.offsetY)));
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && set(null));
  canvas.addEventListener("blur", () => set(null));
  canvas.addEventListener("keydown", (event) => {
    if (!model.event) return;
    const moved = find(event.key, view.cursors[kind]);
    if (moved === undefined) return;
    event.preventDefault();
    set(moved);
  });
  const open = () => {
    const owner = kind === "steps" || view.cursors[kind] === null ? undefined : model.owner((kind === "host" ? model.hostCells : model.cells)[view.cursors[kind]]);
    if (owner) tell(owner.id);
  };
  canvas.addEventListener("click", open);
  canvas.addEventListener("keydown", (event) => event.key === "Enter" && open());
}

/** The cell that a key moves to; undefined: none. */
function walkCells(canvas, cells, room) {
  return (key, cursor) => {
    const number = cells().length;
    const { columns } = layOut(canvas.clientWidth, number, room);
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    if (key === "Home") return 0;
    if (key === "End") return number - 1;
    if (!(key in moves)) return undefined;
    const next = (cursor ?? -1) + moves[key];
    return cursor === null ? 0 : next >= 0 && next < number ? next : cursor;
  };
}

function walkSteps(key, cursor) {
  const moves = { ArrowRight: 1, ArrowLeft: -1 };
  if (!model.steps.length || !(key in moves || key === "Home" || key === "End")) return undefined;
  const last = model.steps.length - 1;
  const place = placeOf(cursor) ?? last + (key === "ArrowLeft" ? 1 : 0);
  const next = key === "Home" ? 0 : key === "End" ? last : Math.min(Math.max(place + moves[key], 0), last);
  return model.steps[next].step;
}

const canvas = { blocks: $("live-blocks"), host: $("live-host"), steps: $("live-steps") };
listen("blocks", canvas.blocks, (x, y) => cellAt(canvas.blocks, model.cells.length, x, y, ROOM.blocks), walkCells(canvas.blocks, () => model.cells, ROOM.blocks));
listen("host", canvas.host, (x, y) => cellAt(canvas.host, model.hostCells.length, x, y, ROOM.host), walkCells(canvas.host, () => model.hostCells, ROOM.host));
listen("steps", canvas.steps, (x) => model.steps[stepAt(canvas.steps, model.steps.length, x) ?? -1]?.step ?? null, walkSteps);

$("live-engine").addEventListener("change", ({ target }) => {
  view.engine = JSON.parse(target.value);
  view.buckets = model.latencies = null;
  restart();
});
$("live-pause").addEventListener("click", ({ target }) => {
  view.isPaused = !view.isPaused;
  target.setAttribute("aria-pressed", view.isPaused);
  setText(target, view.isPaused ? "Go on" : "Pause");
  say(view.isPaused ? "Paused" : "");
  follow();
});
$("live-key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  restart();
});
$("live-story-close").addEventListener("click", closeStory);
$("live-story").addEventListener("keydown", (event) => event.key === "Escape" && closeStory());
document.addEventListener("visibilitychange", follow);
new ResizeObserver(drawSoon).observe($("live-steps")); // a panel was opened, or the window was resized
setInterval(readTimes, METRICS_MS);
