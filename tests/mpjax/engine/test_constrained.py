"""Constrained texts: valid for any schema, beside free rows, with and without speculation."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax
from mpjax.engine import pending
from mpjax.engine.compiled import Programs
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.engine.conftest import Knowing, make_engine
from tests.mpjax.tokenizer_folders import sentencepiece
from tests.sweeps import in_sweep

pytestmark = pytest.mark.usefixtures("exact_products")

NEW = 48
PROMPTS = [[3, 5, 3, 9], [11, 2], [7, 8, 9], [4]]
CONSTRAINTS = [
    mpjax.Regex("[a-c]{5,9}"),
    None,
    mpjax.Grammar('start: "first" | "second"'),  # by masks of the host, where others have tables
    mpjax.JsonSchema({"type": "array", "items": {"enum": [1, "x"]}, "maxItems": 3}),
]
LEAF = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda n: {"type": "integer", "minimum": -n, "maximum": n + 3}, st.integers(0, 500)),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.builds(lambda v: {"enum": v}, st.lists(st.sampled_from(["a", 1, None]), min_size=1)),
    st.builds(lambda v: {"const": v}, st.sampled_from(["é", 3, True])),
    st.just({"type": "string", "pattern": "^[A-Z][a-z]?$"}),
    st.just({"type": "string", "format": "date"}),
)


def _object(properties, count):
    names = list(properties)
    found = {"type": "object", "properties": properties, "required": names[:count]}
    return found | {"additionalProperties": False}


def _nested(inner):
    names = st.text("abc", min_size=1, max_size=2)
    return st.one_of(
        st.builds(_object, st.dictionaries(names, inner, max_size=3), st.integers(0, 3)),
        st.builds(
            lambda i, n: {"type": "array", "items": i, "maxItems": n}, inner, st.integers(0, 2)
        ),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    )


SCHEMAS = st.recursive(LEAF, _nested, max_leaves=4)


def require_valid(lm, schemas, seed):
    """Draws from nearly equal probabilities, most of which the schemas forbid."""
    constraints = [mpjax.JsonSchema(schema, spaces="") for schema in schemas]
    found = mpjax.generate(
        lm,
        [[5 + row] for row in range(len(schemas))],
        max_new_tokens=NEW,
        sampling={"temperature": 3.0},
        constraint=constraints,
        seeds=list(range(seed, seed + len(schemas))),
    )
    ended = 0
    for schema, text, reason in zip(schemas, found.text, found.finish_reasons, strict=True):
        if reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(text), schema)
    return ended


@pytest.mark.parametrize(
    ("kind", "examples"), [("bytes", 2), in_sweep("bytes", 25), in_sweep("sentencepiece", 25)]
)
def test_texts_are_valid_for_any_schema(kind, examples, tiny):
    """In the sweep, 200 schemas for each of two kinds of tokenizers."""
    ended, lm = [], tiny
    if kind == "sentencepiece":
        tokenizer = Tokenizer(sentencepiece(), special_tokens={"eos_token": "</s>"})
        lm = dataclasses.replace(tiny, tokenizer=tokenizer)

    @settings(max_examples=examples)
    @given(st.lists(SCHEMAS, min_size=8, max_size=8), st.integers(0, 99))
    def check(schemas, seed):
        ended.append(require_valid(lm, schemas, seed))

    check()
    assert sum(ended) > 4 * len(ended)


@pytest.fixture(scope="module")
def expected(tiny):
    """The rows of CONSTRAINTS, as `generate` gives them."""
    options = {"max_new_tokens": NEW, "sampling": {"temperature": 1.0}}
    return mpjax.generate(tiny, PROMPTS, constraint=CONSTRAINTS, **options)


def test_rows_are_constrained_each_by_its_own(expected, tiny):
    first, _, third, fourth = expected.text
    assert re.fullmatch("[a-c]{5,9}", first)
    assert third in ("first", "second")
    assert len(json.loads(fourth)) <= 3
    assert expected.finish_reasons[0] == "stop"
    assert expected.tokens[0][-1] in tiny.tokenizer.stop_ids
    free = mpjax.generate(tiny, PROMPTS, max_new_tokens=NEW, sampling={"temperature": 1.0})
    assert expected.tokens[1] == free.tokens[1]
    # Log-probabilities are those of the unmodified logits, where no token is nearly certain.
    assert max(expected.logprobs[2]) < -1


def test_requests_of_an_engine_are_the_same(expected, tiny):
    with make_engine(tiny, table_states=0) as engine:
        handles = [
            engine.submit(
                prompt,
                max_new_tokens=NEW,
                sampling={"temperature": 1.0},
                seed=seed,
                constraint=constraint,
            )
            for seed, (prompt, constraint) in enumerate(zip(PROMPTS, CONSTRAINTS, strict=True))
        ]
        assert [handle.result().tokens for handle in handles] == expected.tokens
        options = {"max_new_tokens": NEW, "sampling": {"temperature": 1.0}}
        together = engine.generate(PROMPTS, constraint=CONSTRAINTS, **options)
        assert together.tokens == expected.tokens
        with pytest.raises(ValueError, match="can't be enforced"):
            engine.submit(PROMPTS[0], constraint=mpjax.JsonSchema({"not": {}}))


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {}], ids=["drawn", "greedy"])
def test_requests_of_many_rows_get_tokens_of_several_steps(sampling, tiny, monkeypatch):
    """The same ones, for the same reasons, and with the same log-probabilities."""
    monkeypatch.setattr(pending, "MANY_ROWS", 1)
    options = {"max_new_tokens": NEW, "sampling": sampling}
    expected = mpjax.generate(tiny, PROMPTS, constraint=CONSTRAINTS, **options)
    assert expected.tokens != mpjax.generate(tiny, PROMPTS, **options).tokens
    with make_engine(tiny, table_states=0, steps=3) as engine:
        handles = []
        for seed, (prompt, constraint) in enumerate(zip(PROMPTS, CONSTRAINTS, strict=True)):
            asked = options | {"seed": seed, "constraint": constraint}
            handles.append(engine.submit(prompt, **asked))
            engine.step()
        gone = engine.submit(PROMPTS[0], **options, constraint=CONSTRAINTS[0])
        told = [len(event.tokens) for _ in range(12) for event in engine.step()]
        gone.cancel()
        found = [handle.result() for handle in handles]
    assert max(told) == 3
    assert [one.tokens for one in found] == expected.tokens
    assert [one.finish_reason for one in found] == expected.finish_reasons
    for one, logprobs in zip(found, expected.logprobs, strict=True):
        np.testing.assert_allclose(one.logprobs, logprobs, rtol=1e-4, atol=1e-5)


def test_speculation_changes_no_token(expected, tiny):
    texts = [prompt + said for prompt, said in zip(PROMPTS, expected.tokens, strict=True)]
    found = mpjax.generate(
        tiny,
        PROMPTS,
        max_new_tokens=NEW,
        sampling={"temperature": 1.0},
        constraint=CONSTRAINTS,
        speculate=Knowing.of(texts),
    )
    assert found.tokens == expected.tokens
    assert found.speculation is not None
    assert min(found.speculation.accepted[row] for row in (0, 1)) > 0


def test_programs_that_hold_the_host_are_measured_when_they_have_drawn(expected, tiny, monkeypatch):
    """As those of proposers on a GPU are."""
    monkeypatch.setattr(Programs, "holds_host", True)
    known, runs = Knowing.of([PROMPTS[0] + expected.tokens[0]]), []
    with make_engine(tiny, speculate=known, table_states=0) as engine:
        engine.observe(runs.append)
        asked = {"max_new_tokens": NEW, "sampling": {"temperature": 1.0}, "seed": 0}
        handle = engine.submit(PROMPTS[0], constraint=CONSTRAINTS[0], **asked)
        assert handle.result().tokens == expected.tokens[0]
    assert sum(run.steps for run in runs) > 0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Saying(mpjax.Processor):
    """Draws tokens in turn; unless it obeys, whatever a constraint allows."""

    tokens: tuple[int, ...]
    obeys: bool

    def __call__(self, logits, memory, number):
        token = jnp.array(self.tokens)[number % len(self.tokens)]
        return (logits if self.obeys else jnp.zeros_like(logits)).at[token].add(1e4)


def test_a_draft_is_bound_by_no_mask_of_the_step_before(tiny):
    """Else it proposes letters of other places, which are not accepted."""
    letters = tuple(tiny.tokenizer.encode(one)[0] for one in "ace")
    found = mpjax.generate(
        tiny,
        PROMPTS[:1],
        max_new_tokens=12,
        processors=(Saying(letters, obeys=True),),
        constraint=mpjax.Grammar("start: /([ab][cd][ef]){6}/"),
        speculate=mpjax.Draft(tiny, k=1),
    )
    assert found.text == ["ace" * 4]
    assert found.speculation is not None
    assert sum(found.speculation.accepted) > 3


@pytest.mark.parametrize("table_states", [0, 512])
def test_a_text_that_leaves_its_constraint_ends_its_request_alone(tiny, table_states):
    stubborn = (Saying((tiny.tokenizer.encode("x")[0],), obeys=False),)
    with make_engine(tiny, processors=stubborn, table_states=table_states) as engine:
        asked = {"max_new_tokens": 12, "constraint": CONSTRAINTS[0]}
        bad = engine.submit(PROMPTS[0], processors=stubborn, **asked)
        good = engine.submit(PROMPTS[0], **asked)
        assert re.fullmatch("[a-c]{5,12}", good.result().text)
        with pytest.raises(ValueError, match="the constraint can't follow the tokens"):
            bad.result()
        assert not engine.is_closed


def test_a_constraint_that_allows_all_changes_no_token(tiny):
    """Of tokens that are text: others are in no grammar."""
    pieces = ((i, tiny.tokenizer.decode([i])) for i in range(tiny.config.vocab_size))
    plain = [i for i, piece in pieces if piece and piece.isascii()]
    options = {"max_new_tokens": 12, "sampling": {"allowed_ids": plain}}
    free = mpjax.generate(tiny, PROMPTS, **options)
    bound = mpjax.generate(tiny, PROMPTS, constraint=mpjax.Regex("(?s:.)*"), **options)
    assert bound.tokens == free.tokens


def test_a_grammar_that_has_ended_wins_over_the_minimum(tiny):
    found = mpjax.generate(
        tiny,
        PROMPTS[:1],
        max_new_tokens=NEW,
        constraint=mpjax.Choice(["ab"]),
        sampling={"min_new_tokens": 20, "stop_ids": ()},
    )
    assert (found.text, found.finish_reasons) == (["ab"], ["stop"])
