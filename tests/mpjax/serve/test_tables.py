from __future__ import annotations

from pathlib import Path

import pytest

from mpjax.serve.keys import read_keys
from mpjax.serve.tables import CHAT, COMPLETION, RESPONSE, STREAM_OPTIONS, rows

pytestmark = pytest.mark.any_version

DOCS = Path(__file__).resolve().parents[3] / "docs" / "serving.md"


def test_the_tables_have_every_key_of_openais_client():
    """And null, which it sends for many, is what leaving them out is."""
    pytest.importorskip("openai")
    from openai.types import chat, completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    for table, params in (
        (COMPLETION, completion_create_params.CompletionCreateParamsStreaming),
        (CHAT, chat_create_params.CompletionCreateParamsStreaming),
        (RESPONSE, response_create_params.ResponseCreateParamsStreaming),
    ):
        keys = params.__annotations__
        assert len(keys) > 15
        assert not {*keys} - {*table}
        assert read_keys(dict.fromkeys(keys), table) == read_keys({}, table)
    assert {*chat.ChatCompletionStreamOptionsParam.__annotations__} == {*STREAM_OPTIONS}


def test_the_documentation_has_the_tables():
    lines = list(rows())
    found = DOCS.read_text(encoding="utf-8")
    assert "\n".join(lines) in found, "docs/serving.md needs these lines:\n" + "\n".join(lines)
