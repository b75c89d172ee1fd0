"""The config.json of Gemma, Gemma 2, Gemma 3 and Gemma 4; numbers are in tests/mpjax/checkpoint."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import ConfigError, Gemma, Gemma2, Gemma3, GroupedQuerySpec
from mpjax.models.config import RopeScaling
from mpjax.models.gemma3n import Gemma3n
from mpjax.models.gemma4 import Gemma4

pytestmark = pytest.mark.any_version

SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
HF = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "hidden_act": "gelu",  # which files of Gemma have beside the right one
    "hidden_activation": "gelu_pytorch_tanh",
}


def test_gemma():
    config = Gemma.config_from_hf(HF)
    assert config.offset_norms
    assert config.tie_word_embeddings
    assert (config.embedding_scale, config.logit_softcap) == (8, None)
    assert {layer.norms for layer in config.layers} == {"pre"}
    assert {layer.mlp.activation for layer in config.layers} == {"gelu"}  # type: ignore[attr-defined]
    assert config.rms_norm_eps == 1e-6
    biased = Gemma.config_from_hf(HF | {"attention_bias": True}).layers[0].attention
    assert (biased.qkv_bias, biased.output_bias) == (True, True)  # type: ignore[attr-defined]


def test_gemma_2():
    config = Gemma2.config_from_hf(HF | {"query_pre_attn_scalar": 64})
    assert config.windows == (8, None) * 3
    assert {layer.norms for layer in config.layers} == {"both"}
    [spec] = {layer.attention for layer in config.layers if layer.attention.window is None}  # type: ignore[attr-defined]
    assert spec == GroupedQuerySpec(scale=0.125, softcap=50.0)
    assert config.logit_softcap == 30.0
    bare = Gemma2.config_from_hf(HF | {"attn_logit_softcapping": 20.0, "tie_word_embeddings": True})
    assert bare.layers[0].attention.softcap == 20.0  # type: ignore[attr-defined]
    without = Gemma2.config_from_hf(HF | dict.fromkeys(SOFTCAPS) | {"tie_word_embeddings": True})
    assert (without.layers[0].attention.softcap, without.logit_softcap) == (None, None)  # type: ignore[attr-defined]
    assert bare.layers[0].attention.scale == 1 / 16  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["6", "05", "full_attention"])
def test_sizes_of_no_layer_are_refused(key):
    hf = HF | {"hidden_size_per_layer_input": 0, "per_layer_config": {"5": {"head_dim": 32}}}
    sizes = [layer.attention.head_dim for layer in Gemma4.config_from_hf(hf).layers]  # type: ignore[attr-defined]
    assert sizes == [None, None, None, None, None, 32]
    expected = f"expected only layers, '0' to '5', as keys, not \\['{key}'\\]"
    with pytest.raises(ConfigError, match=expected):
        Gemma4.config_from_hf(hf | {"per_layer_config": {key: {"head_dim": 32}}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_active_idx": 4}, "altup_active_idx is 4: expected at most 3"),
        ({"intermediate_size": [64] * 5}, "intermediate_size is .*: expected a list of 6 numbers"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "expected numbers of at least 0 and less"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3: expected so few of 6 layers"),
    ],
)
def test_gemma_3n(changes, message):
    hf = HF | {"num_kv_shared_layers": 1}
    layers = Gemma3n.config_from_hf(hf | {"num_hidden_layers": 11}).layers
    assert [layer.mlp.sparsity for layer in layers] == [0.95] * 10 + [None]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=message):
        Gemma3n.config_from_hf(hf | changes)


def test_gemma_3():
    config = Gemma3.config_from_hf(HF)
    assert config.windows == (8, 8, 8, 8, 8, None)
    assert [layer.attention.rope for layer in config.layers] == ["local"] * 5 + ["global"]  # type: ignore[attr-defined]
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.layers[0].attention.qk_norm  # type: ignore[attr-defined]
    assert (config.logit_softcap, config.layers[0].attention.softcap) == (None, None)  # type: ignore[attr-defined]
    linear = {"rope_type": "linear", "factor": 8.0}
    nested = {
        "full_attention": {"rope_theta": 5e5, **linear},
        "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
    }
    newer = Gemma3.config_from_hf(HF | {"rope_parameters": nested})
    older = {"rope_scaling": linear, "rope_theta": 5e5, "rope_local_base_freq": 2e4}
    assert newer == Gemma3.config_from_hf(HF | older)
    assert newer.rope_scaling == RopeScaling("linear", 8.0)
    assert newer.max_position_embeddings == 128  # which linear scaling has made already
    assert newer.local_rope_scaling is None
    nested["sliding_attention"] |= {"rope_type": "linear", "factor": 2.0}
    scaled = Gemma3.config_from_hf(HF | {"rope_parameters": nested})
    assert scaled.local_rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        (
            Gemma2,
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is True: expe",
        ),
        (Gemma2, {"hidden_activation": "relu"}, "hidden_activation is 'relu': expected null or"),
        (Gemma, {"hidden_act": "relu"}, "hidden_act is 'relu': expected null or \"gelu\" or"),
        (
            Gemma3,
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters is .*: expected an obj",
        ),
        (Gemma2, {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1: expected a pos"),
        (Gemma2, {"layer_types": ["full_attention"]}, "layer_types must list 6 of"),
    ],
)
def test_values_that_are_refused(family, change, said):
    with pytest.raises(ConfigError, match=said):
        family.config_from_hf(HF | change)


def test_weights_of_norms_are_float32():
    """Files hold them minus 1, in bfloat16: the sum needs more digits."""
    model = nnx.eval_shape(lambda: Gemma3(Gemma3.config_from_hf(HF), nnx.Rngs(0)))
    offsets = {place.path: place.offset for place in Gemma3.array_places(model.config)}
    assert {path for path, offset in offsets.items() if offset} == {
        path for path in offsets if "norm" in path
    }
    norm = model.layers[0].mlp_post_norm
    assert norm.weight.get_value().dtype == jnp.float32
    real = Gemma3(Gemma3.config_from_hf(HF | {"num_hidden_layers": 1}), nnx.Rngs(0))
    logits = real(jnp.asarray([[1, 2, 3]]))
    assert logits.dtype == jnp.float32
    assert np.isfinite(logits).all()
