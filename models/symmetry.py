"""Symmetry of formats: if any map of a joint product is asymmetric, all are declared so.

A symmetric kernel has zero points that are all the middle of the codes, so declaring it asymmetric
doesn't change its weights.
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
    """The kernel, declared to be as symmetric as `format`; a plain kernel is returned unchanged."""
    if format is None or not isinstance(kernel, QuantizedTensor):
        return kernel
    declared = dataclasses.replace(kernel.format, symmetric=format.symmetric)
    return dataclasses.replace(kernel, format=declared)


def shared_symmetry(formats: Formats) -> WeightFormat | None:
    """The format shared by formats that differ only in symmetry; symmetric if all of them are."""
    first = formats[0]
    if first is None:
        return None
    return dataclasses.replace(
        first, symmetric=all(format is not None and format.symmetric for format in formats)
    )


def formats_of_all(formats: Formats) -> list[WeightFormat | None]:
    """The formats of linear maps, each symmetric only if it is symmetric in all processes.

    A map is symmetric if its zero points are; each process has loaded only some of them.
    """
    mine = np.array([format is None or format.symmetric for format in formats])
    every = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, len(formats)).all(0)
    return [
        None if format is None else dataclasses.replace(format, symmetric=bool(symmetric))
        for format, symmetric in zip(formats, every, strict=True)
    ]
