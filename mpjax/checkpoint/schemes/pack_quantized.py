"""compressed-tensors' `pack-quantized`: integers of 4 and 8 bits in words, along input channels.

With K input and N output channels in G groups and b bits, a module has `weight_packed` int32
[N, ⌈K b / 32⌉], `weight_scale` [N, G] and `weight_shape` int64 [2], which is [N, K]; where zero
points differ, `weight_zero_point` int32 [⌈N b / 32⌉, G]; and from act-order with groups of its own,
`weight_g_idx` int32 [K], the group of each input channel. The weight is (code − zero) · scale, with
codes and zero points stored plus 2**(b − 1). Source: compressed-tensors,
compressors/pack_quantized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint.schemes import checks, compressed_tensors, words, writing
from mpjax.checkpoint.schemes.base import Axes, Axis, Scheme, Specs
from mpjax.checkpoint.schemes.compressed_tensors import (
    GLOBAL_SCALES,
    LINEAR,
    METHOD,
    PACKED,
    PACKED_TENSORS,
    SOURCE,
)
from mpjax.checkpoint.schemes.gptq import permutation_of
from mpjax.checkpoint.schemes.writing import Integers
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.checks import is_known

SUPPORTED_BITS = (4, 8)
# The values of `actorder`, and whether groups follow the order. Without it, and with a static one,
# a group is a run of neighbouring channels.
ACT_ORDERS: dict[Any, bool] = {
    **dict.fromkeys((None, False, "static", "weight"), False),
    **dict.fromkeys((True, "group", "dynamic"), True),
}


class Group(NamedTuple):
    """One of the `config_groups`. has_order: whether there is `weight_g_idx`."""

    targets: tuple[str, ...]
    integers: Integers
    has_order: bool = False


@dataclasses.dataclass(frozen=True)
class PackQuantizedScheme(Scheme):
    """Integers of 4 or 8 bits in compressed-tensors' `pack-quantized` layout.

    groups: what modules are, by their names, by patterns, or as all others (`Linear`).
    ignore: names and patterns of modules that were left in 16 bits.
    unsupported_activations, has_cache_scales: see Scheme.
    """

    title: ClassVar[str] = "pack-quantized"
    methods: ClassVar[tuple[str, ...]] = (METHOD,)
    suffixes: ClassVar[tuple[str, ...]] = (
        *("weight_packed", "weight_scale", "weight_shape"),
        *("weight_zero_point", "weight_g_idx"),
    )
    on_host: ClassVar[tuple[str, ...]] = ("weight_shape", "weight_g_idx")
    order_suffix: ClassVar[str | None] = "weight_g_idx"
    shape_suffix: ClassVar[str | None] = "weight_shape"
    layouts: ClassVar[tuple[str, ...]] = (PACKED,)
    default_for: ClassVar[tuple[str, ...]] = ("uint4:sym", "uint8:sym")

    groups: tuple[Group, ...]
    ignore: tuple[str, ...] = ()
    unsupported_activations: str | None = None
    has_cache_scales: bool = False

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` is of this format."""
        return compressed_tensors.is_layout(config, PACKED)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PackQuantizedScheme:
        """Reads config.json's `quantization_config`. Raises CheckpointError."""
        groups, activations = [], []
        for name, group in compressed_tensors.read_groups(config, (PACKED,), SOURCE).items():
            source = f"{SOURCE}, group {name!r}"
            groups.append(_read_group(group, source))
            activations.append(compressed_tensors.describe_activations(group, source))
        return cls(
            tuple(groups),
            compressed_tensors.read_names(config.get("ignore"), "ignore", SOURCE),
            next(filter(None, activations), None),
            compressed_tensors.has_cache_scales(config, SOURCE),
        )

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module's tensors are packed so."""
        is_nvfp4 = any(suffix in specs for suffix in GLOBAL_SCALES)
        return any(suffix in specs for suffix in PACKED_TENSORS) and not is_nvfp4

    @property
    def weights(self) -> WeightFormat:
        """The format of the modules that no group names."""
        integers = max(self.groups, key=lambda group: LINEAR in group.targets).integers
        return words.usual_format(integers.bits, integers.group_size)

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device."""
        integers = self._group(name).integers
        return words.uniform_format(name, integers.bits, integers.group_size, channels)

    @property
    def choices(self) -> tuple[PackQuantizedScheme, ...]:
        """The same weights with activations of 16 bits."""
        return (dataclasses.replace(self, unsupported_activations=None),)

    def check(
        self, specs: Specs, name: str, shape: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Checks a module's tensors by shape and dtype and returns its (K, N)."""
        (bits, size, symmetric), has_order = self._group(name)[1:]
        if "weight_packed" not in specs or len(specs["weight_packed"].shape) != 2:
            raise CheckpointError(
                f"{name} has no tensor weight_packed that is a matrix: expected int32 "
                f"[N, K · {bits} / 32]"
            )
        per_word = words.WORD_BITS // bits
        outputs, count = specs["weight_packed"].shape
        channels = count * per_word
        if shape is not None and -(-shape[0] // per_word) == count:
            channels = shape[0]  # the last word may be cut
        said = f"num_bits {bits} and group_size {size or -1}"
        checks.check_weight_shape(name, (channels, outputs), shape, size, said)
        groups = 1 if size is None else channels // size
        expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            "weight_packed": ((outputs, count), ("int32",)),
            "weight_scale": ((outputs, groups), checks.SCALE_DTYPES),
            "weight_shape": ((2,), ("int64", "int32")),
        }
        if not symmetric:
            expected["weight_zero_point"] = ((-(-outputs // per_word), groups), ("int32",))
        if has_order:
            expected["weight_g_idx"] = ((channels,), ("int32",))
        checks.check_tensors(name, specs, expected, said)
        for suffix, reason in (("weight_zero_point", "symmetric"), ("weight_g_idx", "actorder")):
            if suffix in specs and suffix not in expected:
                raise CheckpointError(
                    f"{name} has a tensor {suffix}, which by {reason} in config.json there is not: "
                    "config.json is of another checkpoint"
                )
        return channels, outputs

    def axes(self, name: str) -> dict[str, Axes]:
        """Words hold neighbouring input channels, and those of zero points output channels."""
        bits, size, _ = self._group(name).integers
        per_word, groups = words.WORD_BITS // bits, None if size is None else Axis(1, size)
        return {
            "weight_packed": Axes(Axis(1, per_word), Axis(0)),
            "weight_scale": Axes(groups, Axis(0)),
            "weight_zero_point": Axes(groups, Axis(0, per_word)),
        }

    def decode(
        self, tensors: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None
    ) -> PlainCodes:
        """The plain codes of one module.

        `weight_g_idx` must be concrete (a numpy array, not an argument of a jitted function).
        Raises CheckpointError as `check` does, and for a `weight_shape` that is another one.
        """
        channels, outputs = self.check(tensors, name, shape)
        bits, size, symmetric = self._group(name).integers
        if is_known(tensors["weight_shape"]):
            written = np.asarray(tensors["weight_shape"]).tolist()
            if written != [outputs, channels]:
                raise CheckpointError(
                    f"{name}.weight_shape is {written}: expected [{outputs}, {channels}], as the "
                    "other tensors say"
                )
        codes = words.unpack_words(jnp.asarray(tensors["weight_packed"]), bits, axis=1)
        codes = codes[:, :channels].T
        scales = jnp.asarray(tensors["weight_scale"]).T
        zeros = jnp.full(scales.shape, 2 ** (bits - 1), jnp.uint16)
        if not symmetric:
            stored = jnp.asarray(tensors["weight_zero_point"])
            zeros = words.unpack_words(stored, bits, axis=0)[:outputs].T.astype(jnp.uint16)
        order = None
        if "weight_g_idx" in tensors:
            g_idx = np.asarray(tensors["weight_g_idx"])
            order = permutation_of(g_idx, size or channels, name, "weight_g_idx")
        if order is not None:
            codes = codes[order]
        permutation = None if order is None else jnp.asarray(order)
        return PlainCodes(self.format(name, channels), codes, scales, zeros, permutation)

    def extra_bytes(self, specs: Specs, shape: tuple[int, int]) -> int:
        """Bytes of the permutation, where there is `weight_g_idx`."""
        return 4 * shape[0] if "weight_g_idx" in specs else 0

    @classmethod
    def of_layout(cls, layout: str, modules: writing.Modules) -> PackQuantizedScheme:
        """One group for each kind of modules; the most common one targets all others."""
        # compressed-tensors does not read `weight_g_idx`.
        writing.require_codes(layout, modules, ("uint4", "uint8"), permuted="export as 'gptq'")
        integers = writing.integers_of(modules)
        usual = writing.most_common(integers)
        others = sorted({found for found in integers.values() if found != usual}, key=repr)
        return cls(
            (
                Group((LINEAR,), usual),
                *(
                    Group(tuple(name for name, it in integers.items() if it == kind), kind)
                    for kind in others
                ),
            )
        )

    def quantization_config(self, plain: Sequence[str], cache: str | None = None) -> dict[str, Any]:
        """The `quantization_config` of an exported checkpoint; see Scheme."""
        groups = [
            compressed_tensors.write_group(_written(group), targets=group.targets)
            for group in self.groups
        ]
        return compressed_tensors.write(PACKED, groups, (*self.ignore, *plain), cache)

    def encode(self, plain: PlainCodes, name: str) -> dict[str, Any]:
        """The tensors of one module. Raises ValueError for zero points beyond the codes' range."""
        (bits, _, symmetric), has_order = self._group(name)[1:]
        zeros = writing.zero_points(plain)
        middle = 2 ** (bits - 1)
        least, most = (middle, middle) if symmetric else (0, 2**bits - 1)
        writing.require_zeros(PACKED, name, zeros, least, most)
        codes, g_idx = writing.in_channel_order(plain)
        tensors = {
            "weight_packed": words.pack_words(codes.T, bits, axis=1),
            "weight_scale": plain.scales.T,
            # NumPy's, as JAX has no such integers.
            "weight_shape": np.array(plain.shape[::-1], np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words.pack_words(zeros.T, bits, axis=0)
        return tensors | ({"weight_g_idx": g_idx} if has_order else {})

    @property
    def caution(self) -> str | None:
        """What transformers 5.24 with compressed-tensors 0.20 does not load.

        With `dequantize=True` it decodes all modules with one group, whatever the others say.
        Without it, it expects zero points in another layout, which it refuses.
        """
        if len(self.groups) == 1:
            return None
        if not all(group.integers.symmetric for group in self.groups):
            return "transformers does not load weights of several formats with zero points"
        return "transformers with dequantize=True misreads weights of several formats, in silence"

    @property
    def layout_of_heads(self) -> str | None:
        """The layout, in which a quantised head is a module like others."""
        return PACKED

    @property
    def can_hold_cache_scales(self) -> bool:
        """Whether scales of an FP8 cache may lie beside the weights."""
        return True

    def _group(self, name: str) -> Group:
        """Reads the `weights` of a config group for packed modules. Raises CheckpointError."""
        if compressed_tensors.names(self.ignore, name):
            raise CheckpointError(
                f"{name} has packed tensors, but by `ignore` in config.json it was left in 16 bits:"
                " config.json is of another checkpoint"
            )
        for group in self.groups:
            if name in group.targets:
                return group
        for group in self.groups:
            if compressed_tensors.names(group.targets, name):
                return group
        for group in self.groups:
            if LINEAR in group.targets:
                return group
        raise CheckpointError(
            f"{name} has packed tensors, but no group's targets in config.json name it: "
            "config.json is of another checkpoint"
        )


def _read_group(group: Mapping[str, Any], source: str) -> Group:
    weights = compressed_tensors.read_integers(group, source)
    targets = compressed_tensors.read_names(group.get("targets"), "targets", source)
    source = f"{source}, weights"
    checks.require_choice(weights, "num_bits", SUPPORTED_BITS, source)
    checks.require_choice(weights, "strategy", ("group", "channel"), source)
    size = None
    if weights["strategy"] == "group":
        size = checks.parse_group_size(weights, ("group_size",), source)
    order = weights.get("actorder")
    if not isinstance(order, str | bool | None) or order not in ACT_ORDERS:
        raise CheckpointError(
            f"{source}: actorder is {order!r:.80}: expected null, 'static', 'weight' or 'group'"
        )
    symmetric = checks.parse_switch(weights, "symmetric", source) is not False
    return Group(targets, Integers(weights["num_bits"], size, symmetric), ACT_ORDERS[order])


def _written(group: Group) -> dict[str, Any]:
    bits, size, symmetric = group.integers
    strategy = "channel" if size is None else "group"
    return compressed_tensors.write_weights(
        bits,
        "int",
        strategy,
        symmetric=symmetric,
        group_size=size,
        actorder="group" if group.has_order else None,
    )
