"""Symmetry of formats: if any map of a joint product has zero points, all get them.

A symmetric format is an asymmetric one whose zero points are all the middle of the codes, so that a
kernel that is declared asymmetric keeps its numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from mpjax.kernels import QuantizedTensor
from mpjax.kernels.formats import WeightFormat

Formats = Sequence[WeightFormat | None]


def with_symmetry(kernel: Any, format: WeightFormat | None) -> Any:
    """A kernel that is declared as symmetric as a format; a plain kernel stays as it is."""
    if format is None or not isinstance(kernel, QuantizedTensor):
        return kernel
    declared = dataclasses.replace(kernel.format, symmetric=format.symmetric)
    return dataclasses.replace(kernel, format=declared)


def shared_symmetry(formats: Formats) -> WeightFormat | None:
    """The first of some formats that differ in symmetry alone; symmetric if all are."""
    first = formats[0]
    if first is None:
        return None
    return dataclasses.replace(
        first, symmetric=all(format is not None and format.symmetric for format in formats)
    )


def formats_of_all(formats: Formats) -> list[WeightFormat | None]:
    """The formats of linear maps, symmetric if those of all processes are.

    Zero points decide whether a map is symmetric, and each process has read some of them.
    """
    mine = np.array([format is None or format.symmetric for format in formats])
    every = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, len(formats)).all(0)
    return [
        None if format is None else dataclasses.replace(format, symmetric=bool(symmetric))
        for format, symmetric in zip(formats, every, strict=True)
    ]
