"""Formats JSON values for messages."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any, most: int = 40) -> str:
    """The first `most` characters of a value's JSON, such as null, true and "a".

    value: a result of json.loads. Lone surrogates, which UTF-8 can't encode, are escaped.
    """
    return in_utf8(json.dumps(value, ensure_ascii=False)[:most])


def in_utf8(text: str) -> str:
    """The text with its lone surrogates, which UTF-8 can't encode, escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
