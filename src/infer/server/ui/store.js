/*
 * The data of the page that this browser stores, in localStorage. The API key is not stored.
 *
 *   infer.chat.<id>   one conversation: {id, title, updated, revision, used, messages}
 *   infer.settings    the fields of the settings, and which panels are open
 *   infer.theme       system, light or dark (theme.js reads it too)
 *
 * Each conversation has its own entry, so tabs with different conversations never conflict. If two tabs have the
 * same conversation, the revision detects a conflict: a tab that would overwrite a revision that it has not read
 * saves a copy instead.
 *
 * Storage may be full, forbidden or damaged. Then a StoreError explains it, and the page continues without storage.
 */

const CHAT = "infer.chat.";
const MAX_TITLE = 60;

export class StoreError extends Error {}

export const newChat = () => ({ id: newId(), title: "", updated: 0, revision: "", used: 0, messages: [] });

export const isChatKey = (key) => key === null || key.startsWith(CHAT); // null: everything was cleared

/** All conversations, latest first; one that cannot be read has `isBroken`, and can only be deleted. */
export function listChats() {
  let keys = [];
  try {
    keys = Object.keys(localStorage).filter((key) => key.startsWith(CHAT));
  } catch { // storage is forbidden: there are none
  }
  const chats = keys.map((key) => {
    const id = key.slice(CHAT.length);
    return loadChat(id) ?? { id, title: "Unreadable conversation", updated: 0, isBroken: true };
  });
  return chats.sort((one, other) => other.updated - one.updated);
}

/** A conversation; null if it does not exist or its entry is damaged. */
export function loadChat(id) {
  const chat = read(CHAT + id);
  const isMessage = (message) => typeof message?.role === "string" && typeof message.content === "string";
  const isWhole = Array.isArray(chat?.messages) && chat.messages.every(isMessage);
  return isWhole ? { ...newChat(), ...chat, id, title: String(chat.title), updated: Number(chat.updated) || 0 } : null;
}

/** Save a conversation; one without messages is not saved. */
export function saveChat(chat) {
  if (!chat.messages.length) return removeChat(chat.id);
  const stored = loadChat(chat.id);
  if (stored && stored.revision !== chat.revision) chat.id = newId(); // another tab has saved meanwhile: keep both
  const title = titleOf(chat.messages);
  const saved = { ...chat, title, updated: Date.now(), revision: newId() };
  write(CHAT + chat.id, JSON.stringify(saved));
  return Object.assign(chat, saved);
}

/** Delete a conversation and return its stored text, for `restoreChat`. */
export function removeChat(id) {
  try {
    const stored = localStorage.getItem(CHAT + id);
    localStorage.removeItem(CHAT + id);
    return stored;
  } catch {
    return null;
  }
}

export const restoreChat = (id, stored) => write(CHAT + id, stored);

/** The saved settings; null if they cannot be read. */
export const loadSettings = () => read("infer.settings", {});
export const saveSettings = (settings) => write("infer.settings", JSON.stringify(settings));
export const saveTheme = (theme) => write("infer.theme", theme);

/** A message for the API, without the fields that only this page uses. */
export const toApi = ({ stats, ...message }) => message;

/** A conversation as a document. */
export function toMarkdown({ title, messages }) {
  const parts = messages.map((message) => {
    const calls = (message.tool_calls ?? []).map(({ function: { name, arguments: given } }) => `Calls \`${name}\`:\n\n\`\`\`json\n${given}\n\`\`\``);
    return [`**${message.role}**`, message.content.trim(), ...calls].filter(Boolean).join("\n\n");
  });
  return [`# ${title}`, ...parts].join("\n\n") + "\n";
}

function titleOf(messages) {
  const words = (messages.find(({ role }) => role === "user")?.content ?? "Untitled").trim().split("\n", 1)[0];
  return words.length > MAX_TITLE ? `${words.slice(0, MAX_TITLE - 1)}…` : words;
}

/** A random id; browsers do not offer randomUUID to pages loaded over plain HTTP. */
const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(3)), (part) => part.toString(36)).join("");

/** The stored object; `missing` if there is none, null if the entry is something else. */
function read(key, missing = null) {
  try {
    const text = localStorage.getItem(key);
    const value = text === null ? missing : JSON.parse(text);
    return typeof value === "object" ? value : null;
  } catch (error) {
    return error instanceof SyntaxError ? null : missing;
  }
}

function write(key, text) {
  try {
    localStorage.setItem(key, text);
  } catch (error) {
    const isFull = error.name === "QuotaExceededError";
    const why = isFull ? "the browser's storage is full; delete or export old conversations" : "this browser keeps nothing for this page";
    throw new StoreError(`not saved: ${why}`);
  }
}
