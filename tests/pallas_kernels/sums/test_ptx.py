from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.sums.layout import HEADER, RANK, Tiles
from mpjax.kernels.sums.ptx import push_and_add
from tests.pallas_kernels.sums.ptx_threads import INBOX, INPUT, OUTPUT, Devices, Kernel

APART = 65536  # bytes between the arrays of two rounds
ROOM = 8192  # bytes of a sum for which inboxes are opened


def parts_of(tiles: Tiles, dtype: jnp.dtype, seed: int) -> np.ndarray:
    """Numbers [devices, terms, size] whose sums depend on their order."""
    shape = tiles.devices, tiles.terms, tiles.nbytes // dtype.itemsize
    numbers = np.random.default_rng(seed).normal(size=shape) * 10.0 ** np.arange(-3, 0)[seed % 3]
    return np.asarray(jnp.asarray(numbers, dtype))


def added(numbers: np.ndarray) -> np.ndarray:
    """The sum over the first axis in float32, in order, rounded to the dtype of the numbers."""
    total = numbers[0].astype(np.float32)
    for each in numbers[1:]:
        total = total + each.astype(np.float32)
    return total.astype(numbers.dtype)


def run(rounds: list[Tiles], dtype: str, seed: int, change: tuple[str, str] = ("", "")) -> None:
    """Runs sums one after another, and checks all on all devices. change: of the PTX."""
    count, part = rounds[0].devices, Tiles(rounds[0].devices, ROOM).part_bytes
    devices, kernels, expected = Devices(count, seed), list[Kernel](), list[np.ndarray]()
    for device in range(count):
        addresses = np.array([begin + INBOX for begin in devices.begins], np.uint64)
        devices.write(device, INBOX, addresses)
        devices.write(device, INBOX + RANK, np.array([device], np.uint32))
    for number, tiles in enumerate(rounds):
        x = parts_of(tiles, jnp.dtype(dtype), seed + number)
        for device in range(count):
            devices.write(device, INPUT + APART * number, x[device])
        expected.append(added(np.stack([added(each) for each in x])))
        ptx = push_and_add(tiles, jnp.dtype(dtype), HEADER, part).replace(*change)
        kernels.append(Kernel(ptx, tiles.programs, tiles.threads, APART * number))
    devices.run(kernels, 400)
    for number, tiles in enumerate(rounds):
        for device in range(count):
            found = devices.read(device, OUTPUT + APART * number, tiles.nbytes // 4)
            np.testing.assert_array_equal(found, expected[number].view(np.uint32))


@pytest.mark.parametrize(
    ("devices", "sizes", "dtype", "terms"),
    [
        (2, (4096, 16, 2064, 4096), "float32", 1),  # two programs, one thread, two and one thread
        (2, (512, 512), "bfloat16", 3),
        (4, (320, 640), "float32", 2),
        (8, (48,), "bfloat16", 1),
    ],
)
def test_all_devices_get_the_sum_in_the_order_of_the_devices(devices, sizes, dtype, terms):
    run([Tiles(devices, size, terms, warpgroups=1) for size in sizes], dtype, seed=len(sizes))


def test_each_thread_adds_several_units_of_a_large_sum(monkeypatch):
    monkeypatch.setattr("mpjax.kernels.sums.layout.MOST_PROGRAMS", 1)
    tiles = Tiles(2, 4096 + 1040, warpgroups=1)
    assert (tiles.units, tiles.programs) == (3, 1)
    run([tiles], "float32", seed=1)


def test_rounds_in_one_half_of_the_inbox_overwrite_words_that_are_awaited():
    rounds, change = (
        [Tiles(2, 64, warpgroups=1)] * 4,
        ("and.b32 place, round, 1;", "mov.b32 place, 0;"),
    )

    def run_some() -> None:
        for seed in range(20):
            run(rounds, "float32", seed, change)

    with pytest.raises((TimeoutError, AssertionError)):
        run_some()


@pytest.mark.parametrize(("halves", "is_sound"), [(1, False), (2, True)])
def test_no_interleaving_of_rounds_loses_a_word(halves, is_sound):
    """Two devices, each with a word for the other and for itself: all states that they can reach.

    A step of a device is to write its word to itself, to the other, or to see its own inbox full.
    """
    assert is_lossless(halves, rounds=5) == is_sound


def is_lossless(halves: int, rounds: int) -> bool:
    start = ((0, 0), ((0,) * 2 * halves,) * 2)  # steps done, and the rounds of the words in inboxes
    seen, open_states = {start}, [start]
    while open_states:
        done, inboxes = open_states.pop()
        following = []
        for device in (0, 1):
            number, step = divmod(done[device], 3)
            if number == rounds:
                continue
            now, half = number + 1, (number + 1) % halves
            boxes = [list(box) for box in inboxes]
            if step < 2:
                boxes[(device, 1 - device)[step]][2 * half + device] = now
            elif boxes[device][2 * half : 2 * half + 2] != [now, now]:
                continue
            steps = tuple(count + (each == device) for each, count in enumerate(done))
            following.append((steps, tuple(map(tuple, boxes))))
        if not following and min(done) < 3 * rounds:
            return False  # a device waits for a word that was overwritten
        open_states += [state for state in following if state not in seen]
        seen.update(following)
    return True
