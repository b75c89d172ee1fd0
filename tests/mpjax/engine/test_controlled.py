"""Logits processors: the same tokens from all entry points, and no cost for rows without any."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.engine.calls import count_programs
from mpjax.sampling.rules import NoRepeat, Suppress, Typical
from tests.mpjax.engine.conftest import Knowing, make_engine

pytestmark = pytest.mark.usefixtures("exact_products")

NEW = 8
PROMPTS = [[3, 5, 3, 9, 5, 7], [11, 2, 11, 2]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dislike(mpjax.Processor):
    """Takes `strength` from the logits of a row's last three tokens, which it remembers."""

    strength: Any

    def create(self, vocabulary):
        return jnp.full(3, vocabulary, jnp.int32)

    def read(self, memory, tokens, count):
        return tokens[jnp.maximum(count - 3 + jnp.arange(3), 0)]

    def __call__(self, logits, memory, number):
        return logits.at[memory].add(-self.strength, mode="drop")

    def advance(self, memory, token, is_new):
        return jnp.where(is_new, jnp.append(memory[1:], token), memory)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SecondBest(mpjax.Processor):
    """Draws the token of rank `rank`, whatever the key."""

    rank: Any
    draws = True

    def draw(self, logits, key):
        return jnp.argsort(-logits)[self.rank]


EVERYTHING = {
    "temperature": 0.3,
    "top_k": 40,
    "repetition_penalty": 1.4,
    "presence_penalty": 0.7,
    "frequency_penalty": -0.3,
    "logit_bias": {5: 9.0, 9: -3.0},
    "bad_words": [[7, 3]],
    "rules": (Typical(0.6),),
    "stop_ids": (),
}
CASES = [
    ({"frequency_penalty": 2.0, "stop_ids": ()}, ()),
    (EVERYTHING, (Dislike(np.float32(5)),)),
    ({"rules": (NoRepeat(1), Suppress((5, 9), only_first=True)), "stop_ids": ()}, ()),
    ({"temperature": 1.0, "allowed_ids": list(range(30)), "stop_ids": ()}, (SecondBest(1),)),
]


def of_tokens(tiny, sampling, processors, **options):
    tokens = np.zeros((2, 6), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    run = jax.jit(
        lambda model, *arrays: mpjax.generate_tokens(
            model, *arrays, max_new_tokens=NEW, sampling=sampling, processors=processors, **options
        )
    )
    return np.asarray(run(tiny.for_device, tokens, np.array([6, 4])).tokens).tolist()


@pytest.mark.parametrize(("sampling", "processors"), CASES)
def test_all_entry_points_give_the_same_tokens(sampling, processors, tiny):
    """The last requests have pages in common with the first, and no processors beside theirs."""
    expected = of_tokens(tiny, sampling, processors)
    assert expected != of_tokens(tiny, {"stop_ids": (), **_kept(sampling)}, ())
    options = {"max_new_tokens": NEW, "sampling": sampling}
    assert mpjax.generate(tiny, PROMPTS, processors=processors, **options).tokens == expected
    prototypes = jax.tree.map(np.zeros_like, (*sampling.get("rules", ()), *processors))
    with make_engine(tiny, processors=prototypes, page_size=16) as engine:
        handles = []
        for _ in range(2):
            for seed, prompt in enumerate(PROMPTS):
                asked = options | {"seed": seed, "processors": processors}
                handles.append(engine.submit(prompt, **asked))
                handles.append(engine.submit(prompt, max_new_tokens=NEW, seed=seed))
        found = [handle.result().tokens for handle in handles]
        assert engine.generate(PROMPTS, processors=processors, **options).tokens == expected
    assert found[0::2] == expected * 2
    assert found[1::2] == mpjax.generate(tiny, PROMPTS, max_new_tokens=NEW).tokens * 2


def _kept(sampling):
    return {name: sampling[name] for name in ("temperature", "top_k") if name in sampling}


@pytest.mark.parametrize(("sampling", "processors"), CASES)
def test_speculation_changes_no_token(sampling, processors, tiny):
    expected = of_tokens(tiny, sampling, processors)
    texts = [prompt + said for prompt, said in zip(PROMPTS, expected, strict=True)]
    options = {"max_new_tokens": NEW, "sampling": sampling, "processors": processors}
    found = mpjax.generate(tiny, PROMPTS, speculate=Knowing.of(texts), **options)
    assert found.tokens == expected
    assert found.speculation is not None
    assert sum(found.speculation.accepted) > 0
    if any(one.draws for one in processors):  # in the place of the rule for a draft's distributions
        draft = mpjax.Draft(tiny, k=2)
        assert mpjax.generate(tiny, PROMPTS, speculate=draft, **options).tokens == expected


def test_rows_without_processors_pay_nothing(tiny):
    """Their programs neither grow nor are compiled again, and hold no array of the vocabulary."""
    asked = [{"sampling": {"temperature": 1.0}}, {}]
    with make_engine(tiny, processors=(Dislike(np.float32(0)),), share_prefixes=False) as engine:

        def run_plain():
            found = [engine.submit(PROMPTS[0], max_new_tokens=NEW, **one) for one in asked]
            return [handle.result().tokens for handle in found]

        alone, state = run_plain(), engine._runner._state
        assert tiny.model.columns not in {n for x in jax.tree.leaves(state) for n in x.shape}
        before = count_programs()
        controlled = {"sampling": {"frequency_penalty": 1.0}, "max_new_tokens": NEW}
        engine.submit(PROMPTS[1], **controlled).result()
        assert count_programs() > before
        before = count_programs()
        assert run_plain() == alone
        assert count_programs() == before
        assert engine._runner._state.processors == ()


@pytest.mark.parametrize("drafts", [False, True])
def test_a_processor_that_allows_no_token_ends_its_request_alone(drafts, tiny):
    @jax.tree_util.register_static
    class Nothing(mpjax.Processor):
        def __call__(self, logits, memory, number):
            return jnp.where(number < 2, logits, -jnp.inf)

        def __eq__(self, other):
            return isinstance(other, Nothing)

        def __hash__(self):
            return 0

    speculate = mpjax.Draft(tiny, k=2) if drafts else None
    options = {"max_new_tokens": NEW, "sampling": {"temperature": 1.0, "stop_ids": ()}}
    with make_engine(tiny, processors=(Nothing(),), speculate=speculate) as engine:
        bad = engine.submit(PROMPTS[0], processors=(Nothing(),), **options)
        good = engine.submit(PROMPTS[1], **options)
        assert len(good.result().tokens) == NEW
        with pytest.raises(mpjax.errors.NotFiniteError, match="processors allow no token"):
            bad.result()
        assert len(bad.tokens) == 1  # of programs before that one


def test_processors_that_the_engine_does_not_know_are_refused(tiny):
    with make_engine(tiny, processors=(Dislike(np.float32(0)),)) as engine:
        one = Dislike(np.float32(1))
        for wrong in ((one, one), (Dislike(np.zeros(2, np.float32)),), (SecondBest(0),)):
            with pytest.raises(ValueError, match="that the engine has no place for"):
                engine.submit([1], processors=wrong)
        with pytest.raises(ValueError, match=r"expected a tuple of mpjax\.Processor objects"):
            engine.submit([1], processors=[len])


def test_programs_with_processors_are_compiled_ahead(tiny):
    with make_engine(tiny, slots=1, chunk_tokens=16, max_tokens=32, steps=2) as engine:
        engine.compile()
        assert engine._runner._attached == ()  # nobody has asked for any
        before = count_programs()
        options = {"max_new_tokens": 6, "seed": 1}
        penalty = engine.submit([3, 4], sampling={"presence_penalty": 1.0}, **options)
        bound = engine.submit([3, 4], constraint=mpjax.Regex("[ab]{4}"), **options)
        plain = engine.submit([3, 4], **options)
        for handle in (penalty, bound, plain):
            handle.result()
        assert set(bound.text) <= {"a", "b"}
        assert count_programs() == before
