"""Linear maps of a layer, and the places between them where scales of channels can move."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class LinearMaps(NamedTuple):
    """Linear maps of one input, which a layer computes as one product where it can.

    path: the attribute of the layer's attention or MLP that holds the Linear or FusedLinear, such
        as `gate_up`.
    shapes: (input channels, output channels) of each map. bias: whether all maps have biases.
    experts: the number of experts, each of which has such maps; None for maps of the layer itself.
    is_alternating: whether the outputs of an expert's map alternate between gate and up in files,
        and come one after the other in the module. is_transposed: whether files hold 16-bit weights
        as [input, output channels] (gpt-oss).
    factors: of the outputs of each map, biases included; () for none.
    is_precise: whether the maps stay in 16 bits unless a recipe names them: they are small, and
        errors of their outputs add up over many tokens.
    """

    path: str
    shapes: tuple[tuple[int, int], ...]
    bias: bool = False
    experts: int | None = None
    is_alternating: bool = False
    is_transposed: bool = False
    factors: tuple[float, ...] = ()
    is_precise: bool = False


@dataclasses.dataclass(frozen=True)
class Fold:
    """A place where scales of channels can move from one parameter to the linear map behind it.

    Dividing the outputs of the source by scales, and multiplying the rows of the target by them,
    leaves a layer's outputs as they are, if all that lies between is linear in each channel. So
    does another order of channels, where all that lies between treats each channel alike.

    target: the path of the linear map whose rows are multiplied, such as `attention.qkv`.
    source: the path of the norm or the linear map whose outputs are divided. If it is a stack of
        experts' maps, as the target then is, each expert has scales of its own.
    part: which outputs of a source that is several maps joined; None for all.
    repeats: (heads, copies, channels) where the target reads each head of the source several times,
        as query heads that share values do; None where it reads each channel once.
    is_mixable: whether the channels of a head, which `repeats` gives, may also be multiplied by a
        matrix that the target's rows undo, or put in another order: all that lies between treats
        them alike.
    is_elementwise: whether each channel that the target reads depends on that channel of every part
        of the source, and on no other, so that channels can be put in another order.
    is_linear: whether scales can move; False where all that can change is the order of channels.
    others: the paths of all others that read the source's outputs and are multiplied, too: linear
        maps, and arrays [outputs, channels] such as a router.
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
        """The paths of all that reads the source's outputs, the target first."""
        return (self.target, *self.others)

    def below(self, parent: str) -> Fold:
        """The fold with paths that begin at the parent of the module that they began at."""
        source, target, *others = (
            f"{parent}.{path}" for path in (self.source, self.target, *self.others)
        )
        return dataclasses.replace(self, source=source, target=target, others=tuple(others))
