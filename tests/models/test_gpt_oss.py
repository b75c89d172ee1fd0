from __future__ import annotations

from mpjax.models import ExpertPlace, ExpertsSpec, GptOss, GroupedQuerySpec, LayerSpec
from mpjax.models.config import RopeScaling
from mpjax.models.presets import FILES
from mpjax.models.rotary import yarn_attention_factor

GPT_OSS = FILES["gpt-oss-20b"]


def test_layers():
    config = GptOss.config_from_hf(GPT_OSS)
    experts = ExpertsSpec(
        2880,
        num_experts=32,
        experts_per_token=4,
        router_bias=True,
        bias=True,
        gate_limit=7.0,
        gate_alpha=1.702,
        joint_files=True,
    )
    attentions = [
        GroupedQuerySpec(window, qkv_bias=True, output_bias=True, sinks=True)
        for window in (128, None)
    ]
    assert config.layers == tuple(LayerSpec(each, experts) for each in attentions) * 12
    without = {key: value for key, value in GPT_OSS.items() if key != "layer_types"}
    assert GptOss.config_from_hf(without).layers == config.layers


def test_the_rotary_embedding_has_fractional_bounds():
    scaling = GptOss.config_from_hf(GPT_OSS).rope_scaling
    assert scaling == RopeScaling(
        "yarn",
        32.0,
        original_context=4096,
        attention_factor=yarn_attention_factor(32.0),
        whole_channels=False,
    )


def test_files_hold_gate_and_up_as_one_map():
    places = {place.path: place for place in GptOss.linear_places(GptOss.config_from_hf(GPT_OSS))}
    gate_up, down = (places[f"layers.3.mlp.experts.{name}"] for name in ("gate_up", "down"))
    assert isinstance(gate_up, ExpertPlace)
    assert isinstance(down, ExpertPlace)
    assert gate_up.names[1] == "model.layers.3.mlp.experts.1.gate_up_proj"
    assert (gate_up.is_alternating, gate_up.is_transposed) == (True, True)
    assert (down.is_alternating, down.is_transposed) == (False, True)
    assert gate_up.part_shapes(1) == [(32, 2880, 5760)]
    arrays = {place.path: place for place in GptOss.array_places(GptOss.config_from_hf(GPT_OSS))}
    assert arrays["layers.3.mlp.router_bias"].name == "model.layers.3.mlp.router.bias"
    assert arrays["layers.3.attention.sinks"].shape == (64,)
