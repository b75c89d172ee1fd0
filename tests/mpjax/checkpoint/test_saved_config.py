from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from mpjax.checkpoint.saved_config import (
    ADDED_IN_VERSION_6,
    from_json,
    get,
    require,
    to_json,
    upgrade,
)
from mpjax.models import (
    Decoder,
    DecoderConfig,
    GatedMLPSpec,
    GroupedQuerySpec,
    LayerSpec,
    RopeScaling,
    llama_layers,
)

LAYERS = llama_layers((None, 8), 128, qkv_bias=True, qk_norm=True)
CONFIG = DecoderConfig(96, 64, 4, 2, 16, LAYERS, 256, rope_scaling=RopeScaling("linear", 2.0))
# The same model as version 4 says it.
VERSION_4: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "windows": [None, 8],
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "kind": "linear",
        "factor": 2.0,
        "low_frequency_factor": 1.0,
        "high_frequency_factor": 4.0,
        "original_context": 8192,
    },
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "qkv_bias": True,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": True,
    "dtype": "bfloat16",
    "stop_ids": [],
}


def test_a_transform_is_written_where_there_is_one():
    """So that files older than the field are read, and files without one by older readers."""
    mlp = dataclasses.replace(LAYERS[1].mlp, hadamard=32)
    config = dataclasses.replace(
        CONFIG, layers=(LAYERS[0], dataclasses.replace(LAYERS[1], mlp=mlp))
    )
    written = json.loads(json.dumps(to_json(config)))
    assert [layer["mlp"].get("hadamard") for layer in written["layers"]] == [None, 32]
    assert "hadamard" not in written["layers"][0]["mlp"]
    assert from_json(written, Decoder.specs) == config


def test_there_and_back():
    written = json.loads(json.dumps(to_json(CONFIG)))
    assert from_json(written, Decoder.specs) == CONFIG
    assert written["layers"][1] == {
        "attention": {
            "kind": "grouped_query",
            "window": 8,
            "qkv_bias": True,
            "output_bias": False,
            "qk_norm": True,
            "rope": "global",
            "joint_norm": False,
            "scale": None,
            "softcap": None,
            "sinks": False,
        },
        "mlp": {"kind": "gated", "intermediate_size": 128, "bias": False, "activation": "silu"},
        "norms": "pre",
    }


def test_what_version_6_adds_comes_back():
    scaling = RopeScaling("longrope", 4.0, short_factors=(1.0, 2.0), long_factors=(3.0, 4.0))
    changes = {"rope_scaling": scaling, "rotary_dim": 4, "logit_softcap": 30.0}
    layers = tuple(dataclasses.replace(layer, norms="both") for layer in LAYERS)
    config = dataclasses.replace(CONFIG, layers=layers, offset_norms=True, **changes)
    assert from_json(json.loads(json.dumps(to_json(config))), Decoder.specs) == config


def test_a_local_scaling_is_written_where_there_is_one():
    scaling = RopeScaling("yarn", 4.0)
    config = dataclasses.replace(CONFIG, local_rope_theta=100.0, local_rope_scaling=scaling)
    assert from_json(json.loads(json.dumps(to_json(config))), Decoder.specs) == config
    assert "local_rope_scaling" not in to_json(CONFIG)


def test_version_5_is_read():
    written = json.loads(json.dumps(to_json(CONFIG)))
    for where, kind in (
        (written, DecoderConfig),
        (written["rope_scaling"], RopeScaling),
        *((layer, LayerSpec) for layer in written["layers"]),
        *((layer["attention"], GroupedQuerySpec) for layer in written["layers"]),
        *((layer["mlp"], GatedMLPSpec) for layer in written["layers"]),
    ):
        for name in ADDED_IN_VERSION_6[kind]:
            del where[name]
    assert from_json(upgrade(written, 5), Decoder.specs) == CONFIG


def test_version_4_is_read():
    assert from_json(upgrade(VERSION_4, 4), Decoder.specs) == CONFIG


@pytest.mark.parametrize("key", VERSION_4)
def test_version_4_without_a_key(key):
    damaged = {name: value for name, value in VERSION_4.items() if name != key}
    with pytest.raises(ValueError, match=f"^config has no '{key}'$"):
        from_json(upgrade(damaged, 4), Decoder.specs)


def test_version_4_with_windows_that_are_no_list():
    with pytest.raises(ValueError, match=r"^windows is 'x': expected a JSON list$"):
        upgrade(VERSION_4 | {"windows": "x"}, 4)


@pytest.mark.parametrize("key", ["attention", "mlp"])
def test_a_layer_has_both_halves(key):
    written = to_json(CONFIG)
    del written["layers"][1][key]
    with pytest.raises(ValueError, match=rf"^layers\[1\] has no '{key}'$"):
        from_json(written, Decoder.specs)


def test_a_kind_that_the_family_lacks():
    with pytest.raises(ValueError, match="kind is 'gated': expected one of grouped_query"):
        from_json(to_json(CONFIG), Decoder.specs[:1])


def test_types():
    assert get({"a": [1]}, "a", list) == require("a", [1], list) == [1]
    with pytest.raises(ValueError, match=r"^the key 'a' is missing$"):
        get({}, "a", list)
    with pytest.raises(ValueError, match=r"^a is True: expected a JSON integer$"):
        get({"a": True}, "a", int)
