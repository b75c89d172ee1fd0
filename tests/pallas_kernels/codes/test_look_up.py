from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.codes import look_up as look_ups
from mpjax.kernels.codes.look_up import (
    InBoth,
    InRegisters,
    InSharedMemory,
    InSharedRows,
    LookUp,
    pair_rows,
)
from mpjax.kernels.launch import Triton
from mpjax.kernels.target import tracing_for
from tests.pallas_kernels import numpy_ptx


class Reference:
    """A table as kernels have it: `load` is given what `at` says."""

    def __init__(self, values: np.ndarray) -> None:
        self.at = jnp.asarray(values, jnp.float32)


@pytest.fixture(autouse=True)
def _arrays_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ups, "load", lambda values: values)


def every_pair(entries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words whose bytes are all pairs of codes, two registers at a time; and the two codes."""
    low, high = (code.reshape(-1, 2) for code in np.indices((entries, entries)).reshape(2, -1))
    return (low | high << 4 | low << 8 | high << 12).astype(np.uint16), low, high


@pytest.mark.parametrize(
    ("look_up", "bits"),
    [
        *((InRegisters(), 2), (InRegisters(), 3), (InSharedMemory(), 4)),
        *((InSharedRows(), 2), (InSharedRows(), 3), (InSharedRows(), 4)),
        *((InBoth(), 2), (InBoth(), 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LookUp) else str(value),
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pair_of_codes_is_found(look_up: LookUp, bits, dtype, interpreted_ptx, rng):
    values = rng.standard_normal(2**bits).astype(np.float32)
    words, low, high = every_pair(2**bits)
    if isinstance(look_up, InSharedRows | InBoth):
        with tracing_for(numpy_ptx.SharedRows(len(words))):
            prepared = look_up.prepare(values, bits, jnp.dtype(dtype), words.shape[1])
    else:
        prepared = look_up.prepare(Reference(values), bits, jnp.dtype(dtype), words.shape[1])
    decode = look_up.decoder(lambda quad: jnp.asarray(words), prepared, jnp.dtype(dtype))
    values = values.astype(jnp.dtype(dtype))
    for plane in range(8):
        # Planes 0 and 1 of four lie in the lower word of a register, 2 and 3 in the upper one.
        word = plane % 4 // 2
        expected = np.stack([values[low[:, word]], values[high[:, word]]], 1)
        np.testing.assert_array_equal(decode(plane), expected)


def test_bytes_of_eight_entries_lie_in_four_registers(interpreted_ptx):
    # Their halves, as float16, are 0x0100, 0x0302, 0x0504 …
    values = (0x0100 + 0x0202 * np.arange(8)).astype(np.uint16).view(np.float16)
    low, high = 2 * np.arange(8), 1 + 2 * np.arange(8)
    expected = np.concatenate([low, high]).astype(np.uint8).view(np.uint32)
    prepared = InRegisters().prepare(Reference(values), 3, jnp.dtype("float16"), 2)
    found = [np.asarray(word).view(np.uint32).item() for word in prepared]
    assert found == expected.tolist()


def test_half_of_the_planes_are_not_looked_up_in_shared_memory(monkeypatch):
    words, _, _ = every_pair(8)
    dtype, target, asked = jnp.dtype("float16"), numpy_ptx.SharedRows(len(words)), []
    with tracing_for(target):
        prepared = InBoth().prepare(np.arange(8, dtype=np.float32), 3, dtype, words.shape[1])
    monkeypatch.setattr(target, "inline_ptx", lambda assembly, *_, dtype: asked.append(assembly))
    for plane in range(8):
        with tracing_for(target):
            InBoth().decoder(lambda quad: jnp.asarray(words), prepared, dtype)(plane)
        assert ("ld.shared" in "".join(asked)) == (plane % 4 >= 2)
        asked.clear()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_there_is_a_row_for_each_pair(bits):
    words, _, _ = every_pair(2**bits)
    assert pair_rows(bits) == int(words.view(np.uint8).max()) + 1


def test_rows_are_for_kernels_with_room():
    with tracing_for(Triton()), pytest.raises(NotImplementedError, match="Triton has no shared"):
        InSharedRows().prepare(None, 4, jnp.dtype("bfloat16"), 64)


def test_only_pairs_take_shared_memory():
    assert InRegisters().shared_bytes == 0
    assert InSharedMemory().shared_bytes == 256 * 32 * 4 + 1024
