"""Constraints and their matchers: which tokens may come, what is refused, and where texts end."""

from __future__ import annotations

import dataclasses

import jsonschema
import numpy as np
import pytest

import mpjax
from mpjax.constraints.kinds import read_constraints
from mpjax.constraints.matcher import Matcher

DATE = mpjax.Regex(r"[0-9]{4}-[0-9]{2}")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


def matcher(lm, constraint, stop_ids=None):
    return Matcher(lm, constraint, lm.tokenizer.stop_ids if stop_ids is None else stop_ids)


def ids_of(mask):
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(lm, constraint, rng, most=60):
    """A random text of a constraint, and whether it has ended."""
    own, tokens = matcher(lm, constraint), []
    for _ in range(most):
        allowed = ids_of(own.masks([])[0])
        assert max(allowed) < lm.config.vocab_size
        token = int(rng.choice(allowed))
        if token in lm.tokenizer.stop_ids:
            return lm.tokenizer.decode(tokens), True
        tokens.append(token)
        own.advance([token])
    return lm.tokenizer.decode(tokens), False


GBNF = 'root ::= "a" b+\nb ::= "x" | "yz"'


@pytest.mark.parametrize(
    ("constraint", "is_right"),
    [
        (DATE, lambda text: text[4] == "-" and text.replace("-", "").isdigit()),
        (mpjax.Choice(["yes", 'n"o\n', "m\\aybe"]), ["yes", 'n"o\n', "m\\aybe"].__contains__),
        (mpjax.Grammar('start: "(" start ")" | "x"'), lambda text: text.strip("()") == "x"),
        (mpjax.Grammar(GBNF), lambda text: text[0] == "a" and set(text[1:]) <= set("xyz")),
    ],
)
def test_texts_are_of_the_constraint(constraint, is_right, tiny, rng):
    ended = 0
    for _ in range(8):
        text, has_ended = walk(tiny, constraint, rng)
        ended += has_ended
        assert not has_ended or is_right(text), text
    assert ended


def test_masks_behind_drafts_are_those_of_steps(tiny):
    """The masks behind a draft that can't come allow all; the matcher stays where it was."""
    own, drafts = matcher(tiny, DATE), tiny.tokenizer.encode("20")
    wrong = tiny.tokenizer.encode("x")[0]
    found = own.masks([*drafts, wrong, *drafts])
    for place in range(len(drafts) + 1):
        np.testing.assert_array_equal(found[place], own.masks([])[0])
        own.advance(drafts[place : place + 1])
    assert (found[len(drafts) + 1 :] == ~np.uint32(0)).all()
    with pytest.raises(ValueError, match="can't follow the tokens"):
        own.advance([wrong])


def test_a_matcher_that_has_failed_does_not_end_the_text(tiny):
    """It allows an end alone, which must not pass for one of the constraint."""
    own, end = matcher(tiny, DATE), tiny.tokenizer.stop_ids[0]
    assert not own.inner.consume_tokens(tiny.tokenizer.encode("x"))
    assert ids_of(own.masks([])[0]) == [end]
    with pytest.raises(ValueError, match="can't follow the tokens"):
        own.advance([end])


def test_a_drafted_end_leaves_the_matcher_where_it_was(tiny):
    own, end = matcher(tiny, mpjax.Regex("ab?")), tiny.tokenizer.stop_ids[0]
    drafts = [*tiny.tokenizer.encode("a"), end, *tiny.tokenizer.encode("b")]
    first = own.masks([])[0]
    found = own.masks(drafts)
    assert end in ids_of(found[1])
    assert (found[2:] == ~np.uint32(0)).all()
    np.testing.assert_array_equal(own.masks([])[0], first)


def test_a_text_ends_with_the_rows_own_stop_ids(tiny):
    [usual] = tiny.tokenizer.stop_ids
    own = matcher(tiny, mpjax.Regex("ab*"), stop_ids=[700, 5])
    assert not {usual, 700, 5} & {*ids_of(own.masks([])[0])} - {*tiny.tokenizer.encode("a")}
    own.advance(tiny.tokenizer.encode("ab"))
    allowed = {*ids_of(own.masks([])[0])}
    assert allowed >= {700, 5}
    assert usual not in allowed
    with pytest.raises(ValueError, match="the text needs a stop id"):
        matcher(tiny, DATE, stop_ids=[])


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (mpjax.JsonSchema({"not": {}}), r'JsonSchema can\'t be enforced: .*"not"'),
        (mpjax.JsonSchema({"enum": []}), "Unsatisfiable schema"),
        (mpjax.JsonSchema("{"), "the JSON schema is no JSON"),
        (mpjax.JsonSchema(False), "the JSON schema is false, which no value matches"),
        (mpjax.JsonSchema(5), "the JSON schema is 5: expected a mapping"),
        (mpjax.JsonSchema({"const": {1, 2}}), "has a value that JSON lacks"),
        (mpjax.JsonSchema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (mpjax.Regex("a(?=b)"), "look-around"),
        (mpjax.Regex("[^\x00-\U0010ffff]"), "Regex"),
        (mpjax.Regex(5), "Regex: pattern is"),
        (mpjax.Choice([]), r"Choice: texts are \[\]: expected a list of texts"),
        (mpjax.Choice("ab"), "expected a list of texts"),
        (mpjax.Choice(["a", ""]), "expected texts that are not empty"),
        (mpjax.Grammar("start: x"), "unknown name"),
        (mpjax.Grammar("root ::= ("), "the grammar is no GBNF"),
    ],
)
def test_what_can_not_be_enforced_is_refused_by_name(constraint, message, tiny):
    with pytest.raises(ValueError, match=message):
        matcher(tiny, constraint)


def test_constraints_are_for_all_prompts_or_each():
    assert mpjax.JsonSchema(True).grammar() == mpjax.JsonSchema({}).grammar()
    assert read_constraints(DATE, 2) == [DATE, DATE]
    assert read_constraints([DATE, None], 2) == [DATE, None]
    for wrong in ("x", [DATE], [DATE, "x"]):
        with pytest.raises(ValueError, match="constraint"):
            read_constraints(wrong, 2)


def test_a_model_without_a_tokenizer_has_no_constraint(tiny):
    bare = dataclasses.replace(tiny, tokenizer=None)
    with pytest.raises(ValueError, match="tokenizer"):
        Matcher(bare, DATE, [0])


@pytest.mark.parametrize("spaces", ["", "[ ]{0,2}"])
def test_spaces_are_those_of_the_schema(spaces, tiny, rng):
    constraint = mpjax.JsonSchema(SCHEMA, spaces=spaces)
    texts = [text for text, has_ended in (walk(tiny, constraint, rng) for _ in range(12))]
    assert any(" " in text.replace('"', "") for text in texts) or not spaces
    for text in texts:
        assert "\n" not in text.split('"')[0]


def test_the_validator_can_tell_wrong_values():
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"n": 1}, SCHEMA)
