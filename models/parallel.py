"""Two mixers side by side in a layer, such as attention and Mamba2 (Falcon-H1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import jax
from flax import nnx

from mpjax.models.config import DecoderConfig, MixerSpec
from mpjax.models.layers import Activations, Rounding, joined_terms, shared
from mpjax.models.maps import Fold, LinearMaps
from mpjax.models.mixer import Mixer
from mpjax.models.recurrent import RecurrentMixer
from mpjax.models.share import Cut, HeadShares, Share
from mpjax.models.state import Room, StateSpec, StepContext

PARTS = ("attention", "recurrent")  # paths in the module


class JointSpec(MixerSpec):
    """Base class of the specs of mixers that contain other mixers.

    paths: of the fields with their specs, and of the mixers in the module.
    """

    paths: ClassVar[tuple[str, ...]]

    @property
    def parts(self) -> dict[str, MixerSpec]:
        """The mixers, by their paths in the module."""
        return {part: getattr(self, part) for part in self.paths}

    @property
    def ropes(self) -> tuple[str, ...]:
        """The kinds of rotary embedding of all mixers."""
        return tuple(rope for spec in self.parts.values() for rope in spec.ropes)

    def state(self, config: DecoderConfig) -> JointState:
        """The states of all mixers."""
        return JointState(tuple(spec.state(config) for spec in self.parts.values()))

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """The maps of all mixers."""
        return tuple(
            maps._replace(path=f"{part}.{maps.path}")
            for part, spec in self.parts.items()
            for maps in spec.linear_maps(config)
        )

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the other parameters of all mixers."""
        return {
            f"{part}.{path}": shape
            for part, spec in self.parts.items()
            for path, shape in spec.arrays(config).items()
        }

    def wide_arrays(self, config: DecoderConfig) -> tuple[str, ...]:
        """The float32 arrays of all mixers."""
        return self._paths((part, spec.wide_arrays(config)) for part, spec in self.parts.items())

    def readers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of all readers of the input, of all mixers."""
        return self._paths((part, spec.readers(config)) for part, spec in self.parts.items())

    def writers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of all mixers' last linear maps, whose outputs are added."""
        return self._paths((part, spec.writers(config)) for part, spec in self.parts.items())

    def _paths(self, found: Iterable[tuple[str, tuple[str, ...]]]) -> tuple[str, ...]:
        return tuple(f"{part}.{path}" for part, paths in found for path in paths)

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The folds inside each mixer."""
        return tuple(
            fold.below(part) for part, spec in self.parts.items() for fold in spec.folds(config)
        )

    def working_bytes(self, config: DecoderConfig, tokens: int) -> int:
        """Peak bytes of the arrays inside all mixers."""
        return sum(spec.working_bytes(config, tokens) for spec in self.parts.values())

    def divide(self, count: int, units: Mapping[str, int]) -> Self:
        """The spec with a share of each mixer."""
        own = {
            part: spec.divide(
                count, {path.removeprefix(f"{part}."): n for path, n in units.items()}
            )
            for part, spec in self.parts.items()
        }
        return dataclasses.replace(self, **own)

    def cuts(self, config: DecoderConfig, local: Self, share: Share) -> dict[str, Cut]:
        """The cuts of all mixers."""
        return {
            f"{part}.{path}": cut
            for part, spec in self.parts.items()
            for path, cut in spec.cuts(config, getattr(local, part), share).items()
        }


@dataclasses.dataclass(frozen=True)
class ParallelSpec(JointSpec):
    """Spec of two parallel mixers: both read one input, and their outputs are added."""

    kind: ClassVar[str] = "parallel"
    paths: ClassVar[tuple[str, ...]] = PARTS
    attention: MixerSpec
    recurrent: MixerSpec

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Parallel:
        """A Parallel module with random weights."""
        return Parallel(config, self, rngs)


@dataclasses.dataclass(frozen=True)
class JointState:
    """The states of a mixer that contains others; see StateSpec."""

    states: tuple[StateSpec, ...]

    @property
    def is_paged(self) -> bool:
        """Whether any of the states is in pages."""
        return any(state.is_paged for state in self.states)

    @property
    def keeps_sequences(self) -> bool:
        """Whether any of the states has a fixed size for each sequence."""
        return any(state.keeps_sequences for state in self.states)

    @property
    def window(self) -> int | None:
        """The window of the paged state."""
        return next((state.window for state in self.states if state.is_paged), None)

    def create(self, room: Room, scales: jax.Array | None) -> tuple[Any, ...]:
        """An empty state of each mixer."""
        return tuple(state.create(room, scales) for state in self.states)

    def copy(self, state: tuple[Any, ...], source: jax.Array, target: jax.Array) -> tuple[Any, ...]:
        """The states with a sequence's fixed-size states copied to another index."""
        return tuple(
            spec.copy(each, source, target) for spec, each in zip(self.states, state, strict=True)
        )

    def forget(self, state: tuple[Any, ...], before: tuple[Any, ...]) -> tuple[Any, ...]:
        """The states without the tokens since `before`; see `StateSpec.forget`."""
        return tuple(
            spec.forget(each, old)
            for spec, each, old in zip(self.states, state, before, strict=True)
        )

    def clear(self, state: tuple[Any, ...], pages: jax.Array, slots: jax.Array) -> tuple[Any, ...]:
        """The states with zeros in some pages, and in the fixed-size states of some slots."""
        return tuple(
            spec.clear(each, pages, slots) for spec, each in zip(self.states, state, strict=True)
        )


class Parallel(nnx.Module):
    """Two parallel mixers: both read one input, and their outputs are added."""

    def __init__(self, config: DecoderConfig, spec: ParallelSpec, rngs: nnx.Rngs):
        self.attention = spec.attention.build(config, rngs)
        self.recurrent = spec.recurrent.build(config, rngs)

    @property
    def parts(self) -> dict[str, Mixer]:
        """Both mixers, by their paths."""
        return {part: getattr(self, part) for part in PARTS}

    @property
    def activations(self) -> Rounding:
        """How the input of both mixers is rounded; see `shared`."""
        return shared([mixer.activations for mixer in self.parts.values()])

    def divide_norms(self, axis: str, heads: HeadShares) -> None:
        """Makes joint norms of both mixers cover the heads of all devices of a mesh axis."""
        for mixer in self.parts.values():
            mixer.divide_norms(axis, heads)

    def mix(
        self, x: Activations, context: StepContext, state: tuple[Any, ...] | None = None
    ) -> tuple[Any, tuple[Any, ...] | None]:
        """The inputs of both mixers' last maps, and their states; see `Mixer`."""
        found = [
            mixer.mix(x, context, own)
            for mixer, own in zip(self.parts.values(), state or (None, None), strict=True)
        ]
        mixed, states = zip(*found, strict=True)
        return mixed, None if state is None else states

    def settle(self, state: tuple[Any, ...], context: StepContext) -> tuple[Any, ...]:
        """The states after a tentative step; only the recurrent state changes."""
        return tuple(
            mixer.settle(own, context) if isinstance(mixer, RecurrentMixer) else own
            for mixer, own in zip(self.parts.values(), state, strict=True)
        )

    def terms(self, mixed: Any, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is that of both mixers' outputs."""
        parts = zip(self.parts.values(), mixed, strict=True)
        return joined_terms(*(mixer.terms(each, context) for mixer, each in parts))

    def inputs(self, x: jax.Array, mixed: Any) -> dict[str, jax.Array]:
        """The input of each linear map, by its path; see `Mixer.inputs`."""
        return {
            f"{part}.{path}": read
            for (part, mixer), each in zip(self.parts.items(), mixed, strict=True)
            for path, read in mixer.inputs(x, each).items()
        }
