from __future__ import annotations

import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.checkpoint import CheckpointError, array_file
from mpjax.checkpoint.restoring import abstract, restore
from mpjax.checkpoint.safetensors import read_header
from mpjax.checkpoint.saving import save
from mpjax.cli import info
from mpjax.memory import DeviceMemoryError
from mpjax.precision import Precision
from mpjax.tuning import products as tune
from tests.mpjax.checkpoint.saved_models import load, plain, require_same_bits
from tests.mpjax.checkpoint.write_checkpoint import SQUARE


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = plain(tmp_path_factory.mktemp("original") / "model", np.random.default_rng(1))
    return load(folder, "W4g32A16KV8")


@pytest.fixture(scope="module")
def master(original, tmp_path_factory):
    """A saved model that no test changes."""
    folder = tmp_path_factory.mktemp("master") / "saved"
    save(original, folder)
    return folder


@pytest.fixture
def saved(master, tmp_path):
    return shutil.copytree(master, tmp_path / "saved")


def expect(message, folder, read=(restore,), **options):
    for function in read:
        with pytest.raises(CheckpointError, match=message) as caught:
            function(folder, **options)
        assert "\n" not in str(caught.value)


def test_precision_and_dtype_must_agree(master):
    restored = restore(master, precision=Precision.parse("W4g32A16KV4"), dtype=jnp.bfloat16)
    assert restored.precision == "W4g32A16KV4"
    for text in ("W4A16KV8", "W8g32A16KV8", "W16A16KV8"):
        with pytest.raises(ValueError, match=f"precision is {text}, but .* W4g32: ask for A16KV8"):
            restore(master, precision=Precision.parse(text))
    with pytest.raises(ValueError, match=r"dtype is float16, but .* was saved in bfloat16"):
        restore(master, dtype="float16")


def test_an_abstract_model_is_the_restored_one_in_shapes(master):
    found, restored = abstract(master), restore(master)
    shapes = [
        [(leaf.dtype, leaf.shape) for leaf in jax.tree.leaves(nnx.state(lm.model))]
        for lm in (found, restored)
    ]
    assert shapes[0] == shapes[1]
    assert nnx.graphdef(found.model) == nnx.graphdef(restored.model)
    assert (found.precision, found.source) == (restored.precision, restored.source)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(found.model)))


def test_memory_is_asked_for_first(saved, monkeypatch):
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device: 1000)
    monkeypatch.setattr(array_file, "read", None)
    with pytest.raises(DeviceMemoryError, match=r"restoring .*saved needs"):
        restore(saved)


def test_arrays_are_read_one_by_one(master, monkeypatch):
    """Each is on the device before the next is read, and the bar is told about its bytes."""
    read, put = array_file.read, jax.device_put
    events = []

    def watched_read(info, checksum, advance):
        events.append("read")
        return read(info, checksum, advance)

    def watched_put(content, device):
        events.append("put")
        return put(content, device)

    monkeypatch.setattr(array_file, "read", watched_read)
    monkeypatch.setattr(jax, "device_put", watched_put)
    restore(master)
    assert events == ["read", "put"] * len(read_header(master / "weights.safetensors"))


def test_the_bar_counts_bytes(master, capfd):
    restore(master, progress=True)
    total = sum(info.nbytes for info in read_header(master / "weights.safetensors").values())
    shown = capfd.readouterr().err
    assert "Loading saved" in shown
    assert f"{total / 1e3:.1f}/{total / 1e3:.1f} kB" in shown
    restore(master, progress=False)
    assert capfd.readouterr().err == ""


def test_rotten_weights(saved, original):
    """64 bytes of one array are changed, somewhere in the largest file."""
    path = max(saved.rglob("*"), key=lambda path: path.stat().st_size)
    places = read_header(path)
    assert len(places) > 20
    clean = path.read_bytes()
    for name in ("embedding", "layers.1.mlp.down.0.words", "layers.0.attention.qkv.0.parameters"):
        content = bytearray(clean)
        for position in range(places[name].begin, places[name].begin + 64):
            content[position] ^= 0xFF
        path.write_bytes(content)
        expect(rf"^{name} in {path} has other bytes than were saved .*: copy the saved", saved)
        rotten = restore(saved, verify=False)
        with pytest.raises(AssertionError):
            require_same_bits(original, rotten)
    path.write_bytes(clean)
    require_same_bits(original, restore(saved))


def test_incomplete_copies(saved):
    path = saved / "weights.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    expect(r"weights\.safetensors is truncated: expected \d+ bytes, found \d+", saved)
    path.unlink()
    expect(r"saved has no weights\.safetensors: copy the saved model again", saved)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("norm.weight", {"dtype": "F16"}),
        ("norm.weight", {"shape": [8, 8]}),
        ("layers.0.mlp.down.0.parameters", {"dtype": "F32"}),
    ],
)
def test_a_header_that_disagrees(name, entry, saved):
    """The file is sound on its own: the same bytes, of another dtype or shape."""
    path = saved / "weights.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header[name] |= entry
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    expect(rf"disagree about the array '{re.escape(name)}'; copy the saved model again", saved)
    expect("disagree about the array", saved, verify=False)


def test_weights_of_another_model(saved, tmp_path):
    array_file.write(tmp_path / "other", {"extra": jnp.ones(3)}, lambda count: None)
    shutil.copy(tmp_path / "other", saved / "weights.safetensors")
    expect("disagree about the array 'embedding'", saved)


def test_all_that_reads_a_description_refuses_a_damaged_one(saved):
    path = saved / "mpjax.json"
    description = json.loads(path.read_text())
    description["config"]["rms_norm_eps"] = "0.1"
    path.write_text(json.dumps(description))
    message = (
        r"mpjax\.json is damaged: config: rms_norm_eps is '0\.1': expected a positive number; co"
    )
    expect(message, saved, (restore, abstract, info.inspect, tune.model_shapes))


def test_symmetry_is_not_asked_for(tmp_path, rng):
    """As when the original is loaded, for zero points decide it."""
    saved = load(plain(tmp_path / "original", rng, **SQUARE), "W4gKsymA16KV8")
    save(saved, tmp_path / "saved")
    for text in ("W4gKA16KV8", "W4gKsymA16KV8"):
        restored = restore(tmp_path / "saved", precision=Precision.parse(text))
        assert restored.precision == "W4gKsymA16KV8"
