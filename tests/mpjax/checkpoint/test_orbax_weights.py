from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import mpjax
from mpjax.checkpoint import CheckpointError, model_arrays, restoring, staging
from mpjax.checkpoint.orbax_weights import ORBAX_NAME
from mpjax.checkpoint.restoring import restore
from mpjax.checkpoint.saving import save
from tests.eight_devices import run
from tests.mpjax.checkpoint.saved_models import (
    files,
    load,
    mixed,
    plain,
    require_same_bits,
    write_tokenizer,
)
from tests.mpjax.on_devices import write


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = plain(tmp_path_factory.mktemp("original") / "model", np.random.default_rng(1))
    write_tokenizer(folder)
    return load(folder, "W4g32A16KV8")


@pytest.fixture(scope="module")
def master(original, tmp_path_factory):
    """A saved model that no test changes."""
    folder = tmp_path_factory.mktemp("master") / "saved"
    save(original, folder, format="orbax")
    return folder


def empty(model: nnx.Module) -> tuple[nnx.Module, nnx.State]:
    """A model with the same layers and zeros, and the shapes of its state."""
    graph, state = nnx.split(model)
    zeros = nnx.merge(graph, jax.tree.map(np.zeros_like, state))
    return zeros, jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


@pytest.mark.parametrize("kind", ["packed", "plain", "adapters"])
def test_a_trainers_own_checkpoint(kind, original, tmp_path):
    """The state of a model is saved and restored by Orbax as that of any other NNX module."""
    lm = original if kind != "plain" else load(original.source)
    model = mpjax.lora(lm, 2).model if kind == "adapters" else lm.model
    zeros, shapes = empty(model)
    state = nnx.state(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        nnx.update(zeros, checkpointer.restore(tmp_path / "state", shapes))
    require_same_leaves(nnx.state(zeros), state)
    if kind != "adapters":
        return
    pairs = nnx.state(model, nnx.LoRAParam)  # the adapters alone, in a folder of steps
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(7, args=ocp.args.StandardSave(pairs))
        manager.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, pairs)
        restored = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))
    require_same_leaves(restored, pairs)


def require_same_leaves(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, np.asarray(a).tobytes()) == (b.dtype, np.asarray(b).tobytes())


def test_every_array_is_restored(tmp_path, rng):
    """Packed, plain and permuted maps, and the tokenizer beside them."""
    folder = mixed(tmp_path / "original", rng)
    write_tokenizer(folder)
    lm = load(folder, "W16+W4g32A16KV8")
    save(lm, tmp_path / "saved", format="orbax")
    restored = mpjax.load(tmp_path / "saved", progress=False)
    require_same_bits(lm, restored)
    assert restored.tokenizer.encode("a") == lm.tokenizer.encode("a")
    assert not (tmp_path / "saved" / "weights.safetensors").exists()
    save(restored, tmp_path / "saved", overwrite=True)  # the other form takes its place
    assert not (tmp_path / "saved" / ORBAX_NAME).exists()
    require_same_bits(lm, mpjax.load(tmp_path / "saved", progress=False))


def test_activation_widths(tmp_path):
    source = write(tmp_path / "source", "llama", None)
    lm = mpjax.load(source, precision="W4A4KV4", progress=False)
    save(lm, tmp_path / "saved", format="orbax")
    assert restoring.abstract(tmp_path / "saved").precision == lm.precision
    require_same_bits(lm, mpjax.load(tmp_path / "saved", precision=lm.precision, progress=False))


def test_weights_may_change_while_they_are_written(original, tmp_path):
    graph, state = nnx.split(original.model)
    own = original.with_model(nnx.merge(graph, jax.tree.map(jax.numpy.copy, state)))
    saving = save(own, tmp_path / "saved", format="orbax", wait=False)
    rng = np.random.default_rng(2)
    new = {
        place.name: rng.normal(size=place.file_shape).astype(np.float32)
        for place in own.model.array_places(own.config)
    }
    mpjax.update(own, new)  # donates the old arrays
    saving.wait()
    assert saving.done
    require_same_bits(original, restore(tmp_path / "saved"))


def test_on_other_devices(tmp_path):
    assert "restored" in run("tests.mpjax.orbax_on_devices", str(tmp_path))


KILLED = """
import os, signal, sys
from mpjax.checkpoint import staging
import mpjax
lm = mpjax.load(sys.argv[1], progress=False)
staging._sync = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
mpjax.save(lm, sys.argv[2], format="orbax", overwrite=True)
"""


def test_a_killed_save_leaves_the_old_model(original, master, tmp_path):
    """The process is killed when all is written, and nothing has its place yet."""
    folder = shutil.copytree(master, tmp_path / "saved")
    other = plain(tmp_path / "other", np.random.default_rng(3))
    arguments = [sys.executable, "-c", KILLED, str(other), str(folder)]
    done = subprocess.run(arguments, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)
    assert done.returncode == -9
    assert len(list(tmp_path.glob(".saved.saving-*/new/orbax"))) == 1
    require_same_bits(original, restore(folder))
    save(original, folder, format="orbax", overwrite=True)
    assert not list(tmp_path.glob(".saved.saving-*"))


OF_TWO_PROCESSES = """
import sys
import jax, mpjax, numpy as np
address, number, folder = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, int(number))
lm = mpjax.load(mpjax.bundled_model(), precision="W4A16KV8", devices=4, progress=False)
for wait in (False, True):
    mpjax.save(lm, folder, format="orbax", overwrite=True, wait=wait).wait()
from mpjax.checkpoint import saving
def full(*_):
    raise ValueError("the disk is full")
saving.require_room = full  # which process 0 alone calls
try:
    mpjax.save(lm, folder, format="orbax", overwrite=True)
    raise AssertionError("the error has not reached this process")
except (OSError, ValueError) as error:
    assert str(error).endswith("the disk is full"), error
found = mpjax.load(folder, devices=4, progress=False).model
for a, b in zip(jax.tree.leaves(lm.model), jax.tree.leaves(found), strict=True):
    for own, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
        assert np.asarray(own.data).tobytes() == np.asarray(other.data).tobytes()
"""


@pytest.mark.sweep
def test_two_processes(tmp_path):
    """Each writes and reads the shares of its own two devices; one process joins them all.

    An error of the first is raised in both.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", OF_TWO_PROCESSES, address, str(number), str(tmp_path / "saved")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        done = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], done
    lm = mpjax.load(mpjax.bundled_model(), precision="W4A16KV8", progress=False)
    require_same_bits(lm, restore(tmp_path / "saved"))


def test_a_failure_leaves_nothing_behind(original, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", fail)
    before = files(tmp_path)
    saving = save(original, tmp_path / "saved", format="orbax", wait=False)
    with pytest.raises(OSError, match="the disk is gone"):
        saving.wait()
    assert files(tmp_path) == before


def test_an_interrupt_stops_a_save(original, master, tmp_path, monkeypatch):
    """Ctrl-C when all is written, and nothing has its place yet: the old model stays."""

    def interrupt(folder):
        signal.raise_signal(signal.SIGINT)

    folder = shutil.copytree(master, tmp_path / "saved")
    before = files(tmp_path)
    monkeypatch.setattr(staging, "_sync", interrupt)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            save(original, folder, format="orbax", overwrite=True)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert files(tmp_path) == before


def test_what_is_not_a_form(original, tmp_path):
    with pytest.raises(ValueError, match="format is 'zip': expected 'safetensors' or 'orbax'"):
        save(original, tmp_path / "saved", format="zip")
    with pytest.raises(ValueError, match="wait is False: only format='orbax'"):
        save(original, tmp_path / "saved", wait=False)
    with pytest.raises(ValueError, match="wait is 'no': expected a bool"):
        save(original, tmp_path / "saved", format="orbax", wait="no")
    with pytest.raises(ValueError, match="progress is 'no': expected a bool"):
        save(original, tmp_path / "saved", format="orbax", progress="no")
    assert not files(tmp_path)


def test_one_wrong_bit_is_found(original, master, tmp_path):
    """Orbax and TensorStore read packed weights with a wrong bit as they are."""
    saved = shutil.copytree(master, tmp_path / "saved")
    name = "layers.0.mlp.down.0.words"
    begin = np.asarray(model_arrays.take(original.model)[name]).tobytes()[:64]
    [file] = [
        path
        for path in (saved / ORBAX_NAME).rglob("*")
        if path.is_file() and begin in path.read_bytes()
    ]
    content = bytearray(file.read_bytes())
    content[content.index(begin)] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} in .* has other bytes"):
        mpjax.load(saved, progress=False)
    mpjax.load(saved, progress=False, verify=False)
    description = json.loads((saved / "mpjax.json").read_text())
    del description["orbax"]["crc32"]
    (saved / "mpjax.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="the key 'crc32' is missing"):
        mpjax.load(saved, progress=False)
    description["version"] = 7
    (saved / "mpjax.json").write_text(json.dumps(description))
    mpjax.load(saved, progress=False)  # was written without checksums


def test_a_damaged_array_is_named(master, tmp_path):
    """In a process of its own, since Orbax leaves other reads unfinished, and Python warns."""
    saved = shutil.copytree(master, tmp_path / "saved")
    for path in (saved / ORBAX_NAME).glob("ocdbt.process_0/d/*"):
        path.write_bytes(b"\0" * path.stat().st_size)
    program = "import sys, mpjax; mpjax.load(sys.argv[1], progress=False)"
    done = subprocess.run(
        [sys.executable, "-c", program, saved],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search("^mpjax.*CheckpointError: .*orbax can't be read: ", done.stderr, re.MULTILINE)


def test_damage_is_named(master, tmp_path):
    def expect(message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            restore(tmp_path / "saved")
        assert "\n" not in str(caught.value)
        shutil.rmtree(tmp_path / "saved")

    saved = shutil.copytree(master, tmp_path / "saved")
    shutil.rmtree(saved / ORBAX_NAME)
    expect("has no folder orbax")
    shutil.copytree(master, saved)
    (saved / ORBAX_NAME / "_METADATA").write_text("{}")
    expect("is damaged, or of another model than the mpjax.json beside it")
    shutil.copytree(master, saved)
    text = (saved / "mpjax.json").read_text()
    for old, new, message in (
        ('"experts": "divided"', '"experts": "some"', "experts is 'some'"),
        ('"devices": null', '"devices": 0', "devices is 0"),
        ('"devices": null', '"devices": 3', "is not a list of 3 integers"),
    ):
        assert re.search(old, text)
        (saved / "mpjax.json").write_text(text.replace(old, new))
        expect(message)
        shutil.copytree(master, saved)
