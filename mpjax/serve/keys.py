"""Reads JSON objects of requests by tables of keys: obeyed, ignored and refused ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from mpjax.files.json_text import json_text
from mpjax.kernels.checks import did_you_mean, nearest
from mpjax.serve.errors import NOT_OFFERED, UNKNOWN_KEY, RequestError


@dataclasses.dataclass(frozen=True)
class Key:
    """The accepted values of a key, and their effect.

    effect: "obeyed", "ignored" (it can't change an answer) or "refused" (it would change answers
        and is not supported, except for values without effect).
    expected: the accepted values, in words.
    read: converts a value for the server. Raises Misfit for other values, or RequestError with an
        explanation.
    default: the value if the key is missing or null.
    """

    effect: str
    expected: str
    read: Callable[[Any], Any]
    default: Any = None

    def or_else(self, default: Any) -> Key:
        """The same key with a default."""
        return dataclasses.replace(self, default=default)


class Misfit(ValueError):
    """A value that a key does not accept."""


Table = Mapping[str, Key]


def read_keys(found: Any, table: Table, ignore_unknown: bool = False, place: str = "") -> Any:
    """The values of a table's obeyed keys, by name, with defaults for missing keys.

    found: a JSON object. ignore_unknown: whether unknown keys are ignored; null values always are.
    place: the object's path in the body, such as "stream_options.".

    Raises RequestError, which names the key.
    """
    values = {name: key.default for name, key in table.items() if key.effect == "obeyed"}
    for name, value in found.items():
        key, full = table.get(name), place + name
        if value is None or (key is None and ignore_unknown):
            continue
        if key is None:
            hint = did_you_mean(nearest(name, sorted(table)))
            message = f"{json_text(full, 80)} is no key of this request{hint}"
            raise RequestError(message, full, code=UNKNOWN_KEY)
        try:
            read = key.read(value)
        except Misfit:
            raise _refusal(key, full, value) from None
        if key.effect == "obeyed":
            values[name] = read
    return values


def _refusal(key: Key, name: str, value: Any) -> RequestError:
    if key.effect == "obeyed":
        return RequestError(f"{name} is {json_text(value)}: expected {key.expected}", name)
    return RequestError(
        f"{name} is {json_text(value)}, and this server does not offer it: expected {key.expected}",
        name,
        code=NOT_OFFERED,
    )


def ignored(but: Any = None) -> Key:
    """A key that can't change an answer. but: an item that would, so a list must not have it."""

    def read(value: Any) -> Any:
        if but is not None and isinstance(value, list) and but in value:
            raise Misfit
        return value

    return Key("ignored", "any value" if but is None else f"no list with {json_text(but)}", read)


def refused(*neutral: Any) -> Key:
    """An unsupported key. neutral: the values, besides null, that have no effect."""

    def read(value: Any) -> Any:
        if not any(_equal(value, one) for one in neutral):
            raise Misfit
        return value

    return Key("refused", " or ".join(["null", *map(json_text, neutral)]), read)


def _equal(value: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def accepted(expected: str, accepts: Callable[[Any], bool]) -> Key:
    """An obeyed key. accepts: whether a value is accepted."""

    def read(value: Any) -> Any:
        if not accepts(value):
            raise Misfit
        return value

    return Key("obeyed", expected, read)


def is_whole(value: Any) -> bool:
    """Whether a value is an integer in JSON's sense: 16.0 is one, true is not."""
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def whole(least: int, most: int | None = None) -> Key:
    """An integer from `least` to `most`."""

    def read(value: Any) -> int:
        if not is_whole(value) or value < least or (most is not None and value > most):
            raise Misfit
        return int(value)

    limits = f"of {least} or more" if most is None else f"from {least} to {most}"
    return Key("obeyed", f"a whole number {limits}", read)


def number(least: float, most: float | None = None) -> Key:
    """A finite number from `least` to `most`, as a float."""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Misfit
        try:
            found = float(value)
        except OverflowError:
            raise Misfit from None
        if not math.isfinite(found) or found < least or (most is not None and found > most):
            raise Misfit
        return found

    limits = f"of {least:g} or more" if most is None else f"from {least:g} to {most:g}"
    return Key("obeyed", f"a number {limits}", read)


def flag() -> Key:
    """A boolean; false if it is missing."""
    return accepted("true or false", lambda value: isinstance(value, bool)).or_else(False)


def text() -> Key:
    """A string."""
    return accepted("a text", lambda value: isinstance(value, str))


def anything(expected: str) -> Key:
    """A value that is checked later. expected: the accepted values, in words."""
    return accepted(expected, lambda value: True)


def record(name: str, table: Table) -> Key:
    """An object that is read by `table`. name: of the key."""

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Misfit
        return read_keys(value, table, place=f"{name}.")

    obeyed = [name for name, key in table.items() if key.effect == "obeyed"]
    return Key("obeyed", f"an object with {', '.join(obeyed or table)}", read)
