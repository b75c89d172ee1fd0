"""Base class of schemes: everything that the reader of checkpoints needs of a format."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, Self

import jax

from mpjax.checkpoint.schemes import checks
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.precision import describe_weights


class TensorSpec(Protocol):
    """Anything with a shape and a dtype: a TensorInfo, an array, a jax.ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's dimensions."""

    @property
    def dtype(self) -> Any:
        """The tensor's numpy dtype."""


Specs = Mapping[str, TensorSpec]  # a module's tensors, or their descriptions, by suffix


class Axis(NamedTuple):
    """An axis of a tensor, each of whose entries belongs to so many channels."""

    number: int
    channels: int = 1


class Axes(NamedTuple):
    """The axes of a tensor along the input and the output channels; None where it has none."""

    inputs: Axis | None = None
    outputs: Axis | None = None


class Scheme(abc.ABC):
    """The way in which a checkpoint stores its quantised linear maps.

    A subclass is a format, with one line in `registry.SCHEMES`. An instance belongs to one
    checkpoint: it holds the part of `quantization_config` that decoding depends on. It need not
    know the modules that the checkpoint left in 16 bits: their tensors show that.

    title: the format's name in messages. article: the article before the name.
    methods: values of `quant_method` in config.json.
    suffixes: of the tensors that are read. `bias` is among them only if writers of the format add
        biases to modules whose model has none.
    ignored: ends of names of tensors that a checkpoint may have and that are not read.
    on_host: suffixes of tensors that stay NumPy arrays, because decoding needs their values in
        Python, such as the order of the channels.
    dequantizes_tables: whether embedding and head may be quantised too; they are dequantised.
    decoding_bytes: device memory per weight that decoding takes beside the module's own tensors.
    order_suffix: of the tensor that gives the group of each input channel, if there is one.
    shape_suffix: of the tensor that holds the shape [output, input channels], if there is one.
    layouts: names of the forms of the format that `mpjax.export` writes.
    joins_experts: whether they hold maps of all experts in one tensor, and no other maps.
    default_for: kinds of codes for which the first of `layouts` is the default, such as `uint4`, or
        `uint4:sym` for codes that are all symmetric.
    """

    title: ClassVar[str]
    article: ClassVar[str] = "a"
    methods: ClassVar[tuple[str, ...]]
    suffixes: ClassVar[tuple[str, ...]]
    ignored: ClassVar[tuple[str, ...]] = ()
    on_host: ClassVar[tuple[str, ...]] = ()
    dequantizes_tables: ClassVar[bool] = False
    decoding_bytes: ClassVar[int] = 2
    order_suffix: ClassVar[str | None] = None
    shape_suffix: ClassVar[str | None] = None
    layouts: ClassVar[tuple[str, ...]] = ()
    joins_experts: ClassVar[bool] = False
    default_for: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` names this format."""
        return checks.method_of(config) in cls.methods

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads config.json's `quantization_config`.

        Raises CheckpointError for another format, and for a layout that can't be read.
        """

    @classmethod
    @abc.abstractmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has this format, judged by its tensors' names, shapes and dtypes."""

    @classmethod
    def refuse(cls, name: str, specs: Specs, method: str | None) -> NoReturn:
        """Raises CheckpointError: the module has this format, and config.json names another.

        name: of the module. method: the `quant_method` of config.json, None without one.
        """
        said = f"has no quantization_config with quant_method {' or '.join(map(repr, cls.methods))}"
        if method in cls.methods:
            said = f"says quant_method {method!r} with another format"
        raise CheckpointError(
            f"{name} is {cls.article} {cls.title} module ({', '.join(specs)}), but config.json "
            f"{said}: take the config.json of the same checkpoint"
        )

    @property
    def quant_method(self) -> str:
        """The `quant_method` of this checkpoint's config.json."""
        return self.methods[0]

    @property
    def caution(self) -> str | None:
        """Which reader does not load an export of these modules right; None if all do."""
        return None

    @property
    @abc.abstractmethod
    def weights(self) -> WeightFormat:
        """The weight format of most modules on the device; `format` gives that of each module."""

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """`weights`, of each of the schemes that a checkpoint mixes."""
        return (self.weights,)

    def of_module(self, name: str) -> Scheme:
        """The scheme of one module: this one, but where a checkpoint mixes several."""
        return self

    @abc.abstractmethod
    def format(self, name: str, channels: int) -> WeightFormat:
        """The weight format of one module on the device.

        name: of the module. channels: its input channels. Raises CheckpointError where no weight
        format has the module's bits and groups.
        """

    @abc.abstractmethod
    def check(
        self, specs: Specs, name: str, shape: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Checks the shapes and dtypes of a module's tensors and returns the weight's (K, N).

        specs: the tensors or their descriptions, by suffix. name: of the module, for messages and
        for rules of config.json. shape: the (K, N) of the model, if known. Raises CheckpointError.
        """

    @abc.abstractmethod
    def decode(
        self, tensors: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None
    ) -> PlainCodes:
        """Decodes one module to plain codes, on its arrays' device; also inside `jax.jit`.

        tensors: the arrays as in the file, by suffix; those of `on_host` are NumPy arrays. The
        returned scales may have any float dtype, and all zero points may be the middle: the reader
        (`convert.py`) turns both into the form that `pack` takes. Raises CheckpointError as `check`
        does, and for values that contradict config.json or are not finite.
        """

    def axes(self, name: str) -> Mapping[str, Axes]:
        """The axes of a module's tensors, by suffix, along which some channels can be read alone.

        Empty where a module can only be decoded as a whole. Channels of a group, and those of a
        word, are decoded together.
        """
        return {}

    def dequantize(
        self, tensors: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None
    ) -> jax.Array:
        """The weight float32 [K, N] of one module; see `decode`."""
        return self.decode(tensors, name, shape).dequantize()

    @property
    def target(self) -> WeightFormat | None:
        """The format to which all weights are rounded, as `rounded_to` says; None: they stay."""
        return None

    @property
    def loss(self) -> str | None:
        """A sentence about weights that are rounded when they are loaded; None if none are."""
        return None

    @property
    def rounds_codes(self) -> bool:
        """Whether weights get other codes than those of the files."""
        return self.loss is not None

    @property
    def contents(self) -> str:
        """A text about the modules in the files, and the formats that they have when loaded."""
        formats = (dataclasses.replace(format, operand=None) for format in self.formats)
        held = ", ".join(dict.fromkeys(describe_weights(format) for format in formats))
        kept = f"{self.title}, {'rounded to' if self.rounds_codes else 'codes kept as'} {held}"
        return kept + (", with static scales of activations" if self.rounds_statically else "")

    def rounded_to(self, format: WeightFormat) -> Scheme | None:
        """The scheme that rounds weights to a format; None where their codes must stay."""
        return None

    @property
    def choices(self) -> tuple[Scheme, ...]:
        """Schemes that decode the same weights for other activations; a precision chooses one."""
        return (self,)

    @property
    def unsupported_activations(self) -> str | None:
        """A description of the checkpoint's activation format, if it is not implemented; else None.

        Such a checkpoint loads only with a precision that chooses another one of `choices`.
        """
        return None

    @property
    def rounds_statically(self) -> bool:
        """Whether activations are rounded with scales of the files, and not of each token."""
        return False

    def for_experts(self) -> Scheme:
        """The scheme of the maps of experts, whose activations have a scale for each token."""
        return self

    @property
    def has_cache_scales(self) -> bool:
        """Whether the checkpoint also has scales for an FP8 cache."""
        return False

    @property
    def may_lack_cache_scales(self) -> bool:
        """Whether the scales may be missing, although config.json says that there are some."""
        return False

    @classmethod
    def of_layout(cls, layout: str, modules: Mapping[str, PlainCodes]) -> Self:
        """The scheme of a checkpoint that is about to be written in a layout.

        layout: one of `layouts`. modules: all quantised modules, by name; their arrays may be
        shapes alone. Raises ValueError, with what to do, if the layout can't hold them.
        """
        raise ValueError(f"{cls.title} is read and not written")

    def quantization_config(self, plain: Sequence[str], cache: str | None = None) -> dict[str, Any]:
        """The `quantization_config` of an exported checkpoint, which `from_config` reads.

        plain: linear maps that are not quantised, the head among them. cache: whether an FP8
        cache's scales lie beside the weights, for each `tensor` or `attn_head`; None: there are
        none, or they can't.
        """
        raise ValueError(f"{self.title} is read and not written")

    def encode(self, plain: PlainCodes, name: str) -> dict[str, Any]:
        """A module's tensors by suffix: undoes `decode`; may be called inside `jax.jit`.

        Arrays are JAX's, or NumPy's where their values don't depend on those of `plain`. Raises
        ValueError where the layout can't hold a shape, or known values.
        """
        raise ValueError(f"{self.title} is read and not written")

    @property
    def layout_of_heads(self) -> str | None:
        """The layout of the checkpoint if a quantised head may be among its modules, else None."""
        return None

    @property
    def can_hold_cache_scales(self) -> bool:
        """Whether scales of an FP8 cache may be written beside the weights."""
        return False

    def extra_bytes(self, specs: Specs, shape: tuple[int, int]) -> int:
        """Bytes of a module on the device beside codes, scales and zeros, such as a permutation."""
        return 0
