"""Captures and changes of activations by request, against a forward pass over each whole text."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.engine.calls import count_programs
from mpjax.models import Addition, Replacement, Steer
from tests.mpjax.engine.conftest import damage_what_rows_leave, make_engine, resize

pytestmark = pytest.mark.usefixtures("exact_products")

CAPTURE = {"residual": [0, 1], "mlp": [0]}
NEW = 32
LONG = [3 + i * i % 40 for i in range(70)]  # of two chunks and three pages
PROMPTS = [[3, 5, 9, 9], LONG, LONG[:40], [8, 2]]


def vector(lm, number):
    return 3 * jnp.cos(number + jnp.arange(lm.config.hidden_size, dtype=jnp.float32))


def steers_of(lm):
    """Of each prompt; two are of one kind."""
    first, third = (Addition(vector(lm, n), layers=(0,), begin=n) for n in (1, 3))
    return [first, (), third, (third, Replacement(vector(lm, 5), (0,), "mlp", begin=3))]


@jax.jit
def inspect(model, text, steer):
    return model.inspect(text, capture=CAPTURE, steer=steer)


def require_inspected(lm, steer, prompt, tokens, captured):
    """Raises unless greedy tokens and captures are those of one pass over the text."""
    text = prompt + tokens
    padded = jnp.asarray([text + [0] * (112 - len(text))])
    logits, expected = inspect(lm.model, padded, steer)
    assert logits[0, len(prompt) - 1 : len(text) - 1].argmax(-1).tolist() == tokens
    for point, layers in expected.items():
        for layer, values in layers.items():
            found = captured[point][layer]
            assert len(found) == len(text) - 1  # the last token is drawn, and not read
            assert found.dtype == lm.config.dtype
            wide = [np.asarray(x, np.float32) for x in (found, values[0, : len(text) - 1])]
            np.testing.assert_allclose(*wide, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("speculate", [None, mpjax.Ngram(k=3, n=1)], ids=["plain", "speculation"])
def test_requests_are_captured_and_steered_each_by_its_own(speculate, tiny):
    """Pages don't suffice for all rows, so some read their tokens again."""
    steers = steers_of(tiny)
    with make_engine(tiny, speculate=speculate, table_states=0) as engine:
        free = [engine.submit(p, max_new_tokens=NEW, sampling={"stop_ids": ()}) for p in PROMPTS]
        assert [*engine]
        free = [handle.tokens for handle in free]
        resize(engine, pages=7)
        preempted, programs = damage_what_rows_leave(engine), engine.statistics()["programs"]
        options = {"max_new_tokens": NEW, "sampling": {"stop_ids": ()}}
        handles = [
            engine.submit(prompt, capture=CAPTURE, steer=steer, **options)
            for prompt, steer in zip(PROMPTS, steers, strict=True)
        ]
        plain = [engine.submit(prompt, **options) for prompt in PROMPTS]
        assert [*engine]
        assert preempted
        assert [handle.tokens for handle in plain] == free
        assert all(handle.captured is None for handle in plain)
        for handle, steer in zip(handles, steers, strict=True):
            require_inspected(tiny, steer, handle.prompt, handle.tokens, handle.captured)
        assert handles[0].tokens != free[0]
        # Other requests run the programs that they ran before.
        before, used = count_programs(), engine.statistics()["programs"]
        assert used > programs
        resize(engine, pages=33)
        again = [engine.submit(prompt, **options) for prompt in PROMPTS]
        assert [handle.result().tokens for handle in again] == free
        assert (count_programs(), engine.statistics()["programs"]) == (before, used)


def test_generate_captures_of_constrained_rows_too(tiny):
    """By masks of the host, whose steps are two programs."""
    grammar, steers = mpjax.Grammar('start: "first" | "second"'), steers_of(tiny)[::2]
    found = mpjax.generate(
        tiny, PROMPTS[::2], max_new_tokens=8, constraint=grammar, capture=CAPTURE, steer=steers
    )
    assert set(found.text) <= {"first", "second"}
    for prompt, tokens, captured, steer in zip(
        PROMPTS[::2], found.tokens, found.captured, steers, strict=True
    ):
        text = jnp.asarray([prompt + tokens])
        _, expected = tiny.model.inspect(text, capture={"mlp": [0]}, steer=steer)
        wide = [np.asarray(x, np.float32) for x in (captured["mlp"][0], expected["mlp"][0][0, :-1])]
        np.testing.assert_allclose(*wide, rtol=0.05, atol=0.05)


def test_pages_are_shared_only_with_equal_changes(tiny):
    one, other = (Addition(vector(tiny, n), layers=(0,)) for n in (1, 2))
    kinds: list[tuple[dict[str, Any], int]] = [
        ({"steer": one}, 0),
        ({}, 0),
        ({"steer": other}, 0),
        ({"steer": Addition(vector(tiny, 1), layers=(1,))}, 0),
        ({"steer": Addition(vector(tiny, 1), layers=(0,))}, 64),
        ({"capture": CAPTURE}, 0),  # which reads all its tokens
        ({}, 64),
    ]
    with make_engine(tiny) as engine:
        for how, shared in kinds:
            handle = engine.submit(LONG, max_new_tokens=2, **how).result()
            assert handle.shared_tokens == shared, how
            if handle.captured is not None:
                assert len(handle.captured["mlp"][0]) == len(LONG) + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reversed(Steer):
    """Reverses the channels of the stream; a change without arrays."""

    layers = (1,)
    at = "residual"

    def __call__(self, value, layer, positions):
        return value[..., ::-1]


def test_changes_may_have_no_arrays_and_scores_are_changed(tiny):
    with make_engine(tiny) as engine:
        own = {"max_new_tokens": 0, "prompt_logprobs": True}
        plain, changed = (
            engine.submit(PROMPTS[0], steer=steer, **own).result() for steer in ((), Reversed())
        )
    logits, _ = tiny.model.inspect(jnp.asarray([PROMPTS[0]]), steer=Reversed())
    expected = jax.nn.log_softmax(logits[0, :-1])[jnp.arange(3), jnp.asarray(PROMPTS[0][1:])]
    np.testing.assert_allclose(changed.prompt_logprobs.logprobs, expected, rtol=0.02, atol=0.02)
    assert not np.allclose(plain.prompt_logprobs.logprobs, expected, rtol=0.02, atol=0.02)


def test_wrong_arguments_are_named(tiny):
    one = Addition(vector(tiny, 1), layers=(0,))
    with pytest.raises(
        ValueError, match=r"steer is .*: expected a Steer, a tuple of them, or a li"
    ):
        mpjax.generate(tiny, PROMPTS[:1], steer=[one, None])
    with make_engine(tiny) as engine:
        with pytest.raises(ValueError, match=r"capture has \[9\] for 'mlp'"):
            engine.submit([3], capture={"mlp": [9]})
        with pytest.raises(ValueError, match="steer is 7: expected a tuple of Steer"):
            engine.submit([3], steer=7)
