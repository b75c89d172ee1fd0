"""Exceptions shared by several folders."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, inconsistent, or in a layout that can't be read.

    The message is one sentence: the file, module or tensor, what was found, what was expected, and,
    if possible, a remedy.
    """


class ProcessLostError(ConnectionError):
    """A process of an engine over several processes has ended, or can't be reached.

    process: its number (`jax.process_index`). why: what is known of the reason.
    """

    def __init__(self, process: int, why: str) -> None:
        super().__init__(
            f"process {process} of the engine is lost ({why}): start the engine again in all "
            "processes"
        )
        self.process, self.why = process, why


class NotFiniteError(ValueError):
    """A model computes NaN or infinite values; the message names the input and a remedy.

    kind: the word for an input, such as "prompt". row: the input's index. dtype: of the model.
    """

    def __init__(self, kind: str, row: int, dtype: str) -> None:
        remedy = (
            ' in float16, which has none beyond 65504: load it with dtype="bfloat16"'
            if dtype == "float16"
            else f" in {dtype}, whose range is larger than any model needs: its weights are "
            "damaged, or belong to another configuration; fetch or convert the checkpoint again"
        )
        super().__init__(
            f"{kind} {row}: the model computes NaN or infinite numbers{remedy}. Or its logits "
            "processors allow no token, which they have to"
        )
        self.row, self.dtype = row, dtype
