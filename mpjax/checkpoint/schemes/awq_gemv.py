"""Reads AWQ checkpoints in the layouts `gemv` and `gemv_fast`: 4 bits, packed along input channels.

With K input and N output channels in G groups, W is the number of 32-bit words for G zero points,
rounded up by writers. A `gemv` module has `qweight` int32 [N, K / 8] and `qzeros` int32 [N, W],
with nibbles in ascending order, and `scales` float16 [N, 8 W]; the weight is (code − zero) · scale.
A `gemv_fast` module has `qweight` int16 [N / 4, K], four rows interleaved, and `scales` and
`scaled_zeros` float16 [8 W, N]; the weight is code · scale + scaled zero. Source: AutoAWQ,
awq/modules/linear/gemv.py and gemv_fast.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpjax.checkpoint.schemes import awq, checks, words
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.schemes.scheme import Scheme
from mpjax.checkpoint.schemes.tensors import Shape, Specs, Tensors
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.codes.base import GROUP_SIZES

PLAIN, FAST = LAYOUTS = ("gemv", "gemv_fast")
# Group size → the multiple to which writers round words of zero points up; 1 for larger groups.
MULTIPLES = {32: 4, 64: 2}
# In gemv_fast, the words of four rows are interleaved, 64 channels at a time.
ROWS, CHANNELS = 4, 64


@dataclasses.dataclass(frozen=True)
class AWQGemvReader(Reader):
    """AWQ in the layout `gemv` or `gemv_fast`.

    group_size: input channels per group; None: one group of all channels. zero_point: as in
    AWQReader. layout: one of LAYOUTS.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "scaled_zeros")

    group_size: int | None
    zero_point: bool = True
    layout: str = PLAIN

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module's tensors have the packing of `gemv` or `gemv_fast`."""
        return words.packing(specs) == PLAIN or "scaled_zeros" in specs

    @property
    def weights(self) -> WeightFormat:
        """The format of all modules."""
        if self.layout == PLAIN:
            return words.usual_format(awq.BITS, self.group_size)
        return WeightFormat("affine4", self.group_size if self.group_size in GROUP_SIZES else 128)

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device."""
        if self.layout == PLAIN:
            return words.uniform_format(name, awq.BITS, self.group_size, channels)
        size = self.group_size or channels
        if size not in GROUP_SIZES:
            raise CheckpointError(
                f"{name} has groups of {size} input channels: supported in the layout {FAST} are "
                "groups of 32, 64 and 128; load a 'gemm' checkpoint of the model"
            )
        return WeightFormat("affine4", size)

    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks a module's tensors by shape and dtype and returns its (K, N)."""
        rows, columns = (*getattr(specs.get("qweight"), "shape", ()), 0, 0)[:2]
        channels = columns * awq.CODES_PER_WORD if self.layout == PLAIN else columns
        outputs = rows if self.layout == PLAIN else rows * ROWS
        checks.check_weight_shape(name, (channels, outputs), shape, self.group_size)
        width = self._zero_words(channels)
        codes, said = width * awq.CODES_PER_WORD, f"group_size {self.group_size or -1}"
        expected: checks.Expected
        if self.layout == PLAIN:
            expected = {
                "qweight": ((outputs, columns), ("int32",)),
                "qzeros": ((outputs, width), ("int32",)),
                "scales": ((outputs, codes), checks.SCALE_DTYPES),
            }
        else:
            expected = {
                "qweight": ((rows, channels), ("int16",)),
                "scales": ((codes, outputs), ("float16",)),
                "scaled_zeros": ((codes, outputs), ("float16",)),
            }
        checks.check_tensors(name, specs, expected, said)
        if self.layout == FAST and channels % CHANNELS:
            raise CheckpointError(
                f"{name} has {channels} input channels: expected a multiple of {CHANNELS}, which "
                f"the layout {FAST} interleaves"
            )
        return channels, outputs

    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """Decodes one module; see Reader.decode."""
        channels, _ = self.check(tensors, name, shape)
        groups = channels // (self.group_size or channels)
        arrays = {suffix: jnp.asarray(tensor) for suffix, tensor in tensors.items()}
        format = self.format(name, channels)
        if self.layout == FAST:
            scales, minima = (arrays[suffix][:groups] for suffix in ("scales", "scaled_zeros"))
            return PlainCodes(format, _interleaved(arrays["qweight"]), scales, minima)
        codes, zeros = (
            words.unpack_words(arrays[suffix], awq.BITS, axis=1).T
            for suffix in ("qweight", "qzeros")
        )
        zeros = zeros[:groups].astype(jnp.uint16)
        if not self.zero_point:
            words.check_middle(name, zeros, awq.BITS, "zero_point: false")
        return PlainCodes(format, codes, arrays["scales"].T[:groups], zeros)

    def _zero_words(self, channels: int) -> int:
        size = self.group_size or max(channels, 1)
        multiple = MULTIPLES.get(size, 1)
        count = -(-(channels // size) // awq.CODES_PER_WORD)
        return -(-count // multiple) * multiple


def read(config: Mapping[str, Any]) -> AWQGemvReader:
    """Reads a `quantization_config`. Raises CheckpointError for unsupported settings."""
    group_size, zero_point = awq.read_settings(config)
    layouts = set(awq.layouts_of(config))
    if len(layouts) != 1 or not layouts <= set(LAYOUTS):
        raise CheckpointError(
            f"{awq.SOURCE}: the layouts {', '.join(sorted(layouts))} (AWQ version and format) "
            f"differ: expected {' or '.join(LAYOUTS)}"
        )
    return AWQGemvReader(group_size, zero_point, layouts.pop())


def matches(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is AWQ's with one of LAYOUTS."""
    is_awq = checks.method_of(config) == "awq"
    return is_awq and any(layout in LAYOUTS for layout in awq.layouts_of(config))


def _refuse(name: str, specs: Specs, method: str | None) -> None:
    if words.packing(specs) == PLAIN:
        words.refuse_packing(name, specs, method)


SCHEME = Scheme(
    title="AWQ gemv",
    article="an",
    methods=("awq",),
    reader=AWQGemvReader,
    read=read,
    matches=matches,
    refuse=_refuse,
)


@jax.jit
def _interleaved(qweight: jax.Array) -> jax.Array:
    """Unpacks int16 words [N / 4, K] of the layout `gemv_fast` to codes uint8 [K, N]."""
    rows, channels = qweight.shape
    unsigned = jax.lax.bitcast_convert_type(qweight, jnp.uint16)[..., None]
    shifts = jax.lax.broadcast_to_rank(jnp.arange(0, 16, 4, dtype=jnp.uint16), unsigned.ndim)
    nibbles = ((unsigned >> shifts) & jnp.uint16(15)).astype(jnp.uint8)
    # 64 words hold 64 channels of each of four rows, row by row.
    nibbles = nibbles.reshape(rows, channels // CHANNELS, ROWS, CHANNELS)
    codes = nibbles.transpose(0, 2, 1, 3).reshape(rows * ROWS, channels // 32, 4, 2, 4)
    # Eight neighbours are stored in the order 0, 2, 4, 6, 1, 3, 5, 7; among 32, pairs at a distance
    # of 8 are adjacent.
    codes = codes.swapaxes(-1, -2).reshape(rows * ROWS, channels // 32, 4, 4, 2)
    return codes.swapaxes(2, 3).reshape(rows * ROWS, channels).T
