"""`infer generate`: answer prompts and leave.

Where a prompt comes from                          What is done with it
  infer generate "Why is the sky blue?"              a model with a chat template gets it as a user's
  cat question.txt | infer generate                  message; `--raw`, or a model without a template,
  infer generate -                                   continues the text itself
  infer generate --prompts-file FILE   (one per line)

Standard output holds the answers and nothing else: text as it is generated, or with `--json` one
object per line and prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from infer.cli import flags
from infer.cli.answer import Answer, notice, open_llm, show_answer, write_out
from infer.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from infer.engine.engine import EngineObserver
    from infer.llm import LLM
    from infer.sampling.params import SamplingParams

EXAMPLES = """\
examples:
  infer generate "Why is the sky blue?"
  infer generate --model path/to/model --temperature 0 --raw "Once upon a time"
  cat letter.txt | infer generate --system "Summarise in one sentence." --max-tokens 60
  infer generate --prompts-file questions.txt --seed 1 --json > answers.jsonl
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="answer a prompt, or each line of a file",
        description="Answer a prompt, streaming the text to standard output as it is generated.",
        usage="infer generate [PROMPT] [options]",
        epilog=EXAMPLES,
        formatter_class=flags.HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    prompt = parser.add_argument_group("prompt and output")
    prompt.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text; '-' or nothing: standard input"
    )
    prompt.add_argument("--prompts-file", metavar="FILE", type=Path, help="answer each line of this file")
    prompt.add_argument("--system", metavar="TEXT", help="the system message to put before the prompt")
    prompt.add_argument("--raw", action="store_true", help="continue the text as is, without a chat template")
    flags.add_thinking_flag(prompt)
    prompt.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt, when it is done"
    )
    prompt.add_argument("--stats", action="store_true", help="print times and speed to standard error")
    prompt.add_argument(
        "--record",
        metavar="FILE",
        type=Path,
        help="write down the run, for 'infer replay'; holds the prompts",
    )
    flags.add_sampling_flags(parser)
    flags.add_knob_flags(parser, without=flags.SAMPLING_HELP)
    flags.add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer every prompt in turn."""
    if args.raw and args.system is not None:
        raise ConfigError("--system needs the chat template that --raw turns off; give one of the two")
    params = flags.sampling_from(args)
    prompts = read_prompts(args)
    with recording(args.record) as observer:
        answer_all(prompts, params, args, observer)
    return 0


def answer_all(
    prompts: list[str], params: SamplingParams, args: argparse.Namespace, observer: EngineObserver | None
) -> None:
    """Load the model and answer one prompt after the other."""
    started = perf_counter()
    llm = open_llm(args, observer)
    load_s = perf_counter() - started
    params = flags.fit_to_model(params, args, llm.context_len, llm.sampling_defaults)
    for index, prompt in enumerate(prompts):
        if len(prompts) > 1 and not args.json:
            notice(f"[{index + 1}/{len(prompts)}] {prompt}")
        prompt_ids = encode_prompt(llm, prompt, args)
        answer = answer_prompt(llm, prompt_ids, params, is_shown=not args.json)
        if args.json:
            write_out(
                json.dumps(to_json(prompt, prompt_ids, params, answer, load_s), ensure_ascii=False) + "\n"
            )
        if args.stats:
            notice(f"load {load_s:.2f} s, {answer.stats()}")


def recording(path: Path | None) -> AbstractContextManager[EngineObserver | None]:
    """Whoever writes the run down to `path`, and closes the file at the end; nobody without a path."""
    if path is None:
        return nullcontext()
    from infer.engine.record import Recorder

    return Recorder(path)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts, from wherever the user put them."""
    if args.prompts_file is not None:
        if args.prompt is not None:
            raise ConfigError("give a PROMPT or --prompts-file, not both")
        try:
            lines = args.prompts_file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"cannot read --prompts-file {args.prompts_file}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"--prompts-file {args.prompts_file} is not UTF-8: {error}") from None
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise ConfigError(f"--prompts-file {args.prompts_file} holds no prompt; write one per line")
        return prompts
    if args.prompt not in (None, "-"):
        return [args.prompt]
    if args.prompt is None and sys.stdin.isatty():
        raise ConfigError("no prompt: write one after 'infer generate', pipe one in, or use --prompts-file")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt on standard input is not UTF-8: {error}", param="prompt") from None
    return [text.removesuffix("\n")]


def encode_prompt(llm: LLM, prompt: str, args: argparse.Namespace) -> list[int]:
    """The prompt's tokens: as a user's message where the model has a template, else as plain text."""
    if not prompt:
        raise RequestError("the prompt is empty; write at least one character", param="prompt")
    if args.raw or not llm.has_chat_template:
        if args.system is not None:
            raise ConfigError(f"--system needs a chat template, and {llm.name} has none; see --chat-template")
        return llm.encode(prompt)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = [*system, {"role": "user", "content": prompt}]
    return llm.encode_chat(messages, template_options=flags.template_options(args))


def answer_prompt(llm: LLM, prompt_ids: list[int], params: SamplingParams, *, is_shown: bool) -> Answer:
    """Generate one answer, on standard output as it comes if `is_shown`."""
    answer = show_answer(llm.stream(prompt_ids, params), write_out if is_shown else lambda text: None)
    if is_shown:
        write_out("\n")
    return answer


def to_json(
    prompt: str, prompt_ids: list[int], params: SamplingParams, answer: Answer, load_s: float
) -> dict[str, Any]:
    """The object `--json` prints for one prompt."""
    return {
        "prompt": prompt,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "seed": params.seed,
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(answer.token_ids),
            "total_tokens": len(prompt_ids) + len(answer.token_ids),
        },
        "timings": {
            "load_s": round(load_s, 4),
            "first_token_s": round(answer.first_token_s, 4),
            "total_s": round(answer.total_s, 4),
            "tokens_per_s": round(answer.tokens_per_s, 2),
        },
    }
