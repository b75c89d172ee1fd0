"""The mixture of experts of a layer: a router, experts that are MLPs, a shared expert."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels import (
    ActivationFormat,
    ExpertMLP,
    Gate,
    LocalExperts,
    QuantizedTensor,
    RouterLogits,
    Routing,
    expert_mlp_terms,
    grouped_matmul,
    grouped_matmul_terms,
)
from mpjax.kernels.checks import as_array, as_dtype
from mpjax.kernels.experts.plans import MOST_TILE_ROWS, Problem, runs_by_warpgroups
from mpjax.kernels.rowwise.projection import project
from mpjax.models import expert_norms
from mpjax.models.config import DecoderConfig, MLPSpec
from mpjax.models.expert_norms import ExpertNorms
from mpjax.models.layers import Activations, Linear, Projected, Projection, Rounding, joined_terms
from mpjax.models.maps import Fold, LinearMaps
from mpjax.models.mlp import (
    ACTIVATIONS,
    MLP,
    GatedMLPSpec,
    Inputs,
    RoutedInputs,
    UngatedMLPSpec,
)
from mpjax.models.share import Cut, Share, share_size
from mpjax.models.state import WHOLE, StepContext


@dataclasses.dataclass(frozen=True)
class ExpertsSpec(MLPSpec):
    """Spec of a mixture of experts: the weighted sum of a token's experts, and a shared expert.

    intermediate_size: channels of the hidden layer inside each expert.
    num_experts: of a layer. experts_per_token: the number of experts that compute each token.
    scoring, renormalize, scale, groups, groups_per_token, group_score, jitter: as in Routing.
    router_bias: whether the router's logits have a bias. router_correction: whether the router has
        a selection bias, which is added to scores only when experts are chosen (DeepSeek-V3).
    bias: whether the maps of experts have biases.
    gate_limit, gate_alpha: `limit` and `alpha` of the experts' Gate.
    joint_files: whether files store gate and up as one map with alternating outputs, and 16-bit
        weights as [input, output channels] (gpt-oss). transposed_files: the same with gate's
        outputs before up's (Llama 4).
    weighs_inputs: whether weights multiply experts' inputs instead of their outputs (Llama 4).
    ungated: the activation of experts and shared expert if they have no gate, as in
        UngatedMLPSpec; None: they have gates.
    shared_size: intermediate channels of the shared expert; None without one.
    shared_gate: whether the shared expert's output is multiplied by the sigmoid of a linear map.
    shared_factor: by which the output of a shared expert with a gate is multiplied; None for 1.
    activation: of experts and shared expert that have gates, as in GatedMLPSpec.
    own_norms: whether experts, shared expert and router read the residual stream through norms of
        their own, and gains multiply the routing weights; see ExpertNorms.
    """

    kind: ClassVar[str] = "experts"
    num_experts: int = 8
    experts_per_token: int = 2
    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int | None = None
    groups_per_token: int | None = None
    group_score: str = "max"
    router_bias: bool = False
    router_correction: bool = False
    bias: bool = False
    gate_limit: float | None = None
    gate_alpha: float = 1.0
    joint_files: bool = False
    ungated: str | None = None
    shared_size: int | None = None
    shared_gate: bool = False
    jitter: float | None = None
    transposed_files: bool = False
    weighs_inputs: bool = False
    activation: str = "silu"
    own_norms: bool = False
    shared_factor: float | None = None

    @property
    def routing(self) -> Routing:
        """The rules of routing. Raises ValueError for values that don't fit together."""
        fields = {field.name for field in dataclasses.fields(Routing)} - {"per_token"}
        values: Any = {name: getattr(self, name) for name in fields}
        return Routing(self.experts_per_token, **values)

    @property
    def reads_stream(self) -> bool:
        """See SublayerSpec."""
        return self.own_norms

    @property
    def gate(self) -> Gate:
        """The gated activation inside experts."""
        return Gate(self.gate_limit, self.gate_alpha, self.activation)

    def why_unsound(self) -> str | None:
        """The reason why the activation, the routing or the transform is invalid, or None."""
        known = [name for name, (_, learned) in ACTIVATIONS.items() if not learned]
        if self.ungated not in (None, *known):
            return f"ungated is {self.ungated!r:.80}: expected {' or '.join(known)}, or None"
        if self.own_norms and (self.shared_size is None or self.shared_gate):
            return "own_norms is true: expected a shared expert without a gate"
        if self.shared_factor is not None and (self.shared_size is None or self.ungated):
            return "shared_factor is set: expected a shared expert whose MLP has a gate"
        try:
            _ = self.gate
            return self.routing.why_not(self.num_experts) or self.why_unmixable()
        except ValueError as error:
            return str(error)

    @property
    def shared(self) -> GatedMLPSpec | None:
        """The spec of the shared expert, or None if there is none."""
        if (size := self.shared_size) is None:
            return None
        if self.ungated is not None:
            return UngatedMLPSpec(size, activation=self.ungated, hadamard=self.hadamard)
        factors = () if self.shared_factor is None else (1.0, self.shared_factor)
        return GatedMLPSpec(
            size, activation=self.activation, hadamard=self.hadamard, factors=factors
        )

    def mixers(self) -> dict[str, int]:
        """The channels before `down` of the stack of experts, and of the shared expert."""
        shared = {} if self.shared_size is None else {"shared": self.shared_size}
        return {"experts": self.intermediate_size} | shared

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Experts:
        """An Experts module with random weights."""
        return Experts(config, self, rngs)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Grouped products `gate_up` and `down` of all experts, and the shared expert's maps.

        `gate_up` is up alone if experts have no gate.
        """
        hidden, inner, count = config.hidden_size, self.intermediate_size, self.num_experts
        joint, inwards = self.joint_files, ((hidden, inner),) * (1 if self.ungated else 2)
        turned = joint or self.transposed_files
        maps = [
            LinearMaps("experts.gate_up", inwards, self.bias, count, joint, turned),
            LinearMaps("experts.down", ((inner, hidden),), self.bias, count, False, turned),
        ]
        if self.shared is not None:
            shared = self.shared.linear_maps(config)
            maps += [each._replace(path=f"shared.{each.path}") for each in shared]
        return tuple(maps)

    def readers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The experts' `gate_up`, the router, and the shared expert's readers and gate.

        None with own norms.
        """
        if self.own_norms:
            return ()
        found = ["experts.gate_up", "router"]
        if self.shared is not None:
            read = [f"shared.{path}" for path in self.shared.readers(config)]
            found += [*read, *["shared_gate"] * self.shared_gate]
        return tuple(found)

    def writers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The last maps of the experts and of the shared expert."""
        return ("experts.down", *["shared.down"] * (self.shared_size is not None))

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The folds of up and down in each expert and in the shared expert.

        Scales can't move if the gate clamps up or adds 1 to it, or if up has an activation; the
        order of channels can change even then. Experts with a Hadamard transform before down have
        no fold.
        """
        found = []
        if self.hadamard is None:
            is_linear = self.gate_limit is None and self.ungated is None
            part = None if self.ungated else 1
            maps = "experts.down", "experts.gate_up", part
            found.append(Fold(*maps, is_elementwise=True, is_linear=is_linear))
        if self.shared is not None:
            found += [fold.below("shared") for fold in self.shared.folds(config)]
        return tuple(found)

    def working_bytes(self, config: DecoderConfig, tokens: int) -> int:
        """Peak bytes of the arrays inside the experts and the shared expert, and of their terms.

        Terms are float32 [experts_per_token, hidden] for each token; joining them with the shared
        expert's copies them. The warpgroup kernels instead sort rows by expert and pad each expert
        to whole tiles: input, intermediate channels, and float32 products, which are summed to one
        term.
        """
        term, pairs = config.hidden_size * 4, tokens * self.experts_per_token
        item = as_dtype("dtype", config.dtype).itemsize
        rows = pairs + min(pairs, self.num_experts) * (MOST_TILE_ROWS - 1)
        in_tiles = rows * ((config.hidden_size + self.intermediate_size) * item + term)
        apart = super().working_bytes(config, pairs) + pairs * term
        inner = max(apart, in_tiles + tokens * term)
        if self.shared is None:
            return inner
        shared = self.shared.working_bytes(config, tokens)
        return inner + shared + (pairs + 2 * tokens) * term

    def divide(self, count: int, units: Mapping[str, int]) -> ExpertsSpec:
        """The spec with a share of the intermediate channels of each expert and the shared expert.

        Blocks of a Hadamard transform stay whole.
        """
        unit = math.lcm(units["experts.down"], self.hadamard or 1)
        size = share_size(self.intermediate_size, count, unit)
        shared = self._shared_share(count, units)
        return dataclasses.replace(self, intermediate_size=size, shared_size=shared)

    def spread(self, count: int, units: Mapping[str, int]) -> SpreadExpertsSpec:
        """The spec with a share of the experts, and of the shared expert's channels.

        If the number of experts is not a multiple of `count`, zero experts pad the last shares.
        """
        whole = dataclasses.replace(self, shared_size=self._shared_share(count, units))
        fields = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
        return SpreadExpertsSpec(**fields, held_experts=share_size(self.num_experts, count))

    def _shared_share(self, count: int, units: Mapping[str, int]) -> int | None:
        """The intermediate channels of a share of the shared expert."""
        if self.shared is None:
            return None
        return self.shared.divide(count, {"down": units["shared.down"]}).intermediate_size

    def cuts(self, config: DecoderConfig, local: ExpertsSpec, share: Share) -> dict[str, Cut]:
        """The share's intermediate channels, or its experts; the router is whole in each share."""
        if isinstance(local, SpreadExpertsSpec):
            mine = Cut(experts=share.run(self.num_experts, local.held_experts))
            found = {"experts.gate_up": mine, "experts.down": mine}
        else:
            inner = share.run(self.intermediate_size, local.intermediate_size)
            found = {
                "experts.gate_up": Cut(outputs=(inner,) * (1 if self.ungated else 2)),
                "experts.down": Cut(inputs=inner),
            }
        if self.shared is not None and local.shared is not None:
            cuts = self.shared.cuts(config, local.shared, share)
            found |= {f"shared.{path}": cut for path, cut in cuts.items()}
        return found

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the router's parameters and of the shared expert's gate, by path."""
        found: dict[str, tuple[int, ...]] = {"router": (self.num_experts, config.hidden_size)}
        if self.router_bias:
            found["router_bias"] = (self.num_experts,)
        if self.router_correction:
            found["router_correction"] = (self.num_experts,)
        if self.shared_size is not None and self.shared_gate:
            found["shared_gate"] = (1, config.hidden_size)
        own = expert_norms.shapes(config.hidden_size, self.num_experts) if self.own_norms else {}
        return found | {f"norms.{path}": shape for path, shape in own.items()}

    def wide_arrays(self, config: DecoderConfig) -> tuple[str, ...]:
        """The router's selection bias: in 16 bits it would choose other experts."""
        return ("router_correction",) if self.router_correction else ()


@dataclasses.dataclass(frozen=True)
class SpreadExpertsSpec(ExpertsSpec):
    """Spec of an expert-parallel share: some of the experts, and the whole router.

    num_experts: of all shares. held_experts: of this share.
    """

    held_experts: int = 1

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """The maps of ExpertsSpec, with this share's experts alone."""
        return tuple(
            maps if maps.experts is None else maps._replace(experts=self.held_experts)
            for maps in super().linear_maps(config)
        )


class ExpertStack(nnx.Module):
    """The maps of all experts: gate_up and down, each a Linear with a kernel [experts, in, out]."""

    def __init__(self, config: DecoderConfig, spec: ExpertsSpec, rngs: nnx.Rngs):
        initial, dtype = nnx.initializers.normal(0.02), jnp.dtype(config.dtype)

        def create(maps: LinearMaps) -> Linear:
            outputs = sum(out for _, out in maps.shapes)
            shape = maps.experts, maps.shapes[0][0], outputs
            bias = jnp.zeros((maps.experts, outputs), dtype) if maps.bias else None
            return Linear(initial(rngs.params(), shape, dtype), bias)

        gate_up, down, *_ = spec.linear_maps(config)
        self.gate_up, self.down = create(gate_up), create(down)
        self.gate, self.ungated, self.hadamard = spec.gate, spec.ungated, spec.hadamard
        self.weighs_inputs = spec.weighs_inputs

    @property
    def mlp(self) -> ExpertMLP:
        """The maps as the kernels of gated experts take them."""
        gate_up: Any = self.gate_up.kernel.get_value()
        down: Any = self.down.kernel.get_value()
        biases = _bias(self.gate_up), _bias(self.down)
        return ExpertMLP(gate_up, down, self.gate, *biases, self.hadamard)

    def gated(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """The inputs of `down` of each token's experts, [..., k, intermediate_size].

        x: [..., hidden]. experts: int32 [..., k], the experts' indices.
        """
        mlp, own = self.mlp, self.gate_up.own(experts)
        gate = None if self.ungated else mlp.gate
        inner = grouped_matmul(x, mlp.gate_up, own, bias=mlp.gate_up_bias, gate=gate)
        if self.ungated is not None:
            function, _ = ACTIVATIONS[self.ungated]
            inner = function(inner.astype(jnp.float32)).astype(inner.dtype)
        return mlp.mixed(inner)

    def weighted(self, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The inputs of each token's experts, [..., hidden] or [..., k, hidden], and the weights.

        With weighs_inputs, the weights multiply the inputs, and the returned ones are 1.
        """
        if not self.weighs_inputs:
            return x, weights
        own = (x[..., None, :].astype(jnp.float32) * weights[..., None]).astype(x.dtype)
        return own[..., 0, :] if own.shape[-2] == 1 else own, jnp.ones_like(weights)

    def terms(self, x: jax.Array, logits: RouterLogits, context: StepContext) -> jax.Array:
        """Terms [terms, ..., hidden] whose sum is the weighted sum of each token's experts."""
        mlp, rows, down = self.mlp, self.down.divided_rows, self.mlp.down
        if self.gate_up.adapter is not None or self.down.adapter is not None:
            experts, weights = logits.route()
            x, weights = self.weighted(x, weights)
            return self._adapted_terms(x, experts, weights, context)
        is_ordered = isinstance(down, QuantizedTensor) and down.permutation is not None
        is_apart = is_ordered or self.ungated is not None
        is_whole = down.shape[0] == logits.logits.shape[-1]  # this device has all experts
        if is_whole and not is_apart and not self.weighs_inputs:
            return self.down.add_shares(expert_mlp_terms(x, mlp, logits, activations=rows), x.dtype)
        experts, weights = logits.route()
        own = self.down.own(experts)
        x, weights = self.weighted(x, weights)
        if is_apart:
            # Act-order gives each expert its own order of all devices' channels; `routed` applies
            # it. Experts without a gate take this path, too, since `expert_mlp_terms` needs one.
            inner, kernel = self.down.routed(self.gated(x, experts), experts)
            terms = grouped_matmul_terms(
                inner, kernel, own, weights, bias=mlp.down_bias, activations=rows
            )
        else:
            terms = expert_mlp_terms(x, mlp, own, weights, activations=rows)
        return self.down.add_shares(terms, x.dtype)

    def _adapted_terms(
        self, x: jax.Array, experts: jax.Array, weights: jax.Array, context: StepContext
    ) -> jax.Array:
        """The terms with adapters, in unfused grouped products: one term for each chosen expert."""
        mlp, changes = self.mlp, (self.gate_up.adapter, self.down.adapter)
        own = self.gate_up.own(experts)
        numbers = own.numbers if isinstance(own, LocalExperts) else own
        inner = grouped_matmul(x, mlp.gate_up, own, bias=mlp.gate_up_bias).astype(jnp.float32)
        if changes[0] is not None:
            inner += changes[0].of_experts(x, numbers, context)
        if self.ungated is None:
            inner = mlp.gate(*jnp.split(inner, 2, -1))
        else:
            function, _ = ACTIVATIONS[self.ungated]
            inner = function(inner)
        inner = mlp.mixed(inner.astype(x.dtype))
        read, kernel = self.down.routed(inner, experts)
        found = grouped_matmul(read, kernel, own, bias=mlp.down_bias).astype(jnp.float32)
        if changes[1] is not None:
            found += changes[1].of_experts(inner, numbers, context)
        found = jnp.where((numbers >= 0)[..., None], found * weights[..., None], 0)
        return self.down.add_shares(jnp.moveaxis(found, -2, 0), x.dtype)

    def runs_by_warpgroups(self, tokens: int, routing: Routing, experts: int) -> bool:
        """Whether either product of these tokens is planned for warpgroups on the default device.

        routing: of the tokens. experts: the number of experts that tokens can be routed to.
        """
        chosen = tokens, routing.per_token
        kernels: Any = (linear.kernel.get_value() for linear in (self.gate_up, self.down))
        return any(
            runs_by_warpgroups(Problem.of(chosen, kernel, gated=gated, total=experts))
            for kernel, gated in zip(kernels, (self.ungated is None, False), strict=True)
        )


class Experts(nnx.Module):
    """A mixture of experts: Σ weight · expert(x) over a token's experts, and a shared expert."""

    def __init__(self, config: DecoderConfig, spec: ExpertsSpec, rngs: nnx.Rngs):
        initial, dtype = nnx.initializers.normal(0.02), jnp.dtype(config.dtype)
        shapes = spec.arrays(config)

        def create(name: str) -> nnx.Param[jax.Array] | None:
            shape, own = shapes.get(name), jnp.float32 if name == "router_correction" else dtype
            value = None if shape is None else nnx.Param(initial(rngs.params(), shape, own))
            return nnx.data(value)

        self.router = nnx.Param(initial(rngs.params(), shapes["router"], dtype))
        self.router_bias, self.router_correction = (
            create("router_bias"),
            create("router_correction"),
        )
        self.experts = ExpertStack(config, spec, rngs)
        self.shared: MLP | None = nnx.data(None)
        if spec.shared is not None:
            self.shared = spec.shared.build(config, rngs)
        self.shared_gate = create("shared_gate")
        self.norms: ExpertNorms | None = nnx.data(None)
        if spec.own_norms:
            self.norms = ExpertNorms(config, spec.num_experts)
        self.routing = spec.routing

    @property
    def activations(self) -> Rounding | Projection:
        """The router, by which a norm also multiplies its result; experts round x themselves."""
        return ActivationFormat() if self.norms else Projection(self.router.get_value())

    def runs_by_warpgroups(self, tokens: int) -> bool:
        """Whether products of this many tokens with experts run by warpgroups on this device."""
        experts = self.router.get_value().shape[0]
        return self.experts.runs_by_warpgroups(tokens, self.routing, experts)

    def read(self, x: Any, chosen: Any = None) -> tuple[jax.Array, RouterLogits]:
        """The array x [..., hidden], and its RouterLogits. chosen: given experts, or None."""
        if not isinstance(x, Projected):
            x, router = as_array("Experts: x", x), self.router.get_value()
            x = (
                self.norms.routed_input(x, router)
                if self.norms is not None
                else Projected(x, project(x, router))
            )
        gain = None if self.norms is None else self.norms.gain
        given = self.router_correction, self.router_bias, gain
        arrays = [*(None if each is None else each.get_value() for each in given), chosen]
        return x.values, RouterLogits(x.products, self.routing, *arrays)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts of each token of x [..., hidden], int32 [..., k], and their weights."""
        return self.read(x)[1].route()

    def terms(self, x: Activations | Projected, context: StepContext) -> jax.Array:
        """Terms [terms, ..., hidden] whose sum is the output for x [..., hidden]; see `MLP.terms`.

        There is a term for each of a token's experts, and the shared expert's terms. x is an array,
        or Projected with the router's products.
        """
        stream, (x, logits) = x, self.read(x, context.routes)
        terms = self.experts.terms(x, logits, context)
        if self.shared is None:
            return terms
        if self.norms is not None:
            assert isinstance(stream, jax.Array)
            format: Any = self.shared.activations if context.is_cached else None
            shared = self.shared.terms(self.norms.shared_input(stream, format), context)
            return self.norms.outputs(terms, shared)
        shared = self.shared.terms(x, context).astype(jnp.float32)
        if self.shared_gate is not None:
            shared *= jax.nn.sigmoid(project(x, self.shared_gate.get_value()))[None]
        return joined_terms(terms, shared)

    def __call__(self, x: jax.Array, context: StepContext = WHOLE) -> jax.Array:
        """Maps x [..., hidden] to the same shape."""
        return self.terms(x, context).sum(0).astype(x.dtype)

    def inputs(self, x: jax.Array) -> Inputs:
        """The input of each linear map, by its path, for an input x [..., hidden] of the module."""
        stream, (x, logits) = x, self.read(x)
        experts, weights = logits.route()
        own, _ = self.experts.weighted(x, weights)
        count = len(self.router.get_value())
        found: Inputs = {
            "experts.gate_up": RoutedInputs(own, experts, count),
            "experts.down": RoutedInputs(self.experts.gated(own, experts), experts, count),
        }
        if self.shared is not None:
            x = x if self.norms is None else self.norms.shared_norm(stream)
            found |= {f"shared.{path}": read for path, read in self.shared.inputs(x).items()}
        return found


def _bias(linear: Linear) -> jax.Array | None:
    return None if linear.bias is None else linear.bias.get_value()
