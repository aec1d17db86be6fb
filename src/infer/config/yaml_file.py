"""Knobs from a YAML file: what `--config` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infer.config.knobs import KnobRow, parse_knob
from infer.errors import ConfigError, closest


def read_config_file(path: Path, table: Mapping[str, KnobRow]) -> dict[str, Any]:
    """Read knobs from a YAML file: a flat mapping whose keys are flag names, with dashes or underscores."""
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
    knobs: dict[str, Any] = {}
    names = {
        alias.replace("-", "_"): row.name for row in table.values() for alias in (row.name, *row.aliases)
    }
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name not in names:
            raise ConfigError(f"config file {path}: unknown knob {key!r}{closest(name, names)}")
        if names[name] in knobs:
            raise ConfigError(f"config file {path}: {names[name]} is given twice")
        knobs[names[name]] = parse_knob(table[names[name]], value)
    return knobs
