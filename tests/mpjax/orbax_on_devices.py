"""Orbax checkpoints of divided models, restored on other numbers of devices.

It needs a process of its own with several devices:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.mpjax.orbax_on_devices FOLDER`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import jax
import pytest

import mpjax
from mpjax.checkpoint import CheckpointError
from mpjax.checkpoint.orbax_weights import OrbaxWeights
from mpjax.models.sharded import ShardedDecoder
from tests.models.sharded_decoders import require_same_arrays
from tests.mpjax.on_devices import ACT_ORDER, write, write_experts

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)


def require_restored(folder: Path, whole: mpjax.LanguageModel, count: int, **options) -> None:
    found = mpjax.load(folder, devices=count, progress=False, **options).model
    assert found.shards == count
    require_same_arrays(whole.model, found.whole() if isinstance(found, ShardedDecoder) else found)


def require_verified(saved: Path) -> None:
    """A wrong checksum of the second share is found on as many devices, and on one."""
    path = saved / "mpjax.json"
    description = json.loads(path.read_text())
    description["orbax"]["crc32"]["layers.0.mlp_norm.weight"][1] ^= 1
    path.write_text(json.dumps(description))
    for count in (2, 1):
        with pytest.raises(CheckpointError, match=r"mlp_norm\.weight .* in share 1 than"):
            mpjax.load(saved, devices=count, progress=False)
        mpjax.load(saved, devices=count, progress=False, verify=False)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    source = write(folder / "source", "qwen2", ACT_ORDER)  # biases, and channels in another order
    whole = mpjax.load(source, progress=False)
    for count, others in ((2, (4, 3)), (4, (1,)), (1, (2,))):
        saved = folder / f"of {count}"
        mpjax.save(mpjax.load(source, devices=count, progress=False), saved, format="orbax")
        for other in others:
            require_restored(saved, whole, other)
        with mock.patch.object(OrbaxWeights, "read_whole"):  # on as many, none is joined
            require_restored(saved, whole, count)
    require_verified(folder / "of 2")
    experts, saved = write_experts(folder / "mixture"), folder / "of experts"
    mixture = mpjax.load(experts, progress=False)
    lm = mpjax.load(experts, devices=2, experts="whole", progress=False)
    mpjax.save(lm, saved, format="orbax")
    require_restored(saved, mixture, 2)
    require_restored(saved, mixture, 2, experts="whole")
    require_restored(saved, mixture, 3, experts="whole")
    print("restored")
