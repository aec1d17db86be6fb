"""Record which fields the objects of Kubernetes have that our manifests use, from its published schemas.

    python tests/data/record_kubernetes.py > tests/data/kubernetes.json

The schemas come with the package kubernetes-validate, whose wheel has 22 MB (108 MB unpacked) for every
version of Kubernetes: too much for every checkout's tests, which need the few kinds in KINDS. What is kept is
the shape (fields, types, which are required and what an enum allows), without the texts. Objects are strict:
a field that is not in the schema is an error.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

VERSION = "1.37.0"
KINDS = {
    "Deployment": "deployment-apps-v1",
    "Service": "service-v1",
    "PodDisruptionBudget": "poddisruptionbudget-policy-v1",
    "HorizontalPodAutoscaler": "horizontalpodautoscaler-autoscaling-v2",
}
KEPT = {"type", "required", "enum", "items", "additionalProperties", "oneOf", "anyOf"}


def reduce(schema: Any, names: list[str]) -> Any:
    """Keep the shape of a schema, and note the definitions that it refers to."""
    if isinstance(schema, list):
        return [reduce(each, names) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: reduce(each, names) for name, each in value.items()}
        elif key == "$ref":
            name = value.rpartition("/")[2]
            names.append(name)
            kept[key] = f"#/definitions/{name}"
        elif key in KEPT:
            kept[key] = value if key in ("required", "enum", "type") else reduce(value, names)
    return kept


def record(folder: Path) -> dict[str, Any]:
    """Return the schemas of KINDS and every definition that they need."""
    definitions = json.loads((folder / "_definitions.json").read_text("utf-8"))["$defs"]
    names: list[str] = []
    kinds = {
        kind: reduce(json.loads((folder / f"{file}.json").read_text("utf-8")), names)
        for kind, file in KINDS.items()
    }
    found: dict[str, Any] = {}
    while names:
        name = names.pop()
        if name not in found:
            found[name] = reduce(definitions[name], names)
    return {"version": VERSION, "kinds": kinds, "definitions": dict(sorted(found.items()))}


if __name__ == "__main__":
    package = Path(str(importlib.import_module("kubernetes_validate").__file__)).parent
    made = record(package / "kubernetes-json-schema" / f"v{VERSION}-local-strict")
    json.dump(made, sys.stdout, sort_keys=True, separators=(",", ":"))
    print()
