"""Precisions in the notation of the papers, such as `W4A16KV8`."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

from mpjax.kernels import KVFormat, WeightFormat
from mpjax.kernels.checks import nearest, shown
from mpjax.kernels.codes import KINDS, SYMMETRIC
from mpjax.kernels.formats import can_be_symmetric, describe_sizes, group_sizes

EXPECTED = (
    "expected, for example, W4A16KV8, W16A16KV16, WNF3g128A16KV4c, W8A8K8V4, or A16KV8, which "
    "keeps the weights' format"
)
# With Ax, one in DEFAULT_WIDE_BLOCKS activation blocks has 8 bits, the others 4. COMET has 8 to 20
# % (§6.2).
DEFAULT_WIDE_BLOCKS = 8
_ACTIVATIONS = {"16": None, "8": "int8", "FP8": "float8", "x": "int8"}
_W_PART = r"W([A-Z]*\d+)(?:g(\d+|K))?(sym)?"
_A_PART = r"A(X\d*|[A-Z]*\d+)"
_TABLE_PART = r"([A-Z]*\d+)(?:g(\d+|K))?(?:A([A-Z]*\d+))?"
# Default group sizes of tables that differ from those of linear maps.
_OF_TABLES: dict[tuple[str, str], int | None] = {("8", "16"): None}
# KV formats of the precisions that error messages suggest.
_USUAL_CACHES = ("KV16", "KV8", "KV8s", "KV4", "KV4c", "KV2", "KVfp8")


def _formats() -> dict[tuple[str, str], tuple[str, int | None]]:
    """(W part, A part) → codes and default group size, for each weight format."""
    spelt = {
        (spelling.weights, spelling.activations): (codes, spelling.usual_size)
        for codes, kind in KINDS.items()
        if not codes.endswith(SYMMETRIC)
        for spelling in kind.spellings
    }
    return {("16", "16"): ("bfloat16", None), **spelt}


@dataclasses.dataclass(frozen=True)
class Precision:
    """Formats of weights, activations and the KV cache; hashable.

    weights: the format of the layers' linear maps, including their activation format. A 16-bit
        format stands for the model's dtype; None keeps the checkpoint's format.
    kv: the format of cached keys and values.
    mixture: the two or more weight formats of a checkpoint whose linear maps differ, and then
        `weights` is None. Empty otherwise.
    bits: of unpacked weights and unrounded activations: 16, or 32 for a float32 model.
    wide_blocks: for `int4` weights, whose activations have 4 or 8 bits in each block of 128
        channels: one in `wide_blocks` blocks has 8 bits, 0 for none. DEFAULT_WIDE_BLOCKS without
        such weights, and if no single value describes the model.
    head, embedding: the formats of these tables, as matrices [hidden, vocabulary]; None keeps the
        checkpoint's. A tied table has one format for both.

    Formats may also be strings for WeightFormat and KVFormat. `str` is the inverse of `parse`.
    """

    weights: WeightFormat | None = None
    kv: KVFormat = KVFormat()  # noqa: RUF009 (frozen)
    mixture: tuple[WeightFormat, ...] = ()
    bits: int = 16
    wide_blocks: int = DEFAULT_WIDE_BLOCKS
    head: WeightFormat | None = None
    embedding: WeightFormat | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mixture, tuple | list):
            raise ValueError(f"mixture is {shown(self.mixture)}: expected a list of weight formats")
        mixture = tuple(sorted({WeightFormat.of(each) for each in self.mixture}, key=str))
        object.__setattr__(self, "mixture", mixture)
        for name in ("weights", "head", "embedding"):
            if (format := getattr(self, name)) is not None:
                object.__setattr__(self, name, WeightFormat.of(format))
        object.__setattr__(self, "kv", KVFormat.of(self.kv))
        if mixture and (self.weights is not None or len(mixture) == 1):
            raise ValueError(
                f"mixture has {len(mixture)} format(s) and weights is {self.weights}: expected a "
                "mixture of two formats or more, and weights of None"
            )
        if self.bits not in (16, 32):
            raise ValueError(f"bits is {shown(self.bits)}: expected 16 or 32")
        if not isinstance(self.wide_blocks, int) or self.wide_blocks < 0:
            raise ValueError(f"wide_blocks is {shown(self.wide_blocks)}: expected 0 or more")
        if not any(format.codes == "int4" for format in self.formats):
            object.__setattr__(self, "wide_blocks", DEFAULT_WIDE_BLOCKS)
        if self.formats and all(format.operand for format in self.formats):
            # All weights are packed and all activations rounded, so `bits` is meaningless.
            object.__setattr__(self, "bits", 16)

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Parses `W…A…KV…` or `W…A…K…V…`, then optionally `H…` and `E…`; case-insensitive.

        W, the weights: 16; 8 or 4 (integers); M8 or M4 (integers with a float minimum); FP8 (e4m3);
            MXFP4 (e2m1, times a power of two); NF4, NF3 or NF2 (normal float). `gSIZE` is the
            number of input channels that share a scale, or K for all; `sym` is symmetric
            quantisation of integers. Without a W part, as in `A16KV8`, linear maps keep the
            checkpoint's format, and FP8 ones its activation format. Several W parts, as in
            `W16+W4A16KV8` and `W16A16+W8A8KV8`, name all formats of a checkpoint's linear maps.
        A, the activations: 16, or the format to which a product rounds them: 8 with W8 (W8A8) and
            with W4 (LiquidQuant), FP8 with WFP8; x with W4: 4 or 8 bits in each block of 128
            channels (COMET); Ax16 has 8 bits in one of 16 blocks, Ax in one of 8, A4 in none. A32
            instead of A16, and W32A32, mean a model in float32.
        KV, the cached keys and values, or K and V separately as in K8V4: 16; 8 or 4 (integers); fp8
            (e4m3); 4c or 2 (integers; keys have a scale for each channel, and in K4cV4c values
            too); 2t (2 bits with a scale for each token); 4t (4 without a Hadamard transform of the
            keys); 8s (static scales of channels, from a calibration). See KVFormat.
        H, the head, and E, the embedding: 16, or a packed format as in W, such as H8, H4g64, H8A8
            and E8. H8 and E8 have a scale for each token of the vocabulary, and integers of tables
            have no zero points. Without these parts the tables keep the checkpoint's format.

        Raises ValueError with the invalid part and the precision that was probably meant.
        """
        if not isinstance(text, str):
            meant = _meant(str(text)) or "W4A16KV8"
            raise ValueError(f"precision is {shown(text)}: expected a text, such as {meant!r}")
        try:
            found = _read(text)
        except ValueError as error:
            raise ValueError(f"precision {text!r}: {error}") from error
        if found is None:
            meant = _meant(text)
            if meant is None and (reason := _why_not(text)):
                raise ValueError(f"precision {text!r}: {reason}")
            meant = meant or nearest(_compact(text), _usual())
            hint = f"did you mean {meant!r}?" if meant else EXPECTED
            raise ValueError(f"can't read the precision {text!r}: {hint}")
        return found

    @classmethod
    def of(cls, precision: Precision | str) -> Precision:
        """Returns a Precision unchanged, or parses a string."""
        return precision if isinstance(precision, Precision) else cls.parse(precision)

    @classmethod
    def mixed(cls, formats: Iterable[WeightFormat], kv: KVFormat, bits: int) -> Precision:
        """The precision of a model whose linear maps have the given formats, at least one."""
        first, *others = formats = tuple(set(formats))
        return cls(None, kv, formats, bits) if others else cls(first, kv, (), bits)

    @property
    def of_weights(self) -> Precision:
        """The precision with KV16: equal for two models that can share their weights."""
        return dataclasses.replace(self, kv=KVFormat())

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """The formats of linear maps: one, several (a mixture), or none without a W part."""
        return self.mixture if self.weights is None else (self.weights,)

    @property
    def tables(self) -> dict[str, WeightFormat]:
        """The formats of `head` and `embedding` that are set."""
        named = {"head": self.head, "embedding": self.embedding}
        return {table: format for table, format in named.items() if format is not None}

    def with_tables(self, tables: Mapping[str, WeightFormat]) -> Precision:
        """The precision with exactly these table formats, by `head` and `embedding`."""
        head, embedding = tables.get("head"), tables.get("embedding")
        return dataclasses.replace(self, head=head, embedding=embedding)

    def agrees_with(self, found: Iterable[WeightFormat]) -> bool:
        """Whether a checkpoint whose linear maps have the formats `found` has this precision.

        With a single W part, some maps may be in 16 bits. Symmetry isn't compared, since the zero
        points decide it.
        """
        there, asked = _without_symmetry(found), _without_symmetry(self.formats)
        if self.mixture or not asked:
            return not asked or there == asked
        return {format for format in there if format.is_packed} == {
            format for format in asked if format.is_packed
        }

    @property
    def names(self) -> list[str]:
        """The W part of each linear map format, with its A part unless that is A16 or A32."""
        names = sorted(describe_weights(format, self.bits) for format in self.formats)
        if self.wide_blocks == DEFAULT_WIDE_BLOCKS:
            return names
        written = f"Ax{self.wide_blocks}" if self.wide_blocks else "A4"
        return [name.replace("Ax", written) for name in names]

    def __str__(self) -> str:
        names, rest = self.names, f"A{self.bits}"
        if any("A" in name for name in names):
            names, rest = [name if "A" in name else name + rest for name in names], ""
        tables = (table[0].upper() + describe_table(it) for table, it in self.tables.items())
        return f"{'+'.join(names)}{rest}{self.kv}{''.join(tables)}"


def describe_weights(format: WeightFormat, bits: int = 16) -> str:
    """The W part of a precision, such as `W4`, `W4g32`, `WNF3` or `W16`, and its A part if not A16.

    bits: 16 or 32, for an unpacked format.
    """
    if not format.is_packed:
        return f"W{bits}"
    weights, activations = _parts_of(format)
    group = _describe_group(format.group_size, _formats()[weights, activations][1])
    suffix = "" if activations == "16" else f"A{activations}"
    return f"W{weights}{group}" + ("sym" if format.symmetric else "") + suffix


def describe_table(format: WeightFormat) -> str:
    """The part after H or E in a precision, such as `8`, `4g64` or `16`."""
    if not format.is_packed:
        return "16"
    weights, activations = parts = _parts_of(format)
    group = _describe_group(format.group_size, _OF_TABLES.get(parts, _formats()[parts][1]))
    return f"{weights}{group}" + ("" if activations == "16" else f"A{activations}")


def _parts_of(format: WeightFormat) -> tuple[str, str]:
    """The W part and the A part of a packed format."""
    for parts, (codes, _) in _formats().items():
        if (codes, _ACTIVATIONS[parts[1]]) == (format.codes, format.operand):
            return parts
    raise AssertionError(f"unreachable: every format has a name, {format} too")


def _describe_group(size: int | None, usual: int | None) -> str:
    return "" if size == usual else f"g{'K' if size is None else size}"


def _without_symmetry(formats: Iterable[WeightFormat]) -> set[WeightFormat]:
    return {dataclasses.replace(format, symmetric=False) for format in formats}


def _read(text: str) -> Precision | None:
    """Parses a precision; None for an invalid form, ValueError for an unknown part."""
    *firsts, last = text.strip().split("+")
    pattern = rf"(?:{_W_PART})?{_A_PART}(K\w*V\w+?)(H{_TABLE_PART})?(E{_TABLE_PART})?"
    match = re.fullmatch(pattern, last, re.IGNORECASE)
    others = [re.fullmatch(rf"{_W_PART}(?:{_A_PART})?", part, re.IGNORECASE) for part in firsts]
    if match is None or None in others or (others and match[1] is None):
        return None
    parts = [other.groups() for other in others if other is not None] + [match.groups()[:4]]
    formats, bits, wide = [], set(), set()
    for weights, size, symmetric, activations in parts:
        activations = (activations or match[4]).upper()
        if weights == "4" and (share := _wide_blocks(activations)) is not None:
            wide.add(share)
            activations = "x"
        if activations in ("16", "32"):
            bits.add(int(activations))
        if weights is not None:
            formats.append(_format(weights.upper(), size, symmetric is not None, activations))
        elif activations not in ("16", "32"):
            meant = "Ax" if "X" in activations else f"A{activations}"
            example = "W4Ax" if "X" in activations else f"W8A{activations}"
            raise ValueError(f"{meant} needs a W part, such as {example}")
    if len(bits) > 1:
        raise ValueError("A16 and A32 can't be in one model, which has one dtype: choose one")
    if len(wide) > 1:
        raise ValueError("Ax has one share of blocks for the whole model: choose one")
    width = max(bits, default=16)
    kv = KVFormat.parse(match[5])
    found = Precision.mixed(formats, kv, width) if formats else Precision(None, kv, (), width)
    if wide:
        found = dataclasses.replace(found, wide_blocks=wide.pop())
    groups = match.groups()
    tables = {"head": groups[5:9], "embedding": groups[9:]}
    return found.with_tables({path: _table(*it) for path, it in tables.items() if it[0]})


def _wide_blocks(activations: str) -> int | None:
    """`Precision.wide_blocks` of the A part `X`, `X16` or `4`; None for other A parts.

    Raises ValueError for `X0`.
    """
    if activations == "4":
        return 0
    found = re.fullmatch(r"X(\d*)", activations)
    if found is None:
        return None
    share = int(found[1] or DEFAULT_WIDE_BLOCKS)
    if share == 0:
        raise ValueError("Ax0 is no share of blocks in 8 bits: write A4 for none, Ax1 for all")
    return share


def _table(text: str, codes: str, size: str | None, activations: str | None) -> WeightFormat:
    """The format of a table from its H or E part of a precision."""
    codes, activations = codes.upper(), (activations or "16").upper()
    if size is None and (codes, activations) in _OF_TABLES:
        usual = _OF_TABLES[codes, activations]
        size = "K" if usual is None else str(usual)
    name, _ = _formats().get((codes, activations), ("bfloat16", None))
    try:
        return _format(codes, size, can_be_symmetric(name), activations)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def _format(weights: str, size: str | None, symmetric: bool, activations: str) -> WeightFormat:
    if (weights, activations) == ("16", "32") or (weights == "32" and activations != "32"):
        raise ValueError(
            f"W{weights}A{activations} is not implemented: weights that aren't packed have the "
            "model's dtype, as in W16A16 and W32A32"
        )
    plain = {"32": "16"}
    weights, activations = plain.get(weights, weights), plain.get(activations, activations)
    if activations not in _ACTIVATIONS:
        raise ValueError(
            f"A{activations} is not implemented: activations can be A16 (A32 in float32), A8, AFP8 "
            "or, with W4, A4 and Ax"
        )
    if (weights, activations) not in _formats():
        possible = ", ".join(f"W{w}A{a}" for w, a in _formats())
        raise ValueError(f"W{weights}A{activations} is not implemented: expected {possible}")
    codes, usual = _formats()[weights, activations]
    if codes == "bfloat16":
        if size or symmetric:
            raise ValueError("W16 and W32 have no group size and no sym: leave both out")
        return WeightFormat(codes)
    group_size = usual if size is None else None if size in "kK" else int(size)
    if group_size not in group_sizes(codes):
        raise ValueError(
            f"W{weights}g{size} is not implemented with A{activations}: expected "
            f"{describe_sizes(codes, prefix='g')}"
        )
    if symmetric and not can_be_symmetric(codes):
        raise ValueError(f"W{weights}A{activations} has no zero point: leave sym out")
    return WeightFormat(codes, group_size, symmetric, _ACTIVATIONS[activations])


def _meant(text: str) -> str | None:
    """The precision that an invalid string probably means, such as W4A16KV16 for W4 or 4bit.

    None if unclear.
    """
    with contextlib.suppress(ValueError):
        return str(Precision(WeightFormat.parse(text)))
    part = _compact(text).removeprefix("INT").removesuffix("BIT")
    if not part:
        return None
    wholes = [part, f"{part}KV16", f"{part}A16KV16", f"W{part}A16KV16", f"A16{part}"]
    for whole in (*wholes, re.sub(r"^(W\w*?)(?=K\w*V)", r"\1A16", part)):
        with contextlib.suppress(ValueError):
            if (found := _read(whole)) is not None:
                return str(found)
    return None


def _why_not(text: str) -> str | None:
    """The reason why a W part (and its A and KV parts) is invalid; None for other strings."""
    part = _compact(text)
    pattern = rf"(?P<w>{_W_PART})(?P<a>{_A_PART})?(?P<kv>K\w*V\w+)?"
    for whole in (part, f"W{part}"):
        if match := re.fullmatch(pattern, whole, re.IGNORECASE):
            try:
                _read(f"{match['w']}{match['a'] or 'A16'}{match['kv'] or 'KV16'}")
            except ValueError as error:
                return str(error)
    return None


def _compact(text: str) -> str:
    return re.sub(r"[\s_,/-]+", "", text).upper()


def _usual() -> Iterator[str]:
    for cache in _USUAL_CACHES:
        yield f"A16{cache}"
        yield from (f"W{weights}A{activations}{cache}" for weights, activations in _formats())
