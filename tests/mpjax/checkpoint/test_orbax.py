from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from flax import nnx

from models import CacheScales, Decoder, family
from mpjax.checkpoint import CheckpointError, huggingface, orbax
from mpjax.language_model import LanguageModel
from mpjax.memory import DeviceMemoryError
from mpjax.precision import Precision
from mpjax.tokenizer import Tokenizer
from tests.mpjax.checkpoint.write_checkpoint import (
    CONFIGS,
    GPTQ,
    LLAMA,
    linear_shapes,
    pack_random,
    random_tensors,
    write_checkpoint,
)


def write_tokenizer(folder):
    vocabulary = {"<s>": 0, "a": 1, "</s>": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ bos_token }}")


def load(folder, precision="A16KV16", dtype=None):
    precision = Precision.parse(precision)
    model = huggingface.load(folder, precision=precision, dtype=dtype)
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None
    return LanguageModel(model, tokenizer, precision.kv, folder)


def plain(folder, rng, name="llama", dtype=ml_dtypes.bfloat16):
    return write_checkpoint(folder, CONFIGS[name], random_tensors(CONFIGS[name], rng, dtype))


def mixed(folder, rng):
    """Packed, plain and permuted linear maps in one checkpoint, some of them fused."""
    hf = CONFIGS["qwen2"] | {"quantization_config": GPTQ | {"desc_act": True}}
    tensors = random_tensors(hf, rng, np.float16)
    for name, (channels, _) in linear_shapes(hf).items():
        if name not in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
            order = np.arange(channels) // 32
            order = rng.permutation(order) if "layers.0" in name else order
            pack_random(tensors, hf, name, rng, order)
    return write_checkpoint(folder, hf, tensors)


def require_same_bits(first: LanguageModel, second: LanguageModel):
    flat: list[Any] = [jax.tree.flatten(nnx.state(lm.model)) for lm in (first, second)]
    (one, structure), (two, other_structure) = flat
    assert structure == other_structure
    for a, b in zip(one, two, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert first.config == second.config
    assert type(first.model) is type(second.model)
    assert (first.precision, first.kv_format) == (second.precision, second.kv_format)


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "precision", ["W4g32A16KV8", "W4gKsymA16KV4", "W8g64A16KV16", "W8gKA16KV16", "W16A16KVfp8"]
)
def test_round_trip_of_every_format(precision, tmp_path, rng):
    saved = load(plain(tmp_path / "original", rng), precision)
    if precision.endswith("fp8"):
        shape = (saved.config.num_layers, 2, saved.config.num_kv_heads)
        saved.model.cache_scales = CacheScales(jnp.asarray(rng.random(shape, np.float32)))
    orbax.save(saved, tmp_path / "saved")
    shutil.rmtree(tmp_path / "original")
    restored = orbax.restore(tmp_path / "saved")
    require_same_bits(saved, restored)
    assert str(restored.kv_format) == precision.partition("A16")[2]
    assert restored.source == tmp_path / "saved"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    tokens = jnp.ones((1, 4), jnp.int32)
    np.testing.assert_array_equal(saved.model(tokens), restored.model(tokens))


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_of_every_family(name, tmp_path, rng):
    saved = load(plain(tmp_path / "original", rng, name))
    orbax.save(saved, tmp_path / "saved")
    require_same_bits(saved, orbax.restore(tmp_path / "saved"))


def test_round_trip_of_a_mixed_checkpoint(tmp_path, rng):
    saved = load(mixed(tmp_path / "original", rng))
    assert len(saved.model.layers[0].attention.qkv.parts) == 3
    assert len(saved.model.layers[1].attention.qkv.parts) == 1
    orbax.save(saved, tmp_path / "saved")
    require_same_bits(saved, orbax.restore(tmp_path / "saved"))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_round_trip_of_other_dtypes(dtype, tmp_path, rng):
    saved = load(plain(tmp_path / "original", rng), dtype=dtype)
    orbax.save(saved, tmp_path / "saved")
    require_same_bits(saved, orbax.restore(tmp_path / "saved", dtype=dtype))


def test_bits_of_nan_survive(tmp_path, rng):
    saved = load(plain(tmp_path / "original", rng))
    payloads = np.array([0x7FC1, 0xFF81, 0x7F80, 0x8000], np.uint16).view(ml_dtypes.bfloat16)
    saved.model.norm.weight = nnx.Param(jnp.asarray(np.tile(payloads, 16)))
    orbax.save(saved, tmp_path / "saved")
    require_same_bits(saved, orbax.restore(tmp_path / "saved"))


def test_the_tokenizer_goes_along(tmp_path, rng):
    original = plain(tmp_path / "original", rng)
    write_tokenizer(original)
    (original / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    (original / "notes.bin").write_text("not of use")
    saved = load(original)
    orbax.save(saved, tmp_path / "saved")
    shutil.rmtree(original)
    tokenizer = orbax.restore(tmp_path / "saved").tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("a") == [1]
    assert (tokenizer.bos_id, tokenizer.stop_ids) == (0, (2, 1))
    assert tokenizer.chat_templates == {"tool_use": "{{ bos_token }}"}
    assert not (tmp_path / "saved" / "notes.bin").exists()
    with pytest.raises(ValueError, match=r"tokenizer's files are no longer in .*/original"):
        orbax.save(saved, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_restored_model_can_be_saved_over_itself(tmp_path, rng):
    original = plain(tmp_path / "original", rng)
    write_tokenizer(original)
    orbax.save(load(original), tmp_path / "saved")
    restored = orbax.restore(tmp_path / "saved", precision=Precision.parse("A16KV4"))
    orbax.save(restored, tmp_path / "saved", overwrite=True)
    require_same_bits(restored, orbax.restore(tmp_path / "saved"))


def test_what_is_there_is_not_overwritten_unasked(tmp_path, rng):
    lm = load(plain(tmp_path / "original", rng))
    (tmp_path / "empty").mkdir()
    orbax.save(lm, tmp_path / "empty")
    before = files(tmp_path / "empty")
    with pytest.raises(ValueError, match="holds a saved model: replace it with overwrite=True"):
        orbax.save(lm, tmp_path / "empty")
    assert files(tmp_path / "empty") == before

    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    for name in ("file", "folder", "original"):
        with pytest.raises(ValueError, match=f"{name} exists and is no saved model"):
            orbax.save(lm, tmp_path / name, overwrite=True)
    assert (tmp_path / "folder" / "mine").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_leaves_nothing_behind(overwrite, tmp_path, rng, monkeypatch):
    lm = load(plain(tmp_path / "original", rng))
    if overwrite:
        orbax.save(lm, tmp_path / "saved")
    before = files(tmp_path)

    def fail(*_):
        raise OSError("no space left on device")

    for broken in ("_describe", "_arrays"):
        with monkeypatch.context() as patch:
            patch.setattr(orbax, broken, fail)
            with pytest.raises(OSError, match="no space left"):
                orbax.save(lm, tmp_path / "saved", overwrite=overwrite)
        assert files(tmp_path) == before
    rename = Path.rename
    with monkeypatch.context() as patch:
        # The last step of all, when the old model has already been set aside.
        patch.setattr(Path, "rename", lambda a, b: fail() if a.name == "new" else rename(a, b))
        with pytest.raises(OSError, match="no space left"):
            orbax.save(lm, tmp_path / "saved", overwrite=overwrite)
    assert files(tmp_path) == before
    if overwrite:
        require_same_bits(lm, orbax.restore(tmp_path / "saved"))


def test_models_of_other_classes_are_refused(tmp_path, rng):
    class Mine(Decoder):
        pass

    lm = load(plain(tmp_path / "original", rng))
    config = family(LLAMA).config_from_hf(LLAMA)
    lm = dataclasses.replace(lm, model=Mine(config, nnx.Rngs(0)))
    with pytest.raises(
        ValueError, match="models of the class Mine can't be saved: expected one of"
    ):
        orbax.save(lm, tmp_path / "saved")


@pytest.fixture
def saved(tmp_path, rng):
    orbax.save(load(plain(tmp_path / "original", rng), "W4g32A16KV8"), tmp_path / "saved")
    return tmp_path / "saved"


def test_precision_and_dtype_must_agree(saved):
    restored = orbax.restore(saved, precision=Precision.parse("W4g32A16KV4"), dtype=jnp.bfloat16)
    assert restored.precision == "W4g32A16KV4"
    for text in ("W4A16KV8", "W8g32A16KV8", "W16A16KV8"):
        with pytest.raises(ValueError, match=f"precision is {text}, but .* W4g32: ask for A16KV8"):
            orbax.restore(saved, precision=Precision.parse(text))
    with pytest.raises(ValueError, match=r"dtype is float16, but .* was saved in bfloat16"):
        orbax.restore(saved, dtype="float16")


def test_memory_is_asked_for_first(saved, monkeypatch):
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device: 1000)
    monkeypatch.setattr(orbax, "_checkpointer", None)
    with pytest.raises(DeviceMemoryError, match=r"restoring .*saved needs"):
        orbax.restore(saved)


def expect(message, folder):
    with pytest.raises(CheckpointError, match=message) as caught:
        orbax.restore(folder)
    assert "\n" not in str(caught.value)


def edit(saved, **changes):
    path = saved / "mpjax.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_foreign_folders(saved):
    expect(
        "original has no mpjax.json: mpjax did not save a model there", saved.parent / "original"
    )
    (saved / "mpjax.json").write_text("{")
    expect("mpjax.json is not valid JSON", saved)
    for text in ("[]", "{}", '{"format": "another"}'):
        (saved / "mpjax.json").write_text(text)
        expect("mpjax.json does not describe a model that mpjax saved", saved)


def test_other_versions(saved):
    edit(saved, version=2)
    expect("mpjax.json has the format version 2: this mpjax reads version 1", saved)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder", "Mamba"),
        ("config", {}),
        ("kv_format", "KV5"),
        ("linears", {}),
        ("arrays", {}),
        ("files", 3),
    ],
)
def test_damaged_descriptions(key, value, saved):
    edit(saved, **{key: value})
    expect(r"mpjax.json is damaged \(\w+: .*\): convert the checkpoint again", saved)


def test_incomplete_copies(saved):
    [file, *_] = [path for path in (saved / "weights" / "d").iterdir()]
    file.write_bytes(file.read_bytes()[:-1])
    expect(
        rf"1 of the \d+ files in .*weights are missing or of another size .*, d/{file.name}", saved
    )
    shutil.rmtree(saved / "weights")
    expect(r"(\d+) of the \1 files in .*weights are missing", saved)
