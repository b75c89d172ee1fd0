"""/tokenize and /detokenize."""

from __future__ import annotations

import pytest

from mpjax.serve.errors import RequestError
from mpjax.serve.tokens import detokenize, tokenize
from tests.mpjax.serve.scripted import Script, tokenizer_of
from tests.mpjax.tokenizer_folders import llama

pytestmark = pytest.mark.any_version
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def lm():
    return Script(tokenizer_of()).lm


def test_a_prompt_and_back(lm):
    found = tokenize(lm, {"prompt": "é <tool_call>", "model": "it", "return_token_strs": True})
    ids = lm.tokenizer.encode("é <tool_call>")
    assert found["tokens"] == ids
    assert found["count"] == len(ids)
    assert found["token_strs"][-1] == "<tool_call>"
    assert tokenize(lm, {"prompt": ""}) == {"count": 0, "tokens": [], "token_strs": None}
    assert detokenize(lm, {"tokens": [*ids, 0]}) == {"prompt": "é <tool_call><eos>"}


def test_special_tokens_are_added_to_prompts_alone(lm, tmp_path):
    from types import SimpleNamespace

    from mpjax.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(llama(tmp_path))
    lm = SimpleNamespace(require_tokenizer=lambda: tokenizer)
    bos = tokenizer.bos_id
    assert tokenize(lm, {"prompt": "a"})["tokens"][0] == bos
    assert bos not in tokenize(lm, {"prompt": "a", "add_special_tokens": False})["tokens"]
    body = {"messages": [USER]}
    assert tokenize(lm, body)["tokens"].count(bos) == 1  # the template's own
    assert tokenize(lm, body | {"add_special_tokens": True})["tokens"].count(bos) == 2


def test_a_chat(lm):
    tool = {"type": "function", "function": {"name": "now"}}
    for tools in ([], [tool]):
        expected = lm.tokenizer.encode_chat(
            [USER],
            tools=tools
            and [
                {
                    "type": "function",
                    "function": tool["function"]
                    | {"parameters": {"type": "object", "properties": {}}},
                }
            ],
        )
        assert tokenize(lm, {"messages": [USER], "tools": tools})["tokens"] == expected
    body = {"messages": [USER], "add_generation_prompt": False}
    assert lm.tokenizer.decode(tokenize(lm, body)["tokens"]).endswith("user: Hi")


@pytest.mark.parametrize(
    ("ask", "body", "message"),
    [
        (tokenize, {}, "expected one of prompt and messages"),
        (tokenize, {"prompt": "a", "messages": [USER]}, "expected one of prompt and messages"),
        (tokenize, {"prompt": ["a"]}, r'prompt is \["a"\]: expected a text'),
        (tokenize, {"prompt": "\ud800"}, "which UTF-8 can't encode"),
        (tokenize, {"messages": []}, r"messages is \[\]"),
        (tokenize, [], "the body is not a JSON object"),
        (detokenize, {}, "expected a list of token ids"),
        (detokenize, {"tokens": "a"}, 'tokens is "a": expected a list of token ids'),
        (detokenize, {"tokens": [-1]}, "tokens has -1: expected ids from 0 to"),
        (detokenize, {"token": [1]}, '"token" is no key of this request'),
    ],
)
def test_others_are_refused(lm, ask, body, message):
    with pytest.raises(RequestError, match=message):
        ask(lm, body)
