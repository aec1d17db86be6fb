"""`infer batch`: answer the requests of a file, in OpenAI's batch format.

    infer batch requests.jsonl answers.jsonl

The lines go through the application that `infer serve` serves, in this process and without a network, or with
`--url` to a server. Either way the routes, the limits and the errors are the server's own. A line that is
refused has its error in the output and does not affect the others.

    0    every line has a good answer
    1    some lines have an error: standard error says how many
    2    a file cannot be used: no request was sent
    130  Ctrl-C: the output holds whole lines, and the same command continues after them
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import orjson

from infer.cli import flags
from infer.cli.answer import notice
from infer.cli.batch_lines import URLS, BatchLine, BatchOutput, check_input, read_lines
from infer.cli.interrupts import importing
from infer.cli.readers import positive
from infer.cli.terminal import working
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import ConfigError
from infer.log import progress

HELP = "answer the requests of a file, in OpenAI's batch format"
DESCRIPTION = (
    "Answer every request of IN.jsonl and append the answers to OUT.jsonl, in the order in which they\n"
    "come. Run again, the command continues with the lines that have no answer yet."
)
USAGE = "IN.jsonl OUT.jsonl [options]"
EXAMPLES = f"""\
a line of IN.jsonl; the url is one of {", ".join(URLS[:2])},
{", ".join(URLS[2:])}:
  {{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 60}}}}

examples:
  infer batch requests.jsonl answers.jsonl
  infer batch requests.jsonl answers.jsonl --model path/to/model --served-model-name gpt-4o-mini
  infer batch requests.jsonl answers.jsonl --url http://127.0.0.1:8000 --concurrency 16
  infer batch requests.jsonl answers.jsonl --retry-failed
"""

FLAGS: flags.Rows = {
    "input IN.jsonl": (Path, "the requests, one per line"),
    "output OUT.jsonl": (Path, "the answers; created, or continued"),
    "--concurrency N": (positive, "requests in flight at once; default: 256, or 32 with --url"),
    "--retry-failed": (bool, "ask again the lines that have an error in the output"),
    "--served-model-name NAME": (str, "the model's name in the request bodies; default: its own name"),
    "--url URL": (str, "ask the server at this address instead of loading a model"),
    "--api-key KEY": (str, "the key that the server of --url asks for"),
}

HERE_AT_ONCE, ASKED_AT_ONCE = 256, 32
TIMEOUT_S = 3600.0  # seconds that a server's answer may take
FULL = (429, 503)  # statuses after which a request is sent again
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # pauses before a request is sent again; the last one is repeated
PATIENCE_S = 600.0  # total pause of a request


class LineAnswer(NamedTuple):
    """The server's answer to a line."""

    status: int
    body: bytes
    request_id: str


class NoAnswer(Exception):  # noqa: N818  (it becomes a line of the output)
    """The server sent no answer; the message says why."""


Ask: TypeAlias = Callable[[BatchLine], Awaitable[LineAnswer]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    group = parser.add_argument_group("files and requests")
    flags.add_rows(group, FLAGS)
    flags.add_knob_flags(parser)
    flags.add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Check the files, then ask everything that has no answer yet."""
    if args.api_key is not None and args.url is None:
        raise ConfigError("--api-key is for the server that --url names; give both or neither")
    knobs = flags.knobs_from(args)
    config = EngineConfig.from_knobs(**knobs)
    if args.url is not None and (knobs or args.served_model_name is not None):
        names = [*map(flags.flag, knobs), *(["--served-model-name"] if args.served_model_name else [])]
        raise ConfigError(f"--url leaves the engine to the server, so {', '.join(names)} cannot be set here")
    if args.output.exists() and args.input.exists() and args.output.samefile(args.input):
        raise ConfigError(
            f"{args.input} is named as input and as output; give the answers a file of their own"
        )
    numbers = check_input(args.input)
    output = BatchOutput(args.output)
    try:
        output.check_belongs_to(args.input, numbers)
        if output.num_cut:
            notice(f"[the last line of {args.output} was cut off and is asked again]")
        if args.retry_failed and (count := output.forget_failed()):
            notice(f"[{count} of the lines failed before and are asked again]")
        num_left = len(numbers) - len(output.statuses)
        if len(output.statuses):
            notice(f"[{len(output.statuses)} of {len(numbers)} lines have an answer already]")
        if num_left:
            asyncio.run(_answer_all(args, config, output, num_left))
    except KeyboardInterrupt:
        done = f"{len(output.statuses)} of {len(numbers)} lines"
        notice(f"interrupted: {args.output} has {done}; run the same command to continue")
        raise
    finally:
        output.close()
    if output.num_failed:
        said = f"{output.num_failed} of {len(numbers)} lines have an error in place of an answer"
        notice(f"infer: error: {said}; --retry-failed asks them again")
    return 1 if output.num_failed else 0


async def _answer_all(
    args: argparse.Namespace, config: EngineConfig, output: BatchOutput, num_left: int
) -> None:
    """Keep a fixed number of requests in flight until every line has its answer."""
    here = args.url is None
    asking = _asking_here(config, args.served_model_name) if here else _asking_server(args.url, args.api_key)
    at_once = args.concurrency or (HERE_AT_ONCE if here else ASKED_AT_ONCE)
    answered = frozenset(output.statuses)
    lines = (line for line in read_lines(args.input) if line.custom_id not in answered)
    async with asking as ask:
        with progress("batch", total=num_left) as advance:

            async def work() -> None:
                for line in lines:  # shared: each line is taken once
                    output.add(line.custom_id, *await _answer(ask, line))
                    advance(1)

            workers = [asyncio.create_task(work()) for _ in range(min(at_once, num_left))]
            try:
                await asyncio.gather(*workers)
            finally:  # a full disk, or Ctrl-C
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)


async def _answer(ask: Ask, line: BatchLine) -> tuple[dict[str, Any], int]:
    """The output line for an input line, and its status."""
    made: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
    try:
        answer = await _ask_patiently(ask, line)
        body = orjson.loads(answer.body)
    except (NoAnswer, ValueError) as error:
        said = str(error) if isinstance(error, NoAnswer) else f"the answer is not JSON: {error}"
        return made | {"response": None, "error": {"code": "no_answer", "message": said}}, 0
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
    return made | {"response": response, "error": None}, answer.status


async def _ask_patiently(ask: Ask, line: BatchLine) -> LineAnswer:
    """Send a request, and while the server is full, send it again after a pause."""
    waited_s = 0.0
    for number in range(1000):
        answer = await ask(line)
        if answer.status not in FULL or waited_s >= PATIENCE_S:
            break
        pause_s = PAUSES_S[min(number, len(PAUSES_S) - 1)]
        await asyncio.sleep(pause_s)
        waited_s += pause_s
    return answer


@asynccontextmanager
async def _asking_here(config: EngineConfig, name: str | None) -> AsyncIterator[Ask]:
    """Load an engine and ask the server's application in this process."""
    with working(f"loading {config.load.model or 'the default model'}: importing PyTorch"), importing():
        from infer.server.app import create_app
        from infer.server.asgi_call import call_app

    server = ServerConfig(
        in_process=True, access_log=False, request_timeout=0.0, ui=False, served_model_name=name
    )
    app = create_app(config, server)

    async def ask(line: BatchLine) -> LineAnswer:
        headers = [(b"content-type", b"application/json")]
        answer = await call_app(app, "POST", line.url, headers=headers, body=orjson.dumps(line.body))
        return LineAnswer(answer.status, answer.body, dict(answer.headers).get(b"x-request-id", b"").decode())

    async with app.router.lifespan_context(app):
        yield ask


@asynccontextmanager
async def _asking_server(url: str, api_key: str | None) -> AsyncIterator[Ask]:
    """Ask a server over HTTP."""
    from infer.bench.sse_client import BrokenAnswer, Client, Endpoint, fetch

    endpoint = Endpoint(url=url, api_key=api_key, timeout_s=TIMEOUT_S)
    await fetch(endpoint, "/v1/models")  # a wrong address or key is an error of the command, not of a line
    client = Client(endpoint)

    async def ask(line: BatchLine) -> LineAnswer:
        request_id = uuid.uuid4().hex
        message = endpoint.message("POST", line.url, line.body, headers=[f"x-request-id: {request_id}"])
        try:
            status, body = await client.send(message)
        except (BrokenAnswer, OSError) as error:  # a timeout is an OSError
            raise NoAnswer(f"the server did not answer: {error or type(error).__name__}") from None
        return LineAnswer(status, body, request_id)

    try:
        yield ask
    finally:
        client.close()
