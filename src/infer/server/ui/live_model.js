/*
 * The data of the Live tab, independent of the page: events of /admin/live and the text of /metrics become
 * numbers and sentences. The canvases draw from here, and every drawing is also described here in words.
 */

export const STEP_FIELDS = ["step", "decodeRows", "promptRows", "promptTokens", "drafts", "accepted", "forks", "preemptions", "transfers", "inGraph", "microseconds"];
export const REQUEST_FIELDS = ["id", "state", "waitsFor", "sequences", "prompt", "output", "computed", "cached", "blocks", "hostBlocks"];
export const BRANCH_FIELDS = ["parent", "start", "stop", "hits", "children"];
export const [FREE, CACHED, SHARED, UNLISTED, FIRST_LISTED] = [0, 1, 2, 3, 4]; // codes of cells
export const MAX_STEPS = 512;
const KINDS = ["free", "cached, in no request's use", "shared by several sequences", "held by a request that is not listed"];
const REASONS = {
  place: "a place in the batch",
  blocks: "blocks",
  budget: "token budget",
  compile: "its constraint to be compiled",
  turn: "its turn",
  step: "the next step",
  batch: "the end of a static batch",
};
const RATE_S = 3; // seconds over which rates are averaged

const named = (fields) => (row) => Object.fromEntries(fields.map((name, place) => [name, row[place]]));

/** Decode run lengths to one code per cell. */
export function unroll(runs) {
  const cells = new Uint16Array(runs.reduce((sum, value, place) => sum + (place % 2 ? value : 0), 0));
  let at = 0;
  for (let place = 0; place < runs.length; place += 2) cells.fill(runs[place], at, (at += runs[place + 1]));
  return cells;
}

export class LiveModel {
  constructor() {
    this.event = null; // the last one
    this.steps = []; // objects of STEP_FIELDS, oldest first
    this.requests = [];
    this.branches = [];
    this.cells = this.hostCells = new Uint16Array();
    this.latencies = null; // from /metrics, see readMetrics
    this.marks = []; // [seconds, totals], oldest first
    this.numbers = new Map(); // request id -> a number for its colour
  }

  take(event) {
    const before = this.event;
    this.event = event;
    if (before && (event.number < before.number || event.model !== before.model || event.replica !== before.replica)) {
      this.steps = [];
      this.marks = []; // another engine, or the same one restarted
    }
    this.steps = [...this.steps, ...event.steps.map(named(STEP_FIELDS))].slice(-MAX_STEPS);
    this.requests = event.requests.map(named(REQUEST_FIELDS));
    this.branches = event.branches.map(named(BRANCH_FIELDS));
    this.cells = unroll(event.cells);
    this.hostCells = unroll(event.host_cells);
    const recent = this.marks.filter(([at]) => event.made_at - at <= RATE_S);
    this.marks = [...(recent.length ? recent : this.marks.slice(-1)), [event.made_at, event.totals]];
    const numbers = new Map(); // numbers of listed requests, so that a request keeps its colour
    const taken = new Set();
    for (const { id } of this.requests) if (this.numbers.has(id)) numbers.set(id, this.numbers.get(id)), taken.add(this.numbers.get(id));
    let free = 0;
    for (const { id } of this.requests) {
      if (numbers.has(id)) continue;
      while (taken.has(free)) free += 1;
      numbers.set(id, free);
      taken.add(free);
    }
    this.numbers = numbers;
  }

  /** The request whose block a cell shows; undefined: no listed one. */
  owner(code) {
    return this.requests[code - FIRST_LISTED];
  }

  /** The hue of a request's colour in degrees: neighbours in the list are far apart. */
  hue(id) {
    return (this.numbers.get(id) * 137.5 + 20) % 360;
  }

  /** The recent rate of a counter, per second. */
  rate(name) {
    const [first, last] = [this.marks[0], this.marks.at(-1)];
    return first && last[0] > first[0] ? Math.max(last[1][name] - first[1][name], 0) / (last[0] - first[0]) : 0;
  }

  describeCell(place, isHost = false) {
    const { blocks_per_cell, host_blocks_per_cell, num_blocks, num_host_blocks } = this.event;
    const size = isHost ? host_blocks_per_cell : blocks_per_cell;
    const code = (isHost ? this.hostCells : this.cells)[place];
    const last = Math.min((place + 1) * size, isHost ? num_host_blocks : num_blocks) - 1;
    const name = `${isHost ? "Host block" : "Block"}${last > place * size ? `s ${place * size} to ${last}, mostly` : ` ${place}:`}`;
    const owner = this.owner(code);
    return `${name} ${owner ? `held by ${owner.id}` : KINDS[code]}`;
  }

  describeBlocks() {
    const [free, cached, shared, held] = this.event.counts;
    const host = this.event.num_host_blocks ? ` ${spell(this.event.num_host_blocks)} blocks in host memory, ${spell(this.numHostUsed)} of them in use.` : "";
    return `${spell(this.event.num_blocks)} blocks of ${this.event.block_size} tokens: ${spell(held)} held by one sequence, ${spell(shared)} shared, ${spell(cached)} cached, ${spell(free)} free.${host}`;
  }

  /** Host blocks in use; exact if all requests are listed. */
  get numHostUsed() {
    return this.requests.reduce((sum, { hostBlocks }) => sum + hostBlocks, 0);
  }

  describeStep({ step, decodeRows, promptRows, promptTokens, drafts, accepted, forks, preemptions, transfers, inGraph, microseconds }) {
    const parts = [`${count(decodeRows, "decode row")}`];
    if (promptRows) parts.push(`${count(promptTokens, "prompt token")} in ${count(promptRows, "chunk")}`);
    if (drafts) parts.push(`${accepted} of ${count(drafts, "draft")} accepted, ${drafts - accepted} refused`);
    if (forks) parts.push(count(forks, "fork"));
    if (preemptions) parts.push(count(preemptions, "preemption"));
    if (transfers) parts.push(`${count(transfers, "block")} moved`);
    parts.push(inGraph ? "in a graph" : "no graph", `${(microseconds / 1000).toFixed(2)} ms`);
    return `Step ${step}: ${parts.join(", ")}`;
  }

  describeSteps() {
    if (!this.steps.length) return "No step since the page looks: the engine is idle.";
    const sum = (field) => this.steps.reduce((total, step) => total + step[field], 0);
    const slowest = Math.max(...this.steps.map(({ microseconds }) => microseconds)) / 1000;
    return `The last ${count(this.steps.length, "step")}: ${spell(sum("decodeRows"))} decode rows, ${spell(sum("promptTokens"))} prompt tokens, ${spell(sum("accepted"))} of ${count(sum("drafts"), "draft")} accepted, ${count(sum("forks"), "fork")}, ${count(sum("preemptions"), "preemption")}, ${sum("inGraph")} in a graph; ${(sum("microseconds") / 1000 / this.steps.length).toFixed(2)} ms on average, ${slowest.toFixed(2)} at most.`;
  }

  describeQueue() {
    const { num_running, num_waiting, max_batch_size, num_unlisted } = this.event;
    const reasons = Object.entries(Object.groupBy(this.requests.filter(({ waitsFor }) => waitsFor), ({ waitsFor }) => waitsFor));
    const waits = reasons.map(([reason, rows]) => `${rows.length} for ${REASONS[reason]}`).join(", ");
    const rest = num_unlisted ? ` ${count(num_unlisted, "sequence")} more ${num_unlisted === 1 ? "is" : "are"} not listed.` : "";
    return `${num_running} of at most ${count(max_batch_size, "sequence")} ${num_running === 1 ? "runs" : "run"}, ${num_waiting} ${num_waiting === 1 ? "waits" : "wait"}${waits ? `: ${waits}` : ""}.${rest}`;
  }

  describeBranch({ parent, start, stop, hits, children }) {
    const size = this.event.block_size;
    const place = parent < 0 ? `the first ${spell(stop * size)} tokens` : `tokens ${spell(start * size + 1)} to ${spell(stop * size)}`;
    return `${count(hits, "hit")} on ${place}${children ? `, then ${count(children, "way")} on` : ""}`;
  }

  /** [label, value, description] of every figure. */
  figures() {
    const { num_running, num_waiting, host_bytes, totals, interval_s } = this.event;
    const times = this.latencies ?? {};
    const hits = totals.queried_tokens ? `${Math.round((100 * totals.hit_tokens) / totals.queried_tokens)} %` : "–";
    const figures = [
      ["Running", spell(num_running), "sequences in the batch"],
      ["Waiting", spell(num_waiting), "sequences in the queue"],
      ["Output", `${spell(Math.round(this.rate("output_tokens")))}/s`, "tokens made per second"],
      ["Prompts", `${spell(Math.round(this.rate("prompt_tokens")))}/s`, "prompt tokens computed or found per second"],
      ["Steps", `${this.rate("steps").toFixed(1)}/s`, "steps per second"],
      ["Cache hits", hits, "prompt tokens found in the prefix cache since the start"],
      ["First token", spellQuantiles(times.ttft), "time to first token: half of the requests, and 95 % of them, were faster"],
      ["Token gap", spellQuantiles(times.itl), "time between two tokens: half of them, and 95 %, were shorter"],
    ];
    if (times.gpuTotal) figures.push(["GPU memory", `${bytes(times.gpuUsed)} of ${bytes(times.gpuTotal)}`, "in use by all processes"]);
    if (times.gpuBusy !== undefined) figures.push(["GPU busy", `${Math.round(100 * times.gpuBusy)} %`, "share of the last moments in which a kernel ran"]);
    figures.push(["Host memory", `${bytes(host_bytes[1])}`, `used by the engine's process; ${bytes(host_bytes[2])} of ${bytes(host_bytes[0])} are free`]);
    figures.push(["Updates", `${(1 / interval_s).toFixed(interval_s > 0.5 ? 1 : 0)}/s`, "snapshots that can be had per second: they take at most 0.5 % of the engine's time"]);
    return figures;
  }
}

export const whyItWaits = (reason) => (reason ? `waits for ${REASONS[reason]}` : "");
export const spell = (number) => number.toLocaleString("en");
export const count = (number, noun) => `${spell(number)} ${noun}${number === 1 ? "" : "s"}`;

/** The part of an engine's request id that the client knows, as x-request-id. */
export const clientId = (id) => id.split("/")[0];

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  for (; number >= 1000 && power < units.length - 1; power += 1) number /= 1000;
  return `${number.toFixed(power && number < 10 ? 1 : 0)} ${units[power]}`;
}

const spellMs = (seconds) => (seconds === Infinity ? "long" : seconds < 0.01 ? `${(1000 * seconds).toFixed(1)} ms` : seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`);
const spellQuantiles = (quantiles) => (quantiles ? `${spellMs(quantiles[0])} · ${spellMs(quantiles[1])}` : "–");

/** The metrics of one engine: buckets of its histograms, and gauges of its GPU. */
export function readMetrics(text, model, engine) {
  const found = { ttft: new Map(), itl: new Map() };
  const wanted = {
    infer_time_to_first_token_seconds_bucket: found.ttft,
    infer_inter_token_latency_seconds_bucket: found.itl,
  };
  const gauges = { infer_gpu_memory_used_bytes: "gpuUsed", infer_gpu_memory_total_bytes: "gpuTotal", infer_gpu_utilization: "gpuBusy" };
  const isOurs = (labels) => labels.includes(`model_name="${escapeLabel(model)}"`) && labels.includes(`engine="${engine}"`);
  for (const line of text.split("\n")) {
    const [, name, labels, value] = /^(\w+)\{(.*)\} (\S+)$/.exec(line) ?? [];
    if (!name || !isOurs(labels)) continue;
    if (wanted[name]) wanted[name].set(toNumber(/le="([^"]*)"/.exec(labels)[1]), Number(value));
    if (gauges[name]) found[gauges[name]] = Number(value);
  }
  return found;
}

const toNumber = (bound) => (bound === "+Inf" ? Infinity : Number(bound));
const escapeLabel = (value) => value.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll('"', '\\"');

/** The median and 95th percentile of the values between two readings, or since the start if there are none. */
export function quantilesSince(now, before) {
  const since = [...now].map(([bound, value]) => [bound, value - (before?.get(bound) ?? 0)]);
  const buckets = since.at(-1)?.[1] > 0 ? since : [...now];
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!total) return null;
  return [0.5, 0.95].map((share) => {
    let [low, below] = [0, 0];
    for (const [bound, upTo] of buckets) {
      if (upTo >= share * total) return bound === Infinity ? Infinity : low + ((bound - low) * (share * total - below)) / (upTo - below);
      [low, below] = [bound, upTo];
    }
    return Infinity;
  });
}
