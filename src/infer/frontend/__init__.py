"""Text in, text out, around an engine that speaks token ids.

prompts.py      prompts and messages to requests
functions.py    Python functions as tools, and calls of them
outputs.py      token ids to text that is safe to show
llm.py          `LLM`: an engine in the caller's thread
async_llm.py    `AsyncLLM`: an engine for an event loop
"""
