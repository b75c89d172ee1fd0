from __future__ import annotations

import errno
import io
import os
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors

from mpjax.checkpoint import CheckpointError, array_file
from mpjax.checkpoint.array_file import file_bytes, read, write
from mpjax.checkpoint.safetensors import DTYPES, read_header

# The dtypes that JAX holds without jax_enable_x64.
NAMES = [name for name, dtype in DTYPES.items() if dtype.itemsize < 8 or dtype.kind == "c"]


def random_array(dtype: np.dtype, shape: tuple[int, ...], rng) -> jax.Array:
    content = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    if dtype.kind == "b":
        content %= 2
    return jnp.asarray(content.view(dtype).reshape(shape))


@pytest.fixture
def arrays(rng):
    return {name: random_array(DTYPES[name], (3, 5), rng) for name in NAMES} | {
        "scalar": jnp.float32(3),
        "empty": jnp.zeros((0, 4), jnp.bfloat16),
    }


@pytest.mark.parametrize("chunk", [7, array_file.CHUNK_BYTES])
@pytest.mark.parametrize("verify", [True, False])
def test_every_dtype_comes_back_bit_for_bit(chunk, verify, arrays, tmp_path, monkeypatch):
    monkeypatch.setattr(array_file, "CHUNK_BYTES", chunk)
    written: list[int] = []
    checksums = write(tmp_path / "file", arrays, written.append)
    total = sum(array.nbytes for array in arrays.values())
    assert sum(written) == total
    assert (tmp_path / "file").stat().st_size == file_bytes(arrays)
    infos = read_header(tmp_path / "file")
    assert infos.keys() == arrays.keys() == checksums.keys()
    seen: list[int] = []
    for name, array in arrays.items():
        found = read(infos[name], checksums[name] if verify else None, seen.append)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == np.asarray(array).tobytes()
        assert checksums[name] == zlib.crc32(found.tobytes())
        assert infos[name].begin % array.dtype.itemsize == 0
    assert sum(seen) == total


def test_others_can_read_the_file(arrays, tmp_path):
    wanted = {name: arrays[name] for name in ("U16", "I32", "F16", "F32", "scalar", "empty")}
    del wanted["empty"]  # bfloat16 is no dtype of numpy's
    write(tmp_path / "file", wanted, lambda count: None)
    with safetensors.safe_open(tmp_path / "file", "np") as file:
        assert set(file.keys()) == set(wanted)
        for name, array in wanted.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


@pytest.mark.parametrize("name", ["BF16", "F8_E4M3", "U16", "F32"])
def test_every_changed_bit_is_found(name, arrays, tmp_path):
    checksums = write(tmp_path / "file", arrays, lambda count: None)
    info = read_header(tmp_path / "file")[name]
    content = (tmp_path / "file").read_bytes()
    message = (
        rf"{name} in .*file has other bytes than were saved \(checksum [0-9a-f]{{8}}, expected"
    )
    for position in range(info.begin, info.end):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        (tmp_path / "file").write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            read(info, checksums[name], lambda count: None)
        read(info, None, lambda count: None)


def test_a_file_that_becomes_shorter(arrays, tmp_path):
    write(tmp_path / "file", arrays, lambda count: None)
    infos = read_header(tmp_path / "file")
    last = max(infos.values(), key=lambda info: info.end)
    os.truncate(tmp_path / "file", last.end - 1)
    with pytest.raises(CheckpointError, match=f"file has become shorter while {last.name} was"):
        read(last, None, lambda count: None)
    (tmp_path / "file").unlink()
    with pytest.raises(CheckpointError, match=rf"{last.name} in .* can't be read: .*No such file"):
        read(last, None, lambda count: None)


class Failing(io.RawIOBase):
    def readinto(self, buffer):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def seekable(self):
        return True

    def seek(self, offset, whence=0):
        return offset


def test_a_disk_that_can_not_be_read(arrays, tmp_path, monkeypatch):
    write(tmp_path / "file", arrays, lambda count: None)
    info = read_header(tmp_path / "file")["F32"]
    monkeypatch.setattr(Path, "open", lambda *arguments, **keywords: Failing())
    with pytest.raises(CheckpointError, match=r"F32 in .*file can't be read: .*Input/output error"):
        read(info, None, lambda count: None)


def test_the_system_may_give_less_than_was_asked_for(arrays, tmp_path, monkeypatch):
    checksums = write(tmp_path / "file", arrays, lambda count: None)
    info = read_header(tmp_path / "file")["F32"]

    class Slow(io.FileIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:3])

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: Slow(path))
    found = read(info, checksums["F32"], lambda count: None)
    assert found.tobytes() == np.asarray(arrays["F32"]).tobytes()


def test_the_disk_has_what_was_written_after_so_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(array_file, "CHUNK_BYTES", 8)
    monkeypatch.setattr(array_file, "SYNC_BYTES", 16)
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    arrays = {"a": jnp.zeros(3, jnp.uint8), "b": jnp.zeros(40, jnp.uint8)}
    write(tmp_path / "file", arrays, lambda count: None)
    header = file_bytes(arrays) - 43
    assert [size - header for size in sizes] == [19, 35]


def test_the_host_keeps_no_copies(tmp_path, monkeypatch):
    """JAX would keep each with its array."""
    array = jnp.ones((4, 4), ml_dtypes.bfloat16)
    converted = []
    convert = np.ascontiguousarray
    monkeypatch.setattr(
        np, "ascontiguousarray", lambda one: converted.append(one is array) or convert(one)
    )
    write(tmp_path / "file", {"a": array}, lambda count: None)
    assert converted == [False]


def test_arrays_of_numpy_and_spread_ones_are_whole(tmp_path):
    device = jax.devices()[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    spread = jax.device_put(jnp.arange(4), sharding)
    arrays = {"numpy": np.arange(6, dtype=np.int32).reshape(2, 3).T, "spread": spread}
    write(tmp_path / "file", arrays, lambda count: None)
    infos = read_header(tmp_path / "file")
    for name, array in arrays.items():
        np.testing.assert_array_equal(read(infos[name], None, lambda count: None), array)
