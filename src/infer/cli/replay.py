"""`infer replay`: run a record again and say where the two runs diverge.

0    identical, or nothing was compared; standard output says if the record has no end
1    the runs differ: standard output says at which step, and in what
2    this is not a record, or not one of this model
130  Ctrl-C: standard error says how far it came
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from infer.cli import flags, stepping
from infer.cli.answer import notice, write_out, write_rows
from infer.cli.interrupts import importing
from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.tools.replay import Replay, Stepper

HELP = "run a record again, bit for bit"
DESCRIPTION = (
    "Run a record again with its own knobs, and compare every plan and every sampled id.\n"
    "Exit code 1 if the runs differ. If the record was cut off, a line says that it has no end; the exit\n"
    "code is 0 if all that it holds is identical."
)
USAGE = "RECORD [options]"
EXAMPLES = """\
examples:
  infer generate --record run.jsonl "Why is the sky blue?"
  infer replay run.jsonl
  infer replay run.jsonl --until 20
  infer replay run.jsonl --step
  infer generate --record run.jsonl --orders "Why is the sky blue?"
  infer replay run.jsonl --orders
  infer replay run.jsonl --model path/to/model --device cpu --no-check
"""


FLAGS: flags.Rows = {
    "record RECORD": (
        Path,
        "file written by 'infer generate --record' or 'infer serve --record --record-text'",
    ),
    "--model TEXT": (str, "the model that was recorded, if it is not the default one"),
    "--draft-model TEXT": (str, "the draft model that was recorded, if there was one"),
    "--device TEXT": (str, "cpu or cuda; default: as recorded"),
    "--until STEP": (int, "stop after this step and print the engine's state (with --orders: only stop)"),
    "--orders": (bool, "run the recorded orders to the device, without a scheduler; the record needs them"),
    "--step": (bool, "one step per key press, as 'infer step' shows it"),
    "--check": (bool, "compare with the record (default); without it, the requests are only run again", True),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    flags.add_rows(parser, FLAGS)
    stepping.add_watch(parser)
    flags.add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Check the record, load the model, follow the record."""
    if args.until is not None and args.until < 1:
        raise ConfigError(f"--until must be a step, 1 or more, got {args.until}")
    if args.step and args.orders:
        raise ConfigError(
            "--orders runs without a scheduler, so there are no steps to show; leave out --step"
        )
    if args.watch is not None and not args.step:
        raise ConfigError("--watch shows step after step; give it with --step")
    with importing():
        import infer.engine.build  # noqa: F401  (and torch with it, for replay_model)
        from infer.tools.record import Record
        from infer.tools.replay import describe_state, replay_model

    record = Record(args.record)
    if args.until is not None and args.until > record.last_step:
        raise ConfigError(f"--until is {args.until}, but the record ends with step {record.last_step}")
    replay: Replay | None = None
    screen = stepping.StepScreen(watch_s=args.watch)
    try:
        replay = replay_model(
            record,
            args.model,
            draft_model=args.draft_model,
            device=args.device,
            show_progress=True,
            stepper=_frame_stepper(args.model, screen) if args.step else None,
        )
        if args.orders:
            return _run_orders(replay, args)
        with screen.keys() if args.step else nullcontext():
            report = replay.run(until=args.until, check=args.check)
            screen.end()
        if screen.is_left:
            write_out(f"left after {replay.num_steps} of {record.last_step} steps\n")
            return 0
    except KeyboardInterrupt:
        notice(_spell_interrupt(replay, args))
        raise
    if report.difference is not None:
        write_out(f"the runs differ at {report.difference}\n")
        write_out(f"identical up to there: {report.num_steps - 1} steps\n")
    else:
        verdict = "identical" if args.check else "not compared"
        write_out(f"{report.num_steps} steps, {report.num_tokens} tokens, {verdict}\n")
        if not report.is_whole:
            write_out("the record has no end: requests are unfinished; it was cut off, or the run crashed\n")
    if args.until is not None:
        write_rows(describe_state(replay.engine))
    return 0 if report.difference is None else 1


def _frame_stepper(model: str | None, screen: stepping.StepScreen) -> Stepper:
    """The stepper that shows the frames of a replay, with tokens decoded by the model's tokenizer."""
    from infer.config.settings import LoadConfig
    from infer.frontend.open_model import find_source, open_text
    from infer.tools.step_frames import FrameStepper

    config = LoadConfig(model=model)
    _, tokenizer = open_text(config, find_source(config, show_progress=True))
    frames, _ = stepping.make_frames(screen)
    frames.spell = tokenizer.token_text
    return FrameStepper(frames, screen.show)


def _spell_interrupt(replay: Replay | None, args: argparse.Namespace) -> str:
    if replay is None:
        return "interrupted while the model was loaded; nothing was replayed"
    if args.orders:
        return "interrupted; the orders were not run to their end"
    verdict = "identical so far" if args.check else "not compared"
    return f"interrupted after {replay.num_steps} of {replay.record.last_step} steps, {verdict}"


def _run_orders(replay: Replay, args: argparse.Namespace) -> int:
    """Run the orders of a record on the device alone."""
    from infer.tools.order_replay import limits_of, replay_orders

    engine = replay.engine
    report = replay_orders(
        replay.record, engine.device, limits_of(engine), until=args.until, check=args.check
    )
    if report.difference is not None:
        write_out(f"the device differs at {report.difference}\n")
        return 1
    verdict = "identical" if args.check else "not compared"
    write_out(f"{report.num_steps} orders, {report.num_tokens} tokens, {verdict}\n")
    if report.num_left and args.until is None:
        write_out(f"the record has no end: the steps of its last {report.num_left} orders are not in it\n")
    return 0
