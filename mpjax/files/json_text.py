"""Spells values of JSON in messages."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any, most: int = 40) -> str:
    """The first characters of a value as JSON spells it, such as null, true and "a".

    value: what json.loads returned. most: of the characters. Half of a surrogate pair, which a
    message in UTF-8 can't have, is spelled out.
    """
    return in_utf8(json.dumps(value, ensure_ascii=False)[:most])


def in_utf8(text: str) -> str:
    """A text in which halves of surrogate pairs, which UTF-8 can't encode, are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()
