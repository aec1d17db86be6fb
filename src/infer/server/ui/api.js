/*
 * Requests to OpenAI's routes, whose answers are read as they arrive.
 *
 *   POST /v1/chat/completions      data: {"choices":[{"delta":{"content":"Hel"}}]}
 *                                  data: {"choices":[{"delta":{"reasoning_content":"Hm"}}]}
 *                                  data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"call_1",...}]}}]}
 *   POST /v1/completions           data: {"choices":[{"text":"Hel"}]}
 *                                  data: {"choices":[],"usage":{...}}
 *                                  data: [DONE]
 *   POST /tokenize                 {"count": 7, ...}
 *   GET /admin/live                data: {"number": 7, "cells": [...], ...}     for the Live tab
 *
 * A stream may begin long before its first token: lines that begin with a colon only keep the connection alive,
 * and a later error arrives as an event, data: {"error": {"message": ...}}.
 *
 * Every error becomes an ApiError whose message is a sentence for people, except an abort, which the caller
 * asked for.
 */

export class ApiError extends Error {
  constructor(message, { status = 0, retryAfter = 0 } = {}) {
    super(message);
    this.status = status; // status of the answer; 0: there was none
    this.retryAfter = retryAfter; // seconds
  }
}

/** The models of a server, as /v1/models lists them. */
export async function listModels(key) {
  const response = await request("/v1/models", key, {});
  return (await response.json()).data;
}

/** The number of tokens of a prompt. */
export async function countTokens(model, prompt, key, signal) {
  const response = await request("/tokenize", key, { method: "POST", body: JSON.stringify({ model, prompt }), signal });
  return (await response.json()).count;
}

/** Request a streamed answer and yield `{text, reasoning, calls, finish, usage}` per event, each possibly empty. */
export async function* streamAnswer(path, body, key, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request(path, key, { method: "POST", body: JSON.stringify(asked), signal });
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message ?? "the server broke the answer off", { status: event.error.code });
    const choice = event.choices?.[0] ?? {};
    const delta = choice.delta ?? { content: choice.text };
    yield {
      text: delta.content ?? "",
      reasoning: delta.reasoning_content ?? delta.reasoning ?? "",
      calls: delta.tool_calls ?? [],
      finish: choice.finish_reason,
      usage: event.usage,
    };
  }
  throw new ApiError("the connection ended before the answer did");
}

/** Yield an engine's events until it is aborted; `engine` is a model and a replica, or null. */
export async function* streamLive(engine, key, signal) {
  const query = engine ? `?${new URLSearchParams({ model: engine[0], replica: engine[1] })}` : "";
  const response = await request(`/admin/live${query}`, key, { signal });
  for await (const data of readEvents(response.body)) {
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message);
    yield event;
  }
}

/** The answer of a path, as text. */
export async function getText(path, key, accept = "*/*") {
  return (await request(path, key, { headers: { accept } })).text();
}

async function request(path, key, options) {
  const headers = { "content-type": "application/json", ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers }).catch(explainFailure);
  if (response.ok) return response;
  const said = await response.json().catch(() => null); // a proxy's error page is not JSON
  throw new ApiError(said?.error?.message ?? `the server answered ${response.status} ${response.statusText}`, {
    status: response.status,
    retryAfter: Number(response.headers.get("retry-after")),
  });
}

/** The payload of each server-sent event; all other lines (comments, names) are skipped. */
async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(explainFailure);
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop(); // the line that is still arriving
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

function explainFailure(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError("the server cannot be reached; is it still running?");
}
