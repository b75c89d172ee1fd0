from __future__ import annotations

import dataclasses
import types

import jax
import pytest

from mpjax import memory
from mpjax.memory import DeviceMemoryError, free_bytes, has_free, require_free


@dataclasses.dataclass
class FakeGPU:
    statistics: dict | None
    platform: str = "gpu"

    def memory_stats(self):
        return self.statistics

    def __str__(self):
        return "cuda:0"


def test_a_gpu_has_left_what_it_may_take_and_has_not():
    assert free_bytes(FakeGPU({"bytes_limit": 100, "bytes_in_use": 30})) == 70


@pytest.mark.parametrize("statistics", [None, {}, {"bytes_in_use": 3}])
def test_nothing_is_refused_where_nobody_knows(statistics):
    assert free_bytes(FakeGPU(statistics)) is None
    require_free(10**18, "loading", FakeGPU(statistics))
    assert has_free(10**18, FakeGPU(statistics))


def test_too_much_is_refused_with_both_figures():
    device = FakeGPU({"bytes_limit": 24_000_000_000, "bytes_in_use": 1_500_000_000})
    require_free(22_500_000_000, "loading Qwen3-8B", device)
    assert [has_free(size, device) for size in (22_500_000_000, 22_500_000_001)] == [True, False]
    message = r"^loading Qwen3-8B needs 22.51 GB on cuda:0, which has 22.50 GB free: choose"
    with pytest.raises(DeviceMemoryError, match=message):
        require_free(22_510_000_000, "loading Qwen3-8B", device)


def test_linux_says_kibibytes(monkeypatch):
    text = "MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:  500 kB\n"
    monkeypatch.setattr("mpjax.memory.Path.read_text", lambda path: text)
    assert free_bytes(jax.devices("cpu")[0]) == 500 * 1024


def test_the_cpu_has_what_the_system_has():
    assert 10**6 < (free_bytes(jax.devices("cpu")[0]) or 0) < 10**15
    with pytest.raises(MemoryError, match=r"needs 1000000000\.00 GB on"):
        require_free(10**18, "loading", jax.devices("cpu")[0])


def test_each_device_of_a_mesh_needs_its_share(monkeypatch):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100)
    for where in (None, mesh):
        assert memory.has_free_on(where, 100)
        assert not memory.has_free_on(where, 101)
        memory.require_free_on(where, 60, "this", 40)
        with pytest.raises(memory.DeviceMemoryError, match="this needs"):
            memory.require_free_on(where, 60, "this", 41)


def test_a_device_that_has_less_than_its_share_is_named(monkeypatch):
    fake = types.SimpleNamespace(size=2, local_devices=["first", "second"])
    free = {"first": 100, "second": 49}
    monkeypatch.setattr(memory, "free_bytes", free.get)
    monkeypatch.setattr(memory, "default_device", lambda: "first")
    assert not memory.has_free_on(fake, 99)
    with pytest.raises(memory.DeviceMemoryError, match="on second"):
        memory.require_free_on(fake, 99, "this")
    memory.require_free_on(fake, 98, "this", 51)
