"""Reads and writes GPTQ checkpoints of 4 and 8 bits, `gptq` (v1) and `gptq_v2`.

Act-order is supported.

With K input and N output channels in G groups and b bits, a module has `qweight` int32
[K b / 32, N], `qzeros` int32 [G, N b / 32], `scales` [G, N] and `g_idx` int32 [K], the group of
each input channel; the weight is (code − zero) · scale. Source: GPTQModel,
gptqmodel/nn_modules/qlinear/__init__.py and gptqmodel/utils/model.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint.schemes import checks, words, writing
from mpjax.checkpoint.schemes.compressed_tensors import LINEAR
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.schemes.scheme import Rule, Scheme
from mpjax.checkpoint.schemes.tensors import Axes, Axis, Shape, Specs, Tensors
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat

SOURCE = "quantization_config of a GPTQ checkpoint"
SUPPORTED_BITS = (4, 8)
SUPPORTED_FORMATS = ("gptq", "gptq_v2")


@dataclasses.dataclass(frozen=True)
class GPTQReader(Reader):
    """GPTQ of 4 or 8 bits.

    bits: 4 or 8. group_size: input channels per group; None: one group of all channels.
    checkpoint_format: `gptq` (v1, zero points stored minus 1) or `gptq_v2`.
    desc_act: whether channels were quantised in act-order.
    static_groups: whether groups were fixed before act-order, so that each group's channels are
        neighbours.
    symmetric: whether all zero points are 2**(bits − 1); None if config.json doesn't say.
    """

    # Some writers give each module a bias, all zeros if the model has none.
    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx", "bias")
    on_host: ClassVar[tuple[str, ...]] = ("g_idx",)
    order_suffix: ClassVar[str | None] = "g_idx"

    bits: int
    group_size: int | None
    checkpoint_format: str = "gptq"
    desc_act: bool = False
    static_groups: bool = False
    symmetric: bool | None = None

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has a `qweight` without AWQ's packing."""
        is_awq = words.packing(specs) in ("awq", "gemv") or "scaled_zeros" in specs
        return "qweight" in specs and not is_awq

    @property
    def weights(self) -> WeightFormat:
        """The format of modules before their channels are known."""
        return words.usual_format(self.bits, self.group_size)

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device."""
        return words.uniform_format(name, self.bits, self.group_size, channels)

    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks a module's tensors by shape and dtype and returns its (K, N)."""
        words.check_packing(name, specs, "gptq")
        codes_per_word = words.WORD_BITS // self.bits
        rows = specs["qweight"].shape[0] * codes_per_word
        columns = specs["scales"].shape[1]
        if columns % codes_per_word:
            raise CheckpointError(
                f"{name} has {columns} output channels: expected a multiple of {codes_per_word}, "
                f"so that zero points of {self.bits} bits fill whole words"
            )
        said = f"bits {self.bits}"
        checks.check_weight_shape(name, (rows, columns), shape, self.group_size, said)
        groups = 1 if self.group_size is None else rows // self.group_size
        expected: checks.Expected = {
            "qweight": ((rows // codes_per_word, columns), ("int32",)),
            "qzeros": ((groups, columns // codes_per_word), ("int32",)),
            "scales": ((groups, columns), checks.SCALE_DTYPES),
        }
        # Without act-order, groups are in channel order, and some writers omit g_idx.
        if "g_idx" in specs or (self.desc_act and not self.static_groups):
            expected |= {"g_idx": ((rows,), ("int32",))}
        said += f" and group_size {self.group_size or -1}"
        checks.check_tensors(name, specs, expected, said)
        return rows, columns

    @property
    def axes(self) -> dict[str, Axes]:
        """The axes of the tensors; words hold neighbouring input channels.

        Empty without `sym`: then `decode` must compare all zero points.
        """
        per_word, size = words.WORD_BITS // self.bits, self.group_size
        if self.symmetric is None:
            return {}
        groups = None if size is None else Axis(0, size)
        return {
            "qweight": Axes(Axis(0, per_word), Axis(1)),
            "qzeros": Axes(groups, Axis(1, per_word)),
            "scales": Axes(groups, Axis(1)),
        }

    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """Decodes one module: codes uint8 [K, N], scales [G, N] as stored, zeros uint16 [G, N].

        With act-order, the codes' rows are permuted so that groups are contiguous, and the
        permutation int32 [K] is returned with them. `g_idx` must be concrete (a NumPy array, not an
        argument of a jitted function), because the permutation is computed from its values. Raises
        CheckpointError as `check` and `permutation_of` do, and for zero points that contradict
        config.json.
        """
        rows, _ = self.check(tensors, name, shape)
        permutation = None
        if "g_idx" in tensors:
            if isinstance(tensors["g_idx"], jax.core.Tracer):
                raise ValueError(
                    f"{name}.g_idx is an argument of a jitted function: decode needs its values, "
                    "so pass it from outside as a numpy array"
                )
            order = permutation_of(np.asarray(tensors["g_idx"]), self.group_size or rows, name)
            permutation = None if order is None else jnp.asarray(order)
        codes, zeros = _unpack(
            jnp.asarray(tensors["qweight"]),
            jnp.asarray(tensors["qzeros"]),
            permutation,
            bits=self.bits,
            minus_one=self.checkpoint_format == "gptq",
        )
        if self.symmetric is not False:
            zeros = _centred(zeros, self)
        if self.symmetric:
            words.check_middle(name, zeros, self.bits, "sym: true")
        scales = jnp.asarray(tensors["scales"])
        return PlainCodes(self.format(name, rows), codes, scales, zeros, permutation)


def read(config: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Reads a `quantization_config`: rules of `dynamic`, then one for all other modules.

    Raises CheckpointError for unsupported bits or layouts.
    """
    meta = config.get("meta") or {}
    if not isinstance(meta, Mapping):
        raise CheckpointError(f"{SOURCE}: meta is {meta!r}: expected an object")
    if str(config.get("pack_dtype") or "int32") != "int32":
        raise CheckpointError(
            f"{SOURCE}: pack_dtype is {config['pack_dtype']!r}: only int32 words are supported"
        )
    static_groups = checks.parse_switch(config, "static_groups", SOURCE)
    if static_groups is None:
        static_groups = checks.parse_switch(meta, "static_groups", f"{SOURCE}, meta")
    usual = GPTQReader(
        _parse_bits(config, SOURCE),
        checks.parse_group_size(config, ("group_size",), SOURCE),
        _parse_layout(config),
        checks.parse_switch(config, "desc_act", SOURCE) or False,
        static_groups or False,
        checks.parse_switch(config, "sym", SOURCE),
    )
    return *_parse_dynamic(config.get("dynamic") or {}, usual), Rule((LINEAR,), usual)


def write(layout: str, modules: writing.Modules) -> writing.Writer:
    """The writer of the most common format, with a `dynamic` rule for each other module."""
    writing.require_codes(layout, modules, ("uint4", "uint8"))
    integers = writing.integers_of(modules)
    usual = writing.most_common(integers)
    rules = {
        f"+:{_pattern(name)}": _entries(found) for name, found in integers.items() if found != usual
    }
    act_order = any(plain.permutation is not None for plain in modules.values())

    def config(plain: Sequence[str], cache: str | None) -> dict[str, Any]:
        left_out: dict[str, Any] = {f"-:{_pattern(name)}": {} for name in plain}
        return {
            "quant_method": "gptq",
            **_entries(usual),
            "desc_act": act_order,
            "static_groups": False,
            "lm_head": False,
            "checkpoint_format": layout,
            "pack_dtype": "int32",
            "dynamic": left_out | rules,
        }

    return writing.Writer(config, functools.partial(_encode, layout))


SCHEME = Scheme(
    title="GPTQ",
    methods=("gptq",),
    reader=GPTQReader,
    read=read,
    refuse=words.refuse_packing,
    writing=writing.Writing(("gptq_v2", "gptq"), write),  # v2 first: it can hold all zero points
)


def _encode(layout: str, plain: PlainCodes, name: str) -> dict[str, Any]:
    """The tensors of one module. Raises ValueError as Writer.encode does.

    v1 can't hold the zero point 0: stored as −1, it wraps around for readers that unpack first.
    """
    minus_one = layout == "gptq"
    zeros, bits = writing.zero_points(plain), plain.format.bits
    writing.require_columns(layout, name, plain.shape[1], words.WORD_BITS // bits)
    remedy = "export as 'gptq_v2'" if minus_one else writing.REMEDY
    writing.require_zeros(layout, name, zeros, int(minus_one), 2**bits - 1, remedy)
    codes, g_idx = writing.in_channel_order(plain)
    return {
        "qweight": words.pack_words(codes, bits, axis=0),
        "qzeros": words.pack_words(zeros - jnp.uint16(minus_one), bits, axis=1),
        "scales": plain.scales,
        "g_idx": g_idx,
    }


def permutation_of(
    g_idx: np.ndarray, group_size: int, name: str, suffix: str = "g_idx"
) -> np.ndarray | None:
    """The permutation of input channels that makes each group contiguous.

    g_idx: integers [K], the group of each channel, from the tensor `suffix`. Returns int32 [K],
    groups in order and channels of a group in their original order; None if `g_idx` is already in
    that order. Raises CheckpointError unless every group has exactly group_size channels.
    """
    channels = g_idx.shape[0]
    ordered = np.arange(channels) // group_size
    if np.array_equal(g_idx, ordered):
        return None
    if not np.array_equal(np.sort(g_idx), ordered):
        groups, counts = np.unique(g_idx, return_counts=True)
        wrong = (counts != group_size) | (groups < 0) | (groups >= channels // group_size)
        worst = int(np.argmax(wrong))
        raise CheckpointError(
            f"{name}.{suffix} puts {counts[worst]} channels in group {groups[worst]}: expected "
            f"{group_size} channels in each of the groups 0 to {channels // group_size - 1}"
        )
    return np.argsort(g_idx, kind="stable").astype(np.int32)


def _pattern(name: str) -> str:
    """A regular expression that matches only this module's path."""
    return f"^{re.escape(name)}$"


def _entries(integers: writing.Integers) -> dict[str, Any]:
    """The config.json entries on codes, for a checkpoint or a rule."""
    bits, group_size, symmetric = integers
    return {"bits": bits, "group_size": group_size or -1, "sym": symmetric}


def _centred(zeros: jax.Array, config: GPTQReader) -> jax.Array:
    """Corrects zero points of a symmetric weight if config.json names the wrong version.

    Some writers call v2 `gptq`, or v1 `gptq_v2`; then every zero point is the middle plus or minus
    1. If all zero points are off by that, they become the middle; otherwise they don't change.
    """
    middle = 2 ** (config.bits - 1)
    beside = middle + (1 if config.checkpoint_format == "gptq" else -1)
    return jnp.where(jnp.all(zeros == beside), jnp.uint16(middle), zeros)


def _parse_bits(config: Mapping[str, Any], source: str) -> int:
    bits = checks.parse_integer(config, ("bits",), source)
    if bits not in SUPPORTED_BITS:
        raise CheckpointError(f"{source}: bits is {bits}: only 4 and 8 bits are supported")
    return bits


def _parse_layout(config: Mapping[str, Any]) -> str:
    # GPTQModel writes the layout under both keys; older writers under the first, or not at all.
    keys = [k for k in ("checkpoint_format", "format") if config.get(k) is not None]
    formats = {str(config[key]).lower() for key in keys} or {"gptq"}
    if checks.parse_switch(config, "is_marlin_format", SOURCE):
        formats = {"marlin"}
    for unknown in sorted(formats - set(SUPPORTED_FORMATS)):
        raise CheckpointError(
            f"{SOURCE}: the layout {unknown!r} (checkpoint_format) is not supported: "
            f"only {' and '.join(SUPPORTED_FORMATS)} are; look for the model in one of these, "
            "or quantise it again from 16 bits"
        )
    if len(formats) > 1:
        raise CheckpointError(
            f"{SOURCE}: checkpoint_format is {config['checkpoint_format']!r} and format is "
            f"{config['format']!r}: expected them to agree"
        )
    return formats.pop()


def _parse_dynamic(rules: Any, usual: GPTQReader) -> Iterator[Rule]:
    """Reads `dynamic`, a map from patterns to settings.

    A pattern that begins with `-:` names modules left in 16 bits; one with `+:` or no sign, modules
    with other settings; missing settings are those of `usual`. Raises CheckpointError.
    """
    if not isinstance(rules, Mapping):
        raise CheckpointError(f"{SOURCE}: dynamic is {rules!r}: expected a map of patterns")
    for key, overrides in rules.items():
        source = f"{SOURCE}, dynamic rule {key!r:.80}"
        pattern = key[2:] if key.startswith(("-:", "+:")) else key
        checks.parse_pattern(pattern, source)
        targets, overrides = (f"re:{pattern}",), overrides or {}
        if not isinstance(overrides, Mapping):
            raise CheckpointError(f"{source} is {overrides!r}: expected a map of settings")
        if key.startswith("-:"):
            yield Rule(targets, None, "a dynamic rule")
            continue
        for forbidden in ("method", "quant_method", "format", "checkpoint_format", "pack_dtype"):
            if forbidden in overrides:
                raise CheckpointError(
                    f"{source} sets {forbidden}: only bits, group_size and sym may differ by module"
                )
        changes: dict[str, Any] = {}
        if "bits" in overrides:
            changes["bits"] = _parse_bits(overrides, source)
        if "group_size" in overrides:
            changes["group_size"] = checks.parse_group_size(overrides, ("group_size",), source)
        if "sym" in overrides:
            changes["symmetric"] = checks.parse_switch(overrides, "sym", source)
        yield Rule(targets, dataclasses.replace(usual, **changes))


@functools.partial(jax.jit, static_argnames=("bits", "minus_one"))
def _unpack(
    qweight: jax.Array,
    qzeros: jax.Array,
    permutation: jax.Array | None,
    *,
    bits: int,
    minus_one: bool,
) -> tuple[jax.Array, jax.Array]:
    """Unpacks int32 [K b / 32, N] and [G, N b / 32] into uint8 [K, N] and uint16 [G, N]."""
    codes = words.unpack_words(qweight, bits, axis=0)
    if permutation is not None:
        codes = codes[permutation]
    stored = jax.lax.bitcast_convert_type(qzeros, jnp.uint32)
    if minus_one:
        # The writer subtracted 1 from all fields with one subtraction per word, so a zero point of
        # 0 borrowed from the next field; only an addition per word, mod 2**32, undoes that.
        ones = sum(1 << shift for shift in range(0, words.WORD_BITS, bits))
        stored = stored + jnp.uint32(ones)
    return codes, words.unpack_words(stored, bits, axis=1).astype(jnp.uint16)
