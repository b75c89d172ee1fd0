"""Reads the argument `devices`: a number of devices, devices, or a mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, get_args

import jax
import numpy as np

from mpjax.arguments import positive_whole
from mpjax.kernels.checks import shown
from mpjax.kernels.device import default_device
from mpjax.models.share import ExpertDivision

AXIS = "model"
Devices = int | Sequence[jax.Device] | jax.sharding.Mesh


def read_devices(devices: Devices | None) -> jax.sharding.Mesh | None:
    """The mesh of devices among which a model is divided; None for the default device alone.

    devices: a number n, for the first n of `jax.devices()` (1 is the default device); a list of JAX
        devices; or a mesh with one axis, whose name is kept. With several processes
        (`jax.distributed.initialize`), they are devices of all processes.

    Sets NCCL_NVLS_ENABLE=0 for several GPUs, unless the environment sets it: all-reduces as small
    as a decoding step's gain nothing from NVLink multicast.

    Raises ValueError for more devices than there are, duplicate devices, a mesh with several axes,
    and a process without a device.
    """
    if devices is None:
        return None
    chosen, axis = _choose(devices)
    if isinstance(devices, int | np.integer) and len(chosen) == 1:
        return None
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"devices are {shown(chosen)}: expected each once")
    here = {device.process_index for device in chosen}
    if jax.process_count() > 1 and len(here) < jax.process_count():
        raise ValueError(
            f"devices has devices of {len(here)} of {jax.process_count()} processes: expected "
            f"some of each; all together are devices={jax.device_count()}"
        )
    if chosen[0].platform == "gpu" and len(chosen) > 1:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    return jax.sharding.Mesh(np.array(chosen), (axis,))


def read_experts(experts: ExpertDivision, devices: int) -> ExpertDivision:
    """The checked argument `experts`: how `devices` devices divide experts.

    Raises ValueError for unknown values, and for `whole` with one device.
    """
    if experts not in get_args(ExpertDivision):
        raise ValueError(f"experts is {shown(experts)}: expected 'divided' or 'whole'")
    if experts == "whole" and devices == 1:
        raise ValueError(
            "experts is 'whole', and one device has all experts: leave it out, or ask for two or "
            "more devices"
        )
    return experts


def _choose(devices: Devices) -> tuple[list[jax.Device], str]:
    """The selected devices, and the mesh axis's name."""
    if isinstance(devices, jax.sharding.Mesh):
        if len(devices.axis_names) != 1 or not devices.devices.size:
            raise ValueError(
                f"devices is a mesh of the axes {dict(devices.shape)}: expected one axis, such as "
                f"jax.make_mesh((2,), ({AXIS!r},))"
            )
        return list(devices.devices.flat), str(devices.axis_names[0])
    if isinstance(devices, Sequence) and not isinstance(devices, str | bytes):
        if not devices or not all(isinstance(device, jax.Device) for device in devices):
            raise ValueError(f"devices are {shown(devices)}: expected one or more of jax.devices()")
        return list(devices), AXIS
    if isinstance(devices, bool) or not isinstance(devices, int | np.integer):
        raise ValueError(
            f"devices is {shown(devices)}: expected a number of devices, a list of jax.devices(), "
            "or a mesh"
        )
    count = positive_whole("devices", devices)
    found: list[Any] = jax.devices(default_device().platform)
    if count > len(found):
        raise ValueError(
            f"devices is {count}, and JAX sees {len(found)} ({found[0].platform}): ask for at most "
            "so many"
        )
    return found[:count], AXIS
