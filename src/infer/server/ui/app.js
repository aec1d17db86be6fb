/*
 * The page: a conversation, a completion, and the parameters of both.
 *
 * One request runs at a time. Text from the model only ever becomes text nodes, so nothing it writes can
 * turn into markup. A turn that made no text at all is taken back: the question returns to its field.
 *
 * A tool call is answered by hand: a field under it takes the result, which is sent with the next turn.
 */

import { Answer, EXAMPLES, indent, readSchema, readTools } from "/ui/answer.js";
import { listModels, streamAnswer } from "/ui/api.js";

const $ = (id) => document.getElementById(id);
const conversation = []; // [{role, content, …}], as the API wants it
let running = null; // the AbortController of the request in flight

// -- asking -------------------------------------------------------------------------------------------

async function sendChat() {
  const question = $("question").value.trim();
  const results = [...$("messages").querySelectorAll(".result:not([readonly])")];
  if ((!question && !results.length) || !canSend()) return;
  const turn = results.map(({ dataset, value }) => ({ role: "tool", tool_call_id: dataset.call, content: value }));
  if (question) turn.push({ role: "user", content: question });
  conversation.push(...turn);
  for (const field of results) field.readOnly = true;
  $("question").value = "";
  const asked = question && addMessage("user", question);
  const place = addMessage("assistant", "");
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  const tools = readTools($("tools").value);
  const choice = tools && { tools, tool_choice: $("tool-choice").value };

  const answer = await generate("/v1/chat/completions", { messages, ...choice }, place, $("messages"));
  if (!place.isConnected) return; // the conversation was reset meanwhile
  const message = answer.toMessage();
  if (message) {
    conversation.push(message);
    return;
  }
  conversation.length -= turn.length;
  for (const field of results) field.readOnly = false;
  if (asked) asked.remove();
  place.remove();
  $("question").value ||= question;
}

async function sendCompletion() {
  const prompt = $("prompt").value;
  if (!prompt || !canSend()) return;
  const shown = newMessage("", "");
  $("continuation").replaceChildren(...shown.childNodes);
  const answer = await generate("/v1/completions", { prompt }, $("continuation"), $("continuation"));
  if (!answer.text) $("continuation").replaceChildren();
}

/** Stream one answer into `place` and return it. What goes wrong is shown, not thrown. */
async function generate(path, question, place, scroller) {
  const controller = (running = new AbortController());
  const answer = new Answer();
  const text = place.querySelector(".text").appendChild(document.createTextNode(""));
  const thought = place.querySelector(".thought").appendChild(document.createTextNode(""));
  const stats = place.querySelector(".stats");
  const watch = new Stopwatch();
  const format = readSchema($("schema").value);
  const body = { model: $("model").value, ...question, ...readParameters(), ...(format && { response_format: format }) };
  setBusy(place, true);
  showError("");
  try {
    for await (const piece of streamAnswer(path, body, $("key").value, controller.signal)) {
      const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
      if (piece.text || piece.reasoning || piece.calls.length) watch.lap();
      answer.take(piece);
      text.appendData(piece.text);
      thought.appendData(piece.reasoning);
      if (piece.reasoning) place.querySelector(".reasoning").hidden = false;
      if (piece.calls.length) showCalls(place, answer.calls);
      watch.finish ??= piece.finish;
      watch.usage ??= piece.usage;
      stats.textContent = watch.describe();
      if (isAtEnd) scroller.scrollTop = scroller.scrollHeight; // someone who scrolled up is reading
    }
  } catch (error) {
    watch.finish = controller.signal.aborted ? "stopped" : "broken off";
    stats.textContent = watch.describe();
    if (!controller.signal.aborted) showError(error.message);
  } finally {
    running = null;
    setBusy(place, false);
  }
  askForResults(place, answer);
  place.querySelector(".copy").hidden = !answer.text;
  return answer;
}

/** When the first token came, and how fast the others followed. */
class Stopwatch {
  start = performance.now();
  laps = 0;
  usage = null;
  finish = null;

  lap() {
    this.last = performance.now();
    this.first ??= this.last;
    this.laps += 1;
  }

  describe() {
    if (!this.laps) return this.finish ?? "";
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

/** The fields that were filled in; the server knows the defaults of the others. */
function readParameters() {
  const parameters = {};
  for (const { name, type, value } of $("parameters").elements) {
    if (!name || value === "") continue;
    parameters[name] = type === "number" ? Number(value) : value.split("\n").filter(Boolean).map(writeBreaks);
  }
  return parameters;
}

const writeBreaks = (stop) => stop.replaceAll("\\n", "\n").replaceAll("\\t", "\t");

/** Whether a request may start; a field that cannot be sent is pointed out where it is. */
function canSend() {
  if (running) return false;
  for (const id of ["schema", "tools"]) checkJson($(id));
  const wrong = $("parameters").querySelector(":invalid");
  if (wrong?.matches(".code")) showError(`${wrong.labels[0].firstChild.data.trim()}: ${wrong.validationMessage}`);
  for (let fold = wrong; fold; fold = fold.parentElement) {
    if (fold.matches("details")) fold.open = true; // what is folded away cannot be pointed at
  }
  return $("parameters").reportValidity();
}

/** Mark a field of JSON that cannot be sent; the browser points it out. */
function checkJson(field) {
  let complaint = "";
  try {
    (field.id === "schema" ? readSchema : readTools)(field.value);
  } catch (error) {
    complaint = error.message;
  }
  field.setCustomValidity(complaint);
}

// -- showing ------------------------------------------------------------------------------------------

function newMessage(role, text) {
  const message = $("message").content.firstElementChild.cloneNode(true);
  message.className = role;
  message.querySelector(".role").textContent = role;
  message.querySelector(".text").textContent = text;
  return message;
}

function addMessage(role, text) {
  const message = $("messages").appendChild(newMessage(role, text));
  $("messages").scrollTop = $("messages").scrollHeight;
  return message;
}

/** Show the calls of an answer as far as they came. */
function showCalls(place, calls) {
  const shown = place.querySelector(".calls");
  calls.forEach((call, index) => {
    const block = shown.children[index] ?? shown.appendChild($("call").content.firstElementChild.cloneNode(true));
    block.querySelector(".name").textContent = call.name;
    block.querySelector(".arguments").textContent = call.arguments;
  });
}

/** Put a field for the result under each call that is whole, and its arguments into lines. */
function askForResults(place, answer) {
  answer.calls.forEach((call, index) => {
    const block = place.querySelector(".calls").children[index];
    block.querySelector(".arguments").textContent = indent(call.arguments || "{}");
    const label = block.querySelector("label");
    label.hidden = !answer.wholeCalls.includes(call);
    if (label.hidden) return label.remove(); // it broke off: there is nothing to answer
    label.querySelector("span").textContent = `Result of ${call.name}`;
    label.querySelector(".result").dataset.call = call.id;
  });
  const first = place.querySelector(".result");
  first?.scrollIntoView({ block: "nearest" });
  if (!$("question").value) first?.focus();
}

function setBusy(place, isBusy) {
  place.setAttribute("aria-busy", isBusy); // readers wait for the whole answer
  for (const button of document.querySelectorAll(".composer .main")) {
    button.hidden = button.classList.contains("stop") !== isBusy;
  }
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

async function copy(button) {
  const text = button.closest("li, #continuation").querySelector(".text");
  try {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  } catch { // browsers keep the clipboard from pages that came over plain HTTP
    getSelection().selectAllChildren(text);
    button.textContent = "Selected: press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}

function selectTab(tab) {
  for (const other of document.querySelectorAll("[role=tab]")) {
    const isSelected = other === tab;
    other.setAttribute("aria-selected", isSelected);
    other.tabIndex = isSelected ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !isSelected;
  }
  showError("");
}

async function showModels() {
  try {
    const models = await listModels($("key").value);
    $("model").replaceChildren(...models.map(({ id }) => new Option(id)));
    $("model").disabled = false;
    showError("");
  } catch (error) {
    showError(error.message);
    if (error.status === 401) $("settings").open = true;
    if (error.status === 503) setTimeout(showModels, 1000 * (error.retryAfter || 1)); // it is still starting
  }
}

// -- listening ----------------------------------------------------------------------------------------

function sendOnSubmit(form, send) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
}

sendOnSubmit($("chat-form"), sendChat);
sendOnSubmit($("completion-form"), sendCompletion);
sendOnSubmit($("parameters"), () => {});

$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // composing: Enter picks a character
  event.preventDefault();
  sendChat();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) sendCompletion();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.matches(".result")) sendChat();
});
document.addEventListener("click", ({ target }) => {
  if (target.matches(".stop")) running?.abort();
  if (target.matches(".copy")) copy(target);
  if (target.matches(".example")) {
    const field = $(target.dataset.for);
    field.value = JSON.stringify(EXAMPLES[field.id], null, 2);
    field.dispatchEvent(new Event("input"));
  }
  if (target.matches("[role=tab]")) selectTab(target);
});
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const other = document.querySelector("[role=tab][aria-selected=false]");
  selectTab(other);
  other.focus();
});
$("reset").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  $("messages").replaceChildren();
  showError("");
  $("question").focus();
});
$("key").addEventListener("change", showModels);
for (const id of ["schema", "tools"]) $(id).addEventListener("input", ({ target }) => checkJson(target));

$("settings").open = matchMedia("(min-width: 60rem)").matches;
showModels();
