"""Reads and writes AWQ checkpoints in the `gemm` layout: 4 bits, packed along the output channels.

With K input and N output channels in G groups, a module has `qweight` int32 [K, N / 8], `qzeros`
int32 [G, N / 8] and `scales` [G, N]; the weight is (code − zero) · scale. Source: AutoAWQ,
awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpjax.checkpoint.schemes import checks, words, writing
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.schemes.scheme import Scheme
from mpjax.checkpoint.schemes.tensors import Axes, Axis, Shape, Specs, Tensors
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat

SOURCE = "quantization_config of an AWQ checkpoint"
LAYOUT = "awq"  # name of the export layout
BITS = 4
CODES_PER_WORD = 8
# Column j of eight is in field FIELD_OF_COLUMN[j] of its word; field 0 has the lowest bits.
FIELD_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclasses.dataclass(frozen=True)
class AWQReader(Reader):
    """AWQ in the `gemm` layout.

    group_size: input channels per group; None: one group of all channels.
    zero_point: whether quantisation is asymmetric; if not, all stored zero points are 8.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    group_size: int | None
    zero_point: bool = True

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module's tensors have AWQ's `gemm` packing."""
        return words.packing(specs) == "awq"

    @property
    def weights(self) -> WeightFormat:
        """The format of all modules."""
        return words.usual_format(BITS, self.group_size)

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device."""
        return words.uniform_format(name, BITS, self.group_size, channels)

    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks a module's tensors by shape and dtype and returns its (K, N)."""
        words.check_packing(name, specs, "awq")
        if "qzeros" not in specs and not self.zero_point:
            raise CheckpointError(
                f"{name} has no tensor qzeros, and config.json says zero_point: false: AWQ's gemm "
                "layout always stores zero points, and without them the weights are not defined"
            )
        rows, columns = specs["qweight"].shape[0], specs["scales"].shape[1]
        checks.check_weight_shape(name, (rows, columns), shape, self.group_size)
        groups = 1 if self.group_size is None else rows // self.group_size
        expected: checks.Expected = {
            "qweight": ((rows, columns // CODES_PER_WORD), ("int32",)),
            "qzeros": ((groups, columns // CODES_PER_WORD), ("int32",)),
            "scales": ((groups, columns), checks.SCALE_DTYPES),
        }
        checks.check_tensors(name, specs, expected, f"group_size {self.group_size or -1}")
        return rows, columns

    @property
    def axes(self) -> dict[str, Axes]:
        """The axes of the tensors; words hold neighbouring output channels."""
        groups = None if self.group_size is None else Axis(0, self.group_size)
        return {
            "qweight": Axes(Axis(0), Axis(1, CODES_PER_WORD)),
            "qzeros": Axes(groups, Axis(1, CODES_PER_WORD)),
            "scales": Axes(groups, Axis(1)),
        }

    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """Decodes one module: codes uint8 [K, N], scales [G, N] as stored, zeros uint16 [G, N].

        Raises CheckpointError as `check` does, and for zero points that contradict config.json.
        """
        channels, _ = self.check(tensors, name, shape)
        codes, zeros = _unpack(jnp.asarray(tensors["qweight"]), jnp.asarray(tensors["qzeros"]))
        if not self.zero_point:
            words.check_middle(name, zeros, BITS, "zero_point: false")
        scales = jnp.asarray(tensors["scales"])
        return PlainCodes(self.format(name, channels), codes, scales, zeros)


def read(config: Mapping[str, Any]) -> AWQReader:
    """Reads a `quantization_config`, with the keys of AutoAWQ or of GPTQModel.

    Raises CheckpointError unless it has 4 bits and the layout `gemm`.
    """
    group_size, zero_point = read_settings(config)
    for layout in layouts_of(config):
        if layout != "gemm":
            raise CheckpointError(
                f"{SOURCE}: the layout {layout!r} (AWQ version) is not supported: 'gemm', "
                "'gemv' and 'gemv_fast' are; look for a 'gemm' checkpoint of the model"
            )
    return AWQReader(group_size, zero_point)


def matches(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is AWQ's, except for the `gemv` layouts."""
    is_gemv = any(layout.startswith("gemv") for layout in layouts_of(config))
    return checks.method_of(config) == "awq" and not is_gemv


def layouts_of(config: Mapping[str, Any]) -> list[str]:
    """The layouts that a `quantization_config` names, under any of the writers' keys."""
    keys = ("version", "format", "checkpoint_format")
    layouts = [str(config[key]).lower() for key in keys if config.get(key) is not None]
    return [*layouts, "llm-awq"] if config.get("backend") == "llm-awq" else layouts


def read_settings(config: Mapping[str, Any]) -> tuple[int | None, bool]:
    """The group size, and whether quantisation is asymmetric, for any layout of AWQ.

    Raises CheckpointError unless it has 4 bits.
    """
    bits = checks.parse_integer(config, ("bits", "w_bit"), SOURCE)
    if bits != BITS:
        raise CheckpointError(f"{SOURCE}: bits is {bits}: only 4 bits are supported")
    group_size = checks.parse_group_size(config, ("group_size", "q_group_size"), SOURCE)
    return group_size, checks.parse_switch(config, "zero_point", SOURCE) is not False


def write(layout: str, modules: writing.Modules) -> writing.Writer:
    """The writer of 4-bit codes with one group size, always with zero points."""
    writing.require_codes(layout, modules, (f"uint{BITS}",), permuted="export as 'gptq'")
    group_size = writing.only_format(layout, modules).group_size

    def config(plain: Sequence[str], cache: str | None) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": BITS,
            "group_size": group_size or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(plain),
        }

    return writing.Writer(config, _encode)


SCHEME = Scheme(
    title="AWQ",
    article="an",
    methods=("awq",),
    reader=AWQReader,
    read=read,
    matches=matches,
    refuse=words.refuse_packing,
    writing=writing.Writing((LAYOUT,), write),
)


def _encode(plain: PlainCodes, name: str) -> dict[str, Any]:
    """The tensors of one module. Raises ValueError as Writer.encode does."""
    zeros = writing.zero_points(plain)
    writing.require_columns(LAYOUT, name, plain.shape[1], CODES_PER_WORD)
    writing.require_zeros(LAYOUT, name, zeros, 0, 2**BITS - 1)
    return {
        "qweight": words.pack_words(plain.codes, BITS, axis=1, order=FIELD_OF_COLUMN),
        "qzeros": words.pack_words(zeros, BITS, axis=1, order=FIELD_OF_COLUMN),
        "scales": plain.scales,
    }


@jax.jit
def _unpack(qweight: jax.Array, qzeros: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpacks int32 [K, N / 8] and [G, N / 8] into codes uint8 [K, N] and zeros uint16 [G, N]."""
    codes = words.unpack_words(qweight, BITS, axis=1, order=FIELD_OF_COLUMN)
    zeros = words.unpack_words(qzeros, BITS, axis=1, order=FIELD_OF_COLUMN)
    return codes, zeros.astype(jnp.uint16)
