"""What a checkpoint format says of itself: all that the reader of checkpoints knows about it."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, Self

from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat


class TensorSpec(Protocol):
    """Anything with a shape and a dtype: a TensorInfo, an array, a jax.ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's dimensions."""

    @property
    def dtype(self) -> Any:
        """The tensor's numpy dtype."""


Specs = Mapping[str, TensorSpec]  # a module's tensors, by suffix


class Scheme(abc.ABC):
    """How a checkpoint's quantised linear maps are stored.

    A subclass is a format, with one line in `registry.SCHEMES`. An instance is one checkpoint's:
    the part of its `quantization_config` that reading it depends on. Modules that a checkpoint
    left in 16 bits are told by their tensors, so an instance need not know them.

    title: what messages call the format. article: before it.
    methods: what `quant_method` may be in config.json.
    suffixes: a module's tensors of use; its bias only where writers add one that models lack.
    ignored: ends of tensors' names that may be there and are of no use.
    on_host: suffixes of tensors whose values decide the order of the channels: they stay NumPy's.
    decoding_bytes: bytes per weight that live beside a module's own tensors while it is decoded.
    layouts: what `mpjax.export` calls the forms of it that can be written.
    default_for: kinds of codes that the first of `layouts` is written of where none is named, as
        `uint4`, or as `uint4:sym` where all are symmetric.
    """

    title: ClassVar[str]
    article: ClassVar[str] = "a"
    methods: ClassVar[tuple[str, ...]]
    suffixes: ClassVar[tuple[str, ...]]
    ignored: ClassVar[tuple[str, ...]] = ()
    on_host: ClassVar[tuple[str, ...]] = ()
    decoding_bytes: ClassVar[int] = 2
    layouts: ClassVar[tuple[str, ...]] = ()
    default_for: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` is of this format."""
        return config.get("quant_method", config.get("method")) in cls.methods

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads config.json's `quantization_config`.

        Raises CheckpointError where it is of another format, or of a layout that can't be read.
        """

    @classmethod
    @abc.abstractmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module is stored so, judged by names, shapes and dtypes alone."""

    @classmethod
    def refuse(cls, name: str, specs: Specs, method: str | None) -> NoReturn:
        """Raises CheckpointError about a module stored so, where config.json says otherwise.

        name: the module. method: what config.json says, None where it says nothing.
        """
        said = f"has no quantization_config with quant_method {' or '.join(map(repr, cls.methods))}"
        if method in cls.methods:
            said = f"says quant_method {method!r} with another format"
        raise CheckpointError(
            f"{name} is {cls.article} {cls.title} module ({', '.join(specs)}), but config.json "
            f"{said}"
        )

    @property
    def quant_method(self) -> str:
        """What config.json says."""
        return self.methods[0]

    @property
    @abc.abstractmethod
    def weights(self) -> WeightFormat:
        """The format of the checkpoint's weights on the device; single modules may differ."""

    @abc.abstractmethod
    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device.

        name: the module. channels: its input channels. Raises CheckpointError where there is none.
        """

    @abc.abstractmethod
    def check(
        self, specs: Specs, name: str, shape: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Checks a module's tensors by shape and dtype and returns its (K, N).

        specs: the tensors or their descriptions. name: the module, for messages and rules.
        shape: the (K, N) that the model expects, if known. Raises CheckpointError.
        """

    @abc.abstractmethod
    def decode(
        self, tensors: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None
    ) -> PlainCodes:
        """The plain codes of one module, on its arrays' device; may be called inside `jax.jit`.

        tensors: the arrays as in the file, by suffix; those of `on_host` are NumPy's. Scales may
        be in any float dtype, and zero points all the middle: the reader makes of that what `pack`
        takes. Raises CheckpointError as `check` does, and for values that can't be right.
        """

    @property
    def choices(self) -> tuple[Scheme, ...]:
        """The schemes of the same weights among which a precision may choose."""
        return (self,)

    @property
    def unsupported_activations(self) -> str | None:
        """What the checkpoint rounds activations to, in words, if no format here does; else None.

        Somebody must choose another one of `choices` then.
        """
        return None

    @property
    def has_cache_scales(self) -> bool:
        """Whether there are scales for an FP8 cache, too."""
        return False

    @classmethod
    def of_layout(cls, layout: str, modules: Mapping[str, PlainCodes]) -> Self:
        """What `quantization_config` must say of a checkpoint that is written.

        layout: one of `layouts`. modules: all quantised ones, by name; of their arrays, shapes are
        enough. Raises ValueError, with what helps, where the layout can't hold them.
        """
        raise ValueError(f"{cls.title} is read and not written")

    def quantization_config(self, plain: Sequence[str], cache: str | None = None) -> dict[str, Any]:
        """What config.json says of a checkpoint that is written: `from_config` reads it.

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
    def can_hold_cache_scales(self) -> bool:
        """Whether scales of an FP8 cache may be written beside the weights."""
        return False

    def extra_bytes(self, specs: Specs, shape: tuple[int, int]) -> int:
        """Bytes of a module on the device beside its codes and scales, such as a permutation's."""
        return 0
