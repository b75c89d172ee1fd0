"""compressed-tensors' `pack-quantized`: 4- and 8-bit integers, packed along input channels.

With K input and N output channels in G groups and b bits, a module has `weight_packed` int32
[N, ⌈K b / 32⌉], `weight_scale` [N, G] and `weight_shape` int64 [2], which is [N, K]; if asymmetric,
`weight_zero_point` int32 [⌈N b / 32⌉, G]; and for act-order with dynamic groups, `weight_g_idx`
int32 [K], the group of each input channel. The weight is (code − zero) · scale, with codes and zero
points stored plus 2**(b − 1). Source: compressed-tensors, compressors/pack_quantized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint.schemes import checks, compressed_tensors, words, writing
from mpjax.checkpoint.schemes.compressed_tensors import (
    GLOBAL_SCALES,
    LINEAR,
    METHOD,
    PACKED,
    PACKED_TENSORS,
    SOURCE,
)
from mpjax.checkpoint.schemes.gptq import permutation_of
from mpjax.checkpoint.schemes.reader import Activations, Reader
from mpjax.checkpoint.schemes.scheme import Rule, Scheme
from mpjax.checkpoint.schemes.tensors import Axes, Axis, Shape, Specs, Tensors
from mpjax.checkpoint.schemes.writing import Integers
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.checks import is_known

SUPPORTED_BITS = (4, 8)
PLAIN = Activations(operands=(None,))
# Value of `actorder` → whether groups follow act-order. Otherwise a group is contiguous channels.
ACT_ORDERS: dict[Any, bool] = {
    **dict.fromkeys((None, False, "static", "weight"), False),
    **dict.fromkeys((True, "group", "dynamic"), True),
}


@dataclasses.dataclass(frozen=True)
class PackQuantizedReader(Reader):
    """Integers of 4 or 8 bits in compressed-tensors' `pack-quantized` layout.

    integers: bits, groups and symmetry of the codes. has_order: whether modules have
    `weight_g_idx`.
    activations: 16 bits, whatever the checkpoint was made for.
    """

    suffixes: ClassVar[tuple[str, ...]] = (
        *("weight_packed", "weight_scale", "weight_shape"),
        *("weight_zero_point", "weight_g_idx"),
    )
    on_host: ClassVar[tuple[str, ...]] = ("weight_shape", "weight_g_idx")
    order_suffix: ClassVar[str | None] = "weight_g_idx"
    shape_suffix: ClassVar[str | None] = "weight_shape"

    integers: Integers
    has_order: bool = False
    activations: Activations = PLAIN

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module's tensors have this layout."""
        is_nvfp4 = any(suffix in specs for suffix in GLOBAL_SCALES)
        return any(suffix in specs for suffix in PACKED_TENSORS) and not is_nvfp4

    @property
    def weights(self) -> WeightFormat:
        """The format of modules before their channels are known."""
        return words.usual_format(self.integers.bits, self.integers.group_size)

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device."""
        bits, size, _ = self.integers
        return words.uniform_format(name, bits, size, channels)

    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks a module's tensors by shape and dtype and returns its (K, N)."""
        bits, size, symmetric = self.integers
        if "weight_packed" not in specs or len(specs["weight_packed"].shape) != 2:
            raise CheckpointError(
                f"{name} has no tensor weight_packed that is a matrix: expected int32 "
                f"[N, K · {bits} / 32]"
            )
        per_word = words.WORD_BITS // bits
        outputs, count = specs["weight_packed"].shape
        channels = count * per_word
        if shape is not None and -(-shape[0] // per_word) == count:
            channels = shape[0]  # the last word may be partial
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
        if self.has_order:
            expected["weight_g_idx"] = ((channels,), ("int32",))
        checks.check_tensors(name, specs, expected, said)
        for suffix, reason in (("weight_zero_point", "symmetric"), ("weight_g_idx", "actorder")):
            if suffix in specs and suffix not in expected:
                raise CheckpointError(
                    f"{name} has a tensor {suffix}, which by {reason} in config.json there is not: "
                    "config.json is of another checkpoint"
                )
        return channels, outputs

    @property
    def axes(self) -> dict[str, Axes]:
        """The axes; words hold neighbouring input channels, or output channels for zero points."""
        bits, size, _ = self.integers
        per_word, groups = words.WORD_BITS // bits, None if size is None else Axis(1, size)
        return {
            "weight_packed": Axes(Axis(1, per_word), Axis(0)),
            "weight_scale": Axes(groups, Axis(0)),
            "weight_zero_point": Axes(groups, Axis(0, per_word)),
        }

    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """The plain codes of one module.

        `weight_g_idx` must be concrete (a numpy array, not an argument of a jitted function).
        Raises CheckpointError as `check` does, and for a wrong `weight_shape`.
        """
        channels, outputs = self.check(tensors, name, shape)
        bits, size, symmetric = self.integers
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


def read(config: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Reads a `quantization_config`: a rule for `ignore`, then rules for the groups.

    Raises CheckpointError for unsupported settings.
    """
    ignored = compressed_tensors.read_names(config.get("ignore"), "ignore", SOURCE)
    groups = compressed_tensors.read_groups(config, (PACKED,), SOURCE)
    rules = [_read_group(group, f"{SOURCE}, group {name!r}") for name, group in groups.items()]
    left_out = [Rule(ignored, None, "`ignore`")] if ignored else []
    return *left_out, *compressed_tensors.by_precedence(rules)


def write(layout: str, modules: writing.Modules) -> writing.Writer:
    """The writer, with a config group per Integers; the most common one targets `Linear`."""
    # compressed-tensors does not read `weight_g_idx`.
    writing.require_codes(layout, modules, ("uint4", "uint8"), permuted="export as 'gptq'")
    integers = writing.integers_of(modules)
    usual = writing.most_common(integers)
    targets = {usual: [LINEAR]}
    for kind in sorted(set(integers.values()) - {usual}, key=repr):
        targets[kind] = [name for name, found in integers.items() if found == kind]
    groups = [
        compressed_tensors.write_group(_written(kind), targets=named)
        for kind, named in targets.items()
    ]

    def config(plain: Sequence[str], cache: str | None) -> dict[str, Any]:
        return compressed_tensors.write(PACKED, groups, plain, cache)

    def encode(plain: PlainCodes, name: str) -> dict[str, Any]:
        return _encode(plain, name, integers[name])

    return writing.Writer(config, encode, _caution(list(targets)))


SCHEME = Scheme(
    title="pack-quantized",
    methods=(METHOD,),
    reader=PackQuantizedReader,
    read=read,
    matches=lambda config: compressed_tensors.is_layout(config, PACKED),
    writing=writing.Writing(
        (PACKED,), write, default_for=("uint4:sym", "uint8:sym"), packs_heads=True
    ),
)


def _encode(plain: PlainCodes, name: str, integers: Integers) -> dict[str, Any]:
    """The tensors of one module. Raises ValueError for zero points beyond the codes' range."""
    bits, _, symmetric = integers
    zeros = writing.zero_points(plain)
    middle = 2 ** (bits - 1)
    least, most = (middle, middle) if symmetric else (0, 2**bits - 1)
    writing.require_zeros(PACKED, name, zeros, least, most)
    tensors = {
        "weight_packed": words.pack_words(plain.codes.T, bits, axis=1),
        "weight_scale": plain.scales.T,
        # NumPy, since JAX has no int64.
        "weight_shape": np.array(plain.shape[::-1], np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words.pack_words(zeros.T, bits, axis=0)
    return tensors


def _caution(kinds: Sequence[Integers]) -> str | None:
    """The reason why transformers 5.24 with compressed-tensors 0.20 misreads the export, or None.

    With `dequantize=True` it decodes all modules with the settings of one group. Without it, it
    expects zero points in another layout, and refuses these.
    """
    if len(kinds) == 1:
        return None
    if not all(kind.symmetric for kind in kinds):
        return "transformers does not load weights of several formats with zero points"
    return "transformers with dequantize=True misreads weights of several formats, in silence"


def _read_group(group: Mapping[str, Any], source: str) -> Rule:
    weights = compressed_tensors.read_integers(group, source)
    targets = compressed_tensors.read_names(group.get("targets"), "targets", source)
    found = compressed_tensors.describe_activations(group, source)
    activations = PLAIN._replace(unsupported=found)
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
    integers = Integers(weights["num_bits"], size, symmetric)
    return Rule(targets, PackQuantizedReader(integers, ACT_ORDERS[order], activations))


def _written(integers: Integers) -> dict[str, Any]:
    bits, size, symmetric = integers
    strategy = "channel" if size is None else "group"
    return compressed_tensors.write_weights(
        *(bits, "int", strategy), symmetric=symmetric, group_size=size, actorder=None
    )
