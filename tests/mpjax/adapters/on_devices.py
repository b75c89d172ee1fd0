"""Adapters of models that are divided among two devices, against those on one.

It needs a process of its own with several devices:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.mpjax.adapters.on_devices`
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.adapters.collection import Adapter, Adapters
from mpjax.adapters.sites import Group, base_matrix, find_sites, whole
from mpjax.models import Decoder
from mpjax.models.low_rank import LowRank, attach
from tests.models.sharded_decoders import divide
from tests.models.sharded_families import build

jax.config.update("jax_disable_most_optimizations", True)

# Biases and keys that devices share; experts, of which each device has a part.
FAMILIES = ("Qwen2ForCausalLM", "MixtralForCausalLM")


def change(group: Group, seed: int) -> LowRank:
    """Random changes of a group of maps; with a gain where that is supported."""
    rng, rank = np.random.default_rng(seed), 3
    axes = () if group.experts is None else (group.experts,)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.2, (*axes, *shape)).astype(np.float32)

    has_gain = group.place is not None and group.experts is None
    gain = draw(sum(group.sizes)) if has_gain else None
    ups = [draw(rank, size) for size in group.sizes]
    return LowRank(draw(group.inputs, len(group.sizes) * rank), ups, gain)


def adapter(model: Decoder, seed: int) -> Adapter:
    """A random adapter of all maps and tables."""
    groups = {site.group.path: site.group for each in find_sites(model).values() for site in each}
    return Adapter({path: change(groups[path], seed + i) for i, path in enumerate(sorted(groups))})


def check(architecture: str) -> None:
    """Raises AssertionError where logits or tokens on two devices are others."""
    model = build(architecture)
    adapters = {name: adapter(model, seed) for name, seed in (("a", 1), ("b", 50))}
    rng = np.random.default_rng(0)
    tokens, places = jnp.asarray(rng.integers(3, 50, (3, 8)), jnp.int32), jnp.array([2, 0, 1])
    divided = divide(model, 2)
    for group in {site.group for each in find_sites(model).values() for site in each}:
        if group.experts is None:
            one, two = (base_matrix(whole(each), group) for each in (model, divided))
            np.testing.assert_array_equal(one, two)
    found = []
    for each in (model, divided):
        held = Adapters()
        held.reserve(2, 3)
        held.add(each, {"a": adapters["a"]})
        before = held.stacks
        held.add(each, {"b": adapters["b"]})  # into the stacks that there are
        for one, new in zip(*map(jax.tree.leaves, (before, held.stacks)), strict=True):
            assert (one.shape, one.sharding) == (new.shape, new.sharding)
        adapted = attach(each, held.stacks)
        made = mpjax.generate_tokens(
            adapted,
            tokens,
            jnp.full(3, 8),
            adapters=places,
            max_new_tokens=4,
            sampling={"stop_ids": ()},
        )
        found.append((np.asarray(adapted(tokens, places)), np.asarray(made.tokens)))
    (one, first), (two, second) = found
    np.testing.assert_allclose(two, one, atol=2e-4 * np.abs(one).max())
    np.testing.assert_array_equal(first, second)
    base = np.asarray(model(tokens))
    assert np.abs(one - base)[[0, 2]].max() > 0.1
    np.testing.assert_allclose(one[1], base[1], atol=1e-4)


if __name__ == "__main__":
    for architecture in FAMILIES:
        check(architecture)
    print(f"{len(FAMILIES)} families")
