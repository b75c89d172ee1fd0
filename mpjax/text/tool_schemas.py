"""Types of tool arguments by their JSON schema, for values that are written without quotes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
# Python's constants, which templates render and models learn.
PYTHONIC = {"True": True, "False": False, "None": None}
DEPTH = 16  # limit of nested references, which may be circular


def property_of(schema: Schema, key: str) -> Schema:
    """The schema of an argument, with the definitions that it may refer to; {} without one."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {**definitions, **found} if isinstance(found, Mapping) else {}


def types(schema: Schema) -> set[str]:
    """The JSON types that a schema allows; empty if it names none."""
    return {*_types(schema, schema, DEPTH)}


def is_text(schema: Schema) -> bool:
    """Whether a schema allows only strings."""
    return types(schema) == {"string"}


def as_json(written: str, schema: Schema) -> str:
    """The JSON of a value that is written without quotes.

    The value is a string unless it parses as another type that the schema allows. If the schema
    names no type, it is JSON if it parses as JSON, else a string.
    """
    allowed = types(schema)
    bare = written.strip()
    try:
        value = PYTHONIC[bare] if bare in PYTHONIC else json.loads(bare, parse_constant=no_json)
    except (ValueError, RecursionError):
        value = written
    kind = _kind(value)
    if isinstance(value, str) or (allowed and not allowed & {kind, _wider(kind)}):
        return json.dumps(written, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if bare in PYTHONIC else bare


def no_json(word: str) -> None:
    """Raises ValueError for a word such as NaN, which Python's parser accepts but JSON lacks."""
    raise ValueError(f"{word} is no JSON")


def _types(schema: Any, root: Schema, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or not depth:
        return
    found = schema.get("type")
    kinds = found if isinstance(found, list) else [found]
    yield from (one for one in kinds if isinstance(one, str))
    if found is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        yield from map(_kind, values if isinstance(values, list) else [])
        for name in ("anyOf", "oneOf", "allOf"):
            several = schema.get(name)
            for one in several if isinstance(several, list) else []:
                yield from _types(one, root, depth - 1)
        if isinstance(reference := schema.get("$ref"), str):
            yield from _types(_referred(root, reference), root, depth - 1)


def _referred(root: Any, reference: str) -> Any:
    """The schema to which a reference such as "#/$defs/name" points; None if there is none."""
    for name in reference.removeprefix("#/").split("/"):
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def _kind(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def _wider(kind: str) -> str:
    return "number" if kind == "integer" else kind
