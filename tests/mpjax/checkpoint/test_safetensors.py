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
from mpjax.checkpoint.errors import CheckpointError
from mpjax.checkpoint.safetensors import INDEX_NAME, Checkpoint

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


LENGTH_8 = (8).to_bytes(8, "little")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 16381516976\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes: a safetensors file begins with 8 bytes of header length"),
        (b"\x00" * 7, "has 7 bytes: .* interrupted download"),
        (POINTER, "is a git-lfs pointer, not the file itself: run `git lfs pull`"),
        (b"<!DOCTYPE html>", "is not a safetensors file: its first 8 bytes give a header of"),
        (LENGTH_8 + b"{}", "ends inside its header: expected at least 16 bytes, found 10"),
        (LENGTH_8 + b'{"a": 1,', "is not valid JSON"),
        (LENGTH_8 + b"\xff" * 8, "is not valid JSON"),
        (LENGTH_8 + b"[      ]", "is a JSON list: expected an object"),
    ],
)
def test_damaged_start(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint.open(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(error.value)


FLOATS = entry("F32", [2], 0, 8)


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"__metadata__": {"format": 1}}, 0, "__metadata__ .* is not a map of strings"),
        ({"__metadata__": []}, 0, "__metadata__ .* is not a map of strings"),
        (b'{"a": {}, "a": {}}', 0, "names 'a' twice"),
        ({"a": 3}, 0, "tensor 'a' .* described by 3: expected dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 0, "expected dtype, shape and data_offsets"),
        ({"a": entry("F4", [2], 0, 1)}, 1, "has the dtype 'F4': expected one of BOOL, U8"),
        ({"a": entry(["F32"], [2], 0, 8)}, 8, r"has the dtype \['F32'\]"),
        ({"a": entry("F32", [-2], 0, 8)}, 8, r"has the shape \[-2\]"),
        ({"a": entry("F32", [2.0], 0, 8)}, 8, r"has the shape \[2.0\]"),
        ({"a": entry("F32", 2, 0, 8)}, 8, "has the shape 2"),
        ({"a": entry("F32", [True], 0, 4)}, 4, r"has the shape \[True\]"),
        ({"a": entry("U8", [1], False, True)}, 1, r"has the data_offsets \[False, True\]"),
        ({"a": entry("F32", [2], -8, 0)}, 8, r"has the data_offsets \[-8, 0\]"),
        ({"a": entry("F32", [2], 8, 0)}, 8, r"has the data_offsets \[8, 0\]"),
        ({"a": {**FLOATS, "data_offsets": [0]}}, 8, r"has the data_offsets \[0\]"),
        ({"a": entry("F32", [3], 0, 8)}, 8, r"spans 8 bytes: F32 of shape \[3\] needs 12"),
        ({"a": FLOATS, "b": entry("U8", [4], 6, 10)}, 10, "'a' and 'b' .* overlap by 2 bytes"),
        ({"a": FLOATS, "b": FLOATS}, 8, "'a' and 'b' .* overlap by 8 bytes"),
        ({"a": FLOATS, "b": entry("U8", [4], 9, 13)}, 13, "hole of 1 bytes between 'a' and .* 'b'"),
        ({"a": entry("U8", [4], 4, 8)}, 8, "hole of 4 bytes between the header and tensor 'a'"),
        ({"a": FLOATS}, 11, "has 3 bytes after its last tensor"),
    ],
)
def test_inconsistent_header(tmp_path, header, data_bytes, message):
    write_raw(tmp_path, header, bytes(data_bytes))
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint.open(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(error.value)


def test_truncated_file(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 5)
    message = f"truncated: expected {size} bytes, found {size - 5}; likely an interrupted download"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_folder_without_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="nothing is not a folder"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"PyTorch \*\.bin files .*: convert them"):
        Checkpoint.open(tmp_path)
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "b.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"2 safetensors files \(a.*, b.*\) and neither"):
        Checkpoint.open(tmp_path)


def test_index_that_names_missing_shards(tmp_path):
    write_shards(
        tmp_path,
        {"1.safetensors": {"weight": TENSORS["weight"]}},
        {"weight": "1.safetensors", "bias": "2.safetensors", "words": "3.safetensors"},
    )
    message = "names 3 shards, of which 2 are missing: 2.safetensors, 3.safetensors"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("wrong", ["absent", "weight"])
def test_index_that_names_a_tensor_its_shard_lacks(tmp_path, wrong):
    first = {"weight": TENSORS["weight"], "bias": TENSORS["bias"]}
    write_shards(
        tmp_path,
        {"1.safetensors": first, "2.safetensors": {"words": TENSORS["words"]}},
        {"bias": "1.safetensors", "words": "2.safetensors", wrong: "2.safetensors"},
    )
    message = f"tensor '{wrong}' is in 2.safetensors, which lacks it"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    write_shards(
        tmp_path,
        {"1.safetensors": TENSORS, "2.safetensors": {"bias": TENSORS["bias"]}},
        {"weight": "1.safetensors", "bias": "2.safetensors"},
    )
    with pytest.raises(CheckpointError, match=r"'bias' is in both 1\.safetensors and 2\."):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "puts tensor 'a' in '../a.safetensors'"),
        ('{"weight_map": {"a": 3}}', "puts tensor 'a' in 3"),
        (POINTER.decode(), "is a git-lfs pointer"),
    ],
)
def test_damaged_index(tmp_path, index, message):
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)
