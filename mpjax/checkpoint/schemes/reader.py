"""Reading: how the tensors of a quantised module are checked and decoded."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax

from mpjax.checkpoint.schemes.tensors import Axes, Shape, Specs, Tensors
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.precision import describe_weights


class Activations(NamedTuple):
    """The format to which products round the activations that a module meets.

    operand: `int8`, `float8`, or None for 16 bits. is_static: whether the scale is the file's, one
    for all tokens. unsupported: a description of the checkpoint's own format, if it is not
    implemented: `operand` is None then, and a precision must choose. operands: those among which a
    precision chooses; empty where there is no choice.
    """

    operand: str | None = None
    is_static: bool = False
    unsupported: str | None = None
    operands: tuple[str | None, ...] = ()

    @property
    def are_static(self) -> bool:
        """Whether activations are rounded, and with a scale of the files."""
        return self.is_static and self.operand is not None


@dataclasses.dataclass(frozen=True)
class Reader(abc.ABC):
    """The settings of some modules of a checkpoint, which decode their tensors.

    A subclass is a frozen dataclass for each format. `suffixes` has `bias` only if writers of the
    format add biases to modules whose model has none.

    suffixes: of the tensors that are read.
    on_host: suffixes of tensors that stay NumPy arrays, because decoding needs their values in
        Python, such as the order of the channels.
    order_suffix: of the tensor that gives the group of each input channel, if there is one.
    shape_suffix: of the tensor that holds the shape [output, input channels], if there is one.
    decoding_bytes: device memory per weight that decoding takes beside the module's own tensors.
    activations: a field where the format says something of them.
    """

    suffixes: ClassVar[tuple[str, ...]]
    on_host: ClassVar[tuple[str, ...]] = ()
    order_suffix: ClassVar[str | None] = None
    shape_suffix: ClassVar[str | None] = None
    decoding_bytes: ClassVar[int] = 2

    activations = Activations()

    @classmethod
    @abc.abstractmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has this format, judged by its tensors' names, shapes and dtypes."""

    @property
    @abc.abstractmethod
    def weights(self) -> WeightFormat:
        """The weight format on the device of modules whose channels are not known."""

    def format(self, name: str, channels: int) -> WeightFormat:
        """The weight format of one module on the device.

        name: of the module. channels: its input channels. Raises CheckpointError where no weight
        format has the module's bits and groups.
        """
        return self.weights

    @abc.abstractmethod
    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks the shapes and dtypes of a module's tensors and returns the weight's (K, N).

        specs: the tensors or their descriptions, by suffix. name: of the module, for messages.
        shape: the (K, N) of the model, if known. Raises CheckpointError.
        """

    @abc.abstractmethod
    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """Decodes one module to plain codes, on its arrays' device; also inside `jax.jit`.

        tensors: the arrays as in the file, by suffix; those of `on_host` are NumPy arrays. The
        returned scales may have any float dtype, and all zero points may be the middle: `convert`
        turns both into the form that `pack` takes. Raises CheckpointError as `check` does, and for
        values that contradict config.json or are not finite.
        """

    @property
    def axes(self) -> Mapping[str, Axes]:
        """The axes of a module's tensors, by suffix, along which some channels can be read alone.

        Empty where a module can only be decoded as a whole. Channels of a group, and those of a
        word, are decoded together.
        """
        return {}

    def dequantize(self, tensors: Tensors, name: str, shape: Shape | None = None) -> jax.Array:
        """The weight float32 [K, N] of one module; see `decode`."""
        return self.decode(tensors, name, shape).dequantize()

    @property
    def contents(self) -> str:
        """A text about the weights in the files, and the format that they have when loaded."""
        return f"codes kept as {describe_weights(dataclasses.replace(self.weights, operand=None))}"

    @property
    def loss(self) -> str | None:
        """A text about numbers that are rounded when they are loaded; None if none are."""
        return None
