"""JSON-Schema-Test-Suite, from the folder that MPJAX_SCHEMA_SUITE names, such as draft2020-12."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import mpjax
from mpjax.constraints.matcher import Matcher, vocabulary_of

FOLDER = os.environ.get("MPJAX_SCHEMA_SUITE")


def accepts(inner, tokens):
    """The answer of an llguidance matcher at its begin."""
    inner = inner.deep_copy()
    return inner.consume_tokens(tokens) and inner.is_accepting()


def llguidance_matcher(lm, schema):
    """A matcher of the schema with llguidance's own defaults; it may be in an error."""
    from llguidance import LLMatcher

    size, ends = lm.model.columns, lm.usual_stop_ids
    words = vocabulary_of(lm.require_tokenizer(), size, ends)
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return LLMatcher(words, grammar, log_level=0)


def accepts_by_table(lm, schema, tokens):
    """None for a schema without a table."""
    try:
        table = mpjax.Automaton.of(lm, schema)
    except ValueError:
        return None
    state = 0
    for token in [*tokens, lm.tokenizer.stop_ids[0]]:
        state = int(table.step[state, table.token_class[token]])
        if state < 0:
            return False
    return True


@pytest.mark.skipif(not FOLDER, reason="MPJAX_SCHEMA_SUITE names no folder of the suite")
def test_schemas_that_are_enforced_accept_what_llguidance_accepts_and_is_valid(tiny):
    """It refuses valid values whose properties, numbers or formats are not as the schema has them:

    properties come in the schema's order, numbers of an enum or a const in its spelling, integers
    without a fraction, and formats are enforced.
    """
    enforced, checked, by_table = 0, 0, 0
    for path in sorted(Path(FOLDER).glob("*.json")):
        for case in json.loads(path.read_text("utf-8")):
            schema = mpjax.JsonSchema(case["schema"])
            try:
                matcher = Matcher(tiny, schema, tiny.tokenizer.stop_ids)
            except ValueError:
                continue  # llguidance says that it can't enforce it
            enforced, own = enforced + 1, llguidance_matcher(tiny, case["schema"])
            for each in case["tests"]:
                where = path.stem, case["description"], each["description"]
                text = json.dumps(each["data"], ensure_ascii=False)
                tokens = tiny.tokenizer.encode(text, add_special_tokens=False)
                found = accepts(matcher.inner, tokens)
                assert found == accepts(own, tokens), where
                assert each["valid"] or not found, where
                if (other := accepts_by_table(tiny, schema, tokens)) is not None:
                    assert other == found, where
                    by_table += 1
                checked += 1
    print(f"{enforced} schemas are enforced, with {checked} values, of which {by_table} by tables")
    assert enforced > 150
