"""`infer generate`: answer prompts and leave.

Where a prompt comes from                          What happens to it
  infer generate "Why is the sky blue?"              a model that came with a chat template gets it as a
  cat question.txt | infer generate                  user's message; `--raw`, or a model that came without
  infer generate -                                   one, as base models do, continues the text itself
  cat letter.txt | infer generate "Summarise:"       (the prompt, a blank line, the letter)
  infer generate --prompts-file FILE   (one per line)

Standard output holds the answers and nothing else: text as it is generated, or with `--json` one
object per line and prompt. A model's reasoning is not part of the answer: it goes to standard error.

The engine batches the prompts of a file. Answers are printed in the order of the file, each as soon as the
earlier ones are printed. A failed prompt is reported with its line number and does not affect the others; the
exit code is then 1. Each line has its own seed, made from `--seed` and the line's number; `--json` shows it,
and `--seed` with this value repeats the answer.

`--json-schema`, `--regex`, `--choice` or `--grammar` sets the form of the answers.

With `--url` a server has the model and the engine: prompts go to it over HTTP, several at a time if they come
from a file.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from infer.cli import asking, flags, stepping
from infer.cli.answer import Interrupted, Screen, ShownAnswer, notice, show_answer, write_out
from infer.cli.readers import positive
from infer.cli.remote import RemoteModel, RemoteStream, is_remote
from infer.errors import (
    ConfigError,
    DeviceLost,
    EngineError,
    EngineStopped,
    InferError,
    QueueFull,
    RequestError,
    shorten,
)

if TYPE_CHECKING:
    from infer.engine.observer import EngineObserver
    from infer.frontend.llm import LLM, TextStream
    from infer.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

LABEL_LEN = 100  # characters of a prompt shown before its answer
OPEN_AT_ONCE = 1024  # prompts of a file in the engine: more than it runs at once, fewer than fill the memory
ASKED_AT_ONCE = 32  # prompts of a file with a server: a connection and a thread each

HELP = "answer a prompt, or each line of a file"
DESCRIPTION = "Answer a prompt, streaming the text to standard output as it is generated."
USAGE = "[PROMPT] [options]"
EXAMPLES = """\
examples:
  infer generate "Why is the sky blue?"
  infer generate --model path/to/model --temperature 0 --raw "Once upon a time"
  cat letter.txt | infer generate "Summarise in one sentence:" --max-tokens 60
  infer generate --prompts-file questions.txt --seed 1 --json > answers.jsonl
  infer generate --url http://127.0.0.1:8000 "Why is the sky blue?"
  infer generate --choice red --choice green --choice blue "What color is the sky?"
  infer generate --json-schema person.json "Invent a person."
  infer generate -n 3 --temperature 0.7 "Invent a name for a cat."
"""


FLAGS: flags.Rows = {
    "prompt [PROMPT]": (str, "the text, followed by piped input; '-' or nothing: standard input only"),
    "--prompts-file FILE": (Path, "answer each line of this file, all at once and printed in order"),
    "-n/--n N": (positive, "answers to each prompt, drawn independently", 1),
    "--raw": (bool, "continue the text as is, without a chat template"),
    "--json": (bool, "print one JSON object per prompt, when it is done"),
    "--record FILE": (Path, "record the run for 'infer replay'; the file holds the prompts"),
    "--orders": (bool, "with --record: also record the orders that the device gets in each step"),
    "--overwrite": (bool, "let --record replace an existing file"),
    "--step": (bool, "one scheduler step per key press, as 'infer step' does"),
}


class Prompt(NamedTuple):
    """A prompt, its line number if it is from a file, and the number of its answer among all answers."""

    text: str
    line: int | None = None
    draw: int = 0


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt that the engine has, or the error that kept it out."""

    prompt: Prompt
    params: SamplingParams  # parameters of this prompt: each line of a file has its own seed
    stream: TextStream | RemoteStream | InferError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    prompt = parser.add_argument_group("prompt and output")
    flags.add_rows(prompt, FLAGS)
    asking.add_asking_flags(parser, prompt)


def run(args: argparse.Namespace) -> int:
    """Answer every prompt; exit code 1 if some prompts of a file have no answer."""
    if args.step and (is_remote(args) or args.json):
        raise ConfigError("--step shows the steps of an engine here; leave --url and --json out")
    if is_remote(args) and (args.record is not None or args.overwrite):
        raise ConfigError(
            "--record needs an engine here, and --url leaves it to the server; give one of them"
        )
    params = checked_params(args)
    prompts = [
        prompt._replace(draw=args.n * prompt.draw + number)
        for prompt in read_prompts(args)
        for number in range(args.n)
    ]
    if args.orders and args.record is None:
        raise ConfigError("--orders adds to a record; give its name with --record FILE")
    with recording(args.record, may_replace=args.overwrite, orders=args.orders) as observer:
        if args.step:
            step_prompts(prompts, params, args, stepping.StepScreen(), observer)
            return 0
        num_failed = answer_all(prompts, params, args, observer)
    if num_failed:
        notice(
            f"infer: error: {num_failed} of {len(prompts)} prompts have no answer; the lines above say why"
        )
    return 1 if num_failed else 0


def checked_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that flags set, checked for contradictions."""
    if args.raw and (needs := _needs_template(args)):
        raise ConfigError(f"{needs} needs the chat template that --raw turns off; give one of the two")
    return asking.params_from(args)


def step_prompts(
    prompts: Sequence[Prompt],
    params: SamplingParams,
    args: argparse.Namespace,
    screen: stepping.StepScreen,
    recorder: EngineObserver | None,
) -> None:
    """Load the model, answer the prompts step by step on the screen, and print the answers at the end."""
    for flag in ("stats", "api_key"):
        if getattr(args, flag, None):
            raise ConfigError(
                f"--{flag.replace('_', '-')} has no effect on steps, which show their own times and need no "
                "server; leave it out"
            )
    stepping.forbid_overlap(args)
    frames, observer = stepping.make_frames(screen, recorder)
    llm = asking.open_llm(args, observer)
    frames.engine, frames.spell = llm.engine, llm.tokenizer.token_text
    params = flags.fit_to_model(
        stepping.with_candidates(params), args, llm.context_len, llm.sampling_defaults
    )
    streams = []
    for prompt in prompts:
        stream = _ask(llm, prompt, params, args).stream
        if isinstance(stream, InferError):
            raise stream
        streams.append(stream)
    stepping.step_through(llm, frames, screen)
    if screen.is_left:
        return
    for prompt, stream in zip(prompts, streams, strict=True):
        texts: dict[int, str] = {}
        for delta in stream:
            texts[delta.index] = texts.get(delta.index, "") + delta.text
        for text in texts.values():
            write_out(f"\n[{shorten(prompt.text, LABEL_LEN)}]\n{text}\n")


def answer_all(
    prompts: Sequence[Prompt],
    params: SamplingParams,
    args: argparse.Namespace,
    observer: EngineObserver | None,
) -> int:
    """Load the model, print its answers in order, and return the number of failed prompts."""
    started = perf_counter()
    try:
        is_many = args.prompts_file is not None
        llm = asking.open_model(args, observer, counts=args.json, is_patient=is_many)
    except KeyboardInterrupt:
        if args.stats:
            notice(f"interrupted while loading, after {perf_counter() - started:.2f} s")
        raise
    load_s = perf_counter() - started
    params = flags.fit_to_model(params, args, llm.context_len, llm.sampling_defaults)
    # a server applies its own parameters where flags set none
    is_known = not isinstance(llm, RemoteModel) or "temperature" in flags.sampling_given(args)
    if args.n > 1 and params.temperature == 0 and is_known:
        notice(f"[temperature is 0, so all {args.n} answers are the same; --temperature 0.7 draws others]")
    if not (args.raw or isinstance(llm, RemoteModel) or llm.encoder.ships_chat_template):
        logger.info("no chat template, so prompts are continued as plain text model=%s", llm.name)
    answers: list[ShownAnswer] = []
    partial: list[ShownAnswer] = []  # the answer that Ctrl-C ended
    try:
        answer_each(llm, prompts, params, args, load_s, answers)
    except Interrupted as stop:
        partial = [stop.answer]
        if args.stats:
            notice(f"load {load_s:.2f} s, {stop.answer.stats()}")
        raise
    finally:
        if args.stats and len(prompts) > 1:
            total_s = perf_counter() - started - load_s
            num_tokens = sum(len(answer.token_ids) for answer in (*answers, *partial))
            count = f"{len(answers)} of {len(prompts)}" if partial else f"{len(answers)}"
            speed = num_tokens / total_s
            notice(f"{count} answers, {num_tokens} tokens in {total_s:.2f} s, {speed:.1f} tokens/s")
    return len(prompts) - len(answers)


def answer_each(
    llm: LLM | RemoteModel,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    args: argparse.Namespace,
    load_s: float,
    answers: list[ShownAnswer],
) -> None:
    """Print the answers in order and put each into `answers` when complete; say which prompts failed."""
    for number, asked in enumerate(ask_all(llm, prompts, params, args), start=1):
        prompt = asked.prompt
        if len(prompts) > 1 and not args.json:
            notice(f"[{number}/{len(prompts)}] {shorten(prompt.text, LABEL_LEN)}")
        try:
            answer = read_answer(
                asked, None if args.json else Screen(shows_reasoning=asking.shows_reasoning(args))
            )
        except (RequestError, EngineError) as error:
            if prompt.line is None or isinstance(error, DeviceLost | EngineStopped):
                raise
            notice(f"infer: error: line {prompt.line}: {error}")
            if args.json:
                _write_json({"prompt": prompt.text, "line": prompt.line, "error": str(error)})
            continue
        answers.append(answer)
        if answer.finish_reason == "length" and params.structured is not None:
            line = "" if prompt.line is None else f"line {prompt.line}: "
            notice(f"[{line}cut: the answer is incomplete; --max-tokens or the context allows no more]")
        if args.json:
            _write_json(to_json(asked, answer, load_s))
        if args.stats:
            notice(f"load {load_s:.2f} s, {answer.stats()}")


def ask_all(
    llm: LLM | RemoteModel, prompts: Sequence[Prompt], params: SamplingParams, args: argparse.Namespace
) -> Iterator[AskedPrompt]:
    """Submit the prompts and yield them in order; all of them run while the first answer is read.

    If the file is long, or `max_queue` limits the engine's queue, the rest follow as answers are read.
    """
    waiting, asked = deque(prompts), deque[AskedPrompt]()
    at_once = ASKED_AT_ONCE if isinstance(llm, RemoteModel) else OPEN_AT_ONCE
    while waiting or asked:
        while waiting and len(asked) < at_once:
            try:
                asked.append(_ask(llm, waiting[0], params, args))
            except QueueFull:
                if not asked:
                    raise
                break
            waiting.popleft()
        yield asked.popleft()


def _ask(
    llm: LLM | RemoteModel, prompt: Prompt, params: SamplingParams, args: argparse.Namespace
) -> AskedPrompt:
    params = flags.nth_draw(params, prompt.draw)
    try:
        if not prompt.text:
            raise RequestError("the prompt is empty; write at least one character", param="prompt")
        return AskedPrompt(prompt, params, _open_stream(llm, prompt.text, params, args))
    except RequestError as error:  # reported when it is this prompt's turn
        return AskedPrompt(prompt, params, error)


def _open_stream(
    llm: LLM | RemoteModel, text: str, params: SamplingParams, args: argparse.Namespace
) -> TextStream | RemoteStream:
    """Ask with a user's message if the model has a chat template, else with plain text."""
    has_template = isinstance(llm, RemoteModel) or llm.encoder.ships_chat_template
    if has_template and not args.raw:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        messages = [*system, {"role": "user", "content": text}]
        return llm.stream_chat(messages, params, **asking.chat_options(args))
    if needs := _needs_template(args):
        raise ConfigError(
            f"{needs} needs a chat template, and {llm.name} came without one; give a template with "
            "--chat-template FILE, or its family's with --chat-template family"
        )
    return llm.stream(text, params)


def _needs_template(args: argparse.Namespace) -> str | None:
    """Return the flag that asks for a conversation, if one does."""
    if args.system is not None:
        return "--system"
    return None if args.max_reasoning_tokens is None else "--max-reasoning-tokens"


def read_answer(asked: AskedPrompt, screen: Screen | None) -> ShownAnswer:
    """Read one answer to its end, and show it as it comes if there is a screen."""
    if isinstance(asked.stream, InferError):
        raise asked.stream
    answer = show_answer(asked.stream, screen)
    if screen is not None and not answer.text:
        write_out("\n")
    return answer


def _write_json(data: dict[str, Any]) -> None:
    write_out(json.dumps(data, ensure_ascii=False) + "\n")


def recording(
    path: Path | None, *, may_replace: bool = False, orders: bool = False
) -> AbstractContextManager[EngineObserver | None]:
    """Return an observer that records the run to `path`, and closes the file at the end; None if no path."""
    if path is None:
        return nullcontext()
    from infer.tools.record_files import check_record

    check_record(path, may_replace=may_replace)
    from infer.tools.record import Recorder

    return Recorder(path, orders=orders)


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Return the prompts, from the argument, a file or standard input."""
    if args.prompts_file is not None:
        if args.prompt is not None:
            raise ConfigError("give a PROMPT or --prompts-file, not both")
        lines = asking.read_text("--prompts-file", args.prompts_file).split("\n")
        prompts = [Prompt(text, place + 1, place) for place, text in enumerate(lines) if text.strip()]
        if not prompts:
            raise ConfigError(f"--prompts-file {args.prompts_file} holds no prompt; write one per line")
        return prompts
    if args.prompt not in (None, "-"):
        return [Prompt(asking.join_piped(args.prompt))]
    if args.prompt is None and sys.stdin.isatty():
        raise ConfigError("no prompt: write one after 'infer generate', pipe one in, or use --prompts-file")
    return [Prompt(asking.read_piped().removesuffix("\n"))]


def to_json(asked: AskedPrompt, answer: ShownAnswer, load_s: float) -> dict[str, Any]:
    """Return the object that `--json` prints for one prompt; a server's answer has no token ids."""
    stream = asked.stream
    assert not isinstance(stream, InferError), "it has an answer"
    if isinstance(stream, RemoteStream):
        token_ids, usage = None, stream.usage  # the server's own counts
    else:
        token_ids, num_prompt = list(answer.token_ids), stream.num_prompt_tokens
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(token_ids),
            "total_tokens": num_prompt + len(token_ids),
        }
    return {
        "prompt": asked.prompt.text,
        "text": answer.text,
        "reasoning": answer.reasoning or None,
        "token_ids": token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "seed": asked.params.seed,
        "usage": usage,
        "timings": {
            "load_s": round(load_s, 4),
            "first_token_s": round(answer.first_token_s, 4),
            "total_s": round(answer.total_s, 4),
            "tokens_per_s": round(answer.tokens_per_s, 2),
        },
    }
