from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from mpjax.checkpoint import array_file, saving, staging
from mpjax.checkpoint.restoring import restore
from mpjax.checkpoint.saving import save
from mpjax.files.disk import DiskSpaceError
from mpjax.kernels import KVFormat, replace_scales, unpack
from mpjax.language_model import LanguageModel
from mpjax.models import CacheScales, Decoder, Linear, family
from mpjax.precision import Precision
from mpjax.sampling.settings import Sampling
from tests.mpjax.checkpoint.saved_models import (
    files,
    load,
    mixed,
    plain,
    require_same_bits,
    write_tokenizer,
)
from tests.mpjax.checkpoint.write_checkpoint import CONFIGS, LLAMA, SQUARE


@pytest.mark.parametrize(
    ("precision", "arrays", "scales"),
    [
        ("W4g32A16KV8", {"words", "parameters"}, None),
        ("W4gKsymA16KV4", {"words", "parameters"}, None),
        ("WNF3A16KV16", {"words", "parameters", "table"}, None),
        ("WFP8AFP8KV16", {"words", "parameters"}, None),
        ("W8A8KV16", {"words", "parameters"}, None),
        ("W4A8KV8s", {"words", "parameters", "channel_scales"}, (2, 2, 4, 16)),
        ("W16A16KVfp8", {"kernel"}, (2, 2, 4)),
    ],
)
def test_round_trip_of_every_format(precision, arrays, scales, tmp_path, rng):
    sizes = {} if precision.startswith("W4g32") else SQUARE
    saved = load(plain(tmp_path / "original", rng, **sizes), precision)
    if scales:
        saved.model.cache_scales = CacheScales(jnp.asarray(rng.random(scales, np.float32)))
    save(saved, tmp_path / "saved")
    shutil.rmtree(tmp_path / "original")
    restored = restore(tmp_path / "saved")
    require_same_bits(saved, restored)
    assert restored.precision == precision
    assert restored.source == tmp_path / "saved"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    description = json.loads((tmp_path / "saved" / "mpjax.json").read_text())
    prefix = "layers.0.mlp.down.0."
    found = {path.removeprefix(prefix) for path in description["arrays"] if prefix in path}
    assert found == arrays


def test_a_restored_model_computes_the_same(tmp_path, rng):
    saved = load(plain(tmp_path / "original", rng, **SQUARE, num_hidden_layers=1))
    save(saved, tmp_path / "saved")
    tokens = jnp.ones((1, 4), jnp.int32)
    restored = restore(tmp_path / "saved")
    compute = jax.jit(lambda model: model(tokens))
    np.testing.assert_array_equal(compute(saved.model), compute(restored.model))


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_of_every_family(name, tmp_path, rng):
    saved = load(plain(tmp_path / "original", rng, name))
    save(saved, tmp_path / "saved")
    require_same_bits(saved, restore(tmp_path / "saved"))


def test_round_trip_of_a_mixed_checkpoint(tmp_path, rng):
    saved = load(mixed(tmp_path / "original", rng))
    assert len(saved.model.layers[0].attention.qkv.parts) == 3
    assert len(saved.model.layers[1].attention.qkv.parts) == 1
    save(saved, tmp_path / "saved")
    require_same_bits(saved, restore(tmp_path / "saved"))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_round_trip_of_other_dtypes(dtype, tmp_path, rng):
    saved = load(plain(tmp_path / "original", rng, **SQUARE), dtype=dtype)
    # One array in another dtype than the rest.
    saved.model.norm.weight = nnx.Param(jnp.ones(saved.config.hidden_size, jnp.bfloat16))
    save(saved, tmp_path / "saved")
    require_same_bits(saved, restore(tmp_path / "saved", dtype=dtype))


def test_bits_of_nan_survive(tmp_path, rng):
    saved = load(plain(tmp_path / "original", rng))
    payloads = np.array([0x7FC1, 0xFF81, 0x7F80, 0x8000], np.uint16).view(ml_dtypes.bfloat16)
    saved.model.norm.weight = nnx.Param(jnp.asarray(np.tile(payloads, 16)))
    save(saved, tmp_path / "saved")
    require_same_bits(saved, restore(tmp_path / "saved"))


def test_the_tokenizer_goes_along(tmp_path, rng):
    original = plain(tmp_path / "original", rng)
    write_tokenizer(original)
    (original / "generation_config.json").write_text('{"eos_token_id": [2, 1], "top_p": 0.9}')
    (original / "notes.bin").write_text("not of use")
    saved = load(original)
    save(saved, tmp_path / "saved")
    shutil.rmtree(original)
    restored = restore(tmp_path / "saved")
    tokenizer = restored.tokenizer
    assert restored.sampling == Sampling(1.0, top_p=0.9)
    assert tokenizer is not None
    assert tokenizer.encode("a") == [1]
    assert (tokenizer.bos_id, tokenizer.stop_ids) == (0, (2, 1))
    assert tokenizer.chat_templates == {"tool_use": "{{ bos_token }}"}
    assert not (tmp_path / "saved" / "notes.bin").exists()
    with pytest.raises(ValueError, match=r"tokenizer's files are no longer in .*/original"):
        save(saved, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_restored_model_can_be_saved_over_itself(tmp_path, rng):
    original = plain(tmp_path / "original", rng)
    write_tokenizer(original)
    save(load(original), tmp_path / "saved")
    restored = restore(tmp_path / "saved", precision=Precision.parse("A16KV4"))
    save(restored, tmp_path / "saved", overwrite=True)
    require_same_bits(restored, restore(tmp_path / "saved"))


def test_a_path_may_begin_at_home_and_go_through_links(tmp_path, rng, monkeypatch):
    lm = load(plain(tmp_path / "original", rng))
    monkeypatch.setenv("HOME", str(tmp_path))
    save(lm, "~/saved")
    (tmp_path / "link").symlink_to("saved")
    save(lm, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    require_same_bits(lm, restore(tmp_path / "saved"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "original", "saved"]


def test_what_is_there_is_not_overwritten_unasked(tmp_path, rng):
    lm = load(plain(tmp_path / "original", rng))
    (tmp_path / "empty").mkdir()
    save(lm, tmp_path / "empty")
    before = files(tmp_path / "empty")
    with pytest.raises(ValueError, match="holds a saved model: replace it with overwrite=True"):
        save(lm, tmp_path / "empty")
    assert files(tmp_path / "empty") == before

    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    for name in ("file", "folder", "original"):
        with pytest.raises(ValueError, match=f"{name} exists and is not a saved model"):
            save(lm, tmp_path / name, overwrite=True)
    assert (tmp_path / "folder" / "mine").read_text() == "mine"


def test_what_came_meanwhile_is_not_overwritten_unasked(tmp_path, rng, monkeypatch):
    lm = load(plain(tmp_path / "original", rng))
    write = array_file.write

    def write_slowly(*arguments):
        (tmp_path / "saved").mkdir()
        (tmp_path / "saved" / "mine").write_text("mine")
        return write(*arguments)

    monkeypatch.setattr(array_file, "write", write_slowly)
    with pytest.raises(ValueError, match="saved exists and is not a saved model"):
        save(lm, tmp_path / "saved")
    assert (tmp_path / "saved" / "mine").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original", "saved"]


def test_a_model_that_a_killed_save_moved_away_is_not_overwritten_unasked(
    tmp_path, rng, monkeypatch
):
    lm = load(plain(tmp_path / "original", rng))
    save(lm, tmp_path / "saved")
    hidden = tmp_path / f".saved.saving-{staging._host()}-{staging._boot()}"
    (hidden / "new").mkdir(parents=True)
    (hidden / "lock").touch()
    (tmp_path / "saved").rename(hidden / "previous")
    monkeypatch.setattr(array_file, "write", lambda *arguments: pytest.fail("written"))
    with pytest.raises(ValueError, match="holds a saved model: replace it with overwrite=True"):
        save(lm, tmp_path / "saved")
    require_same_bits(lm, restore(tmp_path / "saved"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_leaves_nothing_behind(overwrite, tmp_path, rng, monkeypatch):
    lm = load(plain(tmp_path / "original", rng))
    if overwrite:
        save(lm, tmp_path / "saved")
    before = files(tmp_path)

    def fail(*_):
        raise OSError("the disk is gone")

    for place, broken in ((shutil, "copyfile"), (array_file, "write"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(place, broken, fail)
            with pytest.raises(OSError, match="the disk is gone"):
                save(lm, tmp_path / "saved", overwrite=overwrite)
        assert files(tmp_path) == before
    rename = Path.rename
    with monkeypatch.context() as patch:
        # The last step of all, when the old model has already been set aside.
        patch.setattr(Path, "rename", lambda a, b: fail() if a.name == "new" else rename(a, b))
        with pytest.raises(OSError, match="the disk is gone"):
            save(lm, tmp_path / "saved", overwrite=overwrite)
    assert files(tmp_path) == before
    if overwrite:
        require_same_bits(lm, restore(tmp_path / "saved"))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_is_named(code, overwrite, tmp_path, rng, monkeypatch):
    lm = load(plain(tmp_path / "original", rng))
    if overwrite:
        save(lm, tmp_path / "saved")
    before = files(tmp_path)

    def fill_up(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fill_up)
    message = rf"^saving {tmp_path}/saved needs [\d.]+ MB on the disk at /.*, which has .* free"
    with pytest.raises(DiskSpaceError, match=message) as caught:
        save(lm, tmp_path / "saved", overwrite=overwrite)
    assert ("quota is used up" in str(caught.value)) == (code == errno.EDQUOT)
    assert files(tmp_path) == before


@pytest.fixture
def small_disk(tmp_path):
    """A disk of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs a user who may mount a disk in memory")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("known", [True, False])
def test_a_small_disk(known, small_disk, tmp_path, rng, monkeypatch):
    lm = load(plain(tmp_path / "original", rng))
    save(lm, small_disk / "saved")
    room = 50_000
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - room))
    before = files(small_disk)
    said = rf"0\.\d+ MB on the disk at {small_disk}, which has 0\.0\d MB free"
    with monkeypatch.context() as patch:
        if known:
            patch.setattr(array_file, "write", lambda *arguments: pytest.fail("written"))
        else:
            patch.setattr(saving, "require_room", lambda *arguments: None)
        with pytest.raises(DiskSpaceError, match=f"^saving .*/saved needs {said}") as caught:
            save(lm, small_disk / "saved", overwrite=True)
    assert "\n" not in str(caught.value)
    assert files(small_disk) == before
    require_same_bits(lm, restore(small_disk / "saved"))
    (small_disk / "other").unlink()
    save(lm, small_disk / "saved", overwrite=True)


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
        save(lm, tmp_path / "saved")
    mlp.down = base
    lm.model.extra = nnx.Variable(jnp.ones(3))
    with pytest.raises(ValueError, match="saved with extra, which a Llama does not have"):
        save(lm, tmp_path / "saved")
    del lm.model.extra
    lm.model.norm.weight = nnx.Param(jnp.ones(3))
    message = (
        r"can't be saved: the array norm\.weight is float32 \[3\]: expected bfloat16 or .*64\]"
    )
    with pytest.raises(ValueError, match=message):
        save(lm, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


class Scaled(Linear):
    """A packed map whose scales are learned."""

    def __init__(self, base: Linear):
        super().__init__(base.kernel.get_value())
        self.scales = nnx.Param(unpack(self.kernel.get_value()).scales.astype(jnp.float32))


@pytest.mark.parametrize("precision", ["W4g32A16KV8", "WNF2g32A16KV16", "WFP8gKA16KV8"])
def test_learned_scales_are_saved_in_the_packed_weight(precision, tmp_path, rng):
    lm = load(plain(tmp_path / "original", rng), precision)
    mlp = lm.model.layers[1].mlp
    before = np.asarray(mlp.down.kernel.get_value().scales())
    mlp.down = Scaled(mlp.down)
    mlp.down.scales = nnx.Param(mlp.down.scales.get_value() * 1.5)
    with pytest.raises(ValueError, match=r"saved with layers\.1\.mlp\.down\.scales,"):
        save(lm, tmp_path / "saved")
    mlp.down = Linear(replace_scales(mlp.down.kernel.get_value(), mlp.down.scales.get_value()))
    save(lm, tmp_path / "saved")
    restored = restore(tmp_path / "saved")
    require_same_bits(lm, restored)
    kernel = restored.model.layers[1].mlp.down.kernel.get_value()
    groups = kernel.format.groups(kernel.shape[0])
    expected = before[:groups].astype(np.float32) * np.float32(1.5)
    np.testing.assert_array_equal(kernel.scales()[:groups], expected.astype(before.dtype))


def test_a_cache_that_can_not_be_made_is_refused(tmp_path, rng):
    """KVfp8 has scales by default; those of KV8s come from a calibration alone."""
    lm = load(plain(tmp_path / "original", rng), "A16KV8s")
    for scales in (None, (2, 2, 2)):
        if scales:
            lm.model.cache_scales = CacheScales(jnp.ones(scales))
        with pytest.raises(ValueError, match=r"^KV8s needs a scale .* mpjax\.calibrate_cache or"):
            save(lm, tmp_path / "saved")
    lm.model.cache_scales = None
    save(dataclasses.replace(lm, kv_format=KVFormat("fp8")), tmp_path / "saved")
    restored = restore(tmp_path / "saved")
    restored.model.create_cache(1, 16, restored.kv_format)


def test_models_of_other_classes_are_refused(tmp_path):
    class Mine(Decoder):
        pass

    config = family(LLAMA).config_from_hf(LLAMA)
    model = nnx.eval_shape(lambda: Mine(config, nnx.Rngs(0)))
    lm = LanguageModel(model, None, KVFormat(), tmp_path)
    with pytest.raises(ValueError, match="models of the class Mine can't be saved: expected one"):
        save(lm, tmp_path / "saved")
