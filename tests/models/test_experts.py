from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import Gate, Routing, device, quantize
from mpjax.kernels.cutting import Run
from mpjax.kernels.experts.plans import MOST_TILE_ROWS
from mpjax.models import (
    ConfigError,
    Decoder,
    ExpertsSpec,
    GatedMLPSpec,
    LayerSpec,
    LinearMaps,
    Packed,
)
from mpjax.models.layers import Projected
from mpjax.models.low_rank import LowRank
from mpjax.models.share import Cut, Share
from mpjax.models.state import WHOLE
from tests.models.small import CACHED, CONFIG
from tests.pallas_kernels.experts.cases import expected
from tests.pallas_kernels.oracles import random_array, relative_error, wide

SPEC = ExpertsSpec(
    32,
    num_experts=4,
    experts_per_token=2,
    renormalize=False,
    router_bias=True,
    router_correction=True,
    bias=True,
    gate_limit=2.0,
    gate_alpha=1.5,
    shared_size=96,
    shared_gate=True,
)


def build(spec: ExpertsSpec, rng: np.random.Generator) -> Any:
    """A module with strong random weights, also in its biases."""
    module = spec.build(CONFIG, nnx.Rngs(0))

    def strong(x):
        return random_array(rng, x.shape, "float32") * (x.shape[-2] ** -0.5 if x.ndim > 1 else 1)

    nnx.update(module, jax.tree.map(strong, nnx.state(module)))
    return module


def test_the_maps_and_arrays_of_a_layer():
    assert SPEC.linear_maps(CONFIG) == (
        LinearMaps("experts.gate_up", ((64, 32), (64, 32)), True, 4),
        LinearMaps("experts.down", ((32, 64),), True, 4),
        LinearMaps("shared.gate_up", ((64, 96), (64, 96))),
        LinearMaps("shared.down", ((96, 64),)),
    )
    assert SPEC.arrays(CONFIG) == {
        "router": (4, 64),
        "router_bias": (4,),
        "router_correction": (4,),
        "shared_gate": (1, 64),
    }
    assert SPEC.routing == Routing(2, renormalize=False)
    assert SPEC.gate == Gate(2.0, 1.5)


def test_all_that_reads_the_norm_has_its_scales():
    layer = LayerSpec(CONFIG.layers[0].attention, SPEC)
    [norm] = [fold for fold in layer.folds(CONFIG) if fold.source == "mlp_norm"]
    assert norm.readers == (
        "mlp.experts.gate_up",
        "mlp.router",
        "mlp.shared.gate_up",
        "mlp.shared_gate",
    )
    assert layer.writers(CONFIG)[1:] == ("mlp.experts.down", "mlp.shared.down")


def test_scales_do_not_move_through_a_gate_that_limits_up():
    plain = dataclasses.replace(SPEC, gate_limit=None)
    folds = SPEC.folds(CONFIG), plain.folds(CONFIG)
    targets = [[fold.target for fold in found if fold.is_linear] for found in folds]
    assert targets == [["shared.down"], ["experts.down", "shared.down"]]
    for found in folds:  # channels may be in another order
        assert [fold.target for fold in found if fold.is_elementwise] == targets[1]


def test_bytes_count_all_experts_of_tokens():
    """Of a single token, in a tile of its own for each of its two experts."""
    alone = dataclasses.replace(SPEC, shared_size=None)
    row, term = (64 + 32) * 4 + 64 * 4, 64 * 4
    assert alone.working_bytes(CONFIG, 1) == 2 * MOST_TILE_ROWS * row + term
    shared = 3 * 96 * 4 + 4 * term
    assert SPEC.working_bytes(CONFIG, 1) == alone.working_bytes(CONFIG, 1) + shared
    in_16_bits = dataclasses.replace(CONFIG, dtype="bfloat16")
    assert alone.working_bytes(in_16_bits, 1) == 2 * MOST_TILE_ROWS * ((64 + 32) * 2 + term) + term


def test_bytes_of_many_tokens_count_what_products_apart_have():
    wide = dataclasses.replace(SPEC, shared_size=None, intermediate_size=1024)
    pairs = 2 * 100_000
    assert wide.working_bytes(CONFIG, 100_000) == pairs * (3 * 1024 * 4 + 64 * 4)


def test_which_kernels_compute_experts():
    """Those of experts' own plans: of 32 tokens of an expert, and fewer, it is Triton's."""
    config = dataclasses.replace(CONFIG, hidden_size=256, dtype="bfloat16")
    spec = dataclasses.replace(SPEC, intermediate_size=128)
    plain, packed = (nnx.eval_shape(lambda: spec.build(config, nnx.Rngs(0))) for _ in range(2))
    for linear in (packed.experts.gate_up, packed.experts.down):
        kernel = jax.eval_shape(lambda w: quantize(w, "uint4:g128"), linear.kernel.get_value())
        linear.kernel = Packed(kernel)
    assert not packed.runs_by_warpgroups(4096)  # there is no GPU
    with device.described_as("NVIDIA H200"):
        for module in (plain, packed):
            found = [module.runs_by_warpgroups(tokens) for tokens in (1, 64, 65)]
            assert found == [False, False, True]


def test_a_mixture_with_everything(rng):
    module, x = build(SPEC, rng), random_array(rng, (2, 3, 64), "float32")
    flat = wide(x).reshape(6, 64)
    logits = flat @ wide(module.router.get_value()).T + wide(module.router_bias.get_value())
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ranked = scores + wide(module.router_correction.get_value())
    experts = np.argsort(-ranked, -1, kind="stable")[:, :2]
    weights = np.take_along_axis(scores, experts, -1)
    stack = module.experts

    def arrays(linear):
        return wide(linear.kernel.get_value()), wide(linear.bias.get_value())

    kernel, bias = arrays(stack.gate_up)
    inner = expected(flat, kernel, experts, None, bias, SPEC.gate)
    kernel, bias = arrays(stack.down)
    mixed = expected(inner, kernel, experts, weights, bias)
    shared = wide(module.shared(x)).reshape(6, 64)
    gate = 1 / (1 + np.exp(-(flat @ wide(module.shared_gate.get_value()).T)))
    whole = (mixed + gate * shared).reshape(2, 3, 64)
    assert relative_error(module(x), whole) < 1e-5
    terms = module.terms(x, WHOLE)
    assert terms.shape == (3, 2, 3, 64)  # two experts and the shared MLP
    assert relative_error(terms.sum(0), whole) < 1e-5
    read = module.inputs(x)
    assert read["experts.gate_up"].x is x
    assert relative_error(read["experts.down"].x.reshape(6, 2, 32), inner) < 1e-5
    for path in ("experts.gate_up", "experts.down"):
        np.testing.assert_array_equal(read[path].experts.reshape(6, 2), experts)
        assert read[path].total == 4
    assert [*read][2:] == ["shared.gate_up", "shared.down"]


def test_the_products_of_the_router_may_come_with_x(rng):
    """From the norm; then the router is not multiplied again."""
    module, x = build(SPEC, rng), random_array(rng, (1, 3, 64), "float32")
    projection = module.activations
    products = x @ projection.matrix.T
    found = module.terms(Projected(x, products), CACHED)
    assert relative_error(found, wide(module.terms(x, CACHED))) < 1e-5
    turned = module.terms(Projected(x, products[..., ::-1]), CACHED)
    assert relative_error(turned, wide(found)) > 0.1


def test_experts_in_a_format_are_their_dequantised_twin(rng):
    spec = ExpertsSpec(32, num_experts=4)
    module, x = build(spec, rng), random_array(rng, (5, 64), "float32")
    assert module.shared is None
    packed = []
    for linear in (module.experts.gate_up, module.experts.down):
        packed.append(quantize(linear.kernel.get_value(), "uint4:g32"))
        linear.kernel = nnx.Param(packed[-1].dequantize())
    plain = module(x)
    for linear, kernel in zip((module.experts.gate_up, module.experts.down), packed, strict=True):
        linear.kernel = Packed(kernel)
    assert relative_error(module(x), wide(plain)) < 1e-5


@pytest.mark.parametrize("ungated", [None, "relu2"])
def test_adapters_of_experts_change_their_kernels(ungated, rng):
    module = build(ExpertsSpec(32, num_experts=4, ungated=ungated), rng)
    merged, x = nnx.clone(module), random_array(rng, (5, 64), "float32")
    for name in ("gate_up", "down"):
        linear, target = getattr(module.experts, name), getattr(merged.experts, name).kernel
        _, inputs, outputs = target.get_value().shape
        down, up = (
            random_array(rng, (4, *shape), "float32") * 0.2 for shape in ((inputs, 3), (3, outputs))
        )
        linear.adapter = nnx.data(LowRank(down, [up]))
        target.set_value(target.get_value() + down @ up)
    assert relative_error(module(x), merged(x)) < 1e-5


def test_gradients_reach_the_router(rng):
    module, x = build(ExpertsSpec(32, num_experts=4), rng), random_array(rng, (5, 64), "float32")
    gradients = nnx.grad(lambda module: (module(x) ** 2).sum())(module)
    assert jnp.abs(gradients["router"].get_value()).max() > 1e-3
    assert jnp.abs(gradients["experts"]["down"]["kernel"].get_value()).max() > 1e-3


def test_a_routing_that_does_not_fit_is_found_in_the_configuration():
    layers = tuple(
        dataclasses.replace(layer, mlp=ExpertsSpec(32, num_experts=4, experts_per_token=5))
        for layer in CONFIG.layers
    )
    config = dataclasses.replace(CONFIG, layers=layers)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.mlp: 5 experts per token are more than"):
        Decoder(config, nnx.Rngs(0))
    assert "expected softmax or sigmoid" in (ExpertsSpec(32, scoring="x").why_unsound() or "")


def test_a_share_has_experts_whole_beside_the_router_of_all():
    spec = dataclasses.replace(SPEC, shared_size=96)
    share = spec.spread(3, {"shared.down": 32})
    assert (share.num_experts, share.held_experts, share.intermediate_size) == (4, 2, 32)
    assert share.shared_size == 32
    assert share.arrays(CONFIG) == dataclasses.replace(spec, shared_size=32).arrays(CONFIG)
    experts = [maps.experts for maps in share.linear_maps(CONFIG)]
    assert experts == [2, 2, None, None]
    cuts = spec.cuts(CONFIG, share, Share(1, 3))
    assert cuts["experts.gate_up"] == cuts["experts.down"] == Cut(experts=Run(2, 4, 2))
    assert cuts["shared.down"] == Cut(inputs=Run(32, 64, 32))
    dense = GatedMLPSpec(64)
    assert dense.spread(2, {"down": 32}) == dense.divide(2, {"down": 32})
