/*
 * The parts of an answer and the options of a request; nothing here touches the page.
 *
 *   pieces of a stream ──► Answer ──► a message of the conversation
 *   text in the fields of the settings ──► the body's response_format, tools, tool_choice
 */

/** Reasoning, text and tool calls, assembled from the pieces that `streamAnswer` yields. */
export class Answer {
  reasoning = "";
  text = "";
  calls = []; // [{index, id, name, arguments}], the arguments as the model wrote them

  take({ text, reasoning, calls }) {
    this.reasoning += reasoning;
    this.text += text;
    calls.forEach(({ index, id, function: piece = {} }, place) => {
      index ??= place; // not every server numbers them
      let call = this.calls.find((other) => other.index === index);
      if (!call) this.calls.push((call = { index, id: id ?? `call_${index}`, name: "", arguments: "" }));
      call.name ||= piece.name ?? "";
      call.arguments += piece.arguments ?? "";
    });
  }

  /** The calls that can be answered; the arguments of a call that was cut short are not JSON. */
  get wholeCalls() {
    return this.calls.filter((call) => isObject(parse(call.arguments || "{}")));
  }

  /** The answer as a message of the conversation; null if it is empty. */
  toMessage() {
    const calls = this.wholeCalls;
    if (!this.text && !calls.length) return null;
    const message = { role: "assistant", content: this.text };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (calls.length) {
      message.tool_calls = calls.map(({ id, name, arguments: given }) => (
        { id, type: "function", function: { name, arguments: given || "{}" } }
      ));
    }
    return message;
  }
}

/** JSON with line breaks; other text is returned unchanged. */
export function indent(text) {
  const value = parse(text);
  return value === undefined ? text : JSON.stringify(value, null, 2);
}

/** The `response_format` of a schema; undefined without one. */
export function readSchema(text) {
  if (!text.trim()) return undefined;
  const schema = parseOrExplain(text);
  if (!isObject(schema)) throw new Error('a schema is a JSON object, such as {"type": "object"}');
  return { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
}

/** The `tools` of a list; a bare function is wrapped as the API requires. Undefined without a list. */
export function readTools(text) {
  if (!text.trim()) return undefined;
  const given = parseOrExplain(text);
  if (!Array.isArray(given)) throw new Error('tools are a JSON list: [{"name": …, "parameters": …}]');
  const tools = given.map((tool) => (isObject(tool) && "name" in tool ? { type: "function", function: tool } : tool));
  const index = tools.findIndex((tool) => !isObject(tool) || typeof tool.function?.name !== "string");
  if (index >= 0) throw new Error(`tool ${index + 1} has no name: {"name": …, "parameters": …}`);
  return tools.length ? tools : undefined;
}

export const EXAMPLES = {
  schema: {
    type: "object",
    properties: { city: { type: "string" }, population: { type: "integer" } },
    required: ["city", "population"],
    additionalProperties: false,
  },
  tools: [
    {
      name: "get_weather",
      description: "Look up the weather of a city.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  ],
};

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function parseOrExplain(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`this is no JSON: ${error.message}`);
  }
}
