"""Random traces: adapters come and go while requests run, and each gets what it gets alone."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.adapters.collection import Adapters
from mpjax.checkpoint.adapters.folder import read_adapter
from tests.mpjax.checkpoint.adapters.write_adapter import write_adapter
from tests.mpjax.conftest import TINY
from tests.mpjax.engine.conftest import is_clean, make_engine

pytestmark = pytest.mark.usefixtures("exact_products")

NAMES, CONTENTS = ("x", "y"), range(3)
PROMPTS = [[1 + i * i % 29 for i in range(length)] for length in (40, 70)]
OPTIONS = {"max_new_tokens": 5, "sampling": {"stop_ids": ()}}
SUBMIT = st.tuples(st.just("submit"), st.sampled_from([None, *NAMES]), st.sampled_from([0, 1]))
OPERATIONS = st.one_of(
    *[SUBMIT] * 3,
    st.tuples(st.just("load"), st.sampled_from(NAMES), st.sampled_from(CONTENTS)),
    st.tuples(st.just("unload"), st.sampled_from(NAMES), st.just(0)),
    st.tuples(st.just("cancel"), st.just(None), st.just(0)),
    st.tuples(st.just("step"), st.just(None), st.just(0)),
)

# Each trace begins with two adapters, and a request whose adapter goes before it has ended.
# The same prompt comes with another adapter and with none, whose pages are not those of the first.
BEGIN = [("load", "x", 0), ("load", "y", 1), ("submit", "x", 1), ("step", None, 0)]
BEGIN += [("submit", "y", 1), ("submit", None, 1), ("unload", "x", 0), ("load", "x", 2)]


@pytest.fixture(scope="module")
def lm(tiny):
    lm = dataclasses.replace(tiny, adapters=Adapters())
    lm.reserve_adapters(16, 8)
    return lm


@pytest.fixture(scope="module")
def contents(lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    made = [write_adapter(folder / str(seed), TINY, seed, rank=3 + seed) for seed in CONTENTS]
    return [read_adapter(each, lm.model) for each in made]


@pytest.fixture(scope="module")
def engine(lm):
    with make_engine(lm) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(lm, contents):
    """The tokens of each prompt with each content, and with None, each in an engine of its own."""
    found = {}
    for content in (None, *CONTENTS):
        own = dataclasses.replace(lm, adapters=Adapters())
        own.reserve_adapters(16, 8)
        if content is not None:
            own.add_adapter("alone", contents[content])
        name = None if content is None else "alone"
        for index, prompt in enumerate(PROMPTS):
            with make_engine(own, share_prefixes=False) as fresh:
                handle = fresh.submit(prompt, adapter=name, **OPTIONS)
                found[content, index] = handle.result().tokens
    assert len({tuple(row) for row in found.values()}) == len(found)
    return found


def ask(engine, number, name, loaded):
    """The handle of a request, or None where the name is refused."""
    if name is None or name in loaded:
        return engine.submit(PROMPTS[number], adapter=name, **OPTIONS)
    with pytest.raises(ValueError, match="there is no adapter"):
        engine.submit(PROMPTS[number], adapter=name, **OPTIONS)
    return None


@settings(max_examples=25)
@given(st.lists(OPERATIONS, min_size=6, max_size=25))
def test_each_request_gets_what_it_gets_alone(lm, contents, engine, alone, trace):
    loaded: dict[str, int] = {}
    asked = []
    for kind, name, number in [*BEGIN, *trace]:
        if kind == "submit":
            if (handle := ask(engine, number, name, loaded)) is not None:
                asked.append((handle, alone[loaded.get(name), number]))
        elif kind == "load":
            lm.add_adapter(name, contents[number], replace=name in loaded)
            loaded[name] = number
        elif kind == "unload" and loaded.pop(name, None) is not None:
            lm.remove_adapter(name)
        elif kind == "cancel" and asked:
            asked.pop()[0].cancel()
        else:
            engine.step()
    for handle, expected in asked:
        assert handle.result().tokens == expected
    for name in loaded:
        lm.remove_adapter(name)
    for _ in engine:
        pass
    assert is_clean(engine)
    assert not lm.adapters._held


def test_traces_compile_nothing_new(lm, engine):
    """All of them run the programs of one structure."""
    assert {len(stack.arrays[0]) for stack in lm.adapters.stacks.values()} == {16}
    with_adapters = {name[-1] for name in engine._runner.programs.used if len(name) > 4}
    assert len(with_adapters - {None}) == 1
