"""Knobs from a YAML file: what `--config` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infer.config.knobs import KnobRow, given_names, own_names, parse_knob, spell_as_given
from infer.errors import ConfigError


def read_config_file(path: Path, table: Mapping[str, KnobRow]) -> dict[str, Any]:
    """Return the knobs of a YAML file: a flat mapping, its keys written with dashes or underscores."""
    import yaml

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"config file {path} must be a mapping of knob to value, got {type(raw).__name__}")
    try:
        return {name: parse_knob(table[name], value) for name, value in own_names(raw, table).items()}
    except ConfigError as error:
        message = spell_as_given(str(error), given_names(raw, table))
        raise ConfigError(f"config file {path}: {message}") from None
