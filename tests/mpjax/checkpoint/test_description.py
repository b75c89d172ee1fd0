from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mpjax.checkpoint import CheckpointError
from mpjax.checkpoint.description import Description, is_saved
from mpjax.checkpoint.saved_config import ADDED_IN_VERSION_6
from mpjax.checkpoint.saving import save
from mpjax.models import DecoderConfig, RopeScaling
from tests.mpjax.checkpoint.saved_models import load, mixed, plain

SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    """A saved model that no test changes."""
    folder = tmp_path_factory.mktemp("master")
    changes = {"rope_scaling": SCALING | {"original_max_position_embeddings": 32}}
    lm = load(plain(folder / "original", np.random.default_rng(1), **changes), "W4g32A16KV8")
    save(lm, folder / "saved")
    return folder / "saved"


@pytest.fixture
def saved(master, tmp_path):
    return shutil.copytree(master, tmp_path / "saved")


def change(saved, change):
    """Writes a folder's description again, after `change` has changed it in place."""
    path = saved / "mpjax.json"
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))


def expect(message, folder):
    with pytest.raises(CheckpointError, match=message) as caught:
        Description.read(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000  # it may list all decoders


def test_it_says_what_the_model_is(tmp_path, rng):
    lm = load(mixed(tmp_path / "original", rng))
    save(lm, tmp_path / "saved")
    assert is_saved(tmp_path / "saved")
    assert not is_saved(tmp_path / "original")
    found = Description.read(tmp_path / "saved")
    assert (found.decoder, found.config) == (type(lm.model), lm.config)
    assert found.kv_format == lm.kv_format
    formats = [part and str(part.format) for part in found.parts["layers.0.attention.qkv"]]
    assert formats == ["uint4:g32", "uint4:g32", None]
    again = Description.of(
        lm, {name: array.checksum for name, array in found.arrays.items()}
    ).to_json()
    assert again == (tmp_path / "saved" / "mpjax.json").read_text() == found.to_json()


def test_rotary_scaling_comes_back(master):
    assert Description.read(master).config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


def test_foreign_folders(saved, tmp_path):
    expect("nowhere has no mpjax.json: expected a folder that", tmp_path / "nowhere")
    for text in ("{}", '{"format": "another"}'):
        (saved / "mpjax.json").write_text(text)
        expect("mpjax.json has the format .*: expected 'mpjax checkpoint'", saved)


@pytest.mark.parametrize("version", [3, 9, None, "4"])
def test_other_versions(version, saved):
    change(saved, lambda d: d.update(version=version))
    message = (
        f"mpjax.json has the format version {version!r}: this mpjax reads versions 4 to 8; install"
    )
    expect(message, saved)


def test_version_4_is_read(saved):
    def as_version_4(description):
        layers = description["config"].pop("layers")
        first = layers[0]["attention"] | layers[0]["mlp"]
        description["config"] |= {
            "windows": [layer["attention"]["window"] for layer in layers],
            "intermediate_size": first["intermediate_size"],
            "mlp_bias": first["bias"],
            **{name: first[name] for name in ("qkv_bias", "output_bias", "qk_norm")},
        }
        for name in ADDED_IN_VERSION_6[DecoderConfig]:
            del description["config"][name]
        for name in ADDED_IN_VERSION_6[RopeScaling]:
            (description["config"]["rope_scaling"] or {}).pop(name, None)
        description["version"] = 4

    expected = Description.read(saved)
    change(saved, as_version_4)
    assert Description.read(saved) == expected
    change(saved, lambda d: d["config"].update(windows=[None, 0]))
    expect(r"damaged: config, layers\[1\].attention: window is 0: expected a positive int", saved)


def test_weights_whose_layout_has_changed(saved):
    """Up to version 6, each scale of MXFP4 has a word; other weights are as they were."""
    change(saved, lambda d: d.update(version=6))
    assert Description.read(saved)
    part = {"format": "float4:g32", "scale_dtype": "bfloat16"}
    change(saved, lambda d: next(iter(d["linears"].values())).__setitem__(0, part))
    expect("mpjax.json has weights in float4:g32 with scales of 32 bits, which .* again", saved)


KEYS = ("decoder", "config", "kv_format", "linears", "arrays")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [None, 3, [], {}, "nonsense", True, "missing"])
def test_keys_of_another_type(key, value, saved):
    change(saved, lambda d: d.pop(key) if value == "missing" else d.update({key: value}))
    expect(r"mpjax\.json is damaged: .*; convert the original checkpoint again$", saved)


WRONG_CONFIG = [
    ("rms_norm_eps", "0.1", "config: rms_norm_eps is '0.1': expected a positive number"),
    ("rope_theta", float("nan"), "config: rope_theta is nan: expected a positive number"),
    ("hidden_size", 64.0, "config: hidden_size is 64.0: expected a positive integer"),
    ("max_position_embeddings", 2**31, "max_position_embeddings is 2147483648: expected at most"),
    ("num_kv_heads", 3, "config: num_heads is 4 and num_kv_heads 3: expected a multiple of it"),
    ("head_dim", 17, "config: head_dim is 17: expected a positive, even number"),
    ("tie_word_embeddings", True, "there is an array 'head', which such a model does not have"),
    ("dtype", "int8", "DecoderConfig: dtype is 'int8': expected a dtype, such as bfloat16"),
    ("layers", [], "config: layers is empty: expected one or more"),
    ("layers", [3], r"layers\[0\] is 3: expected a JSON object"),
    ("stop_ids", [1 << 20], r"config: stop_ids is \(1048576,\): expected token ids from 0 to"),
    ("vocab_size", 512, r"the array embedding is bfloat16 \[\d+, 64\]: expected .* \[512, 64\]"),
    ("rope_scaling", {}, "rope_scaling has no 'attention_factor'"),
    ("speed", 3, "config has an unknown key 'speed'"),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG_CONFIG)
def test_values_that_no_model_has(key, value, message, saved):
    change(saved, lambda d: d["config"].update({key: value}))
    expect(rf"mpjax\.json is damaged: .*{message}.*; convert the original checkpoint again$", saved)


def test_more_layers_than_arrays(saved):
    change(saved, lambda d: d["config"].update(layers=d["config"]["layers"] * 5_000))
    expect("there are 10000 layers and only", saved)


ATTENTION = r"config, layers\[1\]\.attention: "


@pytest.mark.parametrize(
    ("half", "key", "value", "message"),
    [
        ("attention", "window", 0, f"{ATTENTION}window is 0: expected a positive integer"),
        ("attention", "qkv_bias", True, "the array layers.1.attention.qkv.0.bias is missing"),
        ("attention", "kind", "linear", r"layers\[1\].attention: kind is 'linear': expected one"),
        ("attention", "kind", "gated", r"layers\[1\].attention has no 'activation'"),
        ("attention", "speed", 3, r"layers\[1\].attention has an unknown key 'speed'"),
        ("mlp", "intermediate_size", 96, r"the array layers.1.mlp.*: expected"),
    ],
)
def test_layers_that_no_model_has(half, key, value, message, saved):
    change(saved, lambda d: d["config"]["layers"][1][half].update({key: value}))
    expect(message, saved)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kind", "ntk", "config, rope_scaling: kind is 'ntk': expected linear or llama3 or yarn"),
        ("factor", "8", "factor is '8': expected a positive number"),
        ("low_frequency_factor", 5.0, "high_frequency_factor is 4.0: expected at least low_f"),
    ],
)
def test_scalings_that_no_model_has(key, value, message, saved):
    change(saved, lambda d: d["config"]["rope_scaling"].update({key: value}))
    expect(message, saved)


DOWN = "layers.1.mlp.down"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], f"{DOWN} has 0 parts: expected 1 or 1"),
        ([None], f"the array {DOWN}.0.kernel is missing"),
        ([{"format": "uint4:g32"}], "the key 'scale_dtype' is missing"),
        ([{"format": "uint5", "scale_dtype": "float16"}], "unknown weight format 'uint5'"),
        ([{"format": "bfloat16", "scale_dtype": "float16"}], "bfloat16 is not packed"),
        ([{"format": "uint4:g32", "scale_dtype": "float64"}], "scale_dtype is 'float64': expected"),
        ([{"format": "table4:g32", "scale_dtype": "float16"}], f"the array {DOWN}.0.table is"),
    ],
)
def test_parts_that_no_map_has(parts, message, saved):
    change(saved, lambda d: d["linears"].update({DOWN: parts}))
    expect(message, saved)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ({"dtype": "complex128"}, "norm.weight has the dtype 'complex128'"),
        ({"dtype": "int32"}, r"norm.weight is int32 \[64\]: expected bfloat16 or float16 or float"),
        ({"shape": [-64]}, r"norm.weight has the shape \[-64\]"),
        ({"shape": 64}, "shape is 64: expected a JSON list"),
        ({"crc32": "abc"}, "crc32 is 'abc': expected a JSON integer"),
    ],
)
def test_arrays_that_no_model_has(array, message, saved):
    def damage(description):
        whole = description["arrays"]["norm.weight"]
        description["arrays"]["norm.weight"] = whole | array

    change(saved, damage)
    expect(message, saved)
    change(saved, lambda d: d["arrays"].pop("norm.weight"))
    expect("the array norm.weight is missing", saved)
