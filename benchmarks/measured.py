"""The options of the command that measured a result file, from the file's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Named(Protocol):
    """A shape of a benchmark."""

    @property
    def name(self) -> str:
        """The name of its model and its own, such as `qwen3-8b.qkv`."""


def models_or_shapes(
    rows: Sequence[Mapping[str, Any]], known: Mapping[str, Sequence[Named]]
) -> str:
    """Names of the measured shapes, or a model's name for all of its shapes, with commas.

    known: the shapes of each model.
    """
    measured = list(dict.fromkeys(row["shape"] for row in rows))
    parts: list[str] = []
    for model in dict.fromkeys(name.partition(".")[0] for name in measured):
        of_model = [name for name in measured if name.partition(".")[0] == model]
        whole = [shape.name for shape in known.get(model, ())]
        parts += [model] if of_model == whole else of_model
    return ",".join(parts)
