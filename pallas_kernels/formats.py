"""Weight formats: the codes in which a matrix is stored, and their layout in memory."""

from __future__ import annotations

import dataclasses
import math
import re

from mpjax.kernels.checks import did_you_mean, nearest, require_type, shown, whole_number
from mpjax.kernels.codes import KINDS, SYMMETRIC, CodeKind, key

# The most input channels in one plane of a block: 64 16-bit words are a full 128-byte cache line.
MAXIMUM_PLANE_WIDTH = 64
# The most input channels of a block, whatever its number of planes, since K is padded to whole
# blocks.
MAXIMUM_BLOCK = 512
# Bits of the input channels that a kernel processes per step if codes are the operand itself: a
# cache line.
FLAT_BITS = 8 * 128


_SIXTEEN_BITS = ("bfloat16", "float16")  # no codes, but plain arrays


class _Plain:
    """The properties of a kind of codes that formats need, for plain arrays."""

    bits = 16
    group_sizes = operands = (None,)
    groups_of_word = 1


def _kind(codes: str) -> CodeKind | type[_Plain]:
    return KINDS.get(codes, _Plain)


def group_sizes(codes: str) -> tuple[int | None, ...]:
    """The numbers of input channels that can share a kind of codes' parameters; None for all."""
    return _kind(codes).group_sizes


def can_be_symmetric(codes: str) -> bool:
    """Whether a kind of codes has zero points, which may all be 2**(bits − 1)."""
    return key(codes, symmetric=True) in KINDS


def names_of_codes() -> list[str]:
    """The names of all kinds of codes, and of plain arrays."""
    return [*(name for name in KINDS if not name.endswith(SYMMETRIC)), *_SIXTEEN_BITS]


def describe_sizes(codes: str, prefix: str = "") -> str:
    """The group sizes of a kind of codes, for messages: `32, 64, 128 or K, all input channels`."""
    *others, last = (
        f"{prefix}K, all input channels" if size is None else f"{prefix}{size}"
        for size in group_sizes(codes)
    )
    return f"{', '.join(others)} or {last}" if others else last


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """The format of a stored weight matrix, written as `uint4:g128` or `int8/int8`.

    Static and hashable.

    codes: the kind of codes.
        `uint4`, `uint8`: an integer minus the group's zero point (AWQ, GPTQ, TurboMind).
        `affine4`, `affine8`: an integer times the group's scale, plus its minimum (GGUF, HQQ).
        `table4`, `table3`, `table2`: an index of a table, such as normal float (FLUTE).
        `float8`: an e4m3 number. `float4`: an e2m1 number, times a power of two (MXFP4). `int8`: a
        signed integer. `int4`: the same, for activations in blocks of 4 and 8 bits (COMET).
        `liquid4`: four bits that become an int8 by a group's integer step and offset (LiquidGEMM).
        `bfloat16`, `float16`: no codes, but a plain array.
    group_size: the number of input channels that share parameters, or None for all.
    symmetric: whether all zero points of `uint4` or `uint8` are 2**(bits − 1), which kernels for
        bfloat16 decode in fewer instructions.
    operand: the dtype to which codes are decoded for the tensor cores: `int8` or `float8`, or None
        for the dtype of 16-bit activations. Words are as wide as the operand. `ProductFormat`
        defines the activations that multiply an operand.

    Raises ValueError for fields that can't be combined.
    """

    codes: str
    group_size: int | None = None
    symmetric: bool = False
    operand: str | None = None

    def __post_init__(self) -> None:
        require_type("the codes of a weight format", self.codes, str)
        if self.codes not in (known := names_of_codes()):
            hint = did_you_mean(nearest(self.codes, known))
            raise ValueError(
                f"unknown weight format {self.codes!r}{hint}: expected one of {', '.join(known)}"
            )
        operands = _kind(self.codes).operands
        if self.group_size is not None:
            size = whole_number(f"{self.codes}: group_size", self.group_size, least=0)
            object.__setattr__(self, "group_size", size)
        if self.group_size not in group_sizes(self.codes):
            found = "K" if self.group_size is None else self.group_size
            raise ValueError(
                f"{self.codes} with group size {found}: expected {describe_sizes(self.codes)}"
            )
        if not isinstance(self.symmetric, bool):
            raise ValueError(f"symmetric is {shown(self.symmetric)}: expected True or False")
        if self.symmetric and not can_be_symmetric(self.codes):
            raise ValueError(f"{self.codes} has no zero point, so that it can't be symmetric")
        if self.operand is None:
            object.__setattr__(self, "operand", operands[0])
        is_name = self.operand is None or isinstance(self.operand, str)
        if not is_name or self.operand not in operands:
            raise ValueError(
                f"{self.codes} with the operand {shown(self.operand)}: expected "
                + " or ".join(operand or "none (16 bits)" for operand in operands)
            )

    @classmethod
    def parse(cls, text: str) -> WeightFormat:
        """Parses `codes[:gSIZE][:sym][/operand]`; SIZE is a number, or K (the default) for all.

        Ignores case and surrounding spaces. Raises ValueError for a string that is not a format.
        """
        require_type("the weight format", text, str, hint=", such as 'uint4:g128'")
        lower = text.strip().lower()
        match = re.fullmatch(r"(\w+?)(?::g(\d+|k))?(:sym)?(?:/(\w+))?", lower)
        if match is None:
            hint = did_you_mean(nearest(lower, map(str, _formats())))
            raise ValueError(
                f"can't read the weight format {text!r}{hint}: expected, for example, uint4:g128, "
                "uint8:gK:sym, table3:g64, float8:g128/float8 or bfloat16"
            )
        codes, size, symmetric, operand = match.groups()
        group_size = None if size in (None, "k") else int(size)
        return cls(codes, group_size, symmetric is not None, operand)

    @classmethod
    def of(cls, format: WeightFormat | str) -> WeightFormat:
        """The format itself, or the parsed string; for arguments that may be either."""
        return format if isinstance(format, WeightFormat) else cls.parse(format)

    def __str__(self) -> str:
        if not self.is_packed:
            return self.codes
        group = "K" if self.group_size is None else self.group_size
        suffix = f"/{self.operand}" if self.operand else ""
        return key(f"{self.codes}:g{group}", symmetric=self.symmetric) + suffix

    def require_matrix(self, shape: tuple[int, ...], name: str = "the matrix") -> None:
        """Raises ValueError unless a shape is [..., K, N], and K can be split into groups.

        name: of the matrix, for messages.
        """
        if len(shape) < 2 or 0 in shape:
            raise ValueError(
                f"{name}: the shape is {shape}; {self} is the format of a matrix [..., K, N]"
            )
        if not self.can_split(shape[-2]):
            raise ValueError(
                f"{shape[-2]} input channels can't be split into groups of {self.group_size}; "
                "choose a group size that divides them, or gK for one group"
            )

    def can_split(self, input_channels: int) -> bool:
        """Whether the input channels are whole groups, or the last group may be shorter."""
        is_whole = self.group_size is None or input_channels % self.group_size == 0
        return is_whole or (self.codes in KINDS and KINDS[self.codes].may_cut_groups)

    @property
    def is_packed(self) -> bool:
        """Whether weights of this format are QuantizedTensors rather than plain arrays."""
        return self.bits < 16

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return _kind(self.codes).bits

    @property
    def word_bits(self) -> int:
        """The bits of a word, which are those of the operand: words are moved like operands."""
        return 8 if self.operand else 16

    @property
    def columns(self) -> int:
        """The number of words that have one code of each plane.

        It is 3 for codes of three bits, of which 16 fill three words, and otherwise 1.
        """
        return 3 if self.bits == 3 else 1

    @property
    def planes(self) -> int:
        """The number of planes: of codes in one lane's words."""
        return self.columns * self.word_bits // self.bits

    @property
    def is_flat(self) -> bool:
        """Whether each word is one code, so that the words are the plain matrix [N, K]."""
        return self.planes == 1

    @property
    def plane_width(self) -> int:
        """The number of neighbouring input channels in one plane of a block, all in one group."""
        if self.is_flat:
            return FLAT_BITS // self.bits
        limit = min(MAXIMUM_PLANE_WIDTH, MAXIMUM_BLOCK // self.planes)
        return min(self.group_size or limit, limit)

    @property
    def block(self) -> int:
        """The number of input channels of one row of words, which a kernel processes at a time."""
        return self.planes * self.plane_width

    @property
    def groups_of_word(self) -> int:
        """The number of neighbouring groups whose parameters share a 32-bit word."""
        return _kind(self.codes).groups_of_word

    @property
    def parameter_channels(self) -> int | None:
        """The number of input channels that share a word of parameters, or None for all."""
        return None if self.group_size is None else self.groups_of_word * self.group_size

    @property
    def parameters_of_block(self) -> int:
        """The number of words of parameters of a block, for one output channel."""
        size = self.parameter_channels
        return 1 if size is None else max(1, self.block // size)

    def groups(self, input_channels: int) -> int:
        """The number of groups of `input_channels` input channels."""
        return 1 if self.group_size is None else -(-input_channels // self.group_size)

    def padding(self, input_channels: int) -> int:
        """The number of padding channels after `input_channels`, in the last block."""
        return -input_channels % self.block

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """The bytes that a weight of `shape` [..., K, N] takes in device memory."""
        *leading, input_channels, output_channels = shape
        if not self.is_packed:
            return math.prod(shape) * 2
        padded = input_channels + self.padding(input_channels)
        kind = KINDS[self.codes]
        channel_scale = 4 if kind.has_channel_scales else 0
        table = 4 * 2**self.bits if kind.has_table else 0
        words = padded // (self.parameter_channels or padded)
        matrix = output_channels * (padded * self.bits // 8 + 4 * words + channel_scale) + table
        return math.prod(leading) * matrix


def _formats() -> list[WeightFormat]:
    """Every valid format."""
    return [
        WeightFormat(codes, size, symmetric, operand)
        for codes in names_of_codes()
        for size in group_sizes(codes)
        for symmetric in ((False, True) if can_be_symmetric(codes) else (False,))
        for operand in _kind(codes).operands
    ]
