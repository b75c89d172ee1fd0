"""Reads and writes GPTQ checkpoints of 4 and 8 bits, `gptq` (v1) and `gptq_v2`.

Channels may be in another order (act-order).

With K input and N output channels in G groups and b bits, a module has `qweight` int32
[K b / 32, N], `qzeros` int32 [G, N b / 32], `scales` [G, N] and `g_idx` int32 [K], the group of
each input channel; the weight is (code − zero) · scale. Source: GPTQModel,
gptqmodel/nn_modules/qlinear/__init__.py and gptqmodel/utils/model.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint import text_model
from mpjax.checkpoint.schemes import checks, words, writing
from mpjax.checkpoint.schemes.base import Axes, Axis, Scheme, Specs
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat

SOURCE = "quantization_config of a GPTQ checkpoint"
SUPPORTED_BITS = (4, 8)
SUPPORTED_FORMATS = ("gptq", "gptq_v2")


@dataclasses.dataclass(frozen=True)
class DynamicRule:
    """GPTQModel's settings for the modules whose path a pattern matches from its start.

    quantized: False for modules that were left in 16 bits. bits, group_size, symmetric: as in
    GPTQScheme; settings that the rule leaves out have the checkpoint's values.
    """

    pattern: re.Pattern[str]
    quantized: bool
    bits: int
    group_size: int | None
    symmetric: bool | None


@dataclasses.dataclass(frozen=True)
class GPTQScheme(Scheme):
    """GPTQ of 4 or 8 bits.

    bits: 4 or 8. group_size: input channels per group; None: one group of all channels.
    checkpoint_format: `gptq` (v1, zero points stored minus 1) or `gptq_v2`.
    desc_act: whether channels were quantised in order of activation (act-order).
    static_groups: whether groups were fixed before act-order, so that channels of one group lie
        side by side.
    symmetric: whether all zero points are 2**(bits − 1); None where config.json does not say.
    dynamic: rules for single modules; the first that matches counts.
    """

    title: ClassVar[str] = "GPTQ"
    methods: ClassVar[tuple[str, ...]] = ("gptq",)
    # Some writers give each module a bias, all zeros where the model has none.
    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx", "bias")
    on_host: ClassVar[tuple[str, ...]] = ("g_idx",)
    order_suffix: ClassVar[str | None] = "g_idx"
    layouts: ClassVar[tuple[str, ...]] = ("gptq_v2", "gptq")  # v2 holds all zero points

    bits: int
    group_size: int | None
    checkpoint_format: str = "gptq"
    desc_act: bool = False
    static_groups: bool = False
    symmetric: bool | None = None
    dynamic: tuple[DynamicRule, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GPTQScheme:
        """Reads config.json's `quantization_config`.

        Raises CheckpointError for another method, and for bits or a layout that can't be read.
        """
        method = checks.method_of(config)
        if method != "gptq":
            raise CheckpointError(f"{SOURCE}: quant_method is {method!r}: expected 'gptq'")
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
        if str(config.get("pack_dtype") or "int32") != "int32":
            raise CheckpointError(
                f"{SOURCE}: pack_dtype is {config['pack_dtype']!r}: only int32 words are supported"
            )
        bits = _parse_bits(config, SOURCE)
        group_size = checks.parse_group_size(config, ("group_size",), SOURCE)
        symmetric = checks.parse_switch(config, "sym", SOURCE)
        meta = config.get("meta") or {}
        if not isinstance(meta, Mapping):
            raise CheckpointError(f"{SOURCE}: meta is {meta!r}: expected an object")
        static_groups = checks.parse_switch(config, "static_groups", SOURCE)
        if static_groups is None:
            static_groups = checks.parse_switch(meta, "static_groups", f"{SOURCE}, meta")
        return cls(
            bits,
            group_size,
            formats.pop(),
            checks.parse_switch(config, "desc_act", SOURCE) or False,
            static_groups or False,
            symmetric,
            _parse_dynamic(config.get("dynamic") or {}, bits, group_size, symmetric),
        )

    def for_module(self, name: str) -> GPTQScheme | None:
        """The scheme of one module after `dynamic` rules; None if it was left in 16 bits.

        name: the module's path, such as `model.layers.0.mlp.down_proj`.
        """
        for rule in self.dynamic:
            if text_model.matches(rule.pattern, name):
                if not rule.quantized:
                    return None
                return dataclasses.replace(
                    self,
                    bits=rule.bits,
                    group_size=rule.group_size,
                    symmetric=rule.symmetric,
                    dynamic=(),
                )
        return self

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has a `qweight` that does not have AWQ's packing."""
        is_awq = words.packing(specs) in ("awq", "gemv") or "scaled_zeros" in specs
        return "qweight" in specs and not is_awq

    @classmethod
    def refuse(cls, name: str, specs: Specs, method: str | None) -> NoReturn:
        """Raises CheckpointError: the module has GPTQ's packing, and config.json names another."""
        words.refuse_packing(name, specs, method)

    @property
    def weights(self) -> WeightFormat:
        """The format of the modules that no `dynamic` rule changes."""
        return words.usual_format(self.bits, self.group_size)

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device."""
        config = self.for_module(name) or self
        return words.uniform_format(name, config.bits, config.group_size, channels)

    def check(
        self, specs: Specs, name: str, shape: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Checks a module's tensors by shape and dtype and returns its (K, N)."""
        words.check_packing(name, specs, "gptq")
        config = self._of_packed_module(name)
        codes_per_word = words.WORD_BITS // config.bits
        rows = specs["qweight"].shape[0] * codes_per_word
        columns = specs["scales"].shape[1]
        if columns % codes_per_word:
            raise CheckpointError(
                f"{name} has {columns} output channels: expected a multiple of {codes_per_word}, "
                f"so that zero points of {config.bits} bits fill whole words"
            )
        said = f"bits {config.bits}"
        checks.check_weight_shape(name, (rows, columns), shape, config.group_size, said)
        groups = 1 if config.group_size is None else rows // config.group_size
        expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            "qweight": ((rows // codes_per_word, columns), ("int32",)),
            "qzeros": ((groups, columns // codes_per_word), ("int32",)),
            "scales": ((groups, columns), checks.SCALE_DTYPES),
        }
        # Without act-order the groups are in order, and some writers leave g_idx out.
        if "g_idx" in specs or (config.desc_act and not config.static_groups):
            expected["g_idx"] = ((rows,), ("int32",))
        said += f" and group_size {config.group_size or -1}"
        checks.check_tensors(name, specs, expected, said)
        return rows, columns

    def axes(self, name: str) -> dict[str, Axes]:
        """Words hold neighbouring input channels; without `sym`, all zero points are compared."""
        config = self._of_packed_module(name)
        per_word, size = words.WORD_BITS // config.bits, config.group_size
        if config.symmetric is None:
            return {}
        groups = None if size is None else Axis(0, size)
        return {
            "qweight": Axes(Axis(0, per_word), Axis(1)),
            "qzeros": Axes(groups, Axis(1, per_word)),
            "scales": Axes(groups, Axis(1)),
        }

    def decode(
        self, tensors: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None
    ) -> PlainCodes:
        """Decodes one module: codes uint8 [K, N], scales [G, N] as stored, zeros uint16 [G, N].

        With act-order, rows of the codes are in the order of a permutation int32 [K], which comes
        with them. `g_idx` must be concrete (a NumPy array, not an argument of a jitted function),
        because the permutation is computed from its values. Raises CheckpointError as `check` and
        `permutation_of` do, and for zero points that contradict config.json.
        """
        rows, _ = self.check(tensors, name, shape)
        config = self._of_packed_module(name)
        permutation = None
        if "g_idx" in tensors:
            if isinstance(tensors["g_idx"], jax.core.Tracer):
                raise ValueError(
                    f"{name}.g_idx is an argument of a jitted function: decode needs its values, "
                    "so pass it from outside as a numpy array"
                )
            order = permutation_of(np.asarray(tensors["g_idx"]), config.group_size or rows, name)
            permutation = None if order is None else jnp.asarray(order)
        codes, zeros = _unpack(
            jnp.asarray(tensors["qweight"]),
            jnp.asarray(tensors["qzeros"]),
            permutation,
            bits=config.bits,
            minus_one=config.checkpoint_format == "gptq",
        )
        if config.symmetric is not False:
            zeros = _centred(zeros, config)
        if config.symmetric:
            words.check_middle(name, zeros, config.bits, "sym: true")
        scales = jnp.asarray(tensors["scales"])
        return PlainCodes(self.format(name, rows), codes, scales, zeros, permutation)

    @classmethod
    def of_layout(cls, layout: str, modules: writing.Modules) -> GPTQScheme:
        """A scheme with the format of most modules, and a `dynamic` rule for each other module."""
        writing.require_codes(layout, modules, ("uint4", "uint8"))
        integers = writing.integers_of(modules)
        usual = writing.most_common(integers)
        rules = tuple(
            DynamicRule(_only(name), True, *found)
            for name, found in integers.items()
            if found != usual
        )
        act_order = any(plain.permutation is not None for plain in modules.values())
        bits, size, symmetric = usual
        return cls(bits, size, layout, act_order, False, symmetric, rules)

    def quantization_config(self, plain: Sequence[str], cache: str | None = None) -> dict[str, Any]:
        """The `quantization_config` of an exported checkpoint; see Scheme."""
        left_out: dict[str, Any] = {f"-:{_only(name).pattern}": {} for name in plain}
        rules = {
            f"{'+' if rule.quantized else '-'}:{rule.pattern.pattern}": _integers(rule)
            for rule in self.dynamic
        }
        return {
            "quant_method": self.quant_method,
            **_integers(self),
            "desc_act": self.desc_act,
            "static_groups": self.static_groups,
            "lm_head": False,
            "checkpoint_format": self.checkpoint_format,
            "pack_dtype": "int32",
            "dynamic": left_out | rules,
        }

    def encode(self, plain: PlainCodes, name: str) -> dict[str, Any]:
        """The tensors of one module. Raises ValueError as Scheme.encode does.

        v1 holds no zero point of 0: stored as −1, it is another one to readers that unpack first.
        """
        config = self._of_packed_module(name)
        minus_one = self.checkpoint_format == "gptq"
        zeros, bits = writing.zero_points(plain), config.bits
        writing.require_columns(
            self.checkpoint_format, name, plain.shape[1], words.WORD_BITS // bits
        )
        remedy = "export as 'gptq_v2'" if minus_one else writing.REMEDY
        bounds = int(minus_one), 2**bits - 1
        writing.require_zeros(self.checkpoint_format, name, zeros, *bounds, remedy)
        codes, g_idx = writing.in_channel_order(plain)
        return {
            "qweight": words.pack_words(codes, bits, axis=0),
            "qzeros": words.pack_words(zeros - jnp.uint16(minus_one), bits, axis=1),
            "scales": plain.scales,
            "g_idx": g_idx,
        }

    def extra_bytes(self, specs: Specs, shape: tuple[int, int]) -> int:
        """Bytes of the permutation, for a module with `g_idx`; an upper bound."""
        return 4 * shape[0] if "g_idx" in specs else 0

    def _of_packed_module(self, name: str) -> GPTQScheme:
        """The scheme after `dynamic` rules, of a module whose tensors are quantised.

        Raises CheckpointError where a rule says that the module was left in 16 bits.
        """
        resolved = self.for_module(name)
        if resolved is None:
            raise CheckpointError(
                f"{name} has packed tensors, but a dynamic rule of config.json says that it was "
                "left in 16 bits; config.json is of another checkpoint"
            )
        return resolved


def permutation_of(
    g_idx: np.ndarray, group_size: int, name: str, suffix: str = "g_idx"
) -> np.ndarray | None:
    """The permutation of input channels that puts each group's channels side by side.

    g_idx: integers [K], the group of each channel, from the tensor `suffix`. Returns int32 [K],
    groups in order and channels of a group in their original order; None where `g_idx` is in that
    order already. Raises CheckpointError unless every group has exactly group_size channels.
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


def _only(name: str) -> re.Pattern[str]:
    """A pattern that matches one module's path."""
    return re.compile(f"^{re.escape(name)}$")


def _integers(said: GPTQScheme | DynamicRule) -> dict[str, Any]:
    """The entries of config.json about codes: of a checkpoint, or of the modules of a rule."""
    return {"bits": said.bits, "group_size": said.group_size or -1, "sym": bool(said.symmetric)}


def _centred(zeros: jax.Array, config: GPTQScheme) -> jax.Array:
    """Corrects zero points of a symmetric weight where config.json names the wrong version.

    Some writers call v2 `gptq`, or v1 `gptq_v2`; every zero point then reads as the middle plus or
    minus 1. Zero points that are all off by that become the middle; others stay.
    """
    middle = 2 ** (config.bits - 1)
    beside = middle + (1 if config.checkpoint_format == "gptq" else -1)
    return jnp.where(jnp.all(zeros == beside), jnp.uint16(middle), zeros)


def _parse_bits(config: Mapping[str, Any], source: str) -> int:
    bits = checks.parse_integer(config, ("bits",), source)
    if bits not in SUPPORTED_BITS:
        raise CheckpointError(f"{source}: bits is {bits}: only 4 and 8 bits are supported")
    return bits


def _parse_dynamic(
    rules: Any, bits: int, group_size: int | None, symmetric: bool | None
) -> tuple[DynamicRule, ...]:
    """Reads `dynamic`, a map from patterns to settings.

    A pattern that begins with `-:` names modules left in 16 bits; with `+:` or no sign, modules
    with other settings. Raises CheckpointError.
    """
    if not isinstance(rules, Mapping):
        raise CheckpointError(f"{SOURCE}: dynamic is {rules!r}: expected a map of patterns")
    parsed = []
    for key, overrides in rules.items():
        source = f"{SOURCE}, dynamic rule {key!r:.80}"
        pattern = checks.parse_pattern(key[2:] if key.startswith(("-:", "+:")) else key, source)
        overrides = overrides or {}
        if not isinstance(overrides, Mapping):
            raise CheckpointError(f"{source} is {overrides!r}: expected a map of settings")
        if key.startswith("-:"):
            parsed.append(DynamicRule(pattern, False, bits, group_size, symmetric))
            continue
        for forbidden in ("method", "quant_method", "format", "checkpoint_format", "pack_dtype"):
            if forbidden in overrides:
                raise CheckpointError(
                    f"{source} sets {forbidden}: only bits, group_size and sym may differ by module"
                )
        parsed.append(
            DynamicRule(
                pattern,
                True,
                _parse_bits(overrides, source) if "bits" in overrides else bits,
                checks.parse_group_size(overrides, ("group_size",), source)
                if "group_size" in overrides
                else group_size,
                checks.parse_switch(overrides, "sym", source) if "sym" in overrides else symmetric,
            )
        )
    return tuple(parsed)


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
        # The writer subtracted 1 from every field with one subtraction per word, so a zero point
        # of 0 borrowed from the next field; only adding word by word, mod 2**32, pays it back.
        ones = sum(1 << shift for shift in range(0, words.WORD_BITS, bits))
        stored = stored + jnp.uint32(ones)
    return codes, words.unpack_words(stored, bits, axis=1).astype(jnp.uint16)
