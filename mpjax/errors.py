"""The error that every reader of checkpoints, and of the files beside them, raises."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, inconsistent, or in a layout that can't be read.

    The message is one sentence for a person: it names the file, module or tensor, what was found,
    what was expected, and where there is one, the way out.
    """
