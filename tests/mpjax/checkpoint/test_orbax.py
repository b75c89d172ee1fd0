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

from mpjax import tune
from mpjax.checkpoint import CheckpointError, huggingface, orbax
from mpjax.cli import info
from mpjax.kernels import KVFormat
from mpjax.language_model import LanguageModel
from mpjax.memory import DeviceMemoryError
from mpjax.models import CacheScales, Decoder, Linear, family
from mpjax.precision import Precision
from mpjax.tokenizer import Tokenizer
from tests.mpjax.checkpoint.write_checkpoint import (
    CONFIGS,
    GPTQ,
    LLAMA,
    SQUARE,
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


def plain(folder, rng, name="llama", **changes):
    hf = CONFIGS[name] | changes
    return write_checkpoint(folder, hf, random_tensors(hf, rng, ml_dtypes.bfloat16))


def mixed(folder, rng):
    """Packed, plain and permuted linear maps in one checkpoint, some of them fused."""
    hf = CONFIGS["qwen2"] | SQUARE | {"quantization_config": GPTQ | {"desc_act": True}}
    tensors = random_tensors(hf, rng, np.float16)
    for name, (channels, _) in linear_shapes(hf).items():
        if name not in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
            order = np.arange(channels) // 32
            order = rng.permutation(order) if "layers.0" in name else order
            pack_random(tensors, hf, name, rng, order)
    return write_checkpoint(folder, hf, tensors)


def require_same_bits(first: LanguageModel, second: LanguageModel):
    assert nnx.graphdef(first.model) == nnx.graphdef(second.model)
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
    ("precision", "arrays", "scales"),
    [
        ("W4g32A16KV8", {"words", "parameters"}, None),
        ("W4gKsymA16KV4", {"words", "parameters"}, None),
        ("WNF3A16KV16", {"words", "parameters", "table"}, None),
        ("W4A8KV8s", {"words", "parameters", "channel_scales"}, (2, 2, 4, 16)),
        ("W16A16KVfp8", {"kernel"}, (2, 2, 4)),
    ],
)
def test_round_trip_of_every_format(precision, arrays, scales, tmp_path, rng):
    sizes = {} if precision.startswith("W4g32") else SQUARE
    saved = load(plain(tmp_path / "original", rng, **sizes), precision)
    if scales:
        saved.model.cache_scales = CacheScales(jnp.asarray(rng.random(scales, np.float32)))
    orbax.save(saved, tmp_path / "saved")
    shutil.rmtree(tmp_path / "original")
    restored = orbax.restore(tmp_path / "saved")
    require_same_bits(saved, restored)
    assert restored.precision == precision
    assert restored.source == tmp_path / "saved"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    description = json.loads((tmp_path / "saved" / "mpjax.json").read_text())
    prefix = "layers.0.mlp.down.0."
    found = {path.removeprefix(prefix) for path in description["arrays"] if prefix in path}
    assert found == arrays


def test_symmetry_is_not_asked_for(tmp_path, rng):
    """As when the original is loaded, for zero points decide it."""
    saved = load(plain(tmp_path / "original", rng, **SQUARE), "W4gKsymA16KV8")
    orbax.save(saved, tmp_path / "saved")
    for text in ("W4gKA16KV8", "W4gKsymA16KV8"):
        restored = orbax.restore(tmp_path / "saved", precision=Precision.parse(text))
        assert restored.precision == "W4gKsymA16KV8"


def test_an_array_of_more_than_a_gigabyte_may_be_held(monkeypatch):
    """Orbax waits for ever for room for one that is larger than its bound."""
    bounds = {}
    monkeypatch.setattr(orbax.ocp, "PyTreeCheckpointHandler", lambda **given: bounds.update(given))
    monkeypatch.setattr(orbax.ocp, "Checkpointer", lambda handler: None)
    for size, gigabytes in ((1000, 1), (3 * 10**9, 4)):
        orbax._checkpointer({"a": jax.ShapeDtypeStruct((size,), jnp.uint8)})
        assert set(bounds.values()) == {gigabytes}


def test_a_restored_model_computes_the_same(tmp_path, rng):
    saved = load(plain(tmp_path / "original", rng, **SQUARE, num_hidden_layers=1))
    orbax.save(saved, tmp_path / "saved")
    tokens = jnp.ones((1, 4), jnp.int32)
    restored = orbax.restore(tmp_path / "saved")
    compute = jax.jit(lambda model: model(tokens))
    np.testing.assert_array_equal(compute(saved.model), compute(restored.model))


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
    saved = load(plain(tmp_path / "original", rng, **SQUARE), dtype=dtype)
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


@pytest.mark.parametrize("restoring", [True, False])
def test_an_interrupt_between_the_renames_loses_nothing(restoring, tmp_path, rng, monkeypatch):
    lm = load(plain(tmp_path / "original", rng))
    orbax.save(lm, tmp_path / "saved")
    before, rename = files(tmp_path), Path.rename

    def interrupted(source, target):
        if source.name == "previous" and not restoring:
            raise KeyboardInterrupt  # the second of an impatient person
        moved = rename(source, target)
        if moved.name == "previous":
            raise KeyboardInterrupt
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            orbax.save(lm, tmp_path / "saved", overwrite=True)
    if restoring:
        assert files(tmp_path) == before
        require_same_bits(lm, orbax.restore(tmp_path / "saved"))
    else:
        [staging] = tmp_path.glob(".saved-*")
        assert not (tmp_path / "saved").exists()
        for copy in ("previous", "new"):
            require_same_bits(lm, orbax.restore(staging / copy))


class Adapted(Linear):
    """Computes more than its kernel says."""

    def __init__(self, base: Linear):
        super().__init__(base.kernel.get_value())
        self.low_rank = nnx.Param(jnp.ones(4))


def test_what_the_format_does_not_hold_is_refused(tmp_path, rng):
    lm = load(plain(tmp_path / "original", rng))
    mlp = lm.model.layers[1].mlp
    base, mlp.down = mlp.down, Adapted(mlp.down)
    with pytest.raises(ValueError, match=r"saved with layers\.1\.mlp\.down\.low_rank, which a Ll"):
        orbax.save(lm, tmp_path / "saved")
    mlp.down = base
    lm.model.extra = nnx.Variable(jnp.ones(3))
    with pytest.raises(ValueError, match="saved with extra, which a Llama does not have"):
        orbax.save(lm, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_a_cache_that_can_not_be_made_is_refused(tmp_path, rng):
    """KVfp8 has scales by default; those of KV8s come from a calibration alone."""
    lm = load(plain(tmp_path / "original", rng), "A16KV8s")
    for scales in (None, (2, 2, 2)):
        if scales:
            lm.model.cache_scales = CacheScales(jnp.ones(scales))
        with pytest.raises(ValueError, match=r"^KV8s needs scales .* mpjax\.calibrate_cache or"):
            orbax.save(lm, tmp_path / "saved")
    lm.model.cache_scales = None
    orbax.save(dataclasses.replace(lm, kv_format=KVFormat("fp8")), tmp_path / "saved")
    restored = orbax.restore(tmp_path / "saved")
    restored.model.create_cache(1, 16, restored.kv_format)


def test_models_of_other_classes_are_refused(tmp_path):
    class Mine(Decoder):
        pass

    config = family(LLAMA).config_from_hf(LLAMA)
    model = nnx.eval_shape(lambda: Mine(config, nnx.Rngs(0)))
    lm = LanguageModel(model, None, KVFormat(), tmp_path)
    with pytest.raises(
        ValueError, match="models of the class Mine can't be saved: expected one of"
    ):
        orbax.save(lm, tmp_path / "saved")


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    """A saved model that no test changes."""
    folder = tmp_path_factory.mktemp("master")
    lm = load(plain(folder / "original", np.random.default_rng(1)), "W4g32A16KV8")
    orbax.save(lm, folder / "saved")
    return folder / "saved"


@pytest.fixture
def saved(master, tmp_path):
    return shutil.copytree(master, tmp_path / "saved")


def test_precision_and_dtype_must_agree(master):
    restored = orbax.restore(master, precision=Precision.parse("W4g32A16KV4"), dtype=jnp.bfloat16)
    assert restored.precision == "W4g32A16KV4"
    for text in ("W4A16KV8", "W8g32A16KV8", "W16A16KV8"):
        with pytest.raises(ValueError, match=f"precision is {text}, but .* W4g32: ask for A16KV8"):
            orbax.restore(master, precision=Precision.parse(text))
    with pytest.raises(ValueError, match=r"dtype is float16, but .* was saved in bfloat16"):
        orbax.restore(master, dtype="float16")


def test_an_abstract_model_is_the_restored_one_in_shapes(master):
    found, restored = orbax.abstract(master), orbax.restore(master)
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
    monkeypatch.setattr(orbax, "_checkpointer", None)
    with pytest.raises(DeviceMemoryError, match=r"restoring .*saved needs"):
        orbax.restore(saved)


def expect(message, folder, read=(orbax.restore,)):
    for function in read:
        with pytest.raises(CheckpointError, match=message) as caught:
            function(folder)
        assert "\n" not in str(caught.value)


def edit(saved, **changes):
    path = saved / "mpjax.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_foreign_folders(saved):
    expect("d has no mpjax.json: mpjax did not save a model there", saved / "weights" / "d")
    (saved / "mpjax.json").write_text("{")
    expect("mpjax.json is not valid JSON", saved)
    for text in ("[]", "{}", '{"format": "another"}'):
        (saved / "mpjax.json").write_text(text)
        expect("mpjax.json does not describe a model that mpjax saved", saved)


def test_other_versions(saved):
    edit(saved, version=2)
    expect("mpjax.json has the format version 2: this mpjax reads version 3", saved)


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
    message = r"mpjax.json is damaged \(\w+: .*\): convert the checkpoint again"
    expect(message, saved, (orbax.restore, orbax.abstract, info.inspect, tune.model_shapes))


def test_incomplete_copies(saved):
    [file, *_] = [path for path in (saved / "weights" / "d").iterdir()]
    file.write_bytes(file.read_bytes()[:-1])
    expect(
        rf"1 of the \d+ files in .*weights are missing or of another size .*, d/{file.name}", saved
    )
    shutil.rmtree(saved / "weights")
    expect(r"(\d+) of the \1 files in .*weights are missing", saved)
