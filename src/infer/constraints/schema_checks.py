"""Checks of a schema before an engine compiles it.

Three kinds of schemas are refused here, with the keyword and a JSON pointer to it:

    no constraint can express it    `not`, `if`, `uniqueItems`, look-around in a pattern, a foreign `$ref`
    it means nothing                a type that JSON does not have, a bound that is not a number, `enum: []`
    it would take seconds           too many properties, alternatives multiplied by `allOf`, `(a{999}){999}`

The compiler would refuse them too, but without the place, and only after it has spent the time. Every schema
that a reference reaches is visited once, so the checks are linear in the size of the schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

from infer.constraints.pattern_checks import MAX_PATTERNS_SIZE, check_pattern, check_size, constraint_error
from infer.errors import RequestError, show_value

MAX_DEPTH = 100  # levels of schemas inside of schemas, references followed
MAX_SCHEMAS = 20_000  # schemas at all levels
MAX_PROPERTIES = 1_000  # properties of one object
MAX_OPTIONAL = 400  # optional properties: any may come next, and a step can follow 400 at most
MAX_ALTERNATIVES = 1_000  # schemas of one anyOf or oneOf
MAX_PRODUCT = 256  # alternatives that allOf combines
MAX_ENUM = 10_000  # values of all enums
MAX_MULTIPLE_OF = 10_000  # largest divisor: each remainder is a state of an automaton

_ANY_OF = "list the cases with anyOf"
UNSUPPORTED = {  # keyword: what to do instead
    "$dynamicAnchor": "use $defs",
    "$dynamicRef": "use $ref",
    "$recursiveAnchor": "use $defs",
    "$recursiveRef": "use $ref",
    "contains": "constrain all items with items",
    "dependencies": _ANY_OF,
    "dependentRequired": _ANY_OF,
    "dependentSchemas": _ANY_OF,
    "else": _ANY_OF,
    "if": _ANY_OF,
    "maxContains": "constrain all items with items",
    "minContains": "constrain all items with items",
    "not": "say what is allowed, with enum, pattern or anyOf",
    "propertyNames": "use patternProperties",
    "then": _ANY_OF,
    "unevaluatedItems": "use items",
    "unevaluatedProperties": "use additionalProperties",
    "uniqueItems": "leave it out, and check the answer",
}
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
MAX_BOUND = 2**53 - 1  # largest bound; beyond it the compiler rounds, or crashes the process
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

_SCHEMAS_BY_NAME = ("properties", "patternProperties")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("additionalItems", "additionalProperties", "items")
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")

_RANGES = (
    ("minimum", "maximum"), ("minItems", "maxItems"), ("minLength", "maxLength"),
    ("minProperties", "maxProperties"),
)  # fmt: skip
_COMBINING = frozenset(("$ref", "allOf", "anyOf", "oneOf"))


def check_keywords(schema: object, *, param: str, is_lenient: bool = False) -> None:
    """Refuse a schema that cannot be compiled in reasonable time; `param` is the client's field.

    A lenient check accepts keywords and formats that a lenient compiler ignores.
    """
    _SchemaCheck(schema, param, is_lenient).run()


def close_objects(schema: Any) -> bool:
    """Forbid other properties in objects that name theirs and do not decide; return True if any changed.

    `schema` is changed in place and only made stricter. Names come from `properties`, `required` and the
    patterns; an object without `properties` and patterns names none and stays open. A schema that combines
    objects (`allOf`, or properties next to `anyOf`) is not changed: each of its parts names only some of the
    properties.
    """
    found, stack = [], [schema]
    while stack:
        each = stack.pop()
        if not isinstance(each, dict):
            continue
        found.append(each)
        for keyword in (*_SCHEMAS_BY_NAME, "$defs", "definitions"):
            stack += each.get(keyword, {}).values() if isinstance(each.get(keyword, {}), dict) else ()
        for keyword in (*_SCHEMA_LISTS, *_SCHEMAS):
            inner = each.get(keyword, [])
            stack += inner if isinstance(inner, list) else [inner]
    if any(
        (isinstance(every := each.get("allOf"), list) and len(every) > 1)
        or (each.keys() & set(_SCHEMAS_BY_NAME) and each.keys() & _COMBINING)
        for each in found
    ):
        return False
    closable = [
        each
        for each in found
        if each.keys() & set(_SCHEMAS_BY_NAME)
        and "additionalProperties" not in each
        and isinstance(each.get("properties", {}), dict)
        and isinstance(needed := each.get("required", []), list)
        and all(isinstance(name, str) for name in needed)
    ]
    for each in closable:
        each["additionalProperties"] = False
        for name in each.get("required", []):
            each.setdefault("properties", {}).setdefault(name, True)
    return bool(closable)


class _SchemaCheck:
    """One walk through a schema; `visit` returns how many alternatives a schema has."""

    def __init__(self, root: object, param: str, is_lenient: bool) -> None:
        self._root = root
        self._param = param
        self._is_lenient = is_lenient
        self._num_enum = 0
        self._patterns_size = 0
        self._by_id: dict[int, int] = {}  # alternatives of every schema; 1 while it is visited
        self._same: dict[int, dict[int, str]] = {}  # schemas for the same value, each with its place

    def run(self) -> None:
        if self._root is False:
            raise self._refuse("#", "is false, which allows nothing; true allows any JSON")
        self.visit(self._root, "#", 0)
        self._check_circles()

    def _check_circles(self) -> None:
        """Refuse a schema that `$ref` and `allOf` alone lead back to."""
        try:
            TopologicalSorter(self._same).prepare()
        except CycleError as error:
            circle = error.args[1]  # schemas, each of which refers to the one before it
            first = next(schema for schema in self._same if schema in circle)
            where = self._same[circle[circle.index(first) + 1]][first]
            raise self._refuse(where, "leads back to its own schema and says nothing about it") from None

    def visit(self, schema: object, where: str, depth: int) -> int:
        if isinstance(schema, bool):
            return 1
        if not isinstance(schema, dict):
            raise self._error(where, "must be an object, true or false", schema)
        if id(schema) not in self._by_id:
            self._by_id[id(schema)] = 1
            if len(self._by_id) > MAX_SCHEMAS:
                raise self._refuse("#", f"holds more than {MAX_SCHEMAS} schemas, which is the most allowed")
            self._by_id[id(schema)] = self._visit_new(schema, where, depth)
        return self._by_id[id(schema)]

    def _visit_new(self, schema: dict[str, Any], where: str, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise self._refuse(where, f"is {depth} schemas deep, at most {MAX_DEPTH} are allowed")
        for keyword, instead in UNSUPPORTED.items():
            if keyword in schema and not self._is_lenient:
                raise self._refuse(f"{where}/{keyword}", f"is not supported; {instead}")
        self._check_values(schema, where)
        inner = [
            self.visit(each, f"{where}/{keyword}", depth + 1) for keyword, each in self._inner(schema, where)
        ]
        factors = [max(inner, default=1)]  # allOf may have to combine the values of equal keys
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                factors.append(sum(self._visit_list(schema, keyword, where, depth)))
        if "allOf" in schema:
            factors += self._visit_list(schema, "allOf", where, depth)
            same = self._same.setdefault(id(schema), {})
            same |= {id(each): f"{where}/allOf" for each in schema["allOf"]}
        if "$ref" in schema:
            factors.append(self._visit_ref(schema, f"{where}/$ref", depth))
        return self._multiply(factors, where)

    def _visit_list(self, schema: dict[str, Any], keyword: str, where: str, depth: int) -> list[int]:
        return [
            self.visit(each, f"{where}/{keyword}/{i}", depth + 1) for i, each in enumerate(schema[keyword])
        ]

    def _visit_ref(self, schema: dict[str, Any], where: str, depth: int) -> int:
        ref = schema["$ref"]
        if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
            raise self._error(where, "must point into this schema, such as #/$defs/name", ref)
        found = self._resolve(ref, where)
        self._same.setdefault(id(schema), {})[id(found)] = where
        return self.visit(found, ref, depth + 1)

    def _resolve(self, ref: str, where: str) -> object:
        found: Any = self._root
        for part in ref.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(found):
                found = found[int(name[:9])]
            else:
                raise self._error(where, "must point into this schema; nothing is there", ref)
        return found

    def _multiply(self, factors: list[int], where: str) -> int:
        product = 1
        for factor in factors:
            if product > 1 and product * factor > max(product, MAX_PRODUCT):
                raise self._refuse(
                    where, f"combines more than {MAX_PRODUCT} alternatives; write out the possible ones"
                )
            product *= factor
        return product

    def _inner(self, schema: dict[str, Any], where: str) -> Iterator[tuple[str, object]]:
        """Yield every schema for a part of the value, with its place."""
        for keyword in _SCHEMAS_BY_NAME:
            for name, each in schema.get(keyword, {}).items():
                if keyword == "patternProperties":
                    self._count_pattern(name, f"{where}/{keyword}")
                yield f"{keyword}/{_escaped(name)}", each
        for keyword in (*_SCHEMAS, "prefixItems"):
            given = schema.get(keyword, [])
            if isinstance(given, list):
                yield from ((f"{keyword}/{i}", each) for i, each in enumerate(given))
            else:
                yield keyword, given

    def _check_values(self, schema: dict[str, Any], where: str) -> None:
        """Refuse keywords of one schema whose values mean nothing."""
        for keyword in _SCHEMAS_BY_NAME:
            named = schema.get(keyword, {})
            if not isinstance(named, dict):
                raise self._error(f"{where}/{keyword}", "must be an object", named)
            self._check_count(f"{where}/{keyword}", len(named), MAX_PROPERTIES, "properties")
        for keyword in _SCHEMA_LISTS:
            listed = schema.get(keyword, [True])
            if not (isinstance(listed, list) and listed):
                raise self._error(f"{where}/{keyword}", "must be a list of schemas", listed)
            self._check_count(f"{where}/{keyword}", len(listed), MAX_ALTERNATIVES, "schemas")
        for keyword in _COUNTS:
            count = schema.get(keyword, 0)
            if not _is_number(count) or count < 0 or count != int(count):
                raise self._error(f"{where}/{keyword}", "must be a whole number of at least 0", count)
            if count > MAX_BOUND:
                raise self._error(f"{where}/{keyword}", f"must be at most {MAX_BOUND}", count)
        for keyword in _BOUNDS:
            bound = schema.get(keyword, 0)
            if not (_is_number(bound) or (keyword.startswith("exclusive") and isinstance(bound, bool))):
                raise self._error(f"{where}/{keyword}", "must be a number", bound)
            if keyword == "multipleOf" and keyword in schema and bound <= 0:
                raise self._error(f"{where}/{keyword}", "must be above 0", bound)
            if not -MAX_BOUND <= bound <= MAX_BOUND:
                wanted = f"must be from -{MAX_BOUND} to {MAX_BOUND}, where numbers are exact; leave it out"
                raise self._error(f"{where}/{keyword}", wanted, bound)
        for low, high in _RANGES:
            if low in schema and high in schema and schema[low] > schema[high]:
                raise self._refuse(f"{where}/{low}", f"is above {high}: no value can be both")
        if schema.get("multipleOf", 0) > MAX_MULTIPLE_OF:
            raise self._error(
                f"{where}/multipleOf", f"must be at most {MAX_MULTIPLE_OF}", schema["multipleOf"]
            )
        self._check_words(schema, where)
        self._check_names(schema, where)

    def _check_names(self, schema: dict[str, Any], where: str) -> None:
        """Refuse required properties that are forbidden, and limits on properties that cannot be counted.

        Keys that the schema does not name may repeat, and a parser merges equal keys, so only one is
        sure to remain.
        """
        required, named = set(schema.get("required", [])), schema.get("properties", {})
        names = named.keys() | required
        is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        for name in sorted(required):
            if named.get(name, not is_closed) is False:
                why = "names a forbidden property: its schema, or additionalProperties, is false"
                raise self._error(f"{where}/required", why, name)
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", MAX_BOUND)
        if most < len(required):
            raise self._refuse(f"{where}/maxProperties", f"is below the {len(required)} that are required")
        if is_closed and least > len(names):
            why = f"is above {len(names)}, the number of properties that the schema names; name more of them"
            raise self._refuse(f"{where}/minProperties", f"{why}, or allow others with additionalProperties")
        if least > len(required) + 1 and not (is_closed and names == required):
            why = f"must be at most {len(required) + 1}, one more than are required; require more by name"
            raise self._error(f"{where}/minProperties", why, least)
        if names == required or (is_closed and most == MAX_BOUND):
            return
        for keyword, is_used in (
            ("minProperties", least > len(required)),
            ("maxProperties", most < MAX_BOUND),
        ):
            if is_used:
                why = "needs all properties to be required by name; require them, or leave it out"
                raise self._refuse(f"{where}/{keyword}", why)

    def _check_words(self, schema: dict[str, Any], where: str) -> None:
        types = schema.get("type", [])
        if types == [] and "type" in schema:
            raise self._refuse(f"{where}/type", "is an empty list, which allows nothing; leave it out")
        for name in types if isinstance(types, list) else [types]:
            if name not in TYPES:
                raise self._error(f"{where}/type", f"must be one of {', '.join(TYPES)}", name)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._error(f"{where}/required", "must be a list of names", required)
        named = schema.get("properties", {})
        what = "properties that are not required; require some"
        self._check_count(f"{where}/properties", len(named.keys() - set(required)), MAX_OPTIONAL, what)
        values = schema.get("enum", [])
        if not isinstance(values, list) or ("enum" in schema and not values):
            raise self._error(f"{where}/enum", "must be a list of at least one value", values)
        self._num_enum += len(values)
        self._check_count(f"{where}/enum", self._num_enum, MAX_ENUM, "values, together with other enums")
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise self._error(f"{where}/pattern", "must be a string", schema["pattern"])
            self._count_pattern(schema["pattern"], f"{where}/pattern")
        if where != "#" and "$id" in schema:
            raise self._refuse(f"{where}/$id", "is not supported below the root; use $defs")
        is_text = not types or "string" in types
        name = schema.get("format", "unknown")
        if is_text and not self._is_lenient and not (isinstance(name, str) and name in FORMATS):
            raise self._error(f"{where}/format", f"must be one of {', '.join(sorted(FORMATS))}", name)

    def _count_pattern(self, pattern: str, where: str) -> None:
        self._patterns_size += check_pattern(pattern, param=self._param, where=where)
        check_size(self._patterns_size, MAX_PATTERNS_SIZE, "all patterns", self._param)

    def _check_count(self, where: str, count: int, limit: int, what: str) -> None:
        if count > limit:
            raise self._refuse(where, f"has {count} {what}; at most {limit} are allowed")

    def _error(self, where: str, wanted: str, given: object) -> RequestError:
        return self._refuse(where, f"{wanted}, got {show_value(given)}")

    def _refuse(self, where: str, why: str) -> RequestError:
        keyword = where.rpartition("/")[2][:80]
        return constraint_error(
            f"the keyword {keyword!r} of the schema at {where[:200]} {why}"
            if keyword in _KEYWORDS
            else f"the schema at {where[:200]} {why}",
            self._param,
        )


_KEYWORDS = frozenset(
    (*UNSUPPORTED, *_SCHEMAS_BY_NAME, *_SCHEMA_LISTS, *_SCHEMAS, *_COUNTS, *_BOUNDS)
    + ("$id", "$ref", "enum", "format", "pattern", "required", "type")
)


def _is_number(value: object) -> bool:
    """Return True if a value is a number of JSON; 1e400 is read as infinity, which is not one."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _escaped(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name[:80].replace("~", "~0").replace("/", "~1")
