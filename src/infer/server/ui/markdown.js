/*
 * Markdown, in the subset that models write, as a tree and then as elements.
 *
 *   text ──parse──► [{type: "list", items: […]}, {type: "code", language, text}, …] ──render──► DOM nodes
 *
 * Text only becomes text nodes: nothing here parses HTML, so nothing that a model writes can turn into markup.
 * A link keeps its address only if that is http or https.
 *
 * Every step takes time linear in the text, even for adversarial text: nesting is bounded (MAX_DEPTH,
 * MAX_OPEN), no pattern can backtrack twice over the same characters, and a table has no more cells than bars.
 *
 * MarkdownView shows a text that grows. A new line can only change the last block, so earlier blocks are drawn
 * once and never changed.
 */

const MAX_DEPTH = 8; // nesting depth of quotes and lists
const MAX_OPEN = 64; // delimiters that wait for their partner; the oldest is dropped
const MAX_COLUMNS = 1000;
const MAX_URL = 2000;

// -- blocks -------------------------------------------------------------------------------------------

/** The blocks of a text. Each knows the number of its first line, as `at`. */
export function parse(text) {
  // an answer that is only JSON keeps its indentation
  if (/^\s*(\{\s*"|\[\s*[\[{"\d])/.test(text)) return [{ type: "code", language: "json", text, at: 0 }];
  return parseLines(text.split("\n").map((line) => (line.endsWith("\r") ? line.slice(0, -1) : line)), 0);
}

function parseLines(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const { end, ...block } = readBlock(lines, at, depth);
    blocks.push({ ...block, at });
    at = end;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  if (openFence(line)) return readFence(lines, at);
  if (isRule(line)) return { type: "rule", end: at + 1 };
  const heading = /^\s*(#{1,6})(?=\s|$)/.exec(line);
  if (heading) {
    const text = line.slice(heading[0].length).trim();
    const open = trimEnd(text, "#"); // marks may also close a heading; "C#" is a word
    const title = !open || /\s$/.test(open) ? open.trim() : text;
    return { type: "heading", level: heading[1].length, children: parseInline(title), end: at + 1 };
  }
  if (depth < MAX_DEPTH && isQuote(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && readMarker(line)) return readList(lines, at, depth);
  if (startsTable(lines, at)) return readTable(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  const text = lines.slice(at, end).map((each) => each.trim()).join("\n");
  return { type: "paragraph", children: parseInline(text), end };
}

const isQuote = (line) => /^\s*>/.test(line);
const isRule = (line) => /^\s*[-*_]/.test(line) && /^(?:-{3,}|\*{3,}|_{3,})$/.test(line.replace(/\s+/g, ""));

/** Return whether a line within a paragraph begins a new block. A lone dash or a year at its start does not. */
function interrupts(lines, at) {
  const line = lines[at];
  const marker = readMarker(line);
  const isItem = marker?.text && (marker.start === null || marker.start === 1);
  return isItem || openFence(line) || isRule(line) || isQuote(line) || /^\s*#{1,6}\s/.test(line) || startsTable(lines, at);
}

function openFence(line) {
  const [, indent, marks, info] = /^(\s*)(`{3,}|~{3,})(.*)$/.exec(line) ?? [];
  return marks && !(marks[0] === "`" && info.includes("`")) ? { indent: indent.length, marks, info: info.trim() } : null;
}

function closesFence(line, { marks }) {
  const text = line.trim();
  return text.length >= marks.length && text.startsWith(marks) && !trimEnd(text, marks[0]);
}

/** A fence that is still open contains the rest of the text: this is code that is still being written. */
function readFence(lines, at) {
  const fence = openFence(lines[at]);
  let end = at + 1;
  while (end < lines.length && !closesFence(lines[end], fence)) end += 1;
  const text = lines.slice(at + 1, end).map((line) => dedent(line, fence.indent)).join("\n");
  return { type: "code", language: fence.info.split(/\s/, 1)[0].slice(0, 40), text, end: end + 1 };
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && isQuote(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^\s*> ?/, ""));
  return { type: "quote", blocks: parseLines(inner, depth + 1), end };
}

function readMarker(line) {
  const [all, indent, mark, space] = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/.exec(line) ?? [];
  if (all === undefined || isRule(line)) return null;
  const start = /\d/.test(mark) ? parseInt(mark, 10) : null;
  return { indent: widthOf(indent), width: widthOf(indent) + mark.length + Math.min(space.length, 4), start, text: line.slice(all.length) };
}

/** A list continues over blank lines, over lines indented by two or more, and to the end of a fence within it. */
function readList(lines, at, depth) {
  const first = readMarker(lines[at]);
  const items = [];
  let end = at;
  for (let marker = first; marker && (marker.start === null) === (first.start === null); marker = readMarker(lines[end] ?? "")) {
    const inner = [marker.text];
    let fence = openFence(marker.text);
    let isCodeEnd = false;
    for (end += 1; end < lines.length; end += 1) {
      const line = lines[end];
      const isIndented = widthOf(/^\s*/.exec(line)[0]) >= marker.indent + 2;
      const isLazy = inner.at(-1).trim() && !isCodeEnd && !readMarker(line) && !interrupts(lines, end);
      if (line.trim() && !fence && !isIndented && !isLazy) break;
      inner.push(dedent(line, marker.width));
      isCodeEnd = fence !== null && closesFence(line, fence);
      fence = isCodeEnd ? null : fence ?? openFence(line);
    }
    items.push(parseLines(inner, depth + 1));
  }
  return { type: "list", start: first.start, items, end };
}

const widthOf = (space) => space.length + 3 * (space.split("\t").length - 1); // a tab is four columns wide

/** A line without its first `width` columns of white space. */
function dedent(line, width) {
  let at = 0;
  for (let column = 0; column < width && (line[at] === " " || line[at] === "\t"); at += 1) column += line[at] === "\t" ? 4 : 1;
  return line.slice(at);
}

function startsTable(lines, at) {
  const below = lines[at + 1] ?? "";
  if (!lines[at].includes("|") || !/^[-:|\s]+$/.test(below)) return false;
  const columns = splitRow(below);
  return columns.length <= MAX_COLUMNS && columns.every((cell) => /^:?-+:?$/.test(cell)) && splitRow(lines[at]).length === columns.length;
}

function readTable(lines, at) {
  const aligned = splitRow(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const readRow = (line) => splitRow(line).slice(0, aligned.length).map(parseInline);
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end += 1) rows.push(readRow(lines[end]));
  return { type: "table", head: readRow(lines[at]), rows, aligned, end };
}

/** The cells between the bars of a row; a bar after a backslash is part of its cell. */
function splitRow(line) {
  const cells = [""];
  for (const [piece] of line.trim().matchAll(/\\.|\||[^\\|]+|\\/gs)) {
    if (piece === "|") cells.push("");
    else cells[cells.length - 1] += piece === "\\|" ? "|" : piece;
  }
  if (!cells[0].trim() && cells.length > 1) cells.shift();
  if (!cells.at(-1).trim() && cells.length > 1) cells.pop();
  return cells.map((cell) => cell.trim());
}

/** A text without the characters `mark` at its end; a pattern such as /#+$/ would take quadratic time. */
function trimEnd(text, marks) {
  let end = text.length;
  while (end && marks.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

// -- within a line ------------------------------------------------------------------------------------

/** The nodes of a paragraph: text, code, em, strong, del, link. A delimiter without a partner stays text. */
export function parseInline(text) {
  const out = [];
  const openers = []; // [{mark, count, at}]: delimiters at out[at] that may still find their partner
  const ticks = findTicks(text);
  const special = /!?\[|[\\`*_~\]<]|\bhttps?:\/\//g;

  const say = (words) => {
    const last = out.at(-1);
    if (last?.type === "text" && !last.isMark) last.text += words;
    else if (words) out.push({ type: "text", text: words });
  };
  const open = (mark, count) => {
    if (openers.length === MAX_OPEN) openers.shift();
    openers.push({ mark, count, at: out.length });
    out.push({ type: "text", text: mark.repeat(count), isMark: true });
  };
  const find = (mark) => openers.findLastIndex((opener) => opener.mark === mark);
  const wrap = (place, node, count) => {
    const opener = openers[place];
    const children = out.splice(opener.at + 1);
    opener.count -= count;
    out[opener.at].text = opener.mark.repeat(opener.count);
    openers.length = opener.count ? place + 1 : place; // those after it can no longer find a partner
    out.push({ ...node, children });
  };
  const emphasize = (mark, run, before, after) => {
    if (run > 3 || (mark === "~" && run !== 2)) return say(mark.repeat(run));
    const isInWord = (side) => mark === "_" && /[\p{L}\p{N}_]/u.test(side); // snake_case has no emphasis
    let left = run;
    if (before.trim() && !isInWord(after)) {
      for (let place = find(mark); left && place >= 0; place = find(mark)) {
        const count = Math.min(openers[place].count, left, 2);
        wrap(place, { type: mark === "~" ? "del" : count === 2 ? "strong" : "em" }, count);
        left -= count;
      }
    }
    if (left && after.trim() && !isInWord(before)) open(mark, left);
    else say(mark.repeat(left));
  };

  let at = 0;
  for (;;) {
    special.lastIndex = at;
    const found = special.exec(text);
    if (!found) break;
    say(text.slice(at, found.index));
    at = found.index;
    const mark = found[0];
    if (mark === "\\") {
      const next = text[at + 1] ?? "";
      const isEscape = /[!-/:-@[-`{-~\n]/.test(next);
      say(isEscape ? next : mark);
      at += isEscape ? 2 : 1;
    } else if (mark === "`") {
      const run = runLength(text, at);
      const close = ticks(run, at + run);
      if (close < 0) say("`".repeat(run));
      else out.push({ type: "code", text: unpad(text.slice(at + run, close)) });
      at = close < 0 ? at + run : close + run;
    } else if (mark.endsWith("[")) { // an image also becomes a link: this page loads nothing from other sites
      open("[", 1);
      out.at(-1).text = mark;
      at += mark.length;
    } else if (mark === "]") {
      const place = find("[");
      const link = place >= 0 ? readDestination(text, at + 1) : null;
      if (link) wrap(place, { type: "link", url: link.url }, 1);
      else say("]");
      if (!link && place >= 0) openers.splice(place, 1);
      at = link ? link.end : at + 1;
    } else if (mark === "<" || mark.startsWith("http")) {
      const { node, end } = readAngle(text, at) ?? readAddress(text, at) ?? { end: at + mark.length };
      if (node?.type === "link") out.push(node);
      else say(node ? node.text : mark);
      at = end;
    } else {
      const run = runLength(text, at);
      emphasize(mark, run, text[at - 1] ?? "", text[at + run] ?? "");
      at += run;
    }
  }
  say(text.slice(at));
  return out.filter((node) => node.type !== "text" || node.text);
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** A function that finds the next run of exactly `count` backticks from a place that only moves forward. */
function findTicks(text) {
  const places = new Map(); // count -> starts of these runs, last first
  for (const { 0: run, index } of [...text.matchAll(/`+/g)].reverse()) {
    if (!places.has(run.length)) places.set(run.length, []);
    places.get(run.length).push(index);
  }
  return (count, from) => {
    const left = places.get(count) ?? [];
    while (left.length && left.at(-1) < from) left.pop();
    return left.at(-1) ?? -1;
  };
}

const unpad = (code) => (code.startsWith(" ") && code.endsWith(" ") && code.trim() ? code.slice(1, -1) : code);

/** The `(address "title")` of a link; parentheses within it may be one deep. */
function readDestination(text, at) {
  if (text[at] !== "(") return null;
  let end = at + 1;
  for (let depth = 1; ; end += 1) {
    const next = text[end];
    if (next === undefined || next === "\n" || end - at > MAX_URL) return null;
    if (next === "(" && (depth += 1) > 2) return null;
    if (next === ")" && (depth -= 1) === 0) break;
  }
  const given = text.slice(at + 1, end).split(/\s["'(]/, 1)[0].trim();
  const url = checkUrl(given.startsWith("<") && given.endsWith(">") ? given.slice(1, -1) : given);
  return url && { url, end: end + 1 };
}

function readAngle(text, at) {
  const pattern = /<(?:br\s{0,9}\/?|(https?:\/\/[^\s<>]{1,2000}))>/iy;
  pattern.lastIndex = at;
  const [all, address] = pattern.exec(text) ?? [];
  if (!all) return null;
  if (!address) return { node: { type: "text", text: "\n" }, end: at + all.length }; // models write this for line breaks in tables
  const url = checkUrl(address);
  return url && { node: { type: "link", url, children: [{ type: "text", text: address }] }, end: at + all.length };
}

/** A bare address in the text, without the punctuation after it. */
function readAddress(text, at) {
  const pattern = /https?:\/\/[^\s<>`|]{1,2000}/y;
  pattern.lastIndex = at;
  let address = trimEnd(pattern.exec(text)?.[0] ?? "", ".,;:!?'\"*_~");
  if (address.endsWith(")") && !address.includes("(")) address = trimEnd(address, ").,;:!?'\"*_~]");
  const url = checkUrl(address);
  return url && { node: { type: "link", url, children: [{ type: "text", text: address }] }, end: at + address.length };
}

/** The address as the browser would follow it, if it is a web page; null for anything that could run code or read files. */
function checkUrl(given) {
  if (given.length > MAX_URL) return null;
  try {
    const url = new URL(given);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

// -- elements -----------------------------------------------------------------------------------------

function make(tag, children = [], properties = {}) {
  const element = Object.assign(document.createElement(tag), properties);
  for (const child of children) element.append(child);
  return element;
}

/** The element of a block. */
export function render(block) {
  switch (block.type) {
    case "paragraph": return make("p", renderInline(block.children));
    case "heading": return make(`h${Math.min(block.level + 2, 6)}`, renderInline(block.children)); // below the page's own headings
    case "quote": return make("blockquote", block.blocks.map(render));
    case "rule": return make("hr");
    case "code": return renderCode(block);
    case "table": return renderTable(block);
    case "list": {
      const items = block.items.map((blocks) => make("li", blocks.map(render)));
      return block.start === null ? make("ul", items) : make("ol", items, { start: block.start });
    }
  }
}

function renderCode({ language, text }) {
  const copy = make("button", ["Copy"], { type: "button", className: "copy-code", ariaLabel: "Copy code" });
  const head = make("div", [make("span", [language || "text"]), copy], { className: "code-head" });
  const code = make("pre", [make("code", [text])], { tabIndex: 0 }); // only a focused element can be scrolled with keys
  return make("div", [head, code], { className: "code-block" });
}

function renderTable({ head, rows, aligned }) {
  const row = (tag) => (cells) => make("tr", cells.map((cell, at) => make(tag, renderInline(cell), { className: aligned[at] })));
  const table = make("table", [make("thead", [row("th")(head)]), make("tbody", rows.map(row("td")))]);
  return make("div", [table], { className: "table", tabIndex: 0 });
}

function renderInline(nodes, isInLink = false) {
  return nodes.map((node) => {
    if (node.type === "text") return document.createTextNode(node.text);
    if (node.type === "code") return make("code", [node.text]);
    if (node.type !== "link") return make(node.type, renderInline(node.children, isInLink));
    if (isInLink) return make("span", renderInline(node.children, true)); // links do not nest
    const safe = { href: node.url, title: node.url, target: "_blank", rel: "noopener noreferrer" };
    return make("a", renderInline(node.children, true), safe);
  });
}

/** A view of a growing text. */
export class MarkdownView {
  #place;
  #settled = 0; // characters whose blocks are final
  #drawn = ""; // the text that is shown
  #open = []; // the elements of the blocks after those

  constructor(place) {
    this.#place = place;
  }

  show(text) {
    if (text === this.#drawn) return;
    this.#drawn = text;
    const rest = text.slice(this.#settled);
    const blocks = parse(rest);
    const elements = blocks.map((block, at) => this.#reuse(block, at) ?? render(block));
    for (const old of this.#open) if (!elements.includes(old)) old.remove();
    let next = this.#open.find((old) => elements.includes(old)) ?? null; // insert before this element
    for (const element of elements) {
      if (element === next) next = next.nextSibling;
      else this.#place.insertBefore(element, next);
    }

    // The line that is still arriving may yet join the block before it, so that block stays open, too.
    const lines = rest.split("\n");
    const last = blocks.findLastIndex((block) => block.at < lines.length - 1);
    if (last > 0) this.#settled += lines.slice(0, blocks[last].at).reduce((sum, line) => sum + line.length + 1, 0);
    this.#open = elements.slice(Math.max(last, 0));
  }

  /** Code that grew is written into its existing element, so that a selection in it survives. */
  #reuse(block, at) {
    const old = this.#open[at];
    if (block.type !== "code" || old?.className !== "code-block") return null;
    old.querySelector(".code-head span").textContent = block.language || "text";
    const shown = old.querySelector("code").firstChild ?? old.querySelector("code").appendChild(new Text());
    if (block.text.startsWith(shown.data)) shown.appendData(block.text.slice(shown.data.length));
    else shown.data = block.text;
    return old;
  }
}
