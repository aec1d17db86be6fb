/*
 * The API as /openapi.json describes it: a list of routes, the fields of each, and a form that sends a request.
 *
 * All text of the description and of answers becomes text nodes, and is never parsed as HTML.
 */

const EXAMPLES = {
  input: "The sky is blue",
  max_tokens: 32,
  messages: [{ role: "user", content: "Where is the river?" }],
  n_predict: 32,
  prompt: "Once there was",
  tokens: [1, 2, 3],
};

const byId = (id) => document.getElementById(id);

/** An element with properties and children, which may be text. */
function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** The schema that a reference points to, or the schema itself. */
export function resolve(schema, api) {
  const name = schema?.$ref?.split("/").pop();
  return name ? api.components.schemas[name] : schema;
}

/** The type of a field in words, such as "list of integer | null". */
export function typeName(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeName).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeName(schema.items ?? {})}`;
  return schema.type ?? "any";
}

/** The fields of a body, and a body to begin with. */
export function describeBody(operation, api) {
  const given = operation.requestBody?.content["application/json"]?.schema;
  const schema = given && resolve(given, api);
  if (!schema) return { fields: [], example: null };
  const required = new Set(schema.required ?? []);
  const fields = Object.entries(schema.properties ?? {}).map(([name, field]) => ({
    name,
    type: typeName(field),
    isRequired: required.has(name),
  }));
  const shown = fields.filter(({ name, isRequired }) => isRequired || name in EXAMPLES);
  return { fields, example: Object.fromEntries(shown.map(({ name }) => [name, EXAMPLES[name] ?? ""])) };
}

function headers(hasBody) {
  const key = byId("key").value.trim();
  return { ...(hasBody && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
}

/** Send a request and show its answer as it arrives. */
async function send(method, path, body, output) {
  output.textContent = "…";
  try {
    const options = { method, headers: headers(body !== null), ...(body !== null && { body }) };
    const response = await fetch(path, options);
    output.textContent = `${response.status} ${response.statusText}\n\n`;
    const decoder = new TextDecoder();
    for (let reader = response.body.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) break;
      output.append(decoder.decode(value, { stream: true }));
    }
  } catch (error) {
    output.textContent = `no answer: ${error.message}`;
  }
}

function routeCard(method, path, operation, api) {
  const { fields, example } = describeBody(operation, api);
  const address = make("input", { className: "path", value: path, spellcheck: false });
  const body = make("textarea", { rows: 6, spellcheck: false, value: JSON.stringify(example, null, 2) });
  const output = make("pre", { hidden: true });
  const button = make("button", { type: "button", textContent: "Send" });
  button.addEventListener("click", () => {
    output.hidden = false;
    send(method.toUpperCase(), address.value, example === null ? null : body.value, output);
  });
  const rows = fields.map(({ name, type, isRequired }) =>
    make("tr", {}, make("td", {}, make("code", {}, name)), make("td", {}, type), make("td", {}, isRequired ? "required" : "")),
  );
  const inside = make("div", { className: "inside" });
  if (rows.length) {
    const titles = make("tr", {}, make("th", {}, "field"), make("th", {}, "type"), make("th", {}));
    inside.append(make("table", {}, titles, ...rows));
  }
  inside.append(make("label", {}, "Address", address));
  if (example !== null) inside.append(make("label", {}, "Body", body));
  inside.append(button, output);
  const said = operation.description ?? operation.summary ?? "";
  const title = make("summary", {}, make("b", {}, method.toUpperCase()), make("code", {}, path), make("span", {}, said));
  return make("details", {}, title, inside);
}

async function load() {
  const error = byId("error");
  error.hidden = true;
  try {
    const response = await fetch("/openapi.json", { headers: headers(false) });
    const api = await response.json();
    if (!response.ok) throw new Error(api.error?.message ?? response.statusText);
    byId("version").textContent = api.info.version;
    const cards = Object.entries(api.paths).flatMap(([path, operations]) =>
      Object.entries(operations).map(([method, operation]) => routeCard(method, path, operation, api)),
    );
    byId("routes").replaceChildren(...cards);
  } catch (problem) {
    error.textContent = `the description of the API could not be read: ${problem.message}`;
    error.hidden = false;
  }
}

if (typeof document !== "undefined") {
  byId("access").addEventListener("submit", (event) => {
    event.preventDefault();
    load();
  });
  load();
}
