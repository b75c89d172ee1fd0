"""Reads HQQ checkpoints of 4 and 8 bits with groups along the input channels (`axis` 1).

With K input and N output channels in groups of g, a weight [N, K] is a list of N · K / g groups.
`W_q` uint8 [groups, g] holds codes of 8 bits; of 4 bits, `W_q` [groups / 2, g] holds the first half
of the list in high nibbles and the second half in low ones. `scale` and `zero` are floats
[groups, 1], and the weight is (code − zero) · scale. Other tensors of a module repeat config.json's
settings.
Source: HQQ, hqq/core/quantize.py and hqq/core/bitpack.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpjax.checkpoint.schemes import checks
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.schemes.scheme import Rule, Scheme
from mpjax.checkpoint.schemes.tensors import Shape, Specs, Tensors
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.codes.base import GROUP_SIZES

SOURCE = "quantization_config of an HQQ checkpoint"
REMEDY = "load another checkpoint of the model, or quantise it again with nbits 4, axis 1"
BITS = (4, 8)
# Tensors that repeat a module's settings.
SETTINGS = (
    *("nbits", "group_size", "axis", "shape", "packing", "channel_wise", "optimize", "round_zero"),
    *("view_as_float", "unpack_view_dtype", "compute_dtype", "quant_scale", "quant_zero"),
    *("encoded_state_dict", "stores_quant_config", "offload_meta"),
)


@dataclasses.dataclass(frozen=True)
class HQQReader(Reader):
    """HQQ with groups along the input channels. Scales and minima become float16.

    bits: of a code. size: input channels per group; None: one group of all channels.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("W_q", "scale", "zero")

    bits: int
    size: int | None

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has packed codes."""
        return "W_q" in specs

    @property
    def weights(self) -> WeightFormat:
        """The format of modules before their channels are known."""
        return self._of_groups(self.size or GROUP_SIZES[-1])

    @property
    def loss(self) -> str:
        """A description of the rounded parameters, which HQQ may store in other dtypes."""
        return "scales and minima of HQQ to float16"

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device, with groups of the file's size or a divisor."""
        size = self.size or channels
        if size % GROUP_SIZES[0] or channels % size:
            raise CheckpointError(
                f"{name} has {channels} input channels in groups of {size}: expected groups of a "
                f"multiple of {GROUP_SIZES[0]} that divide them; {REMEDY}"
            )
        return self._of_groups(size)

    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks a module's tensors by shape and dtype and returns its (K, N).

        Without `shape`, the module is taken to have one output channel.
        """
        rows, columns = (*getattr(specs.get("W_q"), "shape", ()), 0, 0)[:2]
        per_byte = 8 // self.bits
        channels, outputs = shape or (rows * per_byte * columns, 1)
        size = self.size or channels
        count = channels * outputs // max(size, 1)
        expected = {
            "W_q": ((-(-count // per_byte), size), ("uint8",)),
            "scale": ((count, 1), checks.SCALE_DTYPES),
            "zero": ((count, 1), checks.SCALE_DTYPES),
        }
        said = f"nbits {self.bits} and group_size {self.size}"
        checks.check_tensors(name, specs, expected, said)
        self.format(name, channels)
        if count % per_byte:
            raise CheckpointError(
                f"{name} has {count} groups: expected an even number, halves of which share bytes"
            )
        return channels, outputs

    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """Decodes one module to codes with scales and minima; see Reader.decode."""
        channels, outputs = self.check(tensors, name, shape)
        format = self.format(name, channels)
        codes = _unpack(jnp.asarray(tensors["W_q"]), bits=self.bits).reshape(outputs, channels).T
        scales, minima = _parameters(
            *(jnp.asarray(tensors[suffix]).reshape(outputs, -1) for suffix in ("scale", "zero")),
            groups=format.groups(channels),
        )
        return PlainCodes(format, codes, scales, minima)

    def _of_groups(self, size: int) -> WeightFormat:
        """The format with the largest group size that divides the file's."""
        sizes = [mine for mine in GROUP_SIZES if size % mine == 0]
        return WeightFormat(f"affine{self.bits}", max(sizes, default=GROUP_SIZES[0]))


def read(config: Mapping[str, Any]) -> HQQReader | list[Rule]:
    """Reads a `quantization_config`. Raises CheckpointError for unsupported settings.

    It may have separate settings by the last two parts of a module's path, such as
    `self_attn.q_proj`.
    """
    given = config.get("quant_config")
    if not isinstance(given, Mapping) or not given:
        raise CheckpointError(f"{SOURCE}: quant_config is {given!r:.80}: expected an object")
    if "weight_quant_params" in given:
        return _read(given, f"{SOURCE}, quant_config")
    return [
        Rule((rf"re:(.*\.)?{re.escape(tag)}$",), _read(each, f"{SOURCE}, {tag!r:.80}"), tag)
        for tag, each in given.items()
    ]


def _read(given: Any, source: str) -> HQQReader:
    """The reader of one object of settings. Raises CheckpointError for unsupported ones."""
    weights = given.get("weight_quant_params") if isinstance(given, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{source}: expected an object with weight_quant_params")
    for name in ("scale_quant_params", "zero_quant_params"):
        if given.get(name) is not None:
            raise CheckpointError(
                f"{source}: {name} is {given[name]!r:.80}: checkpoints whose scales or zero points "
                f"are quantised can't be read; {REMEDY}"
            )
    bits = checks.parse_integer(weights, ("nbits",), source)
    if bits not in BITS:
        raise CheckpointError(f"{source}: nbits is {bits}: only 4 and 8 are read; {REMEDY}")
    if weights.get("axis", 0) != 1:
        raise CheckpointError(
            f"{source}: axis is {weights.get('axis', 0)!r:.80}, groups along the output channels, "
            f"which no format here has: {REMEDY}"
        )
    checks.require_choice(weights, "channel_wise", (True,), source, True)
    checks.require_choice(weights, "view_as_float", (False,), source, False)
    if weights.get("group_size") is None:
        return HQQReader(bits, None)
    return HQQReader(bits, checks.parse_group_size(weights, ("group_size",), source))


SCHEME = Scheme(
    title="HQQ",
    article="an",
    methods=("hqq",),
    reader=HQQReader,
    read=read,
    ignored=tuple(f".{suffix}" for suffix in SETTINGS),
)


@functools.partial(jax.jit, static_argnames="bits")
def _unpack(packed: jax.Array, *, bits: int) -> jax.Array:
    """Unpacks bytes to codes uint8 [groups, g]."""
    if bits == 8:
        return packed
    return jnp.concatenate([packed >> jnp.uint8(4), packed & jnp.uint8(15)])


@functools.partial(jax.jit, static_argnames="groups")
def _parameters(scale: jax.Array, zero: jax.Array, *, groups: int) -> tuple[jax.Array, jax.Array]:
    """Scales and zero points [N, file's groups] as float16 scales and minima [groups, N]."""
    wide = scale.astype(jnp.float32)
    minima = -zero.astype(jnp.float32) * wide
    repeats = groups // scale.shape[1]
    scales, minima = (jnp.repeat(x.astype(jnp.float16).T, repeats, 0) for x in (wide, minima))
    return scales, minima
