"""Rounds sizes up to buckets, so that inputs of similar sizes share a compiled program."""

from __future__ import annotations


def bucket_tokens(tokens: int) -> int:
    """The length to which `tokens` tokens are padded: 16, 32, … 512, or a multiple of 512."""
    return _bucket(tokens, 16, 512)


def bucket_rows(rows: int) -> int:
    """The batch to which `rows` rows are padded: 1, 2, 4, or a multiple of 8."""
    return _bucket(rows, 1, 8)


def ladder(least: int, most: int) -> list[int]:
    """The sizes `least`, 4 · `least`, 16 · `least`, … below `most`, and `most`."""
    return [] if least > most else sorted({least, *ladder(4 * least, most), most})


def _bucket(size: int, smallest: int, step: int) -> int:
    """The next power of two from `smallest` to `step`, or the next multiple of `step` beyond."""
    if size > step:
        return -(-size // step) * step
    return max(smallest, 1 << (size - 1).bit_length())
