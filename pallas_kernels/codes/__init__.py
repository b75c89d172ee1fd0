"""The kinds of codes: one module for each, and the table of all kinds.

A kind fits parameters to weights and finds the nearest codes, packs codes into words, and has the
few instructions that decode words to operands of the tensor cores. All kinds share one packed
tensor and one main loop. A new kind is a file and a line in the table: formats, precisions,
packing, products, quantising and saving call the kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpjax.kernels.codes.affine import Affine
from mpjax.kernels.codes.base import CodeKind, Decoder, Group
from mpjax.kernels.codes.float4 import Float4
from mpjax.kernels.codes.float8 import Float8
from mpjax.kernels.codes.int4 import Int4
from mpjax.kernels.codes.integer import Integer, Symmetric
from mpjax.kernels.codes.liquid import Liquid
from mpjax.kernels.codes.signed import Signed
from mpjax.kernels.codes.table import Table

if TYPE_CHECKING:
    from mpjax.kernels.formats import WeightFormat

SYMMETRIC = ":sym"  # suffix of codes whose zero points are all the middle


def key(codes: str, *, symmetric: bool) -> str:
    """The name of codes with their symmetry, as in `KINDS` and in the string form of formats."""
    return codes + SYMMETRIC if symmetric else codes


KINDS: dict[str, CodeKind] = {
    "uint4": Integer(4),
    "uint8": Integer(8),
    key("uint4", symmetric=True): Symmetric(4),
    key("uint8", symmetric=True): Symmetric(8),
    "affine4": Affine(4),
    "affine8": Affine(8),
    "table4": Table(4),
    "table3": Table(3),
    "table2": Table(2),
    "float8": Float8(),
    "float4": Float4(),
    "int8": Signed(),
    "int4": Int4(),
    "liquid4": Liquid(),
}


def of(format: WeightFormat) -> CodeKind:
    """The kind of codes of a packed format."""
    return KINDS[key(format.codes, symmetric=format.symmetric)]


def has_table(format: WeightFormat) -> bool:
    """Whether a format's codes are indices of a table; False for plain weights."""
    return format.is_packed and of(format).has_table


__all__ = ["KINDS", "SYMMETRIC", "CodeKind", "Decoder", "Group", "has_table", "key", "of"]
