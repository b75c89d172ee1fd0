from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import early
from mpjax.bench import measure
from mpjax.kernels import device, gated, matmul_terms
from mpjax.kernels.gemm.plans import why_unsound_warpgroups
from mpjax.kernels.gemm.shapes import GemmShape

pytestmark = pytest.mark.any_version

HAS_EARLY_LAUNCHES = jax.__version_info__ >= (0, 11, 2)  # JAX 0.10 has only the instruction


@pytest.mark.parametrize("is_poisoned", [False, True])
def test_slow_sum(is_poisoned):
    terms = jax.random.normal(jax.random.key(0), (2, 2, early.HIDDEN + 64))
    found = early.slow_sum(terms, 9, is_poisoned=is_poisoned, interpret=True)
    expected = terms.sum(0)[:, : early.HIDDEN].astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_fetch_reads_every_word():
    words = jnp.arange(3 * 8192 * early.PROGRAMS, dtype=jnp.uint16).reshape(3, -1)
    before = jnp.arange(early.PROGRAMS, dtype=jnp.int32)
    found = early.fetch(words, jnp.zeros((2, 2)), before, 100, interpret=True)
    tiles = np.asarray(words, np.int64).reshape(3, early.PROGRAMS, -1)
    np.testing.assert_array_equal(np.asarray(found), tiles.sum((0, 2)) + np.asarray(before) + 1)


def test_configurations_fit_an_h100():
    for way in early.WAYS:
        for name, config in (way.configs or {}).items():
            format = early.HEAD_FORMAT if "head" in name else early.FORMAT
            assert why_unsound_warpgroups(config, format) is None


def test_a_chain_is_launched_early_where_the_way_says_so(lower_for_cuda):
    weights = jax.eval_shape(lambda: early.layers_of(1))
    terms = jax.ShapeDtypeStruct((1, 1, early.HIDDEN), jnp.bfloat16)
    fetched = jax.ShapeDtypeStruct((early.PROGRAMS,), jnp.int32)
    state = early.State(terms, jax.ShapeDtypeStruct(terms.shape[1:], terms.dtype), fetched)
    names = {"triton graph"} | ({"early stream"} if HAS_EARLY_LAUNCHES else set())
    for way in (way for way in early.WAYS if way.name in names):
        chain = functools.partial(early._chain, functools.partial(early.layer, way, 1))
        with device.described_as("NVIDIA H200"):
            text = lower_for_cuda(chain, weights, state)
        assert text.count("uses_pdl") == (4 if "early" in way.name else 0)


def test_a_gpu_is_needed(tmp_path):
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    with pytest.raises(Exception, match="GPU"):
        early.main([str(tmp_path / "out.json")])


def test_every_way_is_measured_and_checked(monkeypatch):
    """With small matrices, whose products are XLA's: in two terms in Triton's place."""

    def product(way, name, x, weight):
        [found] = matmul_terms(x, weight)
        if way.configs is not None:
            return found[None]
        return jnp.stack([found.astype(jnp.float32), jnp.zeros(found.shape)])

    small = {"qkv": (256, 320), "output": (256, 256), "gate_up": (256, 512), "down": (256, 256)}
    shapes = [GemmShape(f"qwen3-8b.{name}", *shape) for name, shape in small.items()]
    monkeypatch.setattr(early, "HIDDEN", 256)
    monkeypatch.setattr(early, "QWEN3_8B", shapes)
    monkeypatch.setattr(early, "product", product)
    monkeypatch.setattr(
        early, "gated", lambda *a, implementation, **k: gated(*a, **k, implementation="reference")
    )
    for name in ("slow_sum", "fetch"):
        interpreted = functools.partial(getattr(early, name), interpret=True)
        monkeypatch.setattr(early, name, interpreted)
    monkeypatch.setattr(early, "WAYS", (early.WAYS[0], early.WAYS[2]))
    monkeypatch.setattr(measure, "kernel_microseconds", lambda *_: {"kernel": 4.0})
    for each, count in ((early.ATTENTION, "ATTENTION"), (early.CALLS, "CALLS")):
        monkeypatch.setattr(early, count, min(each, 2))
    monkeypatch.setattr(early, "DELAY", 3)
    rows = list(early.run("layer", early.layers_of(1), 1))
    assert [row["way"] for row in rows] == ["triton graph", "early stream"]
    assert all(row["is_right"] for row in rows)
    assert rows[1]["stress"] == {"calls": early.STRESS, "different_bits": 0}
    assert rows[0]["sum_of_kernels_microseconds"] == 4.0
    assert rows[0]["microseconds"] > 0


@pytest.mark.gpu
def test_early_launches_wait_for_slow_kernels():
    if not HAS_EARLY_LAUNCHES or device.compute_capability() != 9.0:
        pytest.skip("there are no early launches")
    [way] = [way for way in early.WAYS if way.name == "early stream"]
    weights = early.layers_of(1)
    terms = jax.random.normal(jax.random.key(2), (1, 1, early.HIDDEN), jnp.bfloat16)
    state = early.State(terms, terms[0], jnp.zeros((early.PROGRAMS,), jnp.int32))
    assert early.stress("layer", way, weights, state)["different_bits"] == 0
