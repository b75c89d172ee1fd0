"""Reader: checks and decodes the tensors of a quantised module."""

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
    """The format to which a module's input activations are rounded.

    operand: `int8`, `float8`, or None for 16 bits. is_static: whether the scale is the file's, one
    for all tokens. unsupported: a description of the checkpoint's own format if it is not
    implemented; then `operand` is None, and a precision must choose. operands: the choices of a
    precision; empty for no choice.
    """

    operand: str | None = None
    is_static: bool = False
    unsupported: str | None = None
    operands: tuple[str | None, ...] = ()

    @property
    def are_static(self) -> bool:
        """Whether activations are rounded with a scale from the file."""
        return self.is_static and self.operand is not None


@dataclasses.dataclass(frozen=True)
class Reader(abc.ABC):
    """Decodes modules with common settings, its fields.

    A subclass is a frozen dataclass for each format. `suffixes` has `bias` only if writers of the
    format add biases to modules whose model has none.

    suffixes: of the tensors that are read.
    on_host: suffixes of tensors that stay NumPy arrays, because decoding needs their values in
        Python, such as the channel order.
    order_suffix: of the tensor with the group of each input channel, or None.
    shape_suffix: of the tensor with the shape [output, input channels], or None.
    decoding_bytes: extra device bytes per weight while decoding.
    activations: a dataclass field in schemes with an activation format.
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
        """Whether a module has this format, by its tensors' names, shapes and dtypes."""

    @property
    @abc.abstractmethod
    def weights(self) -> WeightFormat:
        """The weight format on the device of modules before their channels are known."""

    def format(self, name: str, channels: int) -> WeightFormat:
        """The weight format of one module on the device.

        name: of the module. channels: its input channels. Raises CheckpointError if no weight
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
        """Decodes one module to plain codes, on its arrays' device; works inside `jax.jit`.

        tensors: the file's arrays, by suffix; NumPy arrays for `on_host`. Returned scales may have
        any float dtype, and all zero points may be the middle: `convert` normalises both for
        `pack`. Raises CheckpointError as `check` does, and for values that contradict config.json
        or are not finite.
        """

    @property
    def axes(self) -> Mapping[str, Axes]:
        """The axes along which a module's tensors can be sliced by channels, by suffix.

        Empty if a module can only be decoded as a whole. Slices must contain whole groups and
        words.
        """
        return {}

    def dequantize(self, tensors: Tensors, name: str, shape: Shape | None = None) -> jax.Array:
        """The weight float32 [K, N] of one module; see `decode`."""
        return self.decode(tensors, name, shape).dequantize()

    @property
    def contents(self) -> str:
        """A description of the weights in the files, and of their format when loaded."""
        return f"codes kept as {describe_weights(dataclasses.replace(self.weights, operand=None))}"

    @property
    def loss(self) -> str | None:
        """A description of what is rounded when loaded; None if nothing is."""
        return None
