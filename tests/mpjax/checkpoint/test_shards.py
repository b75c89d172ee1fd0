from __future__ import annotations

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.checkpoint import array_file, shards
from mpjax.checkpoint.safetensors import Checkpoint


def tensors():
    rng = np.random.default_rng(0)
    return {
        "bytes": rng.integers(0, 256, (3, 5), np.uint8),
        "halves": jnp.asarray(rng.standard_normal((7, 2)), jnp.bfloat16),
        "shape": np.array([3, 5], np.int64),
        "words": jnp.asarray(rng.integers(-9, 9, (4, 3)), jnp.int32),
        "none": np.zeros((0, 4), np.float32),
        "last": np.array(ml_dtypes.float8_e4m3fn(3)),
    }


def write(folder, arrays, limit):
    files = shards.divide(arrays, limit)
    done = []
    with shards.writing(folder, files) as one:
        for name in reversed(arrays):  # in any order
            one(name, arrays[name], done.append)
    assert sum(done) == sum(map(array_file.nbytes, arrays.values()))
    for file in files:
        assert (folder / file.name).stat().st_size == file.nbytes
    return files


@pytest.mark.parametrize("limit", [10**6, 45, 1])
def test_what_is_written_is_read(limit, tmp_path):
    arrays = tensors()
    files = write(tmp_path, arrays, limit)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        found = checkpoint.read(name)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == np.asarray(array).tobytes()
        # Tensors begin at a multiple of their numbers' size, which some readers need.
        assert (checkpoint.tensors[name].begin % array.dtype.itemsize) == 0
    assert len(files) == {10**6: 1, 45: 4, 1: 5}[limit]


def test_others_read_it(tmp_path):
    arrays = {name: array for name, array in tensors().items() if name != "last"}
    write(tmp_path, arrays, 10**6)
    found = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], np.asarray(array))


def test_the_index(tmp_path):
    files = write(tmp_path, tensors(), 45)
    written = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]
    assert [file.name for file in files] == names
    assert written["weight_map"]["bytes"] == names[0]
    assert written["metadata"] == {"total_size": sum(map(array_file.nbytes, tensors().values()))}


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 40))
def test_shards_are_within_the_limit(sizes, limit):
    arrays = {f"{i:02}": np.zeros(size, np.uint8) for i, size in enumerate(sizes)}
    files = shards.divide(arrays, limit)
    assert [name for file in files for name in file.tensors] == [*arrays]  # in order
    for file in files:
        assert len(file.tensors) == 1 or sum(a.size for a in file.tensors.values()) <= limit


def test_mistakes_of_a_caller(tmp_path):
    files = shards.divide(tensors())
    with (
        pytest.raises(ValueError, match="5 tensors were not written, such as halves"),
        shards.writing(tmp_path, files) as one,
    ):
        one("bytes", tensors()["bytes"], lambda count: None)
    (tmp_path / "model.safetensors").unlink()
    with (
        pytest.raises(ValueError, match=r"bytes is uint8 \(2, 2\): it was planned otherwise"),
        shards.writing(tmp_path, files) as one,
    ):
        one("bytes", np.zeros((2, 2), np.uint8), lambda count: None)
