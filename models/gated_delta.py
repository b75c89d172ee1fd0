"""Gated DeltaNet: a mixer with a depthwise convolution and the gated delta rule in each head.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import (
    DeltaGates,
    DeltaInputs,
    gated_delta_rule,
    gated_delta_step,
    rms_norm,
)
from mpjax.kernels.checks import as_dtype
from mpjax.kernels.cutting import Run
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.recurrent.delta_chunks import MOST
from mpjax.models.config import DecoderConfig, MixerSpec
from mpjax.models.convolution import convolve, is_step
from mpjax.models.in_order import in_order
from mpjax.models.layers import Activations, FusedLinear, Linear, Rounding, as_activations, shared
from mpjax.models.maps import LinearMaps
from mpjax.models.recurrent import RecurrentMixer
from mpjax.models.share import Cut, HeadShares, Share, share_size
from mpjax.models.state import SequenceState, StepContext


@dataclasses.dataclass(frozen=True)
class GatedDeltaSpec(MixerSpec):
    """Spec of Gated DeltaNet. Each key head serves a group of consecutive value heads.

    key_heads, value_heads, key_dim, value_dim: the numbers of heads and of their channels.
    width: the kernel size, in tokens, of the convolution of queries, keys and values.
    by_key_head: whether files interleave the outputs by key head: one map has query, key, value and
        gate, another β and decay, one key head after another (Qwen3-Next).
    split_conv: whether the convolution has a tensor of taps for queries, another for keys, and
        another for values, also in files (OLMo Hybrid).
    rate_scale: the largest β; None: 1. With 2, a state's update can have negative eigenvalues.
    epsilon: of the norm; None for the model's.
    """

    kind: ClassVar[str] = "gated_delta"
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    width: int = 4
    by_key_head: bool = False
    split_conv: bool = False
    rate_scale: float | None = None
    epsilon: float | None = None

    @property
    def group(self) -> int:
        """The number of value heads of each key head."""
        return self.value_heads // self.key_heads

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of channels of queries, keys, values and gates of each key head."""
        values = self.group * self.value_dim
        return self.key_dim, self.key_dim, values, values

    @property
    def channels(self) -> int:
        """The number of channels of the convolution."""
        return self.key_heads * sum(self.sizes[:3])

    def why_unsound(self) -> str | None:
        """The reason why the numbers of heads don't fit together, or None if they do."""
        if self.value_heads % self.key_heads:
            return (
                f"value_heads is {self.value_heads} and key_heads {self.key_heads}: expected a "
                "multiple of it"
            )
        return None

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> GatedDelta:
        """A GatedDelta module with random weights."""
        return GatedDelta(config, self, rngs)

    def state(self, config: DecoderConfig) -> SequenceState:
        """Float32 arrays: the matrix of each value head, and the convolution's last inputs."""
        matrices = self.value_heads, self.key_dim, self.value_dim
        return SequenceState((matrices, (self.width - 1, self.channels)))

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Query, key, value and gate (`qkvz`); β and decay (`ba`); and `out`."""
        hidden, inner = config.hidden_size, self.value_heads * self.value_dim
        qkvz = [self.key_heads * size for size in self.sizes]
        ba = [self.value_heads] * 2
        if self.by_key_head:
            qkvz, ba = [sum(qkvz)], [sum(ba)]
        return (
            LinearMaps("qkvz", tuple((hidden, size) for size in qkvz)),
            LinearMaps("ba", tuple((hidden, size) for size in ba), is_precise=True),
            LinearMaps("out", ((inner, hidden),)),
        )

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the convolution's taps, the decay's rate and offset, and the norm's weight."""
        heads = (self.value_heads,)
        sizes = [self.key_heads * size for size in self.sizes[:3]]
        sizes = sizes if self.split_conv else [sum(sizes)]
        taps = {name: (size, 1, self.width) for name, size in zip(self.taps, sizes, strict=True)}
        return {**taps, "decay": heads, "shift": heads, "scale": (self.value_dim,)}

    @property
    def taps(self) -> tuple[str, ...]:
        """The paths of the convolution's taps."""
        return ("query_conv", "key_conv", "value_conv") if self.split_conv else ("conv",)

    def wide_arrays(self, config: DecoderConfig) -> tuple[str, ...]:
        """The decay's rate and offset, and the norm's weight."""
        return "decay", "shift", "scale"

    def readers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The two maps of the module's input."""
        return "qkvz", "ba"

    def working_bytes(self, config: DecoderConfig, tokens: int) -> int:
        """Peak bytes: qkvz's outputs, and in float32 the convolution's, gates and outputs.

        Beside these, kernels keep 12 bytes for each pair of tokens of a chunk.
        """
        item = as_dtype("dtype", config.dtype).itemsize
        read, values = self.key_heads * sum(self.sizes), self.value_heads * self.value_dim
        pairs = 3 * MOST * self.value_heads
        return tokens * (2 * read * item + 4 * (self.channels + 2 * values + pairs))

    def divide(self, count: int, units: Mapping[str, int]) -> GatedDeltaSpec:
        """The spec with a share of the key heads, and the value heads that they serve."""
        values, unit = self.group * self.value_dim, units.get("out", 1)
        heads = share_size(
            self.key_heads, count, next(n for n in range(1, unit + 1) if not n * values % unit)
        )
        return dataclasses.replace(self, key_heads=heads, value_heads=heads * self.group)

    def cuts(self, config: DecoderConfig, local: GatedDeltaSpec, share: Share) -> dict[str, Cut]:
        """The outputs and arrays of a share's heads, and the matching inputs of the output map."""
        run = share.run(self.key_heads, local.key_heads)
        parts = tuple(run.times(size) for size in self.sizes)
        gates, values = run.times(self.group), parts[2]
        begins = [0, self.key_heads * self.key_dim, 2 * self.key_heads * self.key_dim]
        conv = tuple(part.moved(begin) for part, begin in zip(parts[:3], begins, strict=True))
        taps = [(part,) for part in parts[:3]] if self.split_conv else [conv]
        qkvz: tuple[Run, ...] = parts
        ba: tuple[Run, ...] = gates, gates
        if self.by_key_head:
            qkvz, ba = (run.times(sum(self.sizes)),), (run.times(2 * self.group),)
        return {
            "qkvz": Cut(outputs=qkvz),
            "ba": Cut(outputs=ba),
            "out": Cut(inputs=values),
            **{name: Cut(rows=rows) for name, rows in zip(self.taps, taps, strict=True)},
            "decay": Cut(outputs=(gates,)),
            "shift": Cut(outputs=(gates,)),
        }


class GatedDelta(RecurrentMixer):
    """The mixer of Gated DeltaNet: convolution, delta rule, and a gated norm."""

    qkvz: FusedLinear
    ba: FusedLinear
    out: Linear

    def __init__(self, config: DecoderConfig, spec: GatedDeltaSpec, rngs: nnx.Rngs):
        for maps in spec.linear_maps(config):
            found: FusedLinear | Linear = FusedLinear.create(maps, config.dtype, rngs)
            if len(maps.shapes) == 1 and maps.path not in spec.readers(config):
                found = Linear.create(maps.shapes[0], bias=False, dtype=config.dtype, rngs=rngs)
            setattr(self, maps.path, found)
        shapes, initial = spec.arrays(config), nnx.initializers.normal(0.02)
        for name in spec.taps:
            taps = initial(rngs.params(), shapes[name])
            setattr(self, name, nnx.Param(taps.astype(config.dtype)))
        self.decay = nnx.Param(jnp.zeros(shapes["decay"], jnp.float32))
        self.shift = nnx.Param(jnp.ones(shapes["shift"], jnp.float32))
        self.scale = nnx.Param(jnp.ones(shapes["scale"], jnp.float32))
        self.spec, self.kept = spec, spec.state(config)
        self.epsilon = config.rms_norm_eps if spec.epsilon is None else spec.epsilon

    @property
    def activations(self) -> Rounding:
        """How the input of both maps is rounded."""
        return shared([self.qkvz.activations, self.ba.activations])

    def divide_norms(self, axis: str, heads: HeadShares) -> None:
        """Changes nothing: the norm covers one head at a time."""

    def terms(self, mixed: Activations, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the output map of the result of `mix`."""
        return self.out.terms(mixed, context)

    def inputs(self, x: jax.Array, mixed: jax.Array) -> dict[str, jax.Array]:
        """The input of each linear map, by its path; see `Mixer.inputs`."""
        return {"qkvz": x, "ba": x, "out": mixed}

    def advance(
        self, inputs: Any, context: StepContext, state: tuple[jax.Array, ...] | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """Convolution, delta rule and norm: [..., value heads · channels], and the state."""
        channels, gate, rate, decay = inputs
        places, dtype = channels.shape[:-1], channels.dtype
        matrices, before = (None, None) if state is None else state
        found = [getattr(self, name).get_value()[:, 0] for name in self.spec.taps]
        taps = jnp.concatenate(found) if len(found) > 1 else found[0]
        channels, before = convolve(channels, taps, before, context, activation="silu")
        gates = DeltaGates(decay, rate, *self.decay_parameters, scale=self.spec.rate_scale)
        outputs, matrices = self._rule(channels, gates, matrices, context)
        wide = rms_norm(outputs, self.scale.get_value(), self.epsilon)
        wide *= self.opening(gate.astype(jnp.float32))
        mixed = wide.reshape(*places, -1).astype(dtype)
        return mixed, None if matrices is None or before is None else (matrices, before)

    @property
    def decay_parameters(self) -> tuple[jax.Array, jax.Array]:
        """The decays' rates and offsets, as DeltaGates takes them."""
        return self.decay.get_value(), self.shift.get_value()

    def opening(self, gate: jax.Array) -> jax.Array:
        """The factor of the normed outputs, for gates in float32."""
        return jax.nn.silu(gate)

    def _rule(
        self,
        channels: jax.Array,
        gates: DeltaGates,
        states: jax.Array | None,
        context: StepContext,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The outputs of the delta rule, float32 [..., value heads, channels], and the states."""
        if states is not None and is_batch_invariant():
            return in_order(gated_delta_step, self._chunks, channels, (gates,), states, context)
        if states is not None and is_step(channels):
            token = dataclasses.replace(gates, decay=gates.decay[:, 0], rate=gates.rate[:, 0])
            rows = context.rows(states)
            outputs, states = gated_delta_step(channels[:, 0], token, states, rows)
            return outputs[:, None], states
        return self._chunks(channels, (gates,), states, context)

    def _chunks(
        self,
        channels: jax.Array,
        parameters: tuple[DeltaGates],
        states: Any,
        context: StepContext,
    ) -> tuple[jax.Array, Any]:
        """The result of `_rule` in chunks of tokens."""
        [gates] = parameters
        query, key, value = self._heads(channels)
        inputs = DeltaInputs(query, key, value, *gates.applied())
        if states is None:
            return gated_delta_rule(inputs, None, context.counts)[0], None
        rows = context.rows(states)
        outputs, after = gated_delta_rule(inputs, rows.take(states), context.counts)
        return outputs, rows.put(states, after)

    def project(self, x: Activations, context: StepContext) -> tuple[jax.Array, ...]:
        """The convolution's input [..., channels], gates, β and decays.

        x: [batch, tokens, hidden], or varlen [tokens, hidden].

        Gates are [..., value heads, channels], β and decays [..., value heads], all before their
        activations.
        """
        x = as_activations("GatedDelta: x", x)
        spec, places = self.spec, x.shape[:-1]
        qkvz, ba = self.qkvz(x, context), self.ba(x, context)
        if spec.by_key_head:
            qkvz = _parts(qkvz[0].reshape(*places, spec.key_heads, -1), spec.sizes)
            ba = _parts(ba[0].reshape(*places, spec.key_heads, -1), (spec.group, spec.group))
        query, key, value, gate = (part.reshape(*places, -1) for part in qkvz)
        rate, decay = (part.reshape(*places, -1) for part in ba)
        gate = gate.reshape(*places, spec.value_heads, spec.value_dim)
        return jnp.concatenate([query, key, value], -1), gate, rate, decay

    def _heads(self, channels: jax.Array) -> list[jax.Array]:
        """Queries, keys and values, [..., heads, head channels] each."""
        spec = self.spec
        parts = _parts(channels, [spec.key_heads * size for size in spec.sizes[:3]])
        sizes = spec.key_dim, spec.key_dim, spec.value_dim
        return [
            part.reshape(*part.shape[:-1], -1, size)
            for part, size in zip(parts, sizes, strict=True)
        ]


def _parts(x: jax.Array, sizes: Any) -> list[jax.Array]:
    """Splits the last axis into parts of these sizes."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes) - 1)]
    return jnp.split(x, ends, axis=-1)
