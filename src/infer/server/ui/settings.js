/*
 * The settings: the values of their fields become part of the request's body, and are saved for the next visit.
 *
 * An empty field is not sent. Its placeholder shows the default that the server will use: the model's own
 * default if its card in /v1/models names one, else the API's.
 */

import { EXAMPLES, readSchema, readTools } from "/ui/answer.js";
import { loadSettings, saveSettings, saveTheme } from "/ui/store.js";

const $ = (id) => document.getElementById(id);
const API_DEFAULTS = { temperature: 1, top_p: 1, top_k: "off", min_p: 0 };
const form = $("parameters");
const isKept = ({ id, name, tagName }) => tagName !== "BUTTON" && id !== "key" && id !== "theme" && Boolean(id || name);

/** The body's fields for a model: parameters, and the schema of the answer. */
export function readParameters() {
  const parameters = {};
  for (const { name, type, value } of form.elements) {
    if (!name || value === "") continue;
    parameters[name] = type === "number" ? Number(value) : value.split("\n").filter(Boolean).map(writeBreaks);
  }
  const format = readSchema($("schema").value);
  return format ? { ...parameters, response_format: format } : parameters;
}

const writeBreaks = (stop) => stop.replaceAll("\\n", "\n").replaceAll("\\t", "\t");

/**
 * The tools and how they may be chosen. A forced call is forced once per question: if it were forced after its
 * results too, the model could never answer.
 */
export function readToolChoice(messages) {
  const tools = readTools($("tools").value);
  if (!tools) return {};
  const turn = messages.slice(messages.findLastIndex(({ role }) => role === "assistant") + 1);
  const hasResults = turn.some(({ role }) => role === "tool");
  const choice = $("tool-choice").value;
  return { tools, tool_choice: choice === "required" && hasResults ? "auto" : choice };
}

/** Mark the first invalid field and return its error message; an empty text if all fields are valid. */
export function checkSettings() {
  for (const id of ["schema", "tools"]) checkJson($(id));
  const wrong = form.querySelector(":invalid");
  if (!wrong) return "";
  setPanel("settings", true); // a hidden field cannot be marked
  if (wrong.closest("details")) wrong.closest("details").open = true;
  form.reportValidity();
  return `${wrong.labels[0].firstChild.data.trim()}: ${wrong.validationMessage}`;
}

/** Mark a JSON field that is invalid; the browser shows that. */
function checkJson(field) {
  let complaint = "";
  try {
    (field.id === "schema" ? readSchema : readTools)(field.value);
  } catch (error) {
    complaint = error.message;
  }
  field.setCustomValidity(complaint);
}

/** Show the defaults of a model, from its card, as placeholders. */
export function showDefaults(card) {
  const defaults = { ...API_DEFAULTS, ...card?.default_sampling_params };
  for (const [name, value] of Object.entries(defaults)) {
    const field = form.elements.namedItem(name);
    if (field) field.placeholder = value;
  }
  const length = card?.max_model_len;
  form.elements.namedItem("max_tokens").placeholder = length ? `up to ${length}` : "";
}

/** Mark the field of the key: the server requires a key, or another one. */
export function askForKey() {
  setPanel("settings", true);
  const key = $("key");
  $("key-error").textContent = key.value ? "The server does not accept this key." : "This server asks for an API key. Enter it here.";
  $("key-error").hidden = false;
  key.setAttribute("aria-invalid", "true");
  key.focus();
  key.scrollIntoView({ block: "center" });
}

export function acceptKey() {
  $("key-error").hidden = true;
  $("key").removeAttribute("aria-invalid");
}

/** Open or close a side panel; on a narrow screen it covers the page, so the other one closes. */
export function setPanel(id, isOpen) {
  if (isOpen && !isWide()) for (const other of document.querySelectorAll(".panel")) hidePanel(other, other.id !== id);
  hidePanel($(id), !isOpen);
}

function hidePanel(panel, isHidden) {
  panel.hidden = isHidden;
  document.querySelector(`[aria-controls=${panel.id}]`).setAttribute("aria-expanded", !isHidden);
}

export const isWide = () => matchMedia("(min-width: 60rem)").matches;

/** Load saved settings, and save changes from now on. `complain` is called if saving fails. */
export function startSettings(complain) {
  const stored = loadSettings();
  if (!stored) complain("the stored settings cannot be read; the page begins with new ones");
  const kept = stored ?? {};
  for (const field of form.elements) {
    const value = kept[field.id || field.name];
    if (isKept(field) && typeof value === "string") field.value = value;
  }
  $("structure").open = Boolean($("schema").value || $("tools").value);
  $("theme").value = document.documentElement.dataset.theme;
  if (!$("theme").value) $("theme").value = "system";
  setPanel("chats-panel", isWide() && kept.chats !== false);
  setPanel("settings", isWide() && (kept.settings ?? matchMedia("(min-width: 75rem)").matches));

  const attempt = (save) => {
    try {
      save();
    } catch (error) {
      complain(error.message);
    }
  };
  const keep = () => attempt(() => {
    const fields = [...form.elements].filter((field) => isKept(field) && field.value);
    const values = Object.fromEntries(fields.map((field) => [field.id || field.name, field.value]));
    const panels = isWide() && { chats: !$("chats-panel").hidden, settings: !$("settings").hidden };
    saveSettings({ ...values, model: $("model").value, ...panels });
  });
  form.addEventListener("input", keep);
  $("model").addEventListener("change", keep);
  for (const id of ["schema", "tools"]) $(id).addEventListener("input", ({ target }) => checkJson(target));
  $("theme").addEventListener("change", ({ target }) => {
    document.documentElement.dataset.theme = target.value;
    attempt(() => saveTheme(target.value));
  });
  for (const toggle of document.querySelectorAll(".toggle")) {
    toggle.addEventListener("click", () => {
      setPanel(toggle.getAttribute("aria-controls"), toggle.getAttribute("aria-expanded") !== "true");
      keep();
    });
  }
  form.addEventListener("click", ({ target }) => {
    if (!target.matches(".example")) return;
    const field = $(target.dataset.for);
    field.value = JSON.stringify(EXAMPLES[field.id], null, 2);
    checkJson(field);
    keep();
  });
  return kept;
}
