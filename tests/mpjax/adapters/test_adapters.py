"""Adapters that come and go: their places, programs, pages, and rows beside others."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.adapters.collection import Adapters
from mpjax.checkpoint.adapters.folder import read_adapter
from mpjax.engine.calls import count_programs
from mpjax.kernels import KVFormat
from tests.eight_devices import run
from tests.mpjax.checkpoint.adapters.write_adapter import write_adapter
from tests.mpjax.conftest import TINY
from tests.mpjax.engine.conftest import is_clean, make_engine

pytestmark = pytest.mark.usefixtures("exact_products")
STOP = {"stop_ids": ()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": write_adapter(folder / "a", TINY, 1, rank=4),
        "b": write_adapter(folder / "b", TINY, 2, rank=3),
        "c": write_adapter(folder / "c", TINY, 3, rank=8),
        "wide": write_adapter(folder / "wide", TINY, 4, rank=12, leaves=("q_proj", "o_proj")),
    }


@pytest.fixture
def lm(tiny, folders):
    """The tiny model with the adapters a and b, in stacks of two places."""
    lm = dataclasses.replace(tiny, adapters=Adapters())
    lm.adapters.add(lm.model, {name: read_adapter(folders[name], lm.model) for name in "ab"})
    return lm


def tokens_of(lm, prompt, adapter=None, **options):
    made = mpjax.generate(lm, [prompt], max_new_tokens=8, sampling=STOP, adapter=adapter, **options)
    return made.tokens[0]


PROMPT = [1 + i * i % 29 for i in range(70)]


@pytest.mark.parametrize("precision", ["WNF4A32KV8", "W8A8KV8"])
def test_a_mixed_batch_is_each_row_alone(precision, tiny_folder, folders):
    paths = {name: folders[name] for name in "ab"}
    dtype = "bfloat16" if precision == "W8A8KV8" else None
    lm = mpjax.load(tiny_folder, precision=precision, dtype=dtype, adapters=paths)
    engine = make_engine(lm, str(lm.kv_format), page_size=lm.page_size)
    rows = [(PROMPT, "a"), (PROMPT, None), (PROMPT, "b"), (PROMPT[:9], "a")]

    def submit(prompt, name):
        return engine.submit(prompt, max_new_tokens=6, sampling=STOP, adapter=name)

    mixed = [handle.result().tokens for handle in [submit(*row) for row in rows]]
    assert mixed == [submit(*row).result().tokens for row in rows]
    assert len({tuple(row) for row in mixed}) == 4
    engine.close()


def test_generate_tokens_takes_numbers(lm):
    tokens, lengths = jnp.array([PROMPT] * 3), jnp.full(3, len(PROMPT))
    places = jnp.array([lm.adapters[name].place for name in "ab"] + [0])
    options = {"max_new_tokens": 8, "sampling": STOP}
    found = jax.jit(
        lambda model, places: mpjax.generate_tokens(
            model, tokens, lengths, adapters=places, **options
        )
    )(lm.adapted, places)
    assert found.tokens.tolist() == [tokens_of(lm, PROMPT, name) for name in ("a", "b", None)]
    with pytest.raises(ValueError, match="adapters must be from 0, for none, to 2"):
        mpjax.generate_tokens(lm.adapted, tokens, lengths, adapters=[0, 1, 3], **options)
    with pytest.raises(ValueError, match=r"expected integers of shape \(3,\)"):
        mpjax.generate_tokens(lm.adapted, tokens, lengths, adapters=[0, 1], **options)
    with pytest.raises(ValueError, match="has no adapters to choose from: take lm"):
        mpjax.generate_tokens(lm.model, tokens, lengths, adapters=[0, 0, 0], **options)


def lowered(lm, adapter):
    """The text of the first program that an engine runs for a row."""
    engine = make_engine(lm)
    engine.submit(PROMPT[:5], max_new_tokens=4, sampling=STOP, adapter=adapter)
    texts, runner = [], engine._runner

    def run(call, state):
        args = *call.modules, state, *call.arguments
        texts.append(call.run.lower(*args, **call.how).as_text())
        return real(call, state)

    real, runner.programs._run = runner.programs._run, run
    engine.step()
    engine.close()
    return texts[0]


def test_rows_without_an_adapter_run_the_programs_of_a_model_without(tiny, lm):
    assert lowered(lm, None) == lowered(tiny, None)
    assert lowered(lm, "a") != lowered(tiny, None)


def test_adapters_come_and_go_without_a_program(lm, folders):
    """An adapter that fits is written into the stacks; one that does not makes larger stacks."""
    first = tokens_of(lm, PROMPT, "a"), tokens_of(lm, PROMPT, "b")
    count = count_programs()
    lm.remove_adapter("a")
    lm.add_adapter("c", folders["c"])
    third = tokens_of(lm, PROMPT, "c")
    lm.add_adapter("b", folders["a"], replace=True)
    assert tokens_of(lm, PROMPT, "b") == first[0]
    assert count_programs() == count
    assert len({tuple(row) for row in (*first, third)}) == 3
    lm.add_adapter("wide", folders["wide"])
    assert tokens_of(lm, PROMPT, "c") == third
    assert count_programs() > count
    alone = dataclasses.replace(lm, adapters=Adapters())
    alone.add_adapter("wide", folders["wide"])
    assert tokens_of(alone, PROMPT, "wide") == tokens_of(lm, PROMPT, "wide")


def test_reserved_places(lm, folders):
    lm = dataclasses.replace(lm, adapters=Adapters())
    lm.reserve_adapters(3, 16)
    lm.add_adapter("a", folders["a"])
    assert {len(stack.arrays[0]) for stack in lm.adapters.stacks.values()} == {3}
    assert {stack.rank for stack in lm.adapters.stacks.values()} == {16}


def test_a_place_is_free_when_its_last_request_has_ended(lm, folders):
    """A request goes on with an adapter that is removed, also when others come."""
    expected = tokens_of(lm, PROMPT, "a"), tokens_of(lm, PROMPT, "b")
    engine = make_engine(lm)
    handle = engine.submit(PROMPT, max_new_tokens=8, sampling=STOP, adapter="a")
    engine.step()
    lm.remove_adapter("a")
    with pytest.raises(ValueError, match="there is no adapter 'a': the model has b"):
        engine.submit(PROMPT, adapter="a")
    lm.add_adapter("a", folders["c"])
    assert lm.adapters["a"].place == 3
    other = engine.submit(PROMPT, max_new_tokens=8, sampling=STOP, adapter="b")
    assert (handle.result().tokens, other.result().tokens) == expected
    lm.add_adapter("d", folders["a"])
    assert lm.adapters["d"].place == 1
    cancelled = engine.submit(PROMPT, max_new_tokens=8, adapter="d")
    engine.step()
    cancelled.cancel()
    engine.step()
    assert lm.adapters["d"].users == 0
    engine.close()


def test_an_adapter_that_can_t_be_added_changes_nothing(lm, folders, monkeypatch):
    before = [tokens_of(lm, PROMPT, name) for name in ("a", "b")]
    put, seen = Adapters._put, []

    def refuse(adapters, *_):
        seen.append(adapters.names)
        raise ValueError("no room")

    monkeypatch.setattr(Adapters, "_put", refuse)
    for name, options in (("a", {"replace": True}), ("new", {})):
        with pytest.raises(ValueError, match="no room"):
            lm.add_adapter(name, folders["c"], **options)
    monkeypatch.setattr(Adapters, "_put", put)
    assert seen == [["a", "b"]] * 2 == [lm.adapters.names] * 2
    assert [tokens_of(lm, PROMPT, name) for name in ("a", "b")] == before
    lm.add_adapter("a", folders["c"], replace=True)
    assert (lm.adapters["a"].place, *lm.adapters._held) == (1, 2, 1)
    assert tokens_of(lm, PROMPT, "a") not in before


def test_pages_are_shared_by_rows_of_one_adapter(lm, folders):
    engine = make_engine(lm)

    def shared(adapter):
        handle = engine.submit(PROMPT, max_new_tokens=4, sampling=STOP, adapter=adapter)
        tokens = handle.result().tokens
        assert tokens == tokens_of(lm, PROMPT, adapter)[:4]
        return handle.shared_tokens

    assert [shared(name) for name in ("a", "b", None)] == [0, 0, 0]
    assert [shared(name) for name in ("a", "b", None)] == [64, 64, 64]
    lm.add_adapter("a", folders["c"], replace=True)
    assert shared("a") == 0
    assert is_clean(engine)
    engine.close()


@pytest.mark.parametrize("speculate", [mpjax.Ngram(k=3, n=2), "draft"])
def test_speculation(speculate, lm, tiny):
    proposer = mpjax.Draft(tiny, k=2) if speculate == "draft" else speculate
    names = ["a", None, "b"]
    made = mpjax.generate(
        lm, [PROMPT] * 3, max_new_tokens=8, sampling=STOP, adapter=names, speculate=proposer
    )
    assert made.tokens == [tokens_of(lm, PROMPT, name) for name in names]


def test_evaluation(lm):
    texts = ["def f(x):\n    return x + 1\n" * 4]
    found = {name: mpjax.evaluate(lm, texts, adapter=name).perplexity for name in ("a", None)}
    adapted = dataclasses.replace(lm.with_adapter("a"), kv_format=KVFormat())
    np.testing.assert_allclose(found["a"], mpjax.evaluate(adapted, texts).perplexity, rtol=1e-5)
    assert found["a"] != found[None]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("x", "there is no adapter 'x': the model has a, b"),
        (["a"], "expected the name of an adapter, or a list of 2, one for each prompt"),
        (["a", 1], "there is no adapter 1: the model has a, b"),
        (1, "adapter is 1: expected the name of an adapter"),
    ],
)
def test_names_are_checked(names, said, lm):
    with pytest.raises(ValueError, match=said):
        mpjax.generate(lm, [PROMPT] * 2, adapter=names)


def test_a_name_is_taken_once(lm, folders):
    with pytest.raises(ValueError, match="there is an adapter 'a' already: remove it first"):
        lm.add_adapter("a", folders["b"])
    with pytest.raises(ValueError, match="an adapter's name is '': expected a text"):
        lm.add_adapter("", folders["b"])
    with pytest.raises(ValueError, match="there is no adapter 'x': the model has a, b"):
        lm.remove_adapter("x")
    with pytest.raises(ValueError, match="adapters is 'a': expected folders by their names"):
        mpjax.load(mpjax.bundled_model(), adapters="a")


def test_two_devices_have_the_logits_of_one():
    assert run("tests.mpjax.adapters.on_devices") == "2 families\n"
