"""Names of keys in a table, by templates, and the checks of a configuration's fields.

A template has the fields of a key in braces: `{channels}x{outputs}` is `4096x24576`. A boolean
field has the text for true, such as `{gated: gated}`, and nothing for false.
"""

from __future__ import annotations

import dataclasses
import re
import string
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints


def write(template: str, key: Any) -> str:
    """The name of a key, which has the template's fields as attributes."""
    text = ""
    for literal, field, flag in _parts(template):
        value = getattr(key, field) if field else ""
        text += literal + (flag if value is True else "" if value is False else str(value))
    return text


def read(template: str, name: str, keys: type[Any]) -> dict[str, Any]:
    """The fields in a name. Raises ValueError for a name that does not match the template.

    keys: the type of the keys, which has the fields' types.
    """
    kinds, pattern, fields = get_type_hints(keys), "", []
    for literal, field, flag in _parts(template):
        pattern += re.escape(literal)
        if field:
            fields.append(field)
            pattern += {bool: f"({re.escape(flag)})?", int: r"([1-9]\d*)"}.get(kinds[field], "(.+)")
    match = re.fullmatch(pattern, name)
    if match is None:
        plain = re.sub(r"\{\w+:([^}]*)\}", r"[\1]", template).replace("{", "").replace("}", "")
        raise ValueError(f"{name!r} is not of the form {plain!r}")
    values = zip(fields, match.groups(), strict=True)
    return {field: _value(kinds[field], value) for field, value in values}


def _parts(template: str) -> Iterator[tuple[str, str, str]]:
    """The literal parts of a template, each with the next field and a boolean's text, or ""."""
    for literal, field, flag, _ in string.Formatter().parse(template):
        yield literal, field or "", flag or ""


def _value(kind: type, text: str | None) -> Any:
    return text is not None if kind is bool else kind(text)


def require_values(kind: type, values: Mapping[str, Any]) -> None:
    """Raises ValueError for values that the fields of a configuration can't have.

    An integer is at least 1, or 0 if that is the field's default. A string is one of a Literal's.
    """
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name not in values:
            continue
        value, hint = values[field.name], hints[field.name]
        if isinstance(hint, types.UnionType):  # None, which is not written, or another type
            hint = get_args(hint)[0]
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                raise ValueError(f"{field.name} is {value!r}, expected one of {get_args(hint)}")
        elif hint is bool:
            if type(value) is not bool:
                raise ValueError(f"{field.name} is {value!r}, expected true or false")
        elif type(value) is not int or value < (field.default != 0):
            expected = "a positive integer" if field.default != 0 else "an integer from 0 on"
            raise ValueError(f"{field.name} is {value!r}, expected {expected}")
