from __future__ import annotations

import dataclasses
import os
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.checkpoint import CheckpointError
from mpjax.checkpoint.saving import save
from mpjax.loading import load, require_loadable
from mpjax.precision import Precision
from tests.eight_devices import run
from tests.mpjax.checkpoint.saved_models import require_same_bits, write_tokenizer
from tests.mpjax.checkpoint.write_checkpoint import LLAMA, random_tensors, write_checkpoint
from tests.mpjax.formats_on_devices import FORMATS
from tests.mpjax.on_devices import FEW, MANY
from tests.mpjax.precisions_on_devices import SOME
from tests.sweeps import in_sweep


@pytest.fixture
def folder(tmp_path, rng):
    return write_checkpoint(tmp_path / "tiny-llama", LLAMA, random_tensors(LLAMA, rng))


def test_a_hugging_face_folder(folder):
    lm = load(folder)
    assert lm.precision == "W16A16KV16"
    assert lm.tokenizer is None
    assert lm.source == folder


def test_precision_as_text_or_object(folder):
    first = load(str(folder), precision="W4g32A16KV8")
    second = load(folder, precision=Precision.parse("W4g32A16KV8"))
    assert first.precision == second.precision == "W4g32A16KV8"
    require_same_bits(first, second)
    assert load(folder, precision="A16KV4", dtype="float16").precision == "W16A16KV4"
    with pytest.raises(ValueError, match="can't read the precision 'int4'"):
        load(folder, precision="int4")


@pytest.mark.parametrize(("cases", "count"), [("few", len(FEW)), in_sweep("many", len(MANY))])
def test_several_devices_have_the_model_of_one(cases, count, tmp_path):
    assert run("tests.mpjax.on_devices", str(tmp_path), cases) == f"{count} cases\n"


@pytest.mark.sweep
def test_several_devices_have_the_codes_of_each_format():
    assert run("tests.mpjax.formats_on_devices") == f"{len(FORMATS) + 1} formats\n"


@pytest.mark.sweep
def test_several_devices_say_the_tokens_of_one():
    assert run("tests.mpjax.precisions_on_devices", "some") == f"{len(SOME)} precisions\n"


def test_a_mesh_of_one_device_has_all(folder, tmp_path):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("shards",))
    whole, divided = load(folder), load(folder, devices=mesh)
    assert (divided.devices, divided.summary()) == (1, whole.summary())
    assert divided.model.share.axis == "shards"  # type: ignore[attr-defined]
    save(divided, tmp_path / "saved")
    require_same_bits(load(tmp_path / "saved"), dataclasses.replace(whole, source=tmp_path))
    limited = load(folder, devices=mesh, max_positions=8).model
    assert limited.share.config.max_position_embeddings == 8  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="devices is 4096, and JAX sees"):
        load(folder, devices=4096)
    with pytest.raises(ValueError, match="experts is 'whole', and one device has all experts: l"):
        load(folder, devices=mesh, experts="whole")


def test_a_device_without_room_for_its_share_is_named(folder, tmp_path, monkeypatch):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
    save(load(folder), tmp_path / "saved")
    monkeypatch.setattr("mpjax.memory.free_bytes", lambda device=None: 1000)
    for source in (folder, tmp_path / "saved"):
        with pytest.raises(MemoryError, match=r"ing /.* needs .* on .*, which has 0\.00 GB free"):
            load(source, devices=mesh)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": 4}, "precision is 4: expected a text, such as 'W4A16KV16'"),
        ({"dtype": "auto"}, "dtype is 'auto': expected a dtype"),
        ({"dtype": "bf16", "precision": "W4A32KV8"}, "precision is W4A32KV8, which is float32"),
        ({"path_or_id": 7}, "the model is 7: expected a folder's path or a hub id"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message, folder, tmp_path):
    save(load(folder), tmp_path / "saved")
    for place in (folder, tmp_path / "saved"):
        with pytest.raises(ValueError, match=message):
            load(**({"path_or_id": place} | arguments))


@pytest.mark.parametrize("is_saved", [False, True])
def test_precisions_are_checked_without_reading_a_weight(is_saved, folder, tmp_path, monkeypatch):
    if is_saved:
        save(load(folder, precision="W4g32A16KV8"), tmp_path / "saved")
        folder, message = tmp_path / "saved", "are W4g32"
    else:
        message = "which groups of 128 don.t divide"
    good, wrong, other = (
        [Precision.parse(text) for text in texts]
        for texts in (["A16KV16", "A16KV8", "W4g32A16KV4"], ["A16KV8s"], ["W4A16KV8"])
    )

    def fail(*arguments):
        pytest.fail("read a weight")

    monkeypatch.setattr("mpjax.checkpoint.huggingface.fill", fail)
    monkeypatch.setattr("mpjax.checkpoint.array_file.read", fail)
    require_loadable(folder, good)
    with pytest.raises(ValueError, match="KV8s needs scales of channels"):
        require_loadable(folder, good + wrong)
    require_loadable(folder, good + wrong, calibrated=True)
    with pytest.raises(ValueError, match=message):
        require_loadable(folder, good + other)


def test_the_tokenizer_comes_along_and_comes_first(folder):
    write_tokenizer(folder)
    tokenizer = load(folder).tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("a") == [1]
    (folder / "tokenizer.json").write_text("{")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="can't be read as a tokenizer"):
        load(folder)


def test_a_saved_model(folder, tmp_path):
    lm = load(folder, precision="W4g32A16KV8")
    save(lm, tmp_path / "saved")
    require_same_bits(lm, load(tmp_path / "saved"))
    assert load(tmp_path / "saved", precision="A16KV16").precision == "W4g32A16KV16"


def test_a_caller_sets_how_many_positions_there_are(folder, tmp_path):
    tokens = jnp.ones((1, 300), jnp.int32)
    assert load(folder).config.max_position_embeddings == 256
    with pytest.raises(ValueError, match=r"300 tokens would pass the 256 .* with max_positions"):
        load(folder).model(tokens)
    lm = load(folder, max_positions=300)
    assert jax.eval_shape(lm.model, tokens).shape == (1, 300, 96)
    assert lm.config == dataclasses.replace(load(folder).config, max_position_embeddings=300)
    require_same_bits(load(folder, max_positions=256), load(folder))
    save(lm, tmp_path / "saved")
    assert load(tmp_path / "saved").config == lm.config
    assert load(tmp_path / "saved", max_positions=64).config.max_position_embeddings == 64
    for value in (0, 1.5):
        with pytest.raises(ValueError, match=f"max_positions is {value}: expected a"):
            load(folder, max_positions=value)


def test_a_caller_sets_the_size_of_pages(folder, tmp_path):
    lm = load(folder, page_size=32)
    save(lm, tmp_path / "saved")
    for path, options, size in (
        (folder, {"page_size": 32}, 32),
        (folder, {}, 128),
        (tmp_path / "saved", {"page_size": np.int64(64)}, 64),
    ):
        assert load(path, **options).page_size == size
    for options, message in (
        ({"page_size": 48}, r"page size 48: expected one of \(16, 32, 64, 128, 256\)"),
        ({"page_size": 64, "precision": "A16KV4c"}, "page size 64: KV4c needs a multiple of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            load("nowhere", **options)


def test_rotten_weights_are_found_unless_nobody_asks(folder, tmp_path):
    save(load(folder), tmp_path / "saved")
    path = tmp_path / "saved" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-200:-136] = bytes(byte ^ 0xFF for byte in content[-200:-136])
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors has other bytes than w"):
        load(tmp_path / "saved")
    assert load(tmp_path / "saved", verify=False).precision == "W16A16KV16"


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_bar_shows_that_a_model_is_loaded(is_saved, folder, tmp_path, capfd):
    if is_saved:
        save(load(folder), tmp_path / "saved")
        folder = tmp_path / "saved"
    for progress in (False, True):
        load(folder, progress=progress)
        assert (f"Loading {folder.name}" in capfd.readouterr().err) == progress


def test_a_relative_path_is_remembered_whole(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert load("tiny-llama").source == folder


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "nowhere", "a/b/c", "", "org/.."])
def test_what_does_not_exist(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if path in ("", "org/.."):
        message = "the model.s folder is empty text" if path == "" else "does not exist"
    else:
        message = f"{path.removeprefix('./')} does not exist: expected a checkpoint folder, a GGUF"
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_a_damaged_gguf_file(tmp_path):
    (tmp_path / "model.gguf").write_text("GGUF")
    message = r"model\.gguf ends inside its version, at byte 4 of 4: the file is damaged or an"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["Qwen3-8B-AWQ", "gpt2"])
def test_a_hub_id_has_an_owner(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = f"^{name} does not exist: .* a hub id of the form owner/name, such as Qwen/Qwen3"
    with pytest.raises(CheckpointError, match=message):
        load(name)


def hub(monkeypatch, download):
    module = types.SimpleNamespace(snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_hub_id(folder, monkeypatch):
    calls = []

    def download(name, **keywords):
        calls.append((name, keywords))
        return str(folder)

    hub(monkeypatch, download)
    lm = load("org/tiny-llama_1.0")
    assert lm.source == folder
    [(name, keywords)] = calls
    assert name == "org/tiny-llama_1.0"
    assert "*.safetensors" in keywords["allow_patterns"]
    assert not any("bin" in pattern for pattern in keywords["allow_patterns"])


def test_a_gguf_file_on_the_hub(tmp_path, monkeypatch):
    file = tmp_path / "snapshot.gguf"
    file.write_bytes(b"GGUF")
    calls = []

    def download(*arguments):
        calls.append(arguments)
        return str(file)

    module = types.SimpleNamespace(hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    with pytest.raises(CheckpointError, match=r"snapshot\.gguf ends inside its version"):
        load("org/name-GGUF/sub/name-Q8_0.gguf")
    assert calls == [("org/name-GGUF", "sub/name-Q8_0.gguf")]


def test_a_hub_that_does_not_answer(monkeypatch):
    def refuse(name, **_):
        raise OSError("no such repository")

    hub(monkeypatch, refuse)
    message = "org/name is not a folder here, and the hub did not give it: no such repository"
    with pytest.raises(CheckpointError, match=message):
        load("org/name")


def test_without_the_hub_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = r"org/name is not a folder here; .* pip install huggingface_hub"
    with pytest.raises(CheckpointError, match=message):
        load("org/name")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x" * 300, "can't be a folder: .*File name too long"),
        ("~nobody-of-this-name/model", "can't be a folder: Could not determine home directory"),
        ("loop", "loop is not a folder: expected the folder of a checkpoint"),
        ("gone", "gone is not a folder: expected the folder of a checkpoint"),
        ("model.bin", r"model\.bin is a file: expected the folder of a .* or a GGUF file$"),
        ("pipe", "pipe is not a folder: expected the folder of a checkpoint"),
        ("null\0byte", "can't be a folder: embedded null byte"),
    ],
)
def test_paths_that_can_be_no_folder(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("gone").symlink_to("nowhere")
    os.mkfifo("pipe")
    Path("model.bin").touch()
    with pytest.raises(CheckpointError, match=message):
        load(path)
