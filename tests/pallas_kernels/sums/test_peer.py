from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from mpjax.kernels.mosaic import peers
from mpjax.kernels.sums import peer
from mpjax.kernels.sums.plans import MOST_PROGRAMS
from tests.pallas_kernels.mosaic.test_peers import lowered_on_all


@pytest.mark.parametrize(
    ("size", "block"), [(1, 512), (64 * 512, 512), (64 * 512 + 1, 1024), (64 * 8192, 8192)]
)
def test_programs_are_few_enough_to_run_at_the_same_time(size, block):
    assert peer.block_of(size) == block
    assert -(-size // block) <= MOST_PROGRAMS


@pytest.mark.parametrize(("count", "size"), [(2, 4096), (4, 2880)])
def test_a_sum_lowers_without_multicast(count, size):
    def add(x):
        return peer.peer_sum(x, "model", count)

    text = lowered_on_all(count, jax.ShapeDtypeStruct((size,), jnp.float32), add)
    assert "peer_sum" in text
    assert "multimem" not in text


class Array:
    """A reference of a kernel to one device's array, here NumPy's."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.values[_plain(index)].copy()

    def __setitem__(self, index: Any, part: Any) -> None:
        self.values[_plain(index)] = part


def _plain(index: Any) -> tuple[Any, ...]:
    index = index if isinstance(index, tuple) else (index,)
    return tuple(
        slice(int(i.start), int(i.start) + i.size) if isinstance(i, pl.Slice) else int(i)
        for i in index
    )


class Semaphores:
    """The semaphores of one device, `at` each of its programs."""

    def __init__(self, programs: int) -> None:
        self.at = [threading.Semaphore(0) for _ in range(programs)]


def test_all_devices_get_the_parts_in_one_order(monkeypatch):
    """The kernel on three devices with two programs each, which are threads."""
    devices, programs, block = 3, 2, 512
    size = programs * block
    parts = np.random.default_rng(0).standard_normal((devices, size)).astype(np.float32)
    totals = [Array(np.full(size, np.nan, np.float32)) for _ in range(devices)]
    inboxes = [Array(np.full((devices, size), np.nan, np.float32)) for _ in range(devices)]
    arrived = [Semaphores(programs) for _ in range(devices)]
    here = threading.local()

    def signal(own: threading.Semaphore, device: Any) -> None:
        arrived[int(device)].at[here.place["program"]].release()

    def wait(own: threading.Semaphore, count: int) -> None:
        assert all(own.acquire(timeout=30) for _ in range(count))

    monkeypatch.setattr(jax.lax, "axis_index", lambda axis: here.place[axis])
    monkeypatch.setattr(peers, "remote", lambda ref, device: inboxes[int(device)])
    monkeypatch.setattr(peers, "signal", signal)
    monkeypatch.setattr(peers, "wait", wait)

    def run(device: int, program: int) -> None:
        here.place = {"model": device, "program": program}
        peer._kernel(
            *(Array(parts[device]), totals[device], inboxes[device], arrived[device]),
            axis="model",
            devices=devices,
            block=block,
        )

    with concurrent.futures.ThreadPoolExecutor(devices * programs) as threads:
        places = [(device, program) for device in range(devices) for program in range(programs)]
        for done in [threads.submit(run, *place) for place in places]:
            done.result()
    expected = parts[0] + parts[1] + parts[2]
    for total in totals:
        np.testing.assert_array_equal(total.values, expected)
