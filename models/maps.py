"""Linear maps of a layer, and folds: pairs of parameters between which scales can move."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class LinearMaps(NamedTuple):
    """Linear maps of one input, which a layer computes as one product if formats allow it.

    path: of the Linear or FusedLinear inside the layer's mixer or MLP, such as `gate_up`.
    shapes: (input channels, output channels) of each map. bias: whether all maps have biases.
    experts: the number of experts, each of which has such maps; None outside experts.
    is_alternating: whether files alternate an expert's gate and up outputs, which the module keeps
        one after the other. is_transposed: whether files store 16-bit weights as [input, output
        channels] (gpt-oss).
    factors: of the outputs of each map, biases included; () for none.
    is_precise: whether the maps stay in 16 bits unless a recipe names them: they are small, and
        errors of their outputs add up over many tokens.
    is_plain: whether the maps are 16-bit arrays also where files hold them in another format, since
        their transpose is used, too. Beside such maps no adapter runs.
    """

    path: str
    shapes: tuple[tuple[int, int], ...]
    bias: bool = False
    experts: int | None = None
    is_alternating: bool = False
    is_transposed: bool = False
    factors: tuple[float, ...] = ()
    is_precise: bool = False
    is_plain: bool = False


@dataclasses.dataclass(frozen=True)
class Fold:
    """A parameter and the linear map that reads its outputs, between which scales can move.

    Dividing the source's outputs by scales, and multiplying the target's rows by them, leaves a
    layer's outputs unchanged if everything between them is linear in each channel. So does
    reordering channels if everything between them treats all channels alike.

    target: the path of the linear map whose rows are multiplied, such as `attention.qkv`.
    source: the path of the norm or linear map whose outputs are divided. If source and target are
        stacks of experts' maps, each expert has its own scales.
    part: which of several joined maps the source is; None for all outputs.
    repeats: (heads, copies, channels) if the target reads each head of the source several times, as
        query heads share values; None if it reads each channel once.
    is_mixable: whether the channels of a head, given by `repeats`, may also be multiplied by a
        matrix that the target's rows undo, or be reordered: everything between treats them alike.
    is_elementwise: whether each channel that the target reads depends only on that channel of each
        part of the source, so that channels can be reordered.
    is_linear: whether scales can move; False if channels can only be reordered.
    others: the paths of the other readers of the source's outputs, which are multiplied, too:
        linear maps, and arrays [outputs, channels] such as a router.
    """

    target: str
    source: str
    part: int | None = None
    repeats: tuple[int, int, int] | None = None
    is_mixable: bool = False
    is_elementwise: bool = False
    is_linear: bool = True
    others: tuple[str, ...] = ()

    @property
    def readers(self) -> tuple[str, ...]:
        """The paths of all readers of the source's outputs, the target first."""
        return (self.target, *self.others)

    def below(self, parent: str) -> Fold:
        """The fold with paths that begin at the parent of its module."""
        source, target, *others = (
            f"{parent}.{path}" for path in (self.source, self.target, *self.others)
        )
        return dataclasses.replace(self, source=source, target=target, others=tuple(others))
