"""New weights, and memory that is given back, while requests run."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.engine import pending
from mpjax.engine.calls import count_programs
from tests.mpjax.conftest import write_tiny_model
from tests.mpjax.engine.conftest import is_clean, make_engine, require_order

PROMPT = list(range(5, 75))
NEW = 24
HOT = {"temperature": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("managed") / "tiny")


@pytest.fixture(scope="module")
def others(folder):
    """Weights as the tiny model's, of which each map is another layer's noise."""
    model = mpjax.load(folder).model
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda x: jax.device_put(
            np.asarray(rng.standard_normal(x.shape) * 0.1 + (x.ndim < 2), x.dtype),
            jax.NamedSharding(jax.make_mesh((1,), ("data",)), jax.P()),  # as a trainer's may have
        ),
        nnx.state(model),
    )


@pytest.fixture
def engine(folder):
    """An engine of packed weights, whose programs of greedy rows are compiled."""
    with make_engine(mpjax.load(folder, precision="W4A32KV16")) as engine:
        engine.compile(greedy_only=True)
        yield engine


@pytest.fixture(scope="module")
def said(folder, others):
    """What the model says with its own weights, and with the others."""
    lm = mpjax.load(folder, precision="W4A32KV16")
    found = []
    for _ in range(2):
        with make_engine(lm) as engine:
            found.append(engine.submit(PROMPT, max_new_tokens=NEW).result().tokens)
        mpjax.update(lm, others)
    assert found[0] != found[1]
    return found


def begun(engine, steps=4, prompt=PROMPT, **options):
    """A request of which some tokens are known, and others under way."""
    handle = engine.submit(prompt, max_new_tokens=NEW, **options)
    for _ in range(steps):
        engine.step()
    assert 0 < len(handle.tokens) < NEW
    return handle


def test_each_token_has_the_version_that_drew_it(engine, others, said):
    programs = count_programs()
    handle = begun(engine)
    engine.update_weights(others)  # reads what is under way
    own = len(handle.tokens)
    handle.result()
    assert handle.weights == [0] * own + [1] * (NEW - own)
    assert handle.tokens[:own] == said[0][:own]
    again = engine.submit(PROMPT, max_new_tokens=NEW).result()
    assert (again.tokens, again.weights) == (said[1], [1] * NEW)
    assert again.shared_tokens == 0  # of the older weights
    shared = engine.submit(PROMPT, max_new_tokens=NEW).result()
    assert (shared.tokens, shared.shared_tokens) == (said[1], 64)
    assert count_programs() == programs
    assert is_clean(engine)


def test_tokens_that_requests_get_later_have_the_version_that_drew_them(folder, monkeypatch):
    """Where tokens of several steps wait, as where requests get each step's tokens at once."""
    lm, found = mpjax.load(folder), []
    with make_engine(lm, table_states=0, steps=8) as engine:
        for rows in (2, 1):
            monkeypatch.setattr(pending, "MANY_ROWS", rows)
            before = lm.version
            handle = engine.submit(
                PROMPT[:3], max_new_tokens=NEW, constraint=mpjax.Regex("[a-z]{200}")
            )
            for _ in range(7):
                told = engine.step()
            mpjax.update(lm, nnx.state(lm.model))
            found.append([version - before for version in handle.result().weights])
    assert not told  # the tokens wait
    assert found[0] == found[1]
    assert {*found[0]} == {0, 1}


def test_pages_of_requests_that_go_on_are_not_shared(engine, others, said):
    """They hold keys and values of both versions."""
    handle = begun(engine)
    engine.update_weights(others)
    other = engine.submit(PROMPT + handle.tokens, max_new_tokens=2)
    handle.result()
    late = engine.submit(PROMPT + handle.tokens, max_new_tokens=2).result()
    assert other.result().shared_tokens == 0
    assert late.shared_tokens == 64  # of `other`, and not the pages behind
    require_order(engine._runner.planner)


@pytest.mark.parametrize("running", ["reread", "restart", "hold"])
def test_requests_read_again_or_begin_again(running, engine, others, said):
    handle, waiting = begun(engine), engine.submit(PROMPT[:9], max_new_tokens=2)
    own = len(handle.tokens)
    engine.update_weights(others, running=running)
    if running == "hold":
        assert waiting.result().weights == [1, 1]
        with pytest.raises(ValueError, match=r"an engine that holds it: call release"):
            handle.result()
        assert len(handle.tokens) >= own
        engine.release()
    drawn = len(handle.tokens)
    handle.result()
    if running == "restart":
        assert (handle.tokens, handle.weights) == (said[1], [1] * NEW)
        return
    assert handle.weights == [0] * drawn + [1] * (NEW - drawn)
    prompt, left = PROMPT + handle.tokens[:drawn], NEW - drawn
    alone = engine.submit(prompt, max_new_tokens=left).result()
    assert handle.tokens[drawn:] == alone.tokens
    assert is_clean(engine)


def test_pages_of_forgotten_tokens_are_not_found(engine, others):
    """A restarted request publishes a page under the key of its new tokens."""
    prompt = PROMPT[:60]
    handle = begun(engine, prompt=prompt)
    forgotten = handle.tokens[:]
    engine.update_weights(others, running="restart")
    handle.result()
    assert len(forgotten) > 4
    assert forgotten[:4] != handle.tokens[:4]  # which end the page
    shared = [
        engine.submit(prompt + tokens, max_new_tokens=1).result().shared_tokens
        for tokens in (forgotten, handle.tokens)
    ]
    assert shared == [32, 64]


def test_draws_at_random_go_on_by_their_numbers(engine):
    """Held for no new weights, a request draws what it would have drawn."""
    expected = engine.submit(PROMPT, max_new_tokens=NEW, sampling=HOT, seed=5).result().tokens
    handle = begun(engine, sampling=HOT, seed=5)
    engine.hold()
    list(engine)  # the events of what was under way
    assert not engine.has_work
    engine.release()
    assert handle.result().tokens == expected


def test_a_group_stops_at_a_budget_and_goes_on_after_an_update(engine, others):
    """Completions behind the first share its prompt, and each draws by its own seed."""
    options = {"max_new_tokens": NEW, "sampling": HOT}
    alone = [engine.submit(PROMPT, seed=i, **options).result().tokens for i in range(4)]
    engine.update_weights(nnx.state(engine.lm.model))  # whose pages are not those of the prompt
    group = [begun(engine, sampling=HOT, seed=0)]
    group += [engine.submit(PROMPT, seed=i, **options) for i in range(1, 4)]
    while sum(len(handle.tokens) for handle in group) < 2 * NEW:
        engine.step()
    engine.hold()
    list(engine)
    stopped = [len(handle.tokens) for handle in group]
    assert all(count > 0 for count in stopped)
    assert min(stopped) < NEW
    engine.update_weights(others)
    engine.release()
    for handle, expected, count in zip(group, alone, stopped, strict=True):
        handle.result()
        assert handle.tokens[:count] == expected[:count]
        assert handle.weights == [1] * count + [2] * (NEW - count)
    assert len({tuple(tokens) for tokens in alone}) == 4
    assert [handle.shared_tokens for handle in group] == [0, 64, 64, 64]
    assert is_clean(engine)


def test_held_requests_can_be_cancelled_and_closed(folder):
    with make_engine(mpjax.load(folder)) as engine:
        one, two = begun(engine), begun(engine)
        engine.hold()
        one.cancel()
        engine.step()
        assert one.finish_reason == "cancelled"
    assert two.finish_reason == "cancelled"


@pytest.mark.parametrize("compiles", [False, True])
def test_update_alone_reaches_engines_with_their_next_step(compiles, engine, others, said):
    mpjax.update(engine.lm, others, version=5)
    if compiles:
        engine.compile(greedy_only=True)
    handle = engine.submit(PROMPT, max_new_tokens=NEW).result()
    assert (handle.tokens, handle.weights) == (said[1], [5] * NEW)


def test_a_thread_goes_on_through_updates(engine, others):
    """Versions grow along each text, and are those that were there."""
    engine.start()
    new = 4 * NEW  # so that updates come long before the last token
    handles = [engine.submit(PROMPT[i:], max_new_tokens=new) for i in range(6)]
    for version in range(1, 5):
        while sum(len(handle.tokens) for handle in handles) < version * new:
            handles[0].wait(-1)
        engine.update_weights(others, running="reread" if version % 2 else "continue")
    for handle in handles:
        handle.result()
        assert len(handle.weights) == len(handle.tokens) == new
        assert handle.weights == sorted(handle.weights)
    assert len({version for handle in handles for version in handle.weights}) > 2
    assert is_clean(engine)


def test_an_error_in_the_tree_changes_nothing(engine, said):
    handle = begun(engine)
    with pytest.raises(ValueError, match="no place for"):
        engine.update_weights({"model.nothing.weight": np.ones(3)}, running="restart")
    assert handle.result().tokens == said[0]
    assert handle.weights == [0] * NEW


@pytest.mark.parametrize("weights", [False, True])
def test_sleep_gives_memory_back_and_wake_compiles_nothing(weights, engine, said):
    arrays = [x for x in jax.tree.leaves(engine._runner._state) if x.nbytes]
    kernel = engine.lm.model.layers[0].mlp.down.kernel.get_value().words
    handle, programs = begun(engine), count_programs()
    engine.sleep(weights=weights)
    engine.sleep()  # nothing happens
    assert engine.is_asleep
    assert "_state" not in engine._runner.__dict__
    del arrays, kernel
    with pytest.raises(ValueError, match="sleeps: call wake"):
        engine.step()
    with pytest.raises(ValueError, match="sleeps: call wake"):
        handle.result()
    with pytest.raises(ValueError, match="sleeps: call wake"):
        engine.compile()
    late = engine.submit(PROMPT, max_new_tokens=NEW)
    found = engine.lm.model.layers[0].mlp.down.kernel.get_value().words
    assert found.sharding.memory_kind == ("pinned_host" if weights else "device")
    if jax.default_backend() == "cpu":  # decodes the weights, in programs of its own
        engine.wake()
        engine.sleep(weights=weights)
    compilations: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compilations.append(name)
    )
    engine.wake()
    assert not any("backend_compile" in name for name in compilations)
    assert handle.result().tokens == late.result().tokens == said[0]
    assert count_programs() == programs
    assert is_clean(engine)


def test_weights_are_updated_while_the_cache_is_away(engine, others, said):
    engine.sleep()
    engine.update_weights(others)
    engine.wake()
    assert engine.submit(PROMPT, max_new_tokens=NEW).result().tokens == said[1]
    engine.sleep(weights=True)
    with pytest.raises(ValueError, match="weights are on the host: call the engine's wake"):
        engine.update_weights(others)


@pytest.mark.parametrize("running", ["restart", "hold"])
def test_requests_of_an_engine_that_sleeps_begin_again_or_are_held(running, engine, others, said):
    handle = begun(engine)
    engine.sleep()
    own = len(handle.tokens)
    engine.update_weights(others, running=running)
    engine.wake()
    if running == "hold":
        with pytest.raises(ValueError, match=r"an engine that holds it: call release"):
            handle.result()
        engine.release()
        assert handle.result().weights == [0] * own + [1] * (NEW - own)
    else:
        assert handle.result().weights == [1] * NEW
        assert handle.tokens == said[1]
    assert is_clean(engine)


def test_memory_stays_as_it_is_over_many_updates(engine, others):
    def run(times):
        for _ in range(times):
            engine.update_weights(others)
            engine.submit(PROMPT, max_new_tokens=2).result()
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    few = run(3)
    assert run(200) <= few  # arrays of earlier tests may be freed meanwhile


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"running": "stop"}, "running is 'stop': expected continue, reread, restart, hold"),
        ({"scales": "old"}, "scales is 'old': expected 'new' or 'keep'"),
        ({"version": 0}, "version is 0: expected an integer above 0"),
    ],
)
def test_arguments(arguments, message, engine, others):
    with pytest.raises(ValueError, match=message):
        engine.update_weights(others, **arguments)
    assert engine.lm.version == 0
