"""`mpjax.update` leaves the arrays that loading a checkpoint of the new weights gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.generation.decoding import generate_tokens
from mpjax.models import ExpertPlace, trainable
from mpjax.models.registry import FAMILIES
from mpjax.rollouts import renewal
from tests.models.sharded_families import keys
from tests.mpjax.checkpoint.write_checkpoint import write_checkpoint
from tests.sweeps import in_sweep


def write(folder: Path, hf: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Writes a random checkpoint in bfloat16; returns its tensors by their names in files."""
    decoder, rng = FAMILIES[hf["architectures"][0]], np.random.default_rng(seed)
    config = decoder.config_from_hf(hf)
    shapes = {place.name: place.file_shape for place in decoder.array_places(config)}
    for place in decoder.linear_places(config):
        is_transposed = isinstance(place, ExpertPlace) and place.is_transposed
        for name, (inputs, outputs) in zip(place.names, place.shapes, strict=True):
            shape = (inputs, outputs) if is_transposed else (outputs, inputs)
            shapes[f"{name}.weight"] = shape
            if place.bias:
                shapes[f"{name}.bias"] = (outputs,)
    tensors = {
        name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    write_checkpoint(folder, hf, tensors)
    return tensors


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    architecture = f"{name}ForCausalLM"
    return (
        keys(architecture) | {"architectures": [architecture], "torch_dtype": "bfloat16"} | changes
    )


def leaves(lm: mpjax.LanguageModel) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(lm.model))]


def assert_equal(found: mpjax.LanguageModel, expected: mpjax.LanguageModel) -> None:
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Qwen2", "W4g32A16KV16H8E8"),  # biases, and packed tables
        ("Gemma2", "W4g32symA16KV16H8"),  # norms with an offset, and a tied table
        ("Qwen3Moe", "W4g32A16KV16"),  # experts
        ("GptOss", "W16A16KV16"),  # whose gate and up come in turn
        in_sweep("Llama", "WFP8AFP8KV16"),
        in_sweep("Mixtral", "WNF3g32A16KV16"),
    ],
)
def test_arrays_are_those_of_a_loaded_checkpoint(name, precision, tmp_path, monkeypatch):
    monkeypatch.setattr(renewal, "CHUNK_WEIGHTS", 1 << 13)  # several chunks, and a remainder
    hf = config_of(name)
    write(tmp_path / "old", hf, 0)
    new = write(tmp_path / "new", hf, 1)
    lm, expected = (mpjax.load(tmp_path / x, precision=precision) for x in ("old", "new"))
    assert mpjax.update(lm, new) is lm
    assert_equal(lm, expected)
    assert lm.version == 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A packed Llama, a plain one of other weights, the latter's tensors, and it in codes."""
    folder, hf = tmp_path_factory.mktemp("pair"), config_of("Llama", num_hidden_layers=2)
    write(folder / "old", hf, 0)
    tensors = write(folder / "new", hf, 1)
    precision = "W4g32A16KV16"
    return (
        lambda: mpjax.load(folder / "old", precision=precision),
        mpjax.load(folder / "new"),
        tensors,
        mpjax.load(folder / "new", precision=precision),
    )


def test_a_state_is_as_good_as_names_and_so_is_a_part_of_it(pair):
    load, trainer, tensors, expected = pair
    lm, state = load(), nnx.state(trainer.model)
    mpjax.update(lm, {"layers": {1: nnx.state(trainer.model.layers[1])}})
    mpjax.update(lm, nnx.state(trainer.model, trainable))
    assert_equal(lm, expected)
    assert lm.version == 2
    one, other = load(), load()
    name = "model.layers.1.self_attn.k_proj.weight"  # the middle of a joint product
    mpjax.update(one, {name: tensors[name]}, version=7)
    changed = [
        (a != b).sum() for a, b in zip(leaves(one), leaves(other), strict=True) if (a != b).any()
    ]
    assert len(changed) == 2  # words and scales of one product, and nothing else
    assert one.version == 7
    mpjax.update(one, state)
    mpjax.update(one, nnx.state(one.model))  # its own arrays, which stay
    assert_equal(one, expected)


def test_kept_scales_are_those_before(pair):
    load, _, tensors, _ = pair
    lm, name = load(), "model.layers.0.mlp.down_proj.weight"
    before = lm.model.layers[0].mlp.down.kernel.get_value()
    groups = 96 // 32  # without those of padding
    scales, zeros = (np.asarray(x, np.float32)[:groups] for x in (before.scales(), before.zeros()))
    mpjax.update(lm, {name: tensors[name]}, scales="keep")
    after = lm.model.layers[0].mlp.down.kernel.get_value()
    np.testing.assert_array_equal(np.asarray(after.scales(), np.float32)[:groups], scales)
    weight = tensors[name].astype(np.float32).T.reshape(len(scales), -1, 64)
    codes = np.clip(np.rint(weight / scales[:, None]) + zeros[:, None], 0, 15)
    expected = ((codes - zeros[:, None]) * scales[:, None]).reshape(-1, 64)
    np.testing.assert_allclose(np.asarray(after.dequantize()), expected, rtol=1e-6)


def test_tensors_of_all_experts(tmp_path):
    hf = config_of("Qwen3Moe")
    write(tmp_path / "old", hf, 0)
    tensors = write(tmp_path / "new", hf, 1)
    mlp, stacks = "model.layers.0.mlp.experts", {}
    for kind in ("gate", "up", "down"):
        stacks[kind] = np.stack([tensors.pop(f"{mlp}.{i}.{kind}_proj.weight") for i in range(4)])
    tensors[f"{mlp}.gate_up_proj"] = np.concatenate([stacks["gate"], stacks["up"]], 1)
    tensors[f"{mlp}.down_proj"] = stacks["down"]
    lm, expected = (mpjax.load(tmp_path / it, precision="W4g32A16KV16") for it in ("old", "new"))
    mpjax.update(lm, tensors)
    assert_equal(lm, expected)
    back, two = mpjax.load(tmp_path / "old", precision="W4g32A16KV16"), (1, 3)
    some = {f"{mlp}.{i}.down_proj.weight": stacks["down"][i] for i in two}
    mpjax.update(lm, {f"{mlp}.{i}.down_proj.weight": 0 * stacks["down"][i] for i in two})
    mpjax.update(lm, some)
    assert_equal(lm, expected)
    assert any((a != b).any() for a, b in zip(leaves(lm), leaves(back), strict=True))


def test_adapters_are_updated_by_their_paths(pair):
    tuned = mpjax.lora(pair[3], 4)
    pairs = jax.tree.map(lambda x: x + 1, nnx.state(tuned.model, nnx.LoRAParam))
    before = leaves(tuned)
    mpjax.update(tuned, pairs)
    for new, old in zip(
        jax.tree.leaves(nnx.state(tuned.model, nnx.LoRAParam)), jax.tree.leaves(pairs), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))
    assert sum((a != b).any() for a, b in zip(leaves(tuned), before, strict=True)) == len(
        jax.tree.leaves(pairs)
    )


BAD = {
    "no such name": ({"model.layers.0.mlp.dwn_proj.weight": 0}, "dwn_proj.weight.*did you mean"),
    "no such path": ({"layers": {9: {"mlp": jnp.ones(3)}}}, "layers.9.mlp.*no place"),
    "a shape": ({"model.norm.weight": jnp.ones(3)}, r"norm.weight in float32 of shape \[3\]"),
    "a dtype": ({"model.norm.weight": jnp.ones(64, int)}, "norm.weight in int32"),
    "no array": ({"model.norm.weight": "text"}, "norm.weight = 'text'"),
    "infinity": ({"model.norm.weight": jnp.full(64, jnp.inf)}, "NaN or infinity in model.norm"),
    "nothing": ({}, "tree of weights is {}"),
    "no tree": (3, "tree of weights is 3"),
}


@pytest.mark.parametrize(("tree", "message"), BAD.values(), ids=BAD)
def test_bad_trees_are_refused_before_anything_is_written(tree, message, pair):
    lm = pair[3]
    before = leaves(lm)
    good = {"model.layers.0.mlp.up_proj.weight": pair[2]["model.layers.1.mlp.up_proj.weight"]}
    if isinstance(tree, dict) and tree and "layers" not in tree:
        tree = good | tree
    with pytest.raises(ValueError, match=message):
        mpjax.update(lm, tree)
    assert lm.version == 0
    for one, other in zip(leaves(lm), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_generate_tokens_is_not_traced_again(pair):
    load, trainer, _, expected = pair
    lm, tokens = load(), jnp.asarray([[5, 6, 7]])

    traces = []

    @jax.jit
    def draw(model):
        traces.append(model)
        return generate_tokens(model, tokens, jnp.asarray([3]), max_new_tokens=4).tokens

    draw(lm.model)
    old = leaves(lm)
    for _ in range(3):
        mpjax.update(lm, nnx.state(trainer.model))
        found = draw(lm.model)
    assert len(traces) == 1
    assert found.tolist() == draw(expected.model).tolist()
    assert any((a != b).any() for a, b in zip(leaves(lm), old, strict=True))


def test_the_old_memory_is_used_again(pair):
    lm = pair[0]()
    old = lm.model.layers[0].mlp.down.kernel.get_value().words
    mpjax.update(lm, nnx.state(pair[1].model))
    assert old.is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(pair[1].model)))
