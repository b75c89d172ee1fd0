"""Mamba2: a mixer with a depthwise convolution and a selective state space in each head.

Source: Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import ScanGates, state_space_scan, state_space_step
from mpjax.kernels.checks import as_dtype
from mpjax.kernels.cutting import Run
from mpjax.kernels.invariance import in_row_tiles, is_batch_invariant
from mpjax.models.config import DecoderConfig, MixerSpec
from mpjax.models.convolution import convolve, is_step
from mpjax.models.device_sums import add_over_devices
from mpjax.models.in_order import in_order
from mpjax.models.layers import Activations, FusedLinear, Linear, RMSNorm, Rounding
from mpjax.models.maps import Fold, LinearMaps
from mpjax.models.recurrent import RecurrentMixer
from mpjax.models.share import Cut, HeadShares, Share, share_size
from mpjax.models.state import SequenceState, StepContext

NORMS = ("after_gate", "before_gate", "none")


@dataclasses.dataclass(frozen=True)
class Mamba2Spec(MixerSpec):
    """Spec of Mamba2, whose in_proj outputs the gate z, x, B, C and each head's time step.

    heads, head_dim: the number of heads of x and z, and of their channels. groups: the number of
        groups of heads that share B and C.
    states: channels of B and C. width: kernel size, in tokens, of the convolution of x, B and C.
    epsilon: of the RMSNorm over each group's channels. norm: whether it follows the product with
        silu(z) (`after_gate`), precedes it (`before_gate`), or is missing (`none`).
    bias, output_bias, conv_bias: whether in_proj, out_proj and the convolution have biases.
    least_step, most_step: limits of time steps; None for none.
    factors: of in_proj's five outputs, biases included; () for none. output_factor: of the input of
        out_proj.
    joint_channels: in one device's share, the number of channels of all devices that the norm
        covers together; None if the norm covers only this share's channels.
    """

    kind: ClassVar[str] = "mamba2"
    heads: int
    head_dim: int
    groups: int
    states: int
    epsilon: float
    width: int = 4
    norm: str = "after_gate"
    bias: bool = False
    output_bias: bool = False
    conv_bias: bool = True
    least_step: float | None = None
    most_step: float | None = None
    factors: tuple[float, ...] = ()
    output_factor: float = 1.0
    joint_channels: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """The numbers of channels of z, x, B, C and time steps."""
        inner, shared = self.heads * self.head_dim, self.groups * self.states
        return inner, inner, shared, shared, self.heads

    @property
    def channels(self) -> int:
        """The number of channels of the convolution: of x, B and C."""
        return sum(self.sizes[1:4])

    def why_unsound(self) -> str | None:
        """The reason why the fields don't fit together, or None if they do."""
        if self.heads % self.groups:
            return f"heads is {self.heads} and groups {self.groups}: expected a multiple of it"
        if self.norm not in NORMS:
            return f"norm is {self.norm!r:.80}: expected {', '.join(NORMS)}"
        if len(self.factors) not in (0, 5):
            return f"factors is {self.factors!r:.80}: expected five, of z, x, b, c and steps"
        return None

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Mamba2:
        """A Mamba2 module with random weights."""
        return Mamba2(config, self, rngs)

    def state(self, config: DecoderConfig) -> SequenceState:
        """Float32 arrays: the state of each head, and the convolution's last inputs."""
        of_heads = self.heads, self.head_dim, self.states
        return SequenceState((of_heads, (self.width - 1, self.channels)))

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Two products: z, x, B, C and time steps together (`in_proj`), and `out_proj`."""
        shapes = tuple((config.hidden_size, size) for size in self.sizes)
        return (
            LinearMaps("in_proj", shapes, self.bias, factors=self.factors),
            LinearMaps("out_proj", ((self.sizes[0], config.hidden_size),), self.output_bias),
        )

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the other parameters, by path. `skip` is Mamba2's D, which adds skip · x."""
        heads = (self.heads,)
        found: dict[str, tuple[int, ...]] = {"conv": (self.channels, 1, self.width)}
        if self.conv_bias:
            found["conv_bias"] = (self.channels,)
        found |= {"log_rate": heads, "step_bias": heads, "skip": heads}
        return found if self.norm == "none" else found | {"norm.weight": self.sizes[:1]}

    def wide_arrays(self, config: DecoderConfig) -> tuple[str, ...]:
        """The parameters of decays and time steps, whose errors would add up over tokens."""
        return "log_rate", "step_bias", "skip"

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The fold of the norm and `out_proj`; a gate after the norm multiplies each channel."""
        return () if self.norm == "none" else (Fold("out_proj", "norm"),)

    def working_bytes(self, config: DecoderConfig, tokens: int) -> int:
        """Peak bytes: in_proj's outputs, and in float32 x, B, C and the outputs of heads."""
        item = as_dtype("dtype", config.dtype).itemsize
        return tokens * (2 * sum(self.sizes) * item + 4 * (self.channels + 2 * self.sizes[0]))

    def divide(self, count: int, units: Mapping[str, int]) -> Mamba2Spec:
        """The spec with a share of the groups, or of the heads if there is a single group.

        `out_proj` is cut at multiples of its unit. Raises ValueError for more than one group, but
        fewer groups than devices.
        """
        if 1 < self.groups < count:
            raise ValueError(
                f"{self.groups} groups of heads of a Mamba2 layer can't be divided among {count} "
                f"devices: choose up to {self.groups}"
            )
        each = self.heads // self.groups if self.groups > 1 else 1
        channels, unit = each * self.head_dim, units["out_proj"]
        unit = next(n for n in range(1, unit + 1) if not n * channels % unit)
        size = share_size(self.heads // each, count, unit)
        own: dict[str, Any] = (
            {"groups": size} if self.groups > 1 else {"joint_channels": self.sizes[0]}
        )
        return dataclasses.replace(self, heads=size * each, **own)

    def cuts(self, config: DecoderConfig, local: Mamba2Spec, share: Share) -> dict[str, Cut]:
        """The channels of a share's heads and groups; B and C are whole if there is one group."""
        heads = share.run(self.heads, local.heads)
        inner, shared = heads.times(self.head_dim), Run(0, self.states, self.states)
        if self.groups > 1:
            shared = share.run(self.groups, local.groups).times(self.states)
        begins = 0, self.sizes[1], self.sizes[1] + self.sizes[2]
        conv = tuple(
            run.moved(begin) for run, begin in zip((inner, shared, shared), begins, strict=True)
        )
        of_heads = Cut(outputs=(heads,))
        return {
            "in_proj": Cut(outputs=(inner, inner, shared, shared, heads)),
            "out_proj": Cut(inputs=inner),
            "conv": Cut(rows=conv),
            "conv_bias": Cut(outputs=conv),
            **dict.fromkeys(("log_rate", "step_bias", "skip"), of_heads),
            "norm.weight": Cut(outputs=(inner,)),
        }


class Mamba2(RecurrentMixer):
    """The mixer of Mamba2: a convolution, a scan over states, and a gated norm."""

    def __init__(self, config: DecoderConfig, spec: Mamba2Spec, rngs: nnx.Rngs):
        into, out = spec.linear_maps(config)
        self.in_proj = FusedLinear.create(into, config.dtype, rngs)
        self.out_proj = Linear.create(out.shapes[0], bias=out.bias, dtype=config.dtype, rngs=rngs)
        shape = spec.arrays(config)["conv"]
        self.conv = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape, config.dtype))
        zeros = nnx.Param(jnp.zeros(spec.channels, config.dtype)) if spec.conv_bias else None
        self.conv_bias = nnx.data(zeros)
        self.log_rate = nnx.Param(jnp.log(jnp.arange(1, spec.heads + 1, dtype=jnp.float32)))
        self.step_bias = nnx.Param(jnp.ones(spec.heads, jnp.float32))
        self.skip = nnx.Param(jnp.ones(spec.heads, jnp.float32))
        has_norm, inner = spec.norm != "none", spec.sizes[0]
        self.norm = nnx.data(RMSNorm(inner, spec.epsilon, config.dtype) if has_norm else None)
        self.spec, self.kept = spec, spec.state(config)
        self.joint_axis: str | None = None  # mesh axis that divides the heads

    @property
    def activations(self) -> Rounding:
        """How the input of in_proj is rounded."""
        return self.in_proj.activations

    def divide_norms(self, axis: str, heads: HeadShares) -> None:
        """Makes the norm of a single group cover the heads on all devices of a mesh axis."""
        self.joint_axis = axis

    def project(self, x: Activations, context: StepContext) -> tuple[jax.Array, ...]:
        """The gate z, the convolution's input, and time steps before bias and softplus."""
        gate, *read, steps = self.in_proj(x, context)
        return gate, jnp.concatenate(read, -1), steps

    def advance(
        self, inputs: Any, context: StepContext, state: tuple[jax.Array, ...] | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """The input of out_proj, [..., heads · head_dim], and the state."""
        gate, read, steps = inputs
        states, before = (None, None) if state is None else state
        channels, before = convolve(
            read,
            self.conv.get_value()[:, 0],
            before,
            context,
            bias=None if self.conv_bias is None else self.conv_bias.get_value(),
            activation="silu",
        )
        gates = ScanGates(
            steps,
            self.log_rate.get_value(),
            self.step_bias.get_value(),
            self.skip.get_value(),
            self.spec.least_step,
            self.spec.most_step,
        )
        y, states = self._scan(channels, gates, states, context)
        mixed = self._gated(y.reshape(gate.shape), gate).astype(gate.dtype)
        return mixed, None if states is None or before is None else (states, before)

    def _scan(
        self,
        channels: jax.Array,
        gates: ScanGates,
        states: jax.Array | None,
        context: StepContext,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The outputs of heads, float32 [..., heads, head_dim], and the states."""
        if states is not None and is_batch_invariant():
            return in_order(state_space_step, self._chunks, channels, (gates,), states, context)
        if states is not None and is_step(channels):
            token = dataclasses.replace(gates, steps=gates.steps[:, 0])
            y, states = state_space_step(channels[:, 0], token, states, context.rows(states))
            return y[:, None], states
        return self._chunks(channels, (gates,), states, context)

    def _chunks(
        self,
        channels: jax.Array,
        parameters: tuple[ScanGates],
        states: Any,
        context: StepContext,
    ) -> tuple[jax.Array, Any]:
        """The result of `_scan` in chunks of tokens."""
        spec, places, [gates] = self.spec, channels.shape[:-1], parameters
        inner, _, shared, _, _ = spec.sizes
        x, b, c = jnp.split(channels, (inner, inner + shared), -1)
        x = x.reshape(*places, spec.heads, spec.head_dim)
        b, c = (each.reshape(*places, spec.groups, spec.states) for each in (b, c))
        steps, rates, skip = gates.applied()
        rows = None if states is None else context.rows(states)
        known = None if states is None or rows is None else rows.take(states)
        y, after = state_space_scan(x, steps, rates, b, c, known, context.counts)
        y += jax.lax.broadcast_to_rank(skip[:, None], y.ndim) * x.astype(jnp.float32)
        return y, None if states is None or rows is None else rows.put(states, after)

    def _gated(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        """Multiplies y, float32, by silu(gate) and normalises each group, in the spec's order."""
        gate = jax.nn.silu(gate.astype(jnp.float32))
        if self.spec.norm == "after_gate":
            y = self._normed(y * gate)
        elif self.spec.norm == "before_gate":
            y = self._normed(y) * gate
        else:
            y = y * gate
        return y if self.spec.output_factor == 1 else y * self.spec.output_factor

    def _normed(self, y: jax.Array) -> jax.Array:
        assert self.norm is not None

        def squares(y: jax.Array) -> jax.Array:
            return jnp.sum(jnp.square(y.reshape(*y.shape[:-1], self.spec.groups, -1)), -1)

        sums = in_row_tiles(squares, y)[..., None]
        if self.joint_axis is not None and self.spec.joint_channels is not None:
            sums = add_over_devices(sums, self.joint_axis)
        groups = y.reshape(*y.shape[:-1], self.spec.groups, -1)
        channels = self.spec.joint_channels or groups.shape[-1]
        normed = groups * jax.lax.rsqrt(sums / channels + self.norm.epsilon)
        weight = jax.lax.broadcast_to_rank(self.norm.weight.get_value(), y.ndim)
        return normed.reshape(y.shape) * weight.astype(jnp.float32)

    def terms(self, mixed: Activations, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is `out_proj` of the result of `mix`."""
        return self.out_proj.terms(mixed, context)

    def inputs(self, x: jax.Array, mixed: jax.Array) -> dict[str, jax.Array]:
        """The input of each linear map, by its path; see `Mixer.inputs`."""
        return {"in_proj": x, "out_proj": mixed}
