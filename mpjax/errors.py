"""CheckpointError, which every reader of checkpoints and of tokenizer files raises."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, inconsistent, or in a layout that can't be read.

    The message is one sentence for a person: the file, module or tensor, what was found, what was
    expected, and, if possible, what to do.
    """
