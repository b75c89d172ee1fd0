from __future__ import annotations

from mpjax.models import ExpertsSpec, GroupedQuerySpec, LayerSpec, Mixtral
from mpjax.models.presets import FILES

MIXTRAL = FILES["mixtral-8x7b"]


def test_layers_have_experts():
    config = Mixtral.config_from_hf(MIXTRAL)
    experts = ExpertsSpec(14336, num_experts=8, experts_per_token=2)
    assert config.layers == (LayerSpec(GroupedQuerySpec(), experts),) * 32
    assert Mixtral.config_from_hf(MIXTRAL | {"sliding_window": 512}).windows == (512,) * 32
    named = Mixtral.config_from_hf(MIXTRAL | {"num_experts": 4, "num_local_experts": None})
    assert named.layers[0].mlp.num_experts == 4  # type: ignore[attr-defined]


def test_names_are_those_of_the_files():
    config = Mixtral.config_from_hf(MIXTRAL)
    arrays = {place.path: place.name for place in Mixtral.array_places(config)}
    assert arrays["layers.3.mlp.router"] == "model.layers.3.block_sparse_moe.gate.weight"
    places = {place.path: place for place in Mixtral.linear_places(config)}
    gate_up, down = (places[f"layers.3.mlp.experts.{name}"] for name in ("gate_up", "down"))
    experts = "model.layers.3.block_sparse_moe.experts"
    assert gate_up.names[:3] == (f"{experts}.0.w1", f"{experts}.0.w3", f"{experts}.1.w1")
    assert down.names[-1] == f"{experts}.7.w2"
    assert gate_up.part_shapes(1) == [(8, 4096, 28672)]
    assert down.part_shapes(1) == [(8, 14336, 4096)]
