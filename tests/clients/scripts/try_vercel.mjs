import assert from "node:assert/strict";
import { generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const server = { baseURL: `${process.env.INFER_URL}/v1`, apiKey: "any" };
const openai = createOpenAI(server);
const providers = {
  compatible: createOpenAICompatible({ ...server, name: "infer", supportsStructuredOutputs: true, includeUsage: true }),
  anthropic: createAnthropic(server),
  responses: openai.responses, // shows no reasoning: it reads summaries only
  chat: openai.chat, // shows no reasoning
};
const City = z.object({ city: z.string() });
const weather = tool({ description: "d", inputSchema: City, execute: async ({ city }) => `rain in ${city}` });
for (const [name, provider] of Object.entries(providers)) {
  const ask = (prompt, more = {}) => ({ model: provider("fake"), prompt, maxRetries: 0, ...more });
  const said = await generateText(ask("SAY hello END"));
  assert.equal(said.text, "hello", name);
  assert.ok(said.usage.inputTokens > 0, name);
  if (name in { compatible: 1, anthropic: 1 }) assert.equal(said.reasoningText, "An order.", name);
  const order = 'CALL {"name": "weather", "arguments": {"city": "Rome"}} END';
  const called = ask(order, { tools: { weather }, stopWhen: stepCountIs(3) });
  assert.equal((await generateText(called)).text, "The tool said: rain in Rome", name);
  let text = "";
  for await (const piece of streamText(called).textStream) text += piece;
  assert.equal(text, "The tool said: rain in Rome", name);
  const wanted = ask('SAY {"city": "Rome"} END');
  assert.deepEqual((await generateText({ ...wanted, output: Output.object({ schema: City }) })).output, { city: "Rome" });
  let last;
  for await (const piece of streamObject({ ...wanted, schema: City }).partialObjectStream) last = piece;
  assert.deepEqual(last, { city: "Rome" }, name);
  await assert.rejects(generateText({ ...wanted, model: provider("nobody") }), { statusCode: 404 }, name);
}
