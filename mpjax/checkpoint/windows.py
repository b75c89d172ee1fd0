"""Windows of linear maps: the ranges of channels that one of several processes needs.

Tensors are memory-mapped, so bytes outside a window are not read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.checkpoint.plan import LinearSource
from mpjax.checkpoint.safetensors import TensorInfo
from mpjax.checkpoint.schemes.tensors import Axes, Axis
from mpjax.kernels import WeightFormat
from mpjax.kernels import codes as code_kinds
from mpjax.kernels.cutting import cutting_unit
from mpjax.models.window import Window

BIAS = {"bias": Axes(None, Axis(0))}
PLAIN = {"weight": Axes(Axis(1), Axis(0)), **BIAS}  # [out, in]
TRANSPOSED = {"weight": Axes(Axis(0), Axis(1)), **BIAS}


def narrow(
    sources: Sequence[LinearSource],
    windows: Sequence[Window],
    read: Callable[[TensorInfo], np.ndarray],
) -> tuple[tuple[LinearSource, ...], list[Window]]:
    """The sources of a place, restricted to windows of channels, and these windows.

    Windows are widened to whole groups and words. If a source's format can only be decoded or
    rounded as a whole, all sources are read whole, with windows of all channels.
    """
    if windows[0].is_of_experts:
        return _some_experts(sources, list(windows))
    found = []
    for source, window in zip(sources, windows, strict=True):
        channels = source.shape[0 if window.is_of_inputs else 1]
        order = None if source.order is None else read(source.order)
        unit = _unit(source, window, order)
        if unit is None:
            break
        found.append(dataclasses.replace(source, window=window.widened(unit, channels)))
    if len(found) == len(sources):
        return tuple(found), [each.window for each in found if each.window is not None]
    whole = [
        window._replace(begin=0, end=source.shape[0 if window.is_of_inputs else 1])
        for source, window in zip(sources, windows, strict=True)
    ]
    return tuple(sources), whole


def _some_experts(
    sources: Sequence[LinearSource], windows: list[Window]
) -> tuple[tuple[LinearSource, ...], list[Window]]:
    """The sources of the experts in a window; sources are in the order of experts. See `narrow`."""
    each = len(windows)
    if not all(map(keeps_scales, sources)):
        whole = windows[0]._replace(begin=0, end=len(sources) // each)
        return tuple(sources), [whole] * each
    return tuple(sources[windows[0].begin * each : windows[0].end * each]), windows


def take(source: LinearSource, suffix: str, array: Any) -> Any:
    """Slices a memory-mapped tensor to the channels of `source.window`; all without a window."""
    window, reader = source.window, source.reader
    if window is None:
        return array
    if reader is not None and suffix == reader.shape_suffix:
        return np.array(window.of(source.shape)[::-1], array.dtype)
    if reader is not None and suffix == reader.order_suffix and window.is_of_inputs:
        order = array[window.begin : window.end]
        return order - order[0]
    axis = _axis(_axes(source).get(suffix), window)
    if axis is None:
        return array
    places = slice(window.begin // axis.channels, -(-window.end // axis.channels))
    return array[(slice(None),) * axis.number + (places,)]


def _axes(source: LinearSource) -> Mapping[str, Axes]:
    """The axes of a source's tensors; empty if it can only be read as a whole."""
    if source.reader is not None:
        found = source.reader.axes
        return {**found, **BIAS} if found else {}
    return TRANSPOSED if source.is_transposed else PLAIN


def _axis(axes: Axes | None, window: Window) -> Axis | None:
    if axes is None:
        return None
    return axes.inputs if window.is_of_inputs else axes.outputs


def _unit(source: LinearSource, window: Window, order: np.ndarray | None) -> int | None:
    """The unit of windows of this source: their begin and end are multiples of this many channels.

    None if the source can't be read in parts.
    """
    axes = _axes(source)
    of_window = [_axis(axes.get(suffix), window) for suffix in source.tensors]
    found = [axis.channels for axis in of_window if axis is not None]
    if not found or not keeps_scales(source):
        return None
    if not window.is_of_inputs:
        return math.lcm(*found)
    in_order = order is None or bool(np.all(order[:-1] <= order[1:]))
    if not in_order or (source.reader is None and not _rounds_groups(source.format)):
        return None
    format = source.format
    return math.lcm(
        *found, *(() if format is None else (cutting_unit(format), format.group_size or 1))
    )


def _rounds_groups(format: WeightFormat | None) -> bool:
    """Whether rounding to a format treats each group of input channels independently."""
    if format is None:
        return True
    return format.group_size is not None and not code_kinds.of(format).has_channel_scales


def keeps_scales(source: LinearSource) -> bool:
    """Whether the dtype of scales follows from the file's dtype, not from their values."""
    format = source.format
    if source.reader is None or format is None:
        return True
    dtypes = {str(info.dtype) for info in source.tensors.values()}
    return "float32" not in dtypes or "float32" in code_kinds.of(format).scale_dtypes
