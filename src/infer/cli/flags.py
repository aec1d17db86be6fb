"""Command-line flags made from the fields they set, so that a knob exists once.

    LoadConfig.max_seq_len: int | None = knob(None, "longest prompt + output ...", aliases=("max_model_len",))
        becomes   --max-seq-len N                      longest prompt + output ... (also --max-model-len)

    SamplingParams.top_p: float = 1.0
        becomes   --top-p X                            help from SAMPLING_HELP below

The type of a field decides the shape of its flag: a bool is `--x/--no-x`, a tuple is a flag that may
be given several times, choices are checked. A flag that was not given is absent from the parsed arguments,
so flags override the file of `--config`, and that file overrides the defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import secrets
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_type_hints

from infer.cli.readers import KINDS, int_or_none, on_or_off, token_bias
from infer.config.foreign import FOREIGN, SHORT_FLAGS, is_quantization, refuse_quantization
from infer.config.knobs import KnobRow, given_names, own_names, parse_knob, read_config_file
from infer.config.server import ServerConfig
from infer.config.settings import engine_sections, knob_table
from infer.errors import ConfigError
from infer.loader.formats.hf_config import SAMPLING_KEYS
from infer.log import LEVELS
from infer.sampling.params import SamplingParams

SAMPLING_HELP = {
    "temperature": "randomness of the draw; 0: always the likeliest token (greedy)",
    "top_p": "draw from the likeliest tokens that together have this probability",
    "top_k": "draw from this many likeliest tokens; 0 or -1: all",
    "min_p": "drop tokens less likely than this share of the likeliest one",
    "repetition_penalty": "divide the logits of tokens already seen, prompt included; 1: off",
    "presence_penalty": "subtract from the logits of tokens already generated; 0: off",
    "frequency_penalty": "subtract for each time a token was already generated; 0: off",
    "logit_bias": "add BIAS to the logit of token ID; may be given several times",
    "seed": "the same seed gives the same text; each turn or line derives its own; default: random",
    "max_tokens": "stop after this many tokens; none: as many as the context allows",
    "min_tokens": "do not end before this many tokens",
    "stop": "end before this text would appear; may be given several times",
    "stop_token_ids": "end at this token; may be given several times",
    "ignore_eos": "go on past the model's end-of-text token",
    "include_stop_str_in_output": "keep the --stop text that ended the answer",
    "bad_words": "never write this text; may be given several times",
    "allowed_token_ids": "allow only this token; may be given several times",
}

# These fields ask for several texts or for numbers, which the command line cannot show.
# `infer generate -n` asks for each of its answers separately.
LIBRARY_ONLY = {
    "n", "best_of", "use_beam_search", "logprobs", "prompt_logprobs", "structured", "reasoning", "banned_ids",
}  # fmt: skip

# The settings that a chat can change, including one whose flag belongs to the knob of the same name.
CHAT_HELP = SAMPLING_HELP | {
    "num_speculative_tokens": "most draft tokens per step; 0: none; default: the engine's",
}

# Small instruct models ramble at a temperature of 1; these are the values of the sampling flags
# where they differ from SamplingParams, which has the defaults of other engines' libraries.
CLI_SAMPLING = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512}

# The places of flags among the parsed arguments: a knob and a sampling field may have the same name.
KNOB = "knob."
SAMPLING = "sampling."

NUM_SEEDS = 2**31  # number of random seeds: short enough to read from --json and type again

HIDDEN: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
METAVARS = {int: "N", float: "X", str: "TEXT"}


REQUIRED = object()  # stands in place of the default of a flag that must be given

Row: TypeAlias = tuple[Callable[[str], Any], str] | tuple[Callable[[str], Any], str, Any]
Rows: TypeAlias = Mapping[str, Row]  # flags by name, as `add_rows` reads them


def add_rows(group: argparse._ActionsContainer, rows: Rows) -> None:
    """Give `group` the flags of a table: "--name METAVAR": (reader, help), or (reader, help, default).

    Other spellings may follow a name: "--name/--other METAVAR". The help of a flag ends with its default, if
    it has one. A `bool` is a switch, with a `--no-` form if it has a default; a `list` holds the values of
    all uses of the flag. A name without dashes is an argument: "name METAVAR", or "name [METAVAR]" if it is
    optional.
    """
    for spelled, (reader, text, *rest) in rows.items():
        spellings, _, metavar = spelled.partition(" ")
        names = spellings.split("/")
        if metavar.startswith("[") and metavar.endswith("]"):
            group.add_argument(*names, metavar=metavar[1:-1], nargs="?", type=reader, help=text)
            continue
        default = rest[0] if rest else None
        if reader is bool and rest:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, default=default, help=text)
        elif reader is bool:
            group.add_argument(*names, action="store_true", help=text)
        elif reader is list:
            group.add_argument(*names, metavar=metavar, action="append", help=text)
        elif default is REQUIRED:
            group.add_argument(*names, metavar=metavar, type=reader, required=True, help=text)
        else:
            shown = f"{default:g}" if isinstance(default, float) else default
            told = "" if default in (None, "") else f" (default: {shown})"
            described = (text + told).strip()
            group.add_argument(*names, metavar=metavar, type=reader, default=default, help=described)


def add_knob_flags(
    parser: argparse.ArgumentParser, without: Collection[str] = (), *, with_server: bool = False
) -> None:
    """Give `parser` one flag per knob, grouped by section, and `--config FILE`.

    Knobs named in `without` get no flag: the subcommand has its own flag of that name.
    """
    groups = {}
    sections = engine_sections() | ({"server": ServerConfig} if with_server else {})
    for section, section_type in sections.items():
        title = (section_type.__doc__ or "").rstrip(".")
        groups[section] = parser.add_argument_group(f"{section}: {title[:1].lower()}{title[1:]}")
    for row in knob_table(with_server=with_server).values():
        if row.name not in without:
            _add_knob(groups[row.section], row)
    for name, (nothing, *_) in FOREIGN.items():
        action = argparse.BooleanOptionalAction if isinstance(nothing, bool) else "store"
        parser.add_argument(*_flags(name), dest=KNOB + name, action=action, **HIDDEN)
    groups["load"].add_argument(
        "--config", metavar="FILE", type=Path, help="YAML file of knobs, spelled as here; flags override it"
    )


def _add_knob(group: argparse._ArgumentGroup, row: KnobRow) -> None:
    """Add the flag of a knob, and a hidden one for each of its other spellings.

    Each spelling has its own destination, so `own_names` sees which one was used. If the flag takes several
    values, its other spellings take one each: in `--lora DIR PROMPT` the prompt is not a directory.
    """
    options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if row.kind is not bool:
        options = {
            "type": row.kind,
            "action": "append" if row.is_many else "store",
            "choices": None if row.takes_code else row.choices or None,
            "metavar": _metavar(row),
        }
    several = {"action": "extend", "nargs": "+"} if row.takes_several else {}
    shown = "" if row.default in (None, ()) else f" (default: {row.default})"
    others = {"also": row.aliases, "off:": row.opposites}
    also = "".join(f"; {word} {', '.join(map(flag, names))}" for word, names in others.items() if names)
    help_text = (row.help + shown + also).replace("%", "%%")
    group.add_argument(
        flag(row.name), dest=KNOB + row.name, default=argparse.SUPPRESS, help=help_text, **options | several
    )
    for other in row.spellings:
        group.add_argument(*_flags(other), dest=KNOB + other, **HIDDEN, **options)


def _metavar(row: KnobRow) -> str | None:
    """Return the placeholder for the value of a flag in its help; None: its choices."""
    if row.takes_code:
        return "{" + ",".join([*row.choices, "module:Name"]) + "}"
    return None if row.choices else METAVARS[row.kind]


def knobs_from(args: argparse.Namespace, *, with_server: bool = False) -> dict[str, Any]:
    """Return the knobs set by the config file and by flags, which override it."""
    table, every = knob_table(with_server=with_server), knob_table(with_server=True)
    from_file = read_config_file(args.config, table, elsewhere=every) if args.config else {}
    given = own_names(_given(args, KNOB), table, elsewhere=every)
    knobs = from_file | {name: parse_knob(table[name], value) for name, value in given.items()}
    if not is_quantization(name := str(knobs.get("quantization", "auto")).lower()):
        from infer.loader.quantization import is_scheme  # PyTorch takes seconds; it may be a new scheme

        if not is_scheme(name):
            refuse_quantization(name)
    return knobs


def flags_as_given(args: argparse.Namespace) -> dict[str, str]:
    """Return the flag of each knob that was given under another name than its own, for error messages."""
    names = given_names(_given(args, KNOB), knob_table(with_server=True))
    return {own: flag(given) for own, given in names.items()}


def name_model(args: argparse.Namespace, model: str, *, may_replace: bool = False) -> None:
    """Make this the model that the flags name; replacing another one is refused unless allowed."""
    row = knob_table()["model"]
    given = [name for name in (row.name, *row.spellings) if hasattr(args, KNOB + name)]
    for name in given:
        other = getattr(args, KNOB + name)
        if other != model and not may_replace:
            raise ConfigError(f"two models are named, {model!r} and {flag(name)} {other!r}; give one of them")
        delattr(args, KNOB + name)
    setattr(args, KNOB + row.name, model)


def spell(knobs: Mapping[str, object]) -> list[str]:
    """Return the words of a command line that set these knobs."""
    words: list[str] = []
    for name, value in knobs.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(name).replace("--", "--no-", 1))
        else:
            words += [flag(name), *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` one flag per row of SAMPLING_HELP."""
    group = parser.add_argument_group("sampling: how the next token is chosen")
    hints = get_type_hints(SamplingParams)
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)} | CLI_SAMPLING
    for name, help_text in SAMPLING_HELP.items():
        is_off = defaults[name] in (None, False, (), dataclasses.MISSING)
        advised = "the model's advice, else " if name in SAMPLING_KEYS else ""
        shown = "" if is_off else f" (default: {advised}{defaults[name]})"
        options = _sampling_options(hints[name])
        group.add_argument(
            flag(name), dest=SAMPLING + name, help=help_text + shown, default=argparse.SUPPRESS, **options
        )


def _sampling_options(hint: Any) -> dict[str, Any]:
    """Return the options of argparse for a field of this type."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if hint in (int, float):
        return {"type": hint, "metavar": METAVARS[hint]}
    if hint == (int | None):
        return {"type": int_or_none, "metavar": "N"}
    if hint == tuple[str, ...]:
        return {"action": "append", "metavar": "TEXT"}
    if hint == tuple[int, ...]:
        return {"action": "append", "type": int, "metavar": "ID"}
    assert hint == Mapping[int, float], f"no flag is known for a field of type {hint}"
    assert get_args(hint) == (int, float)
    return {"action": "append", "type": token_bias, "metavar": "ID=BIAS"}


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    """Return the SamplingParams of the flags over the defaults of the command line; always with a seed."""
    given = _given(args, SAMPLING)
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if given.get("seed") is None:
        seed = secrets.randbelow(NUM_SEEDS)
        given["seed"] = knobs_from(args).get("seed", seed) if args.config else seed
    return SamplingParams.from_knobs(**(CLI_SAMPLING | given))


def nth_draw(params: SamplingParams, number: int) -> SamplingParams:
    """Return the parameters of a command's n-th answer, counted from 0: the same, with a seed of its own.

    With one seed for all, equal questions would get equal answers. The first answer has the command's seed,
    each further answer a hash of that seed and its number. A command that asks one question with the seed of
    its answer repeats that answer.
    """
    if number == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed} {number}".encode(), digest_size=8).digest()
    return dataclasses.replace(params, seed=int.from_bytes(digest) % NUM_SEEDS)


def sampling_given(args: argparse.Namespace) -> list[str]:
    """Return the names of the sampling parameters that flags set."""
    return list(_given(args, SAMPLING))


def set_sampling(args: argparse.Namespace, name: str, text: str) -> None:
    """Set a sampling parameter as if its flag had been given; `default` removes the flag.

    A flag that may be given several times takes several words; quote a word that holds spaces.
    A `ValueError` names the values that the parameter takes.
    """
    if text == "default":
        vars(args).pop(SAMPLING + name, None)
        return
    options = _sampling_options(get_type_hints(SamplingParams)[name])
    reader = options.get("type", str)
    if options.get("action") is argparse.BooleanOptionalAction:
        reader = on_or_off
    try:
        if options.get("action") == "append":
            value: Any = [reader(word) for word in shlex.split(text)]
        else:
            value = reader(text)
    except ValueError:
        kind = KINDS.get(reader.__name__, reader.__name__)
        raise ValueError(f"{name} must be {kind}, or 'default', got {text!r}") from None
    setattr(args, SAMPLING + name, value)


def fit_to_model(
    params: SamplingParams, args: argparse.Namespace, context_len: int, advice: Mapping[str, Any]
) -> SamplingParams:
    """Return the parameters, with the model's defaults where flags set none, cut to a short context."""
    given = _given(args, SAMPLING)
    changes = {name: value for name, value in advice.items() if name not in given}
    if "max_tokens" not in given and params.max_tokens is not None:
        changes["max_tokens"] = max(1, min(params.max_tokens, context_len // 2))
    return dataclasses.replace(params, **changes)


def add_common_flags(parser: argparse.ArgumentParser, *, log_level: str = "warning") -> None:
    """Add the flags that every subcommand has; `log_level` is the default of --log-level."""
    group = parser.add_argument_group("messages, on standard error")
    group.add_argument("--log-level", choices=LEVELS, default=log_level, help=f"(default: {log_level})")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _given(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """Return the values of the flags whose destination has this prefix."""
    return {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


def _flags(name: str) -> list[str]:
    """Return the flag of another engine's setting, and its short form if there is one."""
    return [flag(name), *([SHORT_FLAGS[name]] if name in SHORT_FLAGS else [])]


def flag(name: str) -> str:
    """Return a knob or a sampling parameter as it is written on the command line."""
    return "--" + name.replace("_", "-")
