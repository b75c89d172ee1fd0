from __future__ import annotations

import gc
import json
import mmap
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from mpjax.checkpoint import safetensors as reader
from mpjax.checkpoint.safetensors import INDEX_NAME, Checkpoint
from mpjax.errors import CheckpointError

TENSORS = {
    "weight": np.arange(24, dtype=np.float32).reshape(4, 6),
    "bias": np.arange(6).astype(ml_dtypes.bfloat16),
    "words": np.array([[-1, 2**31 - 1]], np.int32),
}


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_raw(folder, header, data=b"", name="model.safetensors"):
    """Writes a file with any header: an object, or raw bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_shards(folder, shards, weight_map):
    for name, tensors in shards.items():
        safetensors.numpy.save_file(tensors, folder / name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_reads_what_the_safetensors_package_writes(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(str(tmp_path))
    assert set(checkpoint.tensors) == set(TENSORS)
    assert checkpoint.nbytes == 24 * 4 + 6 * 2 + 2 * 4
    for name, expected in TENSORS.items():
        info = checkpoint.tensors[name]
        assert (info.name, info.dtype, info.shape) == (name, expected.dtype, expected.shape)
        assert info.file == tmp_path / "model.safetensors"
        assert info.file.read_bytes()[info.begin : info.end] == expected.tobytes()
        array = checkpoint.read(name)
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("name", reader.DTYPES)
def test_every_dtype(tmp_path, name):
    dtype = reader.DTYPES[name]
    data = bytes([0, 1] * 12)
    count = len(data) // dtype.itemsize
    write_raw(tmp_path, {"x": entry(name, [count], 0, 24)}, data)
    array = Checkpoint.open(tmp_path).read("x")
    assert (array.dtype, array.shape, array.tobytes()) == (dtype, (count,), data)


def test_scalar_empty_and_unaligned_tensors(tmp_path):
    header = {
        "byte": entry("U8", [], 0, 1),
        "empty": entry("F16", [0, 7], 1, 1),
        "unaligned": entry("F32", [2], 1, 9),
    }
    data = b"\x05" + np.array([1.5, -2.0], np.float32).tobytes()
    # An odd header length, so that nothing is aligned by chance.
    text = json.dumps(header).encode()
    write_raw(tmp_path, text + b" " * (1 - len(text) % 2), data)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("byte").shape == ()
    assert checkpoint.read("byte") == 5
    assert checkpoint.read("empty").shape == (0, 7)
    assert not checkpoint.read("empty").flags.writeable
    np.testing.assert_array_equal(checkpoint.read("unaligned"), [1.5, -2.0])


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_an_empty_tensor_may_stand_before_or_behind_another(names, tmp_path):
    entries = {"a": entry("U8", [0], 0, 0), "b": entry("U8", [3], 0, 3)}
    write_raw(tmp_path, {name: entries[name] for name in names}, b"xyz")
    assert Checkpoint.open(tmp_path).read("b").tobytes() == b"xyz"


def test_tensors_past_the_first_page(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8)
    header = {"a": entry("U8", [40_001], 0, 40_001), "b": entry("U8", [9_999], 40_001, 50_000)}
    write_raw(tmp_path, header, data.tobytes())
    np.testing.assert_array_equal(Checkpoint.open(tmp_path).read("b"), data[40_001:])


def test_arrays_are_read_only(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors")
    array = Checkpoint.open(tmp_path).read("weight")
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1


def test_opening_reads_headers_only(tmp_path, monkeypatch):
    # 64 GiB that exist only as a size: reading them would take longer than any test.
    size = 64 * 2**30
    write_raw(tmp_path, {"huge": entry("U8", [size], 0, size)})
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size + size)
    monkeypatch.setattr(mmap, "mmap", None)
    assert Checkpoint.open(tmp_path).nbytes == size


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which files are mapped")
def test_a_mapping_goes_with_its_array(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)

    def mappings():
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    first, second = checkpoint.read("weight"), checkpoint.read("words")
    assert mappings() == 2
    del first
    gc.collect()
    assert mappings() == 1
    np.testing.assert_array_equal(second, TENSORS["words"])
    del second
    gc.collect()
    assert mappings() == 0


def test_shards(tmp_path):
    shards = {
        "model-00001-of-00002.safetensors": {"weight": TENSORS["weight"]},
        "model-00002-of-00002.safetensors": {"bias": TENSORS["bias"], "words": TENSORS["words"]},
    }
    weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    write_shards(tmp_path, shards, weight_map)
    safetensors.numpy.save_file({"x": TENSORS["bias"]}, tmp_path / "consolidated.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(checkpoint.read(name), expected)


def test_one_file_of_another_name(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "gptq_model-4bit-128g.safetensors")
    assert set(Checkpoint.open(tmp_path).tensors) == set(TENSORS)


def test_unknown_tensor(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor 'weigth'; the nearest name is 'weight'"):
        Checkpoint.open(tmp_path).read("weigth")


def test_files_that_a_file_system_keeps_about_others_are_none(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "gptq_model-4bit-128g.safetensors")
    (tmp_path / "._gptq_model-4bit-128g.safetensors").write_bytes(b"Mac OS X")
    assert set(Checkpoint.open(tmp_path).tensors) == set(TENSORS)


STALE = {"bias": TENSORS["bias"] + ml_dtypes.bfloat16(1)}


@pytest.mark.parametrize("stale_shard", ["1.safetensors", "2.safetensors"])
def test_of_a_tensor_in_two_shards_the_index_says_which_counts(tmp_path, stale_shard):
    """A later save replaces a shard, and leaves a tensor of it in another."""
    current = "2.safetensors" if stale_shard == "1.safetensors" else "1.safetensors"
    shards = {
        stale_shard: {"weight": TENSORS["weight"], **STALE},
        current: {"words": TENSORS["words"], "bias": TENSORS["bias"]},
    }
    weight_map = {"weight": stale_shard, "bias": current, "words": current}
    write_shards(tmp_path, shards, weight_map)
    with pytest.warns(UserWarning, match=f"not name 1 of .* left out: 'bias' in {stale_shard}$"):
        checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(checkpoint.read(name), expected)


def test_tensors_that_no_index_names_are_left_out(tmp_path):
    extra = {f"extra.{number}": TENSORS["bias"] for number in range(7)}
    write_shards(
        tmp_path, {"1.safetensors": TENSORS | extra}, dict.fromkeys(TENSORS, "1.safetensors")
    )
    with pytest.warns(
        UserWarning, match=r"not name 7 of .*: 'extra.0' in 1.*'extra.4' in .*, \.\.\.$"
    ):
        checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.tensors) == set(TENSORS)


def test_null_is_no_metadata(tmp_path):
    data = np.array([1.5, -2.0], np.float32).tobytes()
    write_raw(tmp_path, {"__metadata__": None, "a": entry("F32", [2], 0, 8)}, data)
    expected = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(Checkpoint.open(tmp_path).read("a"), expected["a"])


def test_a_file_that_becomes_shorter(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors became shorter while it was"):
        checkpoint.read("weight")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors can't be read: No such file"):
        checkpoint.read("weight")
