"""Adapters' folders that are refused, each with what was found and what was expected."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import safetensors.numpy

from mpjax.checkpoint.adapters.folder import read_adapter
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.adapters.write_adapter import BEFORE, write_adapter
from tests.mpjax.conftest import TINY

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
A, B = f"{BEFORE}{Q}.lora_A.weight", f"{BEFORE}{Q}.lora_B.weight"
K = Q.replace("q_proj", "k_proj")
EMBED = "model.embed_tokens.token_adapter"
ONE = np.ones((4, 128), np.float32)

KEYS = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3': expected LORA, the only supported kind"),
    ({"peft_type": None}, "peft_type is None: expected LORA"),
    ({"r": 0}, "r is 0: expected a rank, a whole number above 0"),
    ({"r": True}, "r is True: expected a rank"),
    ({"lora_alpha": "16"}, "lora_alpha is '16': expected a number"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan: expected a number"),
    ({"lora_alpha": 10**400}, "lora_alpha is 1000000"),
    ({"use_dora": 1}, "use_dora is 1: expected true or false"),
    ({"use_dora": True}, "_proj lacks lora_magnitude_vector, and use_dora is true"),
    ({"use_rslora": 1}, "use_rslora is 1: expected true or false"),
    ({"bias": "all"}, "bias is 'all': expected 'none'"),
    ({"init_lora_weights": "pissa_niter_4"}, "which changes the base's weights: save the adapter"),
    ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora', which changes the base"),
    ({"layer_replication": [[0, 1]]}, "layer_replication is [[0, 1]]: it is not supported"),
    ({"lora_bias": True}, "lora_bias is True: it is not supported"),
    ({"use_qalora": True}, "use_qalora is True: it is not supported"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is [1]: it is not supported"),
    ({"trainable_token_indices": [3, 3]}, "_indices is [3, 3]: expected different token ids"),
    ({"trainable_token_indices": {"lm_head": 3}}, "expected different token ids"),
    ({"a_key_of_tomorrow": 1}, "a_key_of_tomorrow is 1: it is not supported"),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern['q_proj'] is -1: expected a rank"),
    ({"alpha_pattern": {"(": 1}}, "alpha_pattern has '(', no pattern"),
    ({"rank_pattern": {"(?i)x": 4}}, "rank_pattern has '(?i)x', no pattern"),
    ({"rank_pattern": [1]}, "rank_pattern is [1]: expected an object of patterns"),
    ({"rank_pattern": {"q_proj": 5}}, "has the shape (4, 128): expected (5, 128), by adapter_conf"),
    ({"lora_parameters": {"rank": 4}}, "lora_parameters.scale is None: expected a number"),
    ({"lora_parameters": {"rank": 4, "scale": 1}}, "has no adapters.safetensors, and found adapte"),
    ({"lora_parameters": 4}, "lora_parameters is 4: expected an object"),
]
TENSORS = [
    ({A: None}, f"{Q} lacks lora_A or lora_B: expected both"),
    ({B: None}, f"{Q} lacks lora_A or lora_B: expected both"),
    ({A: ONE[:, :64]}, "q_proj.lora_A.weight has the shape (4, 64): expected (4, 128), by adapter"),
    ({B: ONE[:3]}, "q_proj.lora_B.weight has the shape (3, 128): expected (128, 4), by adapter_"),
    ({A: ONE.astype(np.int32)}, "q_proj.lora_A.weight is int32: expected floating point"),
    ({A: ONE * np.nan}, "q_proj.lora_A.weight has numbers that are not finite"),
    (
        {f"{BEFORE}model.layers.7.self_attn.q_proj.lora_A.weight": ONE},
        "changes model.layers.7.self_attn.q_proj, and the base has no such linear map; the nearest",
    ),
    ({f"{BEFORE}{Q}.lora_C.weight": ONE}, "changes model.layers.0.self_attn.q_proj.lora_C, and"),
    ({f"{BEFORE}{Q}.bias": ONE[0]}, "q_proj.bias is no tensor of an adapter that is supported"),
    ({f"{BEFORE}{Q}.lora_A.default.weight": ONE}, "comes twice"),
    ({f"{BEFORE}{DOWN}.weight": ONE}, "down_proj.weight is a whole linear map: expected LoRA"),
    ({f"{BEFORE}score.weight": ONE}, "changes score, and the base has no such linear map"),
    (
        {f"{BEFORE}lm_head.weight": np.ones((2050, 64), np.float32)},
        "lm_head.weight has the shape (2050, 64): expected (2050, 128), by adapter_config",
    ),
    (
        {f"{BEFORE}lm_head.base_layer.weight": np.ones((2048, 128), np.float32)},
        "lm_head.base_layer.weight is not the base's own table: take its own base",
    ),
    (
        {f"{BEFORE}model.layers.0.self_attn.qkv_proj.lora_A.weight": ONE}
        | {f"{BEFORE}model.layers.0.self_attn.qkv_proj.lora_B.weight": np.ones((256, 4), "f4")},
        "is changed twice, by a module of several maps",
    ),
    ({f"{BEFORE}{EMBED}.trainable_tokens_delta": ONE}, "(4, 128): expected (0, 128), by adapter_"),
    ({f"{BEFORE}{K}.token_adapter.trainable_tokens_delta": ONE}, "is of no table: expected the"),
    (
        {f"{BEFORE}{EMBED}.trainable_tokens_delta": ONE}
        | {f"{BEFORE}model.embed_tokens.lora_embedding_A": ONE},
        "is beside other changes of model.embed_tokens: expected one",
    ),
    (
        {f"{BEFORE}model.embed_tokens.lora_magnitude_vector": ONE[0]},
        "model.embed_tokens lacks lora_A or lora_B: expected both",
    ),
]


@pytest.fixture
def adapter(tmp_path):
    return write_adapter(tmp_path / "adapter", TINY, leaves=("q_proj", "down_proj"))


@pytest.mark.parametrize(("keys", "said"), KEYS, ids=lambda value: str(value)[:40])
def test_a_key_is_refused(keys, said, adapter, tiny):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_adapter(adapter, tiny.model)


@pytest.mark.parametrize(("changes", "said"), TENSORS, ids=lambda value: str(value)[-40:])
def test_a_tensor_is_refused(changes, said, adapter, tiny):
    file = adapter / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file) | changes
    kept = {name: array for name, array in tensors.items() if array is not None}
    safetensors.numpy.save_file(kept, file)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_adapter(adapter, tiny.model)


def test_a_folder_is_refused(adapter, tiny, tmp_path):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safet.*PyTorch's files are"):
        read_adapter(adapter, tiny.model)
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json: expected the folder"):
        read_adapter(tmp_path / "none", tiny.model)
    for odd in ("~nobody-has-this-name/x", "x" * 5000):
        with pytest.raises(CheckpointError, match=rf"^{odd[:20]}"):
            read_adapter(odd, tiny.model)


def test_keys_that_change_nothing(adapter, tiny):
    """A key that PEFT does not use, and those by which it has found the modules."""
    file, before = adapter / "adapter_config.json", read_adapter(adapter, tiny.model)
    more = {"use_dora": False, "eva_config": None, "a_key_of_tomorrow": None, "loftq_config": {}}
    more |= {"target_modules": ".*q_proj", "lora_dropout": 0.5, "fan_in_fan_out": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    after = read_adapter(adapter, tiny.model)
    for path, change in before.changes.items():
        np.testing.assert_array_equal(after.changes[path].arrays[0], change.arrays[0])


def test_the_base_s_own_table_is_no_change(adapter, tiny):
    file = adapter / "adapter_model.safetensors"
    table = np.asarray(tiny.model.head.get_value())
    name = f"{BEFORE}lm_head.base_layer.weight"
    safetensors.numpy.save_file(safetensors.numpy.load_file(file) | {name: table}, file)
    assert "head" not in read_adapter(adapter, tiny.model).changes


def test_norms_are_kept_apart(adapter, tiny):
    file, weight = adapter / "adapter_model.safetensors", np.full(128, 2.0, np.float32)
    name = f"{BEFORE}model.norm.weight"
    safetensors.numpy.save_file(safetensors.numpy.load_file(file) | {name: weight}, file)
    found = read_adapter(adapter, tiny.model)
    np.testing.assert_array_equal(found.arrays["norm.weight"], weight)
    with pytest.raises(ValueError, match=r"whole parameters \(norm.weight\), which rows can't"):
        tiny.adapters.add(tiny.model, {"x": found})
