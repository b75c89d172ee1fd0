from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.codes.look_up import InRegisters, InSharedMemory, LookUp
from tests.pallas_kernels.codes.decoding import bits_of


def halves(values: np.ndarray) -> list:
    """Values of 16 bits, two in each uint32 [1, 1]."""
    return [jnp.asarray(pair).reshape(1, 1) for pair in bits_of(values).view(np.uint32)]


@pytest.mark.parametrize(
    ("look_up", "entries"), [(InRegisters(), 4), (InRegisters(), 8), (InSharedMemory(), 16)]
)
def test_every_pair_of_codes_is_found(look_up: LookUp, entries, interpreted_ptx, rng):
    values = rng.standard_normal(entries).astype(np.float16)
    prepared = look_up.prepare(halves(values))
    # Two registers at a time: all bytes of two codes, at each of the four places.
    low, high = (code.reshape(-1, 2) for code in np.indices((entries, entries)).reshape(2, -1))
    words = (low | high << 4 | low << 8 | high << 12).astype(np.uint16)
    decode = look_up.decoder(lambda quad: jnp.asarray(words), prepared, jnp.dtype("float16"))
    for plane in range(8):
        # Planes 0 and 1 of four lie in the lower word of a register, 2 and 3 in the upper one.
        word = plane % 4 // 2
        expected = np.stack([values[low[:, word]], values[high[:, word]]], 1)
        np.testing.assert_array_equal(decode(plane), expected)


def test_bytes_of_eight_entries_lie_in_four_registers(interpreted_ptx):
    values = (0x0100 + 0x0201 * np.arange(8)).astype(np.uint16)
    low, high = np.arange(8), 1 + 2 * np.arange(8)
    expected = np.concatenate([low, high]).astype(np.uint8).view(np.uint32)
    prepared = [
        np.asarray(word).view(np.uint32).item() for word in InRegisters().prepare(halves(values))
    ]
    assert prepared == expected.tolist()


def test_only_pairs_take_shared_memory():
    assert InRegisters().shared_bytes == 0
    assert InSharedMemory().shared_bytes == 256 * 32 * 4 + 1024
