from __future__ import annotations

import os

import jax
import numpy as np
import pytest

from mpjax import devices
from mpjax.devices import read_devices, read_experts

ONE = jax.devices()[:1]


@pytest.mark.parametrize("one", [None, 1, np.int64(1)])
def test_one_device_is_the_default_device(one):
    assert read_devices(one) is None


def test_a_mesh_keeps_the_name_of_its_axis():
    mesh = read_devices(jax.sharding.Mesh(np.array(ONE), ("shards",)))
    assert mesh is not None
    assert mesh.axis_names == ("shards",)
    assert list(mesh.devices.flat) == ONE


def test_devices_become_a_mesh():
    mesh = read_devices(ONE)
    assert mesh is not None
    assert (mesh.axis_names, mesh.size) == (("model",), 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (4096, r"devices is 4096, and JAX sees \d+ \(\w+\): ask for at most so many"),
        (0, "devices is 0: expected a positive whole number"),
        (-2, "devices is -2: expected a positive"),
        (2.5, "devices is 2.5: expected a number of devices, a list of jax.devices"),
        (True, "devices is True: expected a number"),
        ("gpu", "devices is 'gpu': expected a number"),
        ([], r"devices are \[\]: expected one or more of jax.devices"),
        ([0, 1], "expected one or more of jax.devices"),
        (ONE * 2, "expected each once"),
        (
            jax.sharding.Mesh(np.array(ONE).reshape(1, 1), ("data", "model")),
            r"devices is a mesh of the axes \{'data': 1, 'model': 1\}: expected one axis, such as",
        ),
    ],
)
def test_what_is_wrong_is_said(wrong, message):
    with pytest.raises(ValueError, match=message):
        read_devices(wrong)


class Fake:
    """A device of another platform or process."""

    def __init__(self, platform: str, process: int) -> None:
        self.platform, self.process_index = platform, process


def test_several_gpus_sum_without_multicast(monkeypatch):
    monkeypatch.setattr(devices, "_choose", lambda _: ([Fake("gpu", 0), Fake("gpu", 0)], "model"))
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    read_devices(2)
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    read_devices(2)
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"


def test_each_process_has_some_of_the_devices(monkeypatch):
    monkeypatch.setattr(devices, "_choose", lambda _: ([Fake("cpu", 0), Fake("cpu", 0)], "model"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    with pytest.raises(
        ValueError, match=r"devices of 1 of 2 processes: expected some of each; .*4"
    ):
        read_devices(2)


def test_experts_are_divided_or_whole():
    assert (read_experts("divided", 1), read_experts("whole", 2)) == ("divided", "whole")
    for wrong in ("half", None, 2):
        with pytest.raises(
            ValueError, match=f"experts is {wrong!r}: expected 'divided' or 'whole'"
        ):
            read_experts(wrong, 2)
    with pytest.raises(ValueError, match="one device has all experts: leave it out, or ask f"):
        read_experts("whole", 1)
