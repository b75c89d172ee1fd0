"""Parses proposers of the command line, such as `ngram:4:3` and `draft:4:FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpjax.generation.speculation.draft import Draft
from mpjax.generation.speculation.heads import MTP, read_head
from mpjax.generation.speculation.ngram import Ngram
from mpjax.generation.speculation.proposer import Proposer, read_k
from mpjax.kernels.checks import shown
from mpjax.loading import load

EXPECTED = (
    "expected ngram, ngram:4 or ngram:4:3 (the 4 tokens that followed the last 3 before), or "
    "draft:4:FOLDER_OR_ID (4 tokens of a smaller model; @W4A16KV8 behind it gives its precision), "
    "mtp or mtp:3 (3 tokens of the model's own multi-token-prediction head), or "
    "eagle:3:FOLDER_OR_ID (3 tokens of an EAGLE-3 head)"
)


def parse(text: str) -> Proposer:
    """The proposer that a string describes; a draft model is loaded.

    Raises ValueError for other strings, and the errors of mpjax.load for the draft model.
    """
    if (head := read_head(_head_of(text))) is not None:
        return head
    kind, *rest = text.split(":", 2)
    numbers = rest[:1] if kind == "draft" else rest
    is_known = (kind == "ngram" or (kind == "draft" and len(rest) == 2)) and all(
        number.isdecimal() for number in numbers
    )
    if not is_known:
        raise ValueError(f"speculate is {shown(text)}: {EXPECTED}")
    if kind == "ngram":
        return Ngram(*map(int, numbers))
    k, source, precision = read_k("draft", int(numbers[0])), rest[1], None
    if "@" in source and not Path(source).exists():
        source, _, precision = source.rpartition("@")
    return Draft(load(source, precision=precision), k)


def head_options(text: str | None) -> dict[str, Any]:
    """The arguments of mpjax.load with which the head that a string asks for is loaded.

    Raises ValueError as `parse` for a head, and for an EAGLE-3 head without a folder.
    """
    head = None if text is None else read_head(_head_of(text))
    if text is None or head is None:
        return {}
    if isinstance(head, MTP):
        return {"mtp": True}
    folder = text[len(_head_of(text)) + 1 :]
    if not folder:
        raise ValueError(f"speculate is {shown(text)}: {EXPECTED}")
    return {"drafter": folder}


def _head_of(text: str) -> str:
    """The text without the folder of `eagle:3:FOLDER`."""
    return ":".join(text.split(":", 2)[:2]) if text.startswith("eagle:") else text
