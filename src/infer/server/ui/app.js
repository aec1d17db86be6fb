/*
 * The page: conversations, a completion, and their requests to the server.
 *
 *   app.js ── settings.js   the fields on the right ──► the request's body
 *     ├────── api.js        the request ──► pieces of the answer          answer.js  assembles them
 *     ├────── view.js       an element per message                        markdown.js  text ──► elements
 *     ├────── store.js      data that the browser stores
 *     └────── live.js       the tab that shows an engine at work
 *
 * One request runs at a time. `chat.messages` is always what the next request would send; the view follows it.
 * A turn without any text is undone: the question returns to its field.
 *
 * The user answers tool calls: a field below a call takes its result, which is sent with the next turn.
 */

import { Answer } from "/ui/answer.js";
import { countTokens, listModels, streamAnswer } from "/ui/api.js";
import { showLive } from "/ui/live.js";
import { acceptKey, askForKey, checkSettings, isWide, readParameters, readToolChoice, setPanel, showDefaults, startSettings } from "/ui/settings.js";
import { isChatKey, listChats, loadChat, newChat, removeChat, restoreChat, saveChat, toApi, toMarkdown } from "/ui/store.js";
import { adopt, AnswerView, copyText, download, drawMessages, fromTemplate, newMessage, onFrames, Stopwatch } from "/ui/view.js";

const $ = (id) => document.getElementById(id);
const deleted = new Set(); // ids that a request still in flight must not save again
let chat = newChat(); // the conversation that is shown
let running = null; // the request in flight: {controller, answer, chat}
let cards = new Map(); // model -> its card of /v1/models

// -- requests -----------------------------------------------------------------------------------------

async function sendChat() {
  const question = $("question").value.trim();
  const fields = [...$("messages").querySelectorAll(".result:not([readonly])")];
  if ((!question && !fields.length) || !canSend()) return;
  const turn = fields.map(({ dataset, value }) => ({ role: "tool", tool_call_id: dataset.call, content: value }));
  if (question) turn.push({ role: "user", content: question });
  $("question").value = "";
  const isAnswered = await answerTo([...chat.messages, ...turn]);
  if (!isAnswered) $("question").value ||= question;
}

/** Request the last answer again. */
function regenerate() {
  if (!canSend()) return;
  const isAnswer = chat.messages.at(-1)?.role === "assistant";
  answerTo(isAnswer ? chat.messages.slice(0, -1) : chat.messages);
}

/** Let the model answer these messages, which become the conversation; false if the turn was undone. */
async function answerTo(messages) {
  const asked = chat;
  const before = chat.messages;
  const item = newMessage("assistant");
  asked.messages = messages;
  keep(asked);
  drawMessages(messages, item);
  $("log").scrollTop = $("log").scrollHeight;

  const system = $("system").value.trim();
  const sent = [...(system ? [{ role: "system", content: system }] : []), ...messages.map(toApi)];
  const body = { messages: sent, ...readToolChoice(messages), ...readParameters() };
  const { answer, watch } = await generate("/v1/chat/completions", body, new AnswerView(item, $("log")), item);
  const message = answer.toMessage();
  if (message) {
    asked.messages = [...messages, { ...message, stats: watch.describe() }];
    asked.used = watch.used ?? asked.used;
    adopt(asked.messages.at(-1), item);
  } else if (asked === chat) {
    asked.messages = before;
  }
  keep(asked);
  if (asked !== chat) return true; // another conversation is shown now
  drawMessages(asked.messages);
  showUsed();
  const first = item.querySelector(".result");
  first?.scrollIntoView({ block: "nearest" });
  if (!$("question").value) first?.focus();
  return Boolean(message);
}

async function sendCompletion() {
  const prompt = $("prompt").value;
  if (!prompt || !canSend()) return;
  const place = $("continuation");
  place.replaceChildren(...newMessage("").childNodes);
  const body = { prompt, ...readParameters() };
  const { answer } = await generate("/v1/completions", body, new AnswerView(place, place, { isPlain: true }), place);
  if (!answer.text) place.replaceChildren();
}

/** Stream one answer into its view and return it. Errors are shown, not thrown. */
async function generate(path, question, view, place) {
  const controller = new AbortController();
  const answer = new Answer();
  const watch = new Stopwatch();
  const draw = () => view.draw(answer, watch.describe());
  const drawSoon = onFrames(draw);
  const body = { model: $("model").value, ...question };
  const key = $("key").value;
  running = { controller, answer, chat: path.includes("chat") ? chat : null };
  setBusy(place, true);
  showError("");
  draw();
  try {
    if ("prompt" in body && !("max_tokens" in body)) Object.assign(body, await fillContext(body, key, controller.signal));
    for await (const piece of streamAnswer(path, body, key, controller.signal)) {
      if (piece.text || piece.reasoning || piece.calls.length) watch.lap();
      answer.take(piece);
      watch.finish ??= piece.finish;
      watch.usage ??= piece.usage;
      drawSoon();
    }
  } catch (error) {
    watch.finish = controller.signal.aborted ? "stopped" : "broken off";
    if (error.status === 401) askForKey();
    else if (!controller.signal.aborted) showError(error.message);
  } finally {
    running = null;
    setBusy(place, false);
  }
  draw(); // a background tab gets no animation frames
  view.finish(answer.calls, answer.wholeCalls);
  return { answer, watch };
}

/** A completion without a limit would end after the API's 16 tokens; here it may fill the context. */
async function fillContext({ model, prompt }, key, signal) {
  const room = cards.get(model)?.max_model_len - (await countTokens(model, prompt, key, signal));
  return room > 0 ? { max_tokens: room } : {};
}

/** Return whether a request may start; an invalid field is marked. */
function canSend() {
  if (running) return false;
  const complaint = checkSettings();
  showError(complaint);
  return !complaint;
}

function setBusy(place, isBusy) {
  place.setAttribute("aria-busy", isBusy); // screen readers wait for the whole answer
  document.body.classList.toggle("is-busy", isBusy);
  for (const button of document.querySelectorAll(".composer .main")) {
    button.hidden = button.classList.contains("stop") !== isBusy;
  }
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

/** Show a problem of the browser's storage, which does not prevent requests. */
function showNotice(message) {
  $("notice").textContent = message;
  $("notice").hidden = !message;
}

async function showModels(wanted) {
  try {
    const models = await listModels($("key").value);
    const before = cards.size ? $("model").value : wanted;
    cards = new Map(models.map((card) => [card.id, card]));
    $("model").replaceChildren(...models.map(({ id }) => new Option(id)));
    if (cards.has(before)) $("model").value = before;
    $("model").disabled = false;
    acceptKey();
    showError("");
    showModel();
  } catch (error) {
    if (error.status === 401) return askForKey();
    showError(error.message);
    if (error.status === 503) setTimeout(() => showModels(wanted), 1000 * (error.retryAfter || 1)); // the server is still starting
  }
}

function showModel() {
  showDefaults(cards.get($("model").value));
  showUsed();
}

/** Show how much of the model's context the conversation takes. */
function showUsed() {
  const length = cards.get($("model").value)?.max_model_len;
  $("used").hidden = !(length && chat.used);
  if ($("used").hidden) return;
  const meter = $("used").querySelector("meter");
  Object.assign(meter, { max: length, high: 0.8 * length, value: chat.used });
  $("used").querySelector("span").textContent = `${chat.used.toLocaleString("en")} of ${length.toLocaleString("en")} tokens`;
}

// -- conversations ------------------------------------------------------------------------------------

/** Save a conversation, unless it was deleted meanwhile. */
function keep(changed) {
  if (deleted.has(changed.id)) return;
  try {
    saveChat(changed);
    showNotice("");
  } catch (error) {
    showNotice(error.message);
  }
  if (changed === chat) rememberChat();
  drawChats();
}

/** Remember the conversation that is shown: a reloaded tab returns to it, a new tab begins a new one. */
function rememberChat() {
  try {
    sessionStorage.setItem("infer.open", chat.id);
  } catch { // nothing is stored; the list of conversations reports that
  }
}

function openChat(next) {
  if (chat !== next) running?.chat && running.controller.abort();
  chat = next;
  rememberChat();
  drawMessages(chat.messages);
  drawChats();
  showUsed();
  showError("");
  $("deleted").replaceChildren();
  $("log").scrollTop = $("log").scrollHeight;
  if (!isWide()) setPanel("chats-panel", false);
  selectTab($("chat-tab"));
}

function drawChats() {
  const chats = listChats();
  $("chats").replaceChildren(...chats.map(({ id, title, isBroken }) => {
    const entry = fromTemplate("chat-entry");
    const [open, remove] = entry.querySelectorAll("button");
    open.textContent = title;
    open.title = title;
    open.disabled = Boolean(isBroken);
    if (id === chat.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => openChat(loadChat(id) ?? newChat()));
    remove.setAttribute("aria-label", `Delete ${title}`);
    remove.addEventListener("click", () => deleteChat(id, title));
    return entry;
  }));
  $("no-chats").hidden = chats.length > 0;
  $("export").hidden = !chat.messages.length;
}

/** Delete a conversation; this can be undone until the next action. */
function deleteChat(id, title) {
  const stored = removeChat(id);
  deleted.add(id);
  if (id === chat.id) openChat(newChat());
  drawChats();
  const undo = Object.assign(document.createElement("button"), { type: "button", textContent: "Undo" });
  undo.addEventListener("click", () => {
    deleted.delete(id);
    try {
      restoreChat(id, stored);
    } catch (error) {
      showNotice(error.message);
    }
    drawChats();
    $("deleted").replaceChildren();
    document.querySelector("#chats .chat")?.focus();
  });
  $("deleted").replaceChildren(`Deleted “${title}”. `, undo);
  undo.focus();
}

/** Turn a message of the user into a field; sending it replaces everything after it. */
function editMessage(item, text) {
  const at = chat.messages.filter(({ role }) => role !== "tool")[[...$("messages").children].indexOf(item)];
  const editor = fromTemplate("editor");
  const field = editor.querySelector("textarea");
  const close = () => {
    editor.remove();
    item.classList.remove("is-edited");
    item.querySelector(".edit").focus();
  };
  field.value = text ?? at.content;
  item.append(editor);
  item.classList.add("is-edited");
  field.focus();
  editor.querySelector(".cancel").addEventListener("click", close);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (isSendKey(event)) editor.requestSubmit();
    if (isSendKey(event)) event.preventDefault();
  });
  sendOnSubmit(editor, async () => {
    const content = field.value.trim();
    if (!content || !canSend()) return;
    close();
    $("question").focus();
    const earlier = chat.messages.slice(0, chat.messages.indexOf(at));
    const isAnswered = await answerTo([...earlier, { role: "user", content }]);
    if (!isAnswered) editMessage(item, content);
  });
}

const fileName = () => chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";

function exportJson() {
  const { title, updated, messages } = chat;
  const told = { title, model: $("model").value, updated: new Date(updated).toISOString(), messages: messages.map(toApi) };
  download(`${fileName()}.json`, "application/json", JSON.stringify(told, null, 2));
}

// -- event handlers -----------------------------------------------------------------------------------

function sendOnSubmit(form, send) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
}

const isSendKey = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing; // composing: Enter picks a character
const isCtrlEnter = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey);

function selectTab(tab) {
  for (const other of document.querySelectorAll("[role=tab]")) {
    const isSelected = other === tab;
    other.setAttribute("aria-selected", isSelected);
    other.tabIndex = isSelected ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !isSelected;
  }
  showLive(tab.id === "live-tab");
  showError("");
}

/** The text that a copy button copies: the model's own text, not its rendering. */
function copyAnswer(button) {
  const place = button.closest("li, #continuation");
  const shown = place.querySelector(".text");
  const items = [...$("messages").children];
  const message = chat.messages.filter(({ role }) => role !== "tool")[items.indexOf(place)];
  copyText(button, message?.content ?? shown.textContent, shown);
}

sendOnSubmit($("chat-form"), sendChat);
sendOnSubmit($("completion-form"), sendCompletion);
sendOnSubmit($("parameters"), () => {});

$("question").addEventListener("keydown", (event) => {
  if (!isSendKey(event)) return;
  event.preventDefault();
  sendChat();
});
$("prompt").addEventListener("keydown", (event) => isCtrlEnter(event) && sendCompletion());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.controller.abort();
  if (event.key === "Escape" && !isWide() && event.target.closest(".panel")) {
    const panel = event.target.closest(".panel");
    setPanel(panel.id, false);
    document.querySelector(`[aria-controls=${panel.id}]`).focus();
  }
  if (isCtrlEnter(event) && event.target.matches(".result")) sendChat();
});
document.addEventListener("click", ({ target }) => {
  if (target.matches(".stop")) running?.controller.abort();
  if (target.matches(".copy")) copyAnswer(target);
  if (target.matches(".copy-code")) {
    const code = target.closest(".code-block").querySelector("code");
    copyText(target, code.textContent, code);
  }
  if (target.matches(".edit") && !running) editMessage(target.closest("li"));
  if (target.matches(".again")) regenerate();
  if (target.matches("[role=tab]")) selectTab(target);
});
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const step = event.key === "ArrowRight" ? 1 : -1;
  const other = tabs.at((tabs.indexOf(event.target) + step) % tabs.length);
  selectTab(other);
  other.focus();
});
$("new").addEventListener("click", () => {
  openChat(newChat());
  $("question").focus();
});
$("export-json").addEventListener("click", exportJson);
$("export-markdown").addEventListener("click", () => download(`${fileName()}.md`, "text/markdown", toMarkdown(chat)));
$("copy-markdown").addEventListener("click", ({ target }) => copyText(target, toMarkdown(chat)));
$("key").addEventListener("change", () => showModels());
$("model").addEventListener("change", showModel);

addEventListener("storage", ({ key }) => { // another tab changed something
  if (!isChatKey(key)) return;
  drawChats();
  const stored = loadChat(chat.id);
  const isTouched = running || document.querySelector(".editor, .result:not([readonly])");
  if (stored && stored.revision !== chat.revision && !isTouched) openChat(stored);
});
addEventListener("pagehide", () => { // saves the answer so far
  const message = running?.chat && running.answer.toMessage();
  if (!message) return;
  running.chat.messages = [...running.chat.messages, { ...message, stats: "broken off" }];
  keep(running.chat);
});

function start() {
  const kept = startSettings(showNotice);
  let last = null;
  try {
    last = sessionStorage.getItem("infer.open");
  } catch { // nothing is stored
  }
  openChat((last && loadChat(last)) || chat);
  const broken = listChats().filter(({ isBroken }) => isBroken).length;
  if (broken) showNotice(`${broken} stored conversation${broken > 1 ? "s" : ""} cannot be read; the list lets you delete what is left`);
  showModels(kept.model);
  if (location.hash === "#live") selectTab($("live-tab"));
}

start();
