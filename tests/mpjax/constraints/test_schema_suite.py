"""JSON-Schema-Test-Suite, from the folder that MPJAX_SCHEMA_SUITE names, such as draft2020-12."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import mpjax
from mpjax.constraints.matcher import Matcher

FOLDER = os.environ.get("MPJAX_SCHEMA_SUITE")
# Where a valid value may be refused: properties come in the schema's order, numbers of an enum or a
# const in its spelling, and integers without a fraction; formats are enforced.
STRICTER = {"allOf", "const", "enum", "format", "type"}


def accepts_by_matcher(lm, schema, tokens):
    matcher = Matcher(lm, schema, lm.tokenizer.stop_ids)
    try:
        matcher.advance(tokens)
    except ValueError:
        return False
    return bool(matcher._matcher.is_accepting())


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
def test_schemas_that_are_enforced_accept_what_is_valid_alone(tiny):
    enforced, checked, by_table = 0, 0, 0
    for path in sorted(Path(FOLDER).glob("*.json")):
        for case in json.loads(path.read_text("utf-8")):
            schema = mpjax.JsonSchema(case["schema"])
            try:
                Matcher(tiny, schema, tiny.tokenizer.stop_ids)
            except ValueError:
                continue  # llguidance says that it can't enforce it
            enforced += 1
            for each in case["tests"]:
                where = path.stem, case["description"], each["description"]
                text = json.dumps(each["data"], ensure_ascii=False)
                tokens = tiny.tokenizer.encode(text, add_special_tokens=False)
                found = accepts_by_matcher(tiny, schema, tokens)
                assert found == each["valid"] or (path.stem in STRICTER and not found), where
                if (other := accepts_by_table(tiny, schema, tokens)) is not None:
                    assert other == found, where
                    by_table += 1
                checked += 1
    print(f"{enforced} schemas are enforced, with {checked} values, of which {by_table} by tables")
    assert enforced > 150
