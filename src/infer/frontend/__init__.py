"""Text in, text out, around an engine that speaks token ids.

prompts.py      prompts and messages to requests
open_model.py   a model's files to its text side, with or without weights
functions.py    Python functions as tools, and calls of them
outputs.py      token ids to text that is safe to show
text_model.py   the common part of `LLM` and `AsyncLLM`
llm.py          `LLM`: an engine in the caller's thread
async_llm.py    `AsyncLLM`: an engine for an event loop
"""
