"""Translates JSON schemas without recursion or additional properties to regular expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

# Keywords that don't constrain a value.
IRRELEVANT = {"title", "description", "default", "examples", "$schema", "$id", "$comment"}
# Without escaped surrogates, which would be half a character in minLength's count.
CHARACTER = (
    r'(?:[^"\\\x00-\x1f\x7f]|\\["\\/bfnrt]'
    r"|\\u(?:[0-9a-cA-Ce-fE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"
)
INTEGER = r"-?(?:0|[1-9][0-9]*)"
NUMBER = INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
SIMPLE = {"boolean": "true|false", "null": "null", "integer": INTEGER, "number": NUMBER}


def schema_pattern(schema: Any, spaces: str) -> str:
    """A regular expression of a schema's values. spaces: that of white space between tokens.

    Raises ValueError for an unsupported keyword.
    """
    gap = f"(?:{spaces})?" if spaces else ""
    return _value(schema, gap)


def _value(schema: Any, gap: str) -> str:
    if not isinstance(schema, Mapping):
        raise ValueError(f"the schema {schema!r} allows values of any kind")
    own = {name: value for name, value in schema.items() if name not in IRRELEVANT}
    if "const" in own or "enum" in own:
        values = [own.pop("const")] if "const" in own else _list(own, "enum")
        kinds = _kinds(own) if "type" in own else list(IS_OF)
        _require_empty(own)
        values = [one for one in values if any(IS_OF[kind](one) for kind in kinds)]
        if not values:
            raise ValueError("the schema has an enum or const without any value of its type")
        return "|".join(re.escape(json.dumps(one, ensure_ascii=False)) for one in values)
    if "anyOf" in own:
        parts = _list(own, "anyOf")
        _require_empty(own)
        return "|".join(f"(?:{_value(one, gap)})" for one in parts)
    kinds = _kinds(own)
    if len(kinds) > 1:
        return "|".join(f"(?:{_value({**_of_kind(own, one), 'type': one}, gap)})" for one in kinds)
    [kind] = kinds
    if kind in SIMPLE:
        _require_empty(own)
        return SIMPLE[kind]
    return KINDS[kind](own, gap)


def _string(own: dict[str, Any], gap: str) -> str:
    least, most = _bounds(own, "Length")
    _require_empty(own)
    return f'"{CHARACTER}{{{least},{"" if most is None else most}}}"'


def _array(own: dict[str, Any], gap: str) -> str:
    if "items" not in own:
        raise ValueError("the schema has an array without items, which may be of any kind")
    item = f"(?:{_value(own.pop('items'), gap)})"
    least, most = _bounds(own, "Items")
    _require_empty(own)
    more = f"(?:{gap},{gap}{item})"
    bounds = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    items = "" if most == 0 else f"{item}{more}{bounds}{gap}"
    return rf"\[{gap}{items}\]" if least else rf"\[{gap}(?:{items})?\]"


def _object(own: dict[str, Any], gap: str) -> str:
    properties, required = own.pop("properties", {}), own.pop("required", [])
    if not isinstance(properties, Mapping):
        raise ValueError(f"the schema has properties {properties!r}: expected a mapping")
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise ValueError(f"the schema has required {required!r}: expected a list of texts")
    if own.pop("additionalProperties", True) is not False:
        raise ValueError("the schema has an object without additionalProperties false")
    _require_empty(own)
    if unknown := set(required) - set(properties):
        raise ValueError(f"the schema requires {sorted(unknown)}, which are no properties")
    # first: a pattern for each property that may come first, and all after it. behind: the pattern
    # of the properties after the current one.
    first: list[str] = []
    behind = ""
    for name, schema in reversed(list(properties.items())):
        key = re.escape(json.dumps(name, ensure_ascii=False))
        own_text = f"{key}{gap}:{gap}(?:{_value(schema, gap)})"
        first = [own_text + behind, *(() if name in required else first)]
        behind = f"(?:{gap},{gap}{own_text}){'' if name in required else '?'}{behind}"
    inner = f"(?:(?:{'|'.join(first)}){gap}){'' if required else '?'}" if first else ""
    return rf"\{{{gap}{inner}\}}"


KINDS: dict[str, Callable[[dict[str, Any], str], str]] = {
    "string": _string,
    "array": _array,
    "object": _object,
}
# JSON type → whether a value has it. true is not a number, and 1.0 is an integer.
IS_OF: dict[str, Callable[[Any], bool]] = {
    "boolean": lambda one: isinstance(one, bool),
    "null": lambda one: one is None,
    "integer": lambda one: type(one) is int or (isinstance(one, float) and one.is_integer()),
    "number": lambda one: type(one) in (int, float),
    "string": lambda one: isinstance(one, str),
    "array": lambda one: isinstance(one, list),
    "object": lambda one: isinstance(one, Mapping),
}
# JSON type → its keywords, for schemas whose `type` is a list.
OF_KIND = {
    "string": {"minLength", "maxLength"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


def _of_kind(own: dict[str, Any], kind: str) -> dict[str, Any]:
    _require_empty({k: v for k, v in own.items() if all(k not in it for it in OF_KIND.values())})
    return {name: value for name, value in own.items() if name in OF_KIND.get(kind, ())}


def _kinds(own: dict[str, Any]) -> list[str]:
    """The schema's types, as a list. Raises ValueError for a missing or unknown type."""
    found = own.pop("type", None)
    kinds = found if isinstance(found, list) else [found]
    if not kinds or not all(isinstance(one, str) and one in IS_OF for one in kinds):
        raise ValueError(f"the schema has the type {found!r}, which is any or unknown")
    return kinds


def _list(own: dict[str, Any], name: str) -> list[Any]:
    """Pops a keyword's list. Raises ValueError if it is not a list, or empty."""
    found = own.pop(name)
    if not isinstance(found, list) or not found:
        raise ValueError(f"the schema has {name} {found!r}: expected a list that is not empty")
    return found


def _bounds(own: dict[str, Any], what: str) -> tuple[int, int | None]:
    """Pops the bounds min… and max… (None without) of a length or count.

    Raises ValueError if they aren't non-negative integers in order.
    """

    def whole(name: str) -> int:
        found = own.pop(name)
        if not IS_OF["integer"](found) or found < 0:
            raise ValueError(f"the schema has {name} {found!r}: expected a whole number")
        return int(found)

    least = whole(f"min{what}") if f"min{what}" in own else 0
    most = whole(f"max{what}") if f"max{what}" in own else None
    if most is not None and most < least:
        raise ValueError(f"the schema has max{what} {most} below min{what} {least}")
    return least, most


def _require_empty(left: Mapping[str, Any]) -> None:
    if left:
        raise ValueError(f"the schema has {', '.join(sorted(left))}, which no table follows")
