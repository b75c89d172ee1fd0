"""The refusal of results that are no numbers."""

from __future__ import annotations


class NotFiniteError(ValueError):
    """A model computes NaN or infinite numbers; the message says for what, and what to do.

    kind, row: what the model reads, such as "prompt", and which of them, from 0. dtype: what it
        computes in.
    """

    def __init__(self, kind: str, row: int, dtype: str) -> None:
        remedy = (
            ', as those beyond 65504 are in float16: load it with dtype="bfloat16"'
            if dtype == "float16"
            else f" in {dtype}, which has room for larger ones than any model needs: its weights "
            "are damaged, or not those that its configuration describes; fetch or convert them "
            "again"
        )
        super().__init__(f"{kind} {row}: the model computes NaN or infinite numbers{remedy}")
        self.row = row
