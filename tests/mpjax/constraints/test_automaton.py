"""Tables on the device: automata over bytes, their texts, and generations that follow them."""

from __future__ import annotations

import json
import re

import jax
import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax
from mpjax.constraints.byte_automaton import ByteAutomaton, ascii_classes
from mpjax.constraints.matcher import Matcher
from mpjax.constraints.schema_pattern import schema_pattern
from tests.mpjax.constraints.test_kinds import ids_of
from tests.mpjax.engine.conftest import Knowing, make_engine
from tests.mpjax.engine.test_constrained import SCHEMAS

PATTERNS = [
    "a|bc*",
    r"[a-z]{2,4}\d+",
    r"[^\"\\]*",
    ".*é.",
    r"[^a]{0,3}[ß-ö]",
    "(?i)AbC[x-z]",
    r"(a?b){2,}$",
    r"^[\w-]?\S$",
    "[à-\U00010fff]",
    "[\x7f-\u0800]x?",
]
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "ok": {"enum": [True, None, "ß"]}},
    "required": ["name"],
    "additionalProperties": False,
}
LETTERS = 'abcABCé"\\ßö01-_ \n\U0001f601\u2028\x7f\u0800\u07ff\uffffx'


def accepts(automaton, text):
    state = 0
    for byte in text.encode():
        state = int(automaton.step[state, byte])
        if state < 0:
            return False
    return bool(automaton.accepts[state])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_automaton_accepts_what_the_expression_matches(pattern):
    automaton, expression = ByteAutomaton.of(pattern), re.compile(ascii_classes(pattern))

    @settings(max_examples=150)
    @given(st.text(LETTERS, max_size=6))
    def check(text):
        # "$" of a fullmatch is the end, before which Python's allows a newline.
        assert accepts(automaton, text) == (expression.fullmatch(text) is not None)

    check()
    assert sum(accepts(automaton, one) for one in (*LETTERS, "a", "abab", "ab1", "xé-", "ABCx"))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(?=b)", "has assert"),
        (r"\bword", "which no table can follow"),
        ("a$b", "which no table can follow"),
        ("(?i:a)b", "has flags inside"),
        ("(", "the regular expression is wrong"),
        (f"a{{{10**12}}}", "the regular expression is wrong"),
        ("(" * 5000 + ")" * 5000, "the regular expression is wrong"),
        (r"(a)\1", "has groupref"),
        (r"[^\x00-\U0010ffff]", "matches no text"),
        (r"[^\W]", r"has \\W in brackets"),
        ("(a|b)*a(a|b){13}", "needs more than 4096 states"),
    ],
)
def test_what_is_not_regular_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        ByteAutomaton.of(pattern)


@pytest.mark.parametrize(
    "constraint",
    [
        mpjax.Regex(r"\d{4}-[é-ö]{2}"),
        mpjax.Choice(["yes", "nothing at all", "may.be"]),
        mpjax.Regex("[^\n]*x"),
        mpjax.JsonSchema(OBJECT),
        mpjax.JsonSchema({"type": "object", "additionalProperties": False}),
        mpjax.JsonSchema({"type": "array", "items": {"type": "number"}, "minItems": 1}, spaces=""),
    ],
)
def test_a_table_allows_what_the_matcher_allows(constraint, tiny, rng):
    """Also where the text is forced: there both allow the tokenizer's own tokens alone."""
    automaton, ends = mpjax.Automaton.of(tiny, constraint), tiny.tokenizer.stop_ids
    for _ in range(6):
        own, state = Matcher(tiny, constraint, ends), 0
        for _ in range(20):
            allowed = {*ids_of(own.masks([])[0])}
            mine = {*np.flatnonzero(automaton.step[state][automaton.token_class] >= 0).tolist()}
            assert allowed == mine
            token = int(rng.choice(sorted(allowed)))
            state = int(automaton.step[state, automaton.token_class[token]])
            if token in ends:
                break
            own.advance([token])


def walk(lm, automaton, rng, most=80):
    state, tokens = 0, []
    for _ in range(most):
        token = int(rng.choice(np.flatnonzero(automaton.step[state][automaton.token_class] >= 0)))
        state = int(automaton.step[state, automaton.token_class[token]])
        if token in lm.tokenizer.stop_ids:
            assert {*np.flatnonzero(automaton.step[state][automaton.token_class] >= 0)} == {token}
            return lm.tokenizer.decode(tokens)
        tokens.append(token)
    return None


@settings(max_examples=25)
@given(SCHEMAS, st.sampled_from(["", " {1,2}"]))
def test_texts_of_a_table_are_valid(tiny, schema, spaces):
    try:
        automaton = mpjax.Automaton.of(tiny, mpjax.JsonSchema(schema, spaces=spaces))
    except ValueError as error:
        assert "which no table follows" in str(error)  # noqa: PT017
        return
    rng = np.random.default_rng(3)
    for text in (walk(tiny, automaton, rng) for _ in range(4)):
        if text is not None:
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object"}, "without additionalProperties false"),
        ({"type": "array"}, "array without items"),
        ({}, "any or unknown"),
        (True, "type None, which is any or unknown"),
        ({"type": "integer", "minimum": 3}, "minimum, which no table follows"),
        ({"type": "string", "format": "date"}, "format, which no table follows"),
        ({"$ref": "#/$defs/a"}, "any or unknown"),
        ({"type": {}}, "any or unknown"),
        ({"type": []}, "any or unknown"),
        ({"enum": []}, r"enum \[\]: expected a list that is not empty"),
        ({"anyOf": []}, r"anyOf \[\]: expected a list that is not empty"),
        ({"type": "integer", "const": "a"}, "without any value of its type"),
        ({"type": "string", "minLength": True}, "minLength True: expected a whole number"),
        ({"type": "array", "items": {"type": "null"}, "minItems": "2"}, "minItems '2': expected"),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 0},
            "maxItems 0 below minItems 1",
        ),
        (
            {"type": "object", "properties": [1], "additionalProperties": False},
            r"properties \[1\]: expected a mapping",
        ),
        (
            {"type": "object", "required": [[]], "additionalProperties": False},
            r"required \[\[\]\]: expected a list of texts",
        ),
    ],
)
def test_schemas_without_a_table_are_refused_by_name(schema, message, tiny):
    with pytest.raises(ValueError, match=f"JsonSchema has no table: .*{message}.* needs none"):
        mpjax.Automaton.of(tiny, mpjax.JsonSchema(schema))


def test_values_and_bounds_of_a_schema_are_those_of_its_type():
    mixed = {"type": ["integer", "null"], "enum": ["a", 1, True, 2.0, None]}
    assert schema_pattern(mixed, "") == r"1|2\.0|null"
    text = {"type": "string", "minLength": 2.0, "maxLength": 3}
    assert re.fullmatch(schema_pattern(text, ""), '"ab"')
    assert not re.fullmatch(schema_pattern(text, ""), '"a"')


@pytest.mark.parametrize("constraint", [mpjax.Regex(None), mpjax.Regex(b"a")])
def test_a_regular_expression_is_a_text(constraint, tiny):
    with pytest.raises(ValueError, match=r"Regex: pattern is .*: expected a text"):
        mpjax.Automaton.of(tiny, constraint)


def test_whole_generations_follow_a_table_without_the_host(tiny):
    """In one loop under jit, in `generate`, in an engine and with speculation: the same tokens."""
    constraint = mpjax.Regex("([a-z]{1,4} ){2,3}end")
    automaton = mpjax.Automaton.of(tiny, constraint)
    prompts = [[3, 5, 3, 9], [11, 2, 7, 4]]
    sampling = {"temperature": 1.0}

    @jax.jit
    def run(model, automaton):
        return mpjax.generate_tokens(
            model,
            np.array(prompts),
            np.array([4, 4]),
            max_new_tokens=32,
            sampling=sampling,
            constraint=automaton,
        )

    jaxpr = str(jax.make_jaxpr(run)(tiny.for_device, automaton))
    assert "callback" not in jaxpr
    found = run(tiny.for_device, automaton)
    texts = [np.asarray(t)[:n].tolist() for t, n in zip(found.tokens, found.lengths, strict=True)]
    for text in texts:
        assert re.fullmatch(constraint.pattern, tiny.tokenizer.decode(text))
    options = {"max_new_tokens": 32, "sampling": sampling, "processors": (automaton,)}
    assert mpjax.generate(tiny, prompts, **options).tokens == texts
    said = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    fast = mpjax.generate(tiny, prompts, speculate=Knowing.of(said), **options)
    assert fast.tokens == texts
    with make_engine(tiny, processors=(automaton,)) as engine:
        # Small tables have the same sizes.
        other = mpjax.Automaton.of(tiny, mpjax.Choice(["left", "right"]))
        first = engine.submit(prompts[0], **options)
        second = engine.submit(prompts[1], max_new_tokens=32, processors=(other,))
        assert first.result().tokens == texts[0]
        assert second.result().text in ("left", "right")


def test_small_constraints_become_tables_by_themselves_and_change_no_token(tiny):
    """Masks of the host are for a schema with a pattern, flags, and a stop id that is a word."""
    drawn = {"temperature": 1.0}
    [word] = tiny.tokenizer.encode("a")
    asked = [
        (mpjax.Regex("([a-z]{1,4} ){2,3}end"), drawn),
        (mpjax.JsonSchema(OBJECT, spaces=""), drawn),
        (mpjax.Choice(["left", "right"]), drawn),
        (mpjax.JsonSchema({"type": "string", "pattern": "^[ab]{9}$"}), drawn),
        (mpjax.Regex("(?i)abc"), drawn),
        (mpjax.Regex("[ab]{9}"), drawn | {"stop_ids": (word,)}),
    ]
    found = []
    for states, on_host in ((512, [3, 4, 5]), (0, [*range(6)])):
        with make_engine(tiny, table_states=states) as engine:
            handles = [
                engine.submit(
                    [3, 5 + row], max_new_tokens=24, seed=row, constraint=one, sampling=sampling
                )
                for row, (one, sampling) in enumerate(asked)
            ]
            rows = [request.row.is_constrained for request in engine._inbox]
            assert np.flatnonzero(rows).tolist() == on_host
            found.append([handle.result().tokens for handle in handles])
    assert found[0] == found[1]


def test_arrays_take_a_constraint_as_tables(tiny):
    tokens, lengths = np.array([[3, 5]]), np.array([2])
    with pytest.raises(ValueError, match=r"make its tables by mpjax.Automaton.of\(lm, Regex"):
        mpjax.generate_tokens(
            tiny.model, tokens, lengths, max_new_tokens=2, constraint=mpjax.Regex("a")
        )
