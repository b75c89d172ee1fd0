from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from mpjax.checkpoint import Checkpoint
from mpjax.checkpoint.fused_experts import join_experts, split_experts
from mpjax.models import GptOss, Llama, Qwen3MoE

MLP = "model.layers.1.mlp"


@pytest.fixture
def arrays(rng):
    shapes = {"gate_up_proj": (3, 8, 6), "down_proj": (3, 6, 4)}
    found = {f"{MLP}.experts.{name}": rng.standard_normal(s) for name, s in shapes.items()}
    return {name: array.astype(np.float32) for name, array in found.items()} | {
        f"{MLP}.gate.weight": np.ones((3, 6), np.float32)
    }


@pytest.fixture
def folder(arrays, tmp_path):
    save_file(arrays, tmp_path / "model.safetensors")
    return tmp_path


def test_each_expert_has_its_part_of_the_file(arrays, folder):
    found = split_experts(Checkpoint.open(folder), Qwen3MoE)
    assert len(found.tensors) == 3 * 3 + 1
    for expert in range(3):
        name = f"{MLP}.experts.{expert}"
        gate, up = np.split(arrays[f"{MLP}.experts.gate_up_proj"][expert], 2)
        down = arrays[f"{MLP}.experts.down_proj"][expert]
        for part, array in (("gate", gate), ("up", up), ("down", down)):
            np.testing.assert_array_equal(found.read(f"{name}.{part}_proj.weight"), array)
    assert found.nbytes == Checkpoint.open(folder).nbytes


def test_suffixes_become_those_of_modules(tmp_path):
    blocks = np.arange(2 * 4 * 3 * 16, dtype=np.uint8).reshape(2, 4, 3, 16)
    name = f"{MLP}.experts.down_proj"
    save_file(
        {f"{name}_blocks": blocks, f"{name}_bias": np.ones((2, 4))}, tmp_path / "a.safetensors"
    )
    found = split_experts(Checkpoint.open(tmp_path), Qwen3MoE)
    assert sorted(found.tensors) == [
        f"{MLP}.experts.{expert}.down_proj.{suffix}"
        for expert in (0, 1)
        for suffix in ("bias", "blocks")
    ]
    np.testing.assert_array_equal(found.read(f"{MLP}.experts.1.down_proj.blocks"), blocks[1])


def test_joining_undoes_splitting(tmp_path, rng):
    arrays = {
        f"{MLP}.experts.gate_up_proj_blocks": rng.integers(0, 9, (3, 8, 2, 16)).astype(np.uint8),
        f"{MLP}.experts.gate_up_proj_bias": rng.standard_normal((3, 8), np.float32),
        f"{MLP}.experts.down_proj": rng.standard_normal((3, 4, 6), np.float32),
    }
    save_file(arrays, tmp_path / "a.safetensors")
    apart = split_experts(Checkpoint.open(tmp_path), GptOss)
    found = dict(join_experts((name, apart.read(name)) for name in apart.tensors))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_other_checkpoints_stay_as_they_are(folder, tmp_path):
    checkpoint = Checkpoint.open(folder)
    assert split_experts(checkpoint, Llama) is checkpoint
    (tmp_path / "other").mkdir()
    save_file(
        {f"{MLP}.experts.0.down_proj.weight": np.ones((4, 4))}, tmp_path / "other" / "a.safetensors"
    )
    checkpoint = Checkpoint.open(tmp_path / "other")
    assert split_experts(checkpoint, Qwen3MoE) is checkpoint
