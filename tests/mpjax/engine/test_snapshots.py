"""Requests that share beginnings in a model whose layers keep a state of each sequence."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.engine import memory
from mpjax.engine.sizes import Sizes
from mpjax.engine.snapshots import SnapshotPool
from mpjax.engine.state import cache_bytes, snapshot_bytes
from mpjax.kernels import KVFormat
from tests.models.small import hybrid_model
from tests.mpjax.engine.conftest import is_clean, make_engine, require_order, resize
from tests.mpjax.odd_models import with_damaged_token

pytestmark = pytest.mark.usefixtures("exact_products")

NEW, PAGE = 24, 32
COMMON = [1 + i * i % 29 for i in range(70)]
TEXTS = [COMMON + [2 + (n + i) * (i + 3) % 31 for i in range(40)] for n in range(3)]
GREEDY = {"max_new_tokens": NEW, "sampling": {"stop_ids": ()}}


@pytest.fixture(scope="module")
def lm() -> mpjax.LanguageModel:
    return mpjax.LanguageModel(hybrid_model(), None, KVFormat(16), Path(), PAGE)


@pytest.fixture(scope="module")
def alone(lm) -> list[list[int]]:
    with make_engine(lm, share_prefixes=False) as engine:
        return [engine.submit(text, **GREEDY).result().tokens for text in TEXTS]


def said(engine, text):
    """The tokens of a request that runs by itself, and how many it has shared."""
    handle = engine.submit(text, **GREEDY)
    while engine.has_work:
        engine.step()
        require_order(engine._runner.planner)
    return handle.tokens, handle.shared_tokens


def test_a_pool_gives_places_once_and_keeps_the_last_used():
    pool = SnapshotPool(range(4, 6))
    first, second = pool.take(), pool.take()
    assert {first, second} == {4, 5}
    assert pool.take() is None
    pool.publish(first, b"a")
    pool.publish(second, b"b")
    assert pool.use(b"a") == first
    assert pool.take() == second
    assert pool.has(b"a")
    assert not pool.has(b"b")
    pool.publish(second, b"a")  # which has a place already
    assert pool.kept == 1
    assert pool.take() == second
    pool.drop(second)
    assert pool.take() == second


def test_prefixes_are_shared_where_states_were_kept(lm, alone):
    """At the last page of a prompt at first, and where texts part from the second of them on."""
    with make_engine(lm) as engine:
        shared = []
        for number in (0, 0, 1, 2):
            tokens, count = said(engine, TEXTS[number])
            assert tokens == alone[number]
            shared.append(count)
        assert shared == [0, 3 * PAGE, 0, 2 * PAGE]
        numbers = engine.statistics()
        assert numbers["kept_snapshots"] == 4  # of three texts, and of what they begin with
        assert numbers["snapshots"] == 4 * engine.slots
        assert is_clean(engine)


def test_compilation_leaves_snapshots_as_they_are(lm):
    with make_engine(lm, slots=1, chunk_tokens=PAGE, steps=1) as engine:
        engine.submit(COMMON[: PAGE + 1], max_new_tokens=1).result()
        runner = engine._runner
        [place] = runner.planner.groups.snapshots._idle.values()
        assert place == engine.slots  # the first place behind the slots
        kept = [np.asarray(array[place]) for array in runner._state.cache.layers[0]]
        engine.compile(greedy_only=True)
        found = [np.asarray(array[place]) for array in runner._state.cache.layers[0]]
        assert all(array.any() for array in kept)
        assert all(map(np.array_equal, found, kept))


@pytest.mark.parametrize("snapshots", [1, 2])
def test_snapshots_are_evicted_at_any_moment(lm, alone, snapshots):
    """Among rows that run together, are preempted, cancelled, and read again."""
    with make_engine(lm, chunk_tokens=48) as engine:
        resize(engine, snapshots=snapshots, pages=10)
        handles, order = [], np.random.default_rng(snapshots).integers(0, 3, 14)
        for step, number in enumerate(order):
            handles.append((number, engine.submit(TEXTS[number], **GREEDY)))
            if step % 5 == 2:
                handles.pop()[1].cancel()
            for _ in range(step % 4):
                engine.step()
                require_order(engine._runner.planner)
        for number, handle in handles:
            assert handle.result().tokens == alone[number]
        numbers = engine.statistics()
        assert numbers["preemptions"] > 0
        assert numbers["shared_tokens"] > 0
        assert numbers["kept_snapshots"] <= snapshots
        pool = engine._runner.planner.groups.snapshots
        while engine.has_work:
            engine.step()
        assert len(pool._free) + pool.kept == snapshots


def test_states_that_are_not_finite_are_not_kept(lm, alone):
    damaged = with_damaged_token(lm, 49)
    with make_engine(damaged) as engine:
        bad = [*TEXTS[0][:80], 49, *TEXTS[0][80:]]
        assert engine.submit(bad, **GREEDY).finish_reason is None
        while engine.has_work:
            engine.step()
        assert engine.statistics()["kept_snapshots"] <= 1
        tokens, shared = said(engine, TEXTS[0])
        assert tokens == alone[0]
        assert shared <= 2 * PAGE
        runner = engine._runner
        held = runner.planner.groups.snapshots._idle.values()
        for layer in runner._state.cache.layers[0], runner._state.cache.layers[2]:
            for array in layer:
                assert jnp.isfinite(array[np.array([*held])]).all()


def test_an_engine_tells_the_bytes_of_a_state_and_has_as_many_as_fit(lm):
    config = lm.config
    shapes = [shape for spec in (config.states[0], config.states[2]) for shape in spec.shapes]
    shapes += config.states[1].states[1].shapes
    nbytes = 4 * sum(int(np.prod(shape)) for shape in shapes)
    [page], _ = cache_bytes(lm, 1)
    assert snapshot_bytes(lm) == nbytes
    sizes = Sizes(4, (), PAGE, table_states=0)
    room = memory._state_bytes(lm, sizes, 0)[1] + 10 * page
    with make_engine(lm, cache_memory=room, table_states=0) as engine:
        assert engine.state_bytes == nbytes
        assert 0 < engine.statistics()["snapshots"] < 16
    with make_engine(lm, share_prefixes=False) as engine:
        assert engine.statistics()["snapshots"] == 0
