"""Cuts packed tensors into parts along K and N, and joins the parts again.

A part is a packed tensor, and all parts have one shape: the last parts of uneven axes are padded
with zeros. Along N, and along K at multiples of `cutting_unit`, words are copied unchanged.
Elsewhere along K the codes are unpacked and packed again, in smaller groups if groups would be
split. Leading axes (experts) stay as they are.

Functions take NumPy and JAX arrays: slices of NumPy arrays need no compilation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.formats import WeightFormat, group_sizes
from mpjax.kernels.plain_codes import PlainCodes
from mpjax.kernels.quantized_tensor import QuantizedTensor, pack, unpack


class Run(NamedTuple):
    """The range [begin, end) of an axis, padded with zeros to a length of `size`."""

    begin: int
    end: int
    size: int

    @property
    def length(self) -> int:
        """The length of the range without padding."""
        return self.end - self.begin

    def moved(self, places: int) -> Run:
        """The run shifted by `places`."""
        return self._replace(begin=self.begin + places, end=self.end + places)

    def times(self, channels: int) -> Run:
        """The run of channels if each index stands for this many channels."""
        return Run(*(channels * place for place in self))


Runs = Sequence[Run]


def take_runs(array: Any, runs: Runs, axis: int) -> Any:
    """The concatenated runs of an array along an axis."""
    axis, numpy = axis % array.ndim, _namespace(array)
    pieces = []
    for run in runs:
        pieces.append(array[(slice(None),) * axis + (slice(run.begin, run.end),)])
        if missing := run.size - run.length:
            shape = (*array.shape[:axis], missing, *array.shape[axis + 1 :])
            pieces.append(numpy.zeros(shape, array.dtype))
    return pieces[0] if len(pieces) == 1 else numpy.concatenate(pieces, axis=axis)


def put_runs(parts: Sequence[Any], runs: Sequence[Runs], axis: int) -> Any:
    """Joins parts, the results of `take_runs`, to the whole array.

    runs: of each part. Several parts may have the same run; together they cover the axis.
    """
    axis, found = axis % parts[0].ndim, {}
    for part, taken in zip(parts, runs, strict=True):
        offset = 0
        for run in taken:
            if run.length and run.begin not in found:
                places = slice(offset, offset + run.length)
                found[run.begin] = part[(slice(None),) * axis + (places,)]
            offset += run.size
    pieces = [found[begin] for begin in sorted(found)]
    return _namespace(parts[0]).concatenate(pieces, axis=axis)


def cutting_unit(format: WeightFormat) -> int:
    """The number of input channels at multiples of which a format's words can be cut along K."""
    return math.lcm(format.block, format.parameter_channels or 1) if format.is_packed else 1


def cut_outputs(tensor: QuantizedTensor, runs: Runs) -> QuantizedTensor:
    """The output channels of the concatenated runs.

    The padding after a run is channels with zero weights.
    """
    return _each_output_array(tensor, lambda name, axis: take_runs(name(tensor), runs, axis))


def join_outputs(parts: Sequence[QuantizedTensor], runs: Sequence[Runs]) -> QuantizedTensor:
    """Joins parts, the results of `cut_outputs`, to the whole tensor. runs: of each part."""
    return _each_output_array(
        parts[0], lambda name, axis: put_runs([name(part) for part in parts], runs, axis)
    )


def _each_output_array(tensor: QuantizedTensor, function: Any) -> QuantizedTensor:
    """The tensor with each array that has an axis of N replaced by the result of a function.

    function: takes a getter of the array, and its axis of output channels.
    """
    channel_scales = tensor.channel_scales
    if channel_scales is not None:
        channel_scales = function(lambda part: part.channel_scales, -1)
    return dataclasses.replace(
        tensor,
        words=function(lambda part: part.words, -2),
        parameters=function(lambda part: part.parameters, -1),
        channel_scales=channel_scales,
    )


def require_cuttable(format: WeightFormat, runs: Runs) -> None:
    """Raises ValueError if `cut_inputs` can't cut a tensor of this format into these runs."""
    if format.is_packed and not _is_aligned(format, runs):
        _group_size(format, runs)


def cut_inputs(tensor: QuantizedTensor, runs: Runs, number: int, begin: int = 0) -> QuantizedTensor:
    """The part with the input channels of one of the runs.

    runs: of all parts, of equal size, which contain each input channel once. In x, the channels of
        a part after its run must be zeros.
    number: the index of the part.
    begin: the channel at which the tensor begins, if it has only a window of the input channels
        that contains the part: a multiple of `cutting_unit` and of the group size.

    With a permutation, a run is of rows of the packed matrix, and the part's permutation has the
    indices of these rows' channels in the x of all parts, concatenated.

    Raises ValueError if no group size of the format divides the parts into whole groups.
    """
    run, permutation = runs[number].moved(-begin), tensor.permutation
    if begin and permutation is not None:
        raise ValueError("a window of a tensor with a permutation can't be cut: pass all of it")
    if _is_aligned(tensor.format, runs):
        part = _cut_words(tensor, run)
    else:
        part = _cut_codes(tensor, run, _group_size(tensor.format, runs))
    if permutation is None:
        return part
    rows = take_runs(permutation, [run._replace(size=run.length)], -1)
    places = jnp.asarray(_places(runs))[rows]
    return dataclasses.replace(
        part, permutation=take_runs(places, [Run(0, run.length, run.size)], -1)
    )


def join_inputs(
    parts: Sequence[QuantizedTensor], runs: Runs, format: WeightFormat
) -> QuantizedTensor:
    """Joins parts, the results of `cut_inputs`, to the whole tensor in its own format."""
    plain, each = [unpack(part) for part in parts], [[run] for run in runs]
    permutation = None
    if plain[0].permutation is not None:
        channels = np.zeros(len(runs) * runs[0].size, np.int32)
        places = _places(runs)
        channels[places] = np.arange(len(places))
        rows = put_runs([part.permutation for part in plain], each, -1)
        permutation = jnp.asarray(channels)[rows]
    sources = _sources_of_groups(runs, plain[0].format, format)

    def stack(arrays: Sequence[Any]) -> jax.Array:
        return jnp.stack([arrays[part][..., row, :] for part, row in sources], -2)

    zeros = [part.zeros for part in plain if part.zeros is not None]
    widths = [part.activation_bits for part in plain if part.activation_bits is not None]
    if widths:
        bits = jnp.stack([widths[part][..., row] for part, row in sources], -1)
    return pack(
        dataclasses.replace(
            plain[0],
            format=format,
            codes=put_runs([part.codes for part in plain], each, -2),
            scales=stack([part.scales for part in plain]),
            zeros=stack(zeros) if zeros else None,
            permutation=permutation,
            activation_bits=bits if widths else None,
        )
    )


def _places(runs: Runs) -> np.ndarray:
    """The index of each input channel in the concatenated x of all parts, int32 [K]."""
    places = np.zeros(max(run.end for run in runs), np.int32)
    for number, run in enumerate(runs):
        places[run.begin : run.end] = number * run.size + np.arange(run.length)
    return places


def _sources_of_groups(
    runs: Runs, local: WeightFormat, whole: WeightFormat
) -> list[tuple[int, int]]:
    """For each group of the whole tensor, the part with its scale, and the scale's row there."""
    found, channels = [], max(run.end for run in runs)
    for group in range(whole.groups(channels)):
        row = group * (whole.group_size or channels)
        part = next(i for i, run in enumerate(runs) if run.begin <= row < run.end)
        found.append((part, (row - runs[part].begin) // (local.group_size or channels)))
    return found


def _is_aligned(format: WeightFormat, runs: Runs) -> bool:
    """Whether all runs begin and end at multiples of the unit, or at the end of the tensor."""
    unit, channels = cutting_unit(format), max(run.end for run in runs)
    return all(
        run.begin % unit == run.size % unit == 0 and (run.end % unit == 0 or run.end == channels)
        for run in runs
        if run.length
    )


def _cut_words(tensor: QuantizedTensor, run: Run) -> QuantizedTensor:
    """The input channels of a run that begins at a multiple of the unit."""
    format, unit = tensor.format, cutting_unit(tensor.format)
    begin = run.begin if run.length else 0
    units = Run(begin, begin + -(-run.length // unit) * unit, run.size)

    def places(size: int) -> list[Run]:
        return [Run(*(place // size for place in units))]

    parameters = tensor.parameters
    if (size := format.parameter_channels) is not None:
        parameters = take_runs(parameters, places(size), -2)
    words = take_runs(
        tensor.words, *((places(1), -1) if format.is_flat else (places(format.block), -3))
    )
    return dataclasses.replace(
        tensor,
        words=words,
        parameters=parameters,
        padding=0,
        activation_bits=_cut_widths(tensor, run),
    )


def _cut_codes(tensor: QuantizedTensor, run: Run, size: int | None) -> QuantizedTensor:
    """The input channels of a run, packed again in groups of `size`."""
    plain = dataclasses.replace(unpack(tensor), permutation=None)
    if size is None:
        groups = Run(0, 1, 1)
    else:
        plain = _regrouped(plain, size)
        begin, end = run.begin // size, -(-run.end // size)
        groups = Run(begin, end, plain.format.groups(run.size)) if run.length else Run(0, 0, 1)
        groups = groups._replace(size=plain.format.groups(run.size))
    zeros = None if plain.zeros is None else take_runs(plain.zeros, [groups], -2)
    codes, scales = take_runs(plain.codes, [run], -2), take_runs(plain.scales, [groups], -2)
    return pack(
        dataclasses.replace(
            plain,
            codes=codes,
            scales=scales,
            zeros=zeros,
            activation_bits=_cut_widths(tensor, run),
        )
    )


def _cut_widths(tensor: QuantizedTensor, run: Run) -> Any:
    """The activation widths of a run of whole groups; None for a tensor without them.

    Padding after the run gets the fewest bits of any group, so that groups of equal widths stay
    equal.
    """
    bits, size = tensor.activation_bits, tensor.format.group_size
    if bits is None or size is None:
        return None
    groups = Run(run.begin // size, -(-run.end // size), tensor.format.groups(run.size))
    if not run.length:
        groups = Run(0, 0, groups.size)
    found = take_runs(bits, [groups], -1)
    return _namespace(found).where(found == 0, bits.min(), found).astype("uint8")


def _regrouped(plain: PlainCodes, size: int) -> PlainCodes:
    """The same weights in smaller groups of `size`, which repeat the larger groups' parameters."""
    assert plain.format.group_size is not None
    repeats = plain.format.group_size // size
    return dataclasses.replace(
        plain,
        format=dataclasses.replace(plain.format, group_size=size),
        scales=jnp.repeat(plain.scales, repeats, axis=-2),
        zeros=None if plain.zeros is None else jnp.repeat(plain.zeros, repeats, axis=-2),
    )


def _group_size(format: WeightFormat, runs: Runs) -> int | None:
    """The largest group size, at most the format's own, that divides all runs into whole groups.

    Raises ValueError if there is none.
    """
    size = format.group_size
    if size is None:
        return None
    if format.codes == "float8" and all(
        run.begin % size == 0 or (run.end - 1) // size == run.begin // size for run in runs
    ):
        return size  # a part's last group may be shorter
    shared = math.gcd(*(place for run in runs for place in run))
    for smaller in sorted((s for s in group_sizes(format.codes) if s), reverse=True):
        if size % smaller == 0 and shared % smaller == 0:
            return smaller
    raise ValueError(
        f"{max(run.end for run in runs)} input channels of a {format} tensor can't be divided into "
        f"{len(runs)} parts of {runs[0].size}, which are no whole groups: choose "
        f"fewer parts (devices), or {_other_formats(format)}"
    )


def _other_formats(format: WeightFormat) -> str:
    """Names of weight formats, for messages, that can be cut where this format can't."""
    if len(group_sizes(format.codes)) == 1:
        return f"another weight format, as {format.codes} has groups of {format.group_size} alone"
    return "a weight format with smaller groups, or with one group for all channels (gK)"


def _namespace(array: Any) -> Any:
    return np if isinstance(array, np.ndarray) else jnp
