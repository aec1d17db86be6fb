/*
 * The display of messages: an element per message, and the drawing of an answer while it arrives.
 *
 * An element is created once per message and reused, so redrawing a conversation preserves everything that the
 * user did in it: unfolded reasoning, typed results, selected text.
 */

import { indent } from "/ui/answer.js";
import { MarkdownView } from "/ui/markdown.js";

const $ = (id) => document.getElementById(id);
const elements = new WeakMap(); // message -> its <li>

export const fromTemplate = (id) => $(id).content.firstElementChild.cloneNode(true);

export function newMessage(role) {
  const item = fromTemplate("message");
  item.className = role;
  item.querySelector(".role").textContent = role === "user" ? "You" : role;
  return item;
}

/** Register an existing element as the one of a message. */
export const adopt = (message, item) => elements.set(message, item);

/** Show these messages, followed by the element of an answer that is still arriving. */
export function drawMessages(messages, pending) {
  const items = messages.filter(({ role }) => role !== "tool").map((message) => elements.get(message) ?? makeItem(message));
  if (pending) items.push(pending);
  const list = $("messages");
  for (const old of [...list.children]) if (!items.includes(old)) old.remove();
  items.forEach((item, at) => list.children[at] === item || list.insertBefore(item, list.children[at] ?? null));

  const results = new Map(messages.map((message) => [message.tool_call_id, message.content]));
  for (const field of list.querySelectorAll(".result")) {
    field.readOnly = results.has(field.dataset.call);
    if (field.readOnly) field.value = results.get(field.dataset.call);
  }
  items.forEach((item, at) => {
    const again = item.querySelector(".again");
    again.hidden = Boolean(pending) || at < items.length - 1;
    again.textContent = item.className === "user" ? "Answer" : "Regenerate";
  });
  $("greeting").hidden = items.length > 0;
}

function makeItem(message) {
  const item = newMessage(message.role);
  elements.set(message, item);
  if (message.role !== "assistant") {
    item.querySelector(".text").textContent = message.content;
    item.querySelector(".edit").hidden = false;
    return item;
  }
  const calls = (message.tool_calls ?? []).map(({ id, function: { name, arguments: given } }) => ({ id, name, arguments: given }));
  const view = new AnswerView(item, null);
  view.draw({ text: message.content, reasoning: message.reasoning_content ?? "", calls }, message.stats ?? "");
  view.finish(calls, calls);
  return item;
}

/** The view of an answer. */
export class AnswerView {
  #place;
  #scroller;
  #markdown = null; // null: text is shown unformatted
  #text;
  #thought;
  #isFinished = false; // a requested frame may run after the end

  constructor(place, scroller, { isPlain = false } = {}) {
    this.#place = place;
    this.#scroller = scroller;
    const text = place.querySelector(".text");
    if (isPlain) this.#text = text.appendChild(new Text());
    else this.#markdown = new MarkdownView(text);
    this.#thought = place.querySelector(".thought").appendChild(new Text());
    text.classList.toggle("markdown", !isPlain);
  }

  draw({ text, reasoning, calls }, stats) {
    if (this.#isFinished) return;
    const scroller = this.#scroller;
    const isAtEnd = scroller && scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
    if (this.#markdown) this.#markdown.show(text);
    else this.#text.data = text;
    if (this.#thought.data !== reasoning) this.#thought.data = reasoning;
    this.#place.querySelector(".reasoning").hidden = !reasoning;
    this.#place.querySelector(".copy").hidden = !text;
    this.#place.querySelector(".stats").textContent = stats;
    const shown = this.#place.querySelector(".calls");
    calls.forEach((call, index) => {
      const block = shown.children[index] ?? shown.appendChild(fromTemplate("call"));
      block.querySelector(".name").textContent = call.name;
      block.querySelector(".arguments").textContent = call.arguments;
    });
    if (isAtEnd) scroller.scrollTop = scroller.scrollHeight; // a user who scrolled up is reading
  }

  /** Add a field for the result below each complete call, and format its arguments. */
  finish(calls, whole) {
    this.#isFinished = true;
    calls.forEach((call, index) => {
      const block = this.#place.querySelector(".calls").children[index];
      block.querySelector(".arguments").textContent = indent(call.arguments || "{}");
      const label = block.querySelector("label");
      if (!whole.includes(call)) return label.remove(); // cut short: there is nothing to answer
      label.hidden = false;
      label.querySelector("span").textContent = `Result of ${call.name}`;
      label.querySelector(".result").dataset.call = call.id;
    });
  }
}

/** A function that schedules `draw` for the next frame, so that drawing takes at most a fifth of the time. */
export function onFrames(draw) {
  let isDue = false;
  let restUntil = 0;
  const run = (now) => {
    if (now < restUntil) return requestAnimationFrame(run);
    isDue = false;
    const start = performance.now();
    draw();
    const end = performance.now();
    restUntil = end + 4 * (end - start);
  };
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(run);
  };
}

/** The time of the first token, and the rate of the others. */
export class Stopwatch {
  start = performance.now();
  laps = 0;
  usage = null;
  finish = null;

  lap() {
    this.last = performance.now();
    this.first ??= this.last;
    this.laps += 1;
  }

  /** Tokens of the context that the conversation takes; undefined until the server has reported them. */
  get used() {
    return this.usage?.prompt_tokens && this.usage.prompt_tokens + this.usage.completion_tokens;
  }

  describe() {
    if (!this.laps) return this.finish ?? "waiting for the first token";
    const tokens = this.usage?.completion_tokens ?? this.laps; // until the usage arrives, one event is one token
    const seconds = (this.last - this.first) / 1000;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    const reasoning = this.usage?.completion_tokens_details?.reasoning_tokens;
    return [
      `${tokens} token${tokens === 1 ? "" : "s"}`,
      reasoning && `${reasoning} of reasoning`,
      `first after ${Math.round(this.first - this.start)} ms`,
      tokens > 1 && seconds > 0 && `${((tokens - 1) / seconds).toFixed(1)} tokens/s`,
      cached && `${cached} of ${this.usage.prompt_tokens} prompt tokens cached`,
      this.finish,
    ].filter(Boolean).join(" · ");
  }
}

/** Copy a text; if the browser forbids that, select the element that shows it. */
export async function copyText(button, text, shown) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch { // browsers block the clipboard on pages loaded over plain HTTP
    if (shown) getSelection().selectAllChildren(shown);
    button.textContent = shown ? "Selected: press Ctrl+C" : "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 2000);
}

/** Download a text as a file. */
export function download(name, type, text) {
  const link = Object.assign(document.createElement("a"), { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
