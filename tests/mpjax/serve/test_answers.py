"""Answers with text and its tokens side by side, which the server's tests don't look at."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from mpjax.engine.handle import Handle, PromptLogprobs
from mpjax.serve.answers import Answer, Chats, Completions, Piece, pieces
from mpjax.serve.requests import Asked
from mpjax.text.answers import Style
from mpjax.text.channels import THINK
from mpjax.text.spelling import token_bytes

pytestmark = pytest.mark.any_version


@pytest.fixture
def handle():
    handle = Handle(None, 0, [70, 71, 72], None)
    handle.tokens, handle.logprobs = [80, 81], [-0.5, -1.5]
    handle.finish_reason = "stop"
    arrays = np.array([-3.0, -1.0]), np.array([[75], [72]]), np.array([[-2.0], [-1.0]])
    handle.prompt_logprobs = PromptLogprobs(*arrays)
    return handle


def answer(tiny, **changes):
    echoes = [tiny.tokenizer.decode([70, 71, 72])] if changes.pop("echo", False) else None
    asked = Asked([[70, 71, 72]], 2, {}, [], 0, echoes=echoes, **({"logprobs": True} | changes))
    return Answer(tiny.tokenizer, "tiny", asked)


def test_offsets_are_those_of_the_texts_of_tokens(tiny, handle):
    found = Completions().whole(answer(tiny, echo=True, top=1), [handle])
    [choice] = found["choices"]
    columns = choice["logprobs"]
    texts = [tiny.tokenizer.decode([i]) for i in (70, 71, 72, 80, 81)]
    assert columns["tokens"] == texts
    assert columns["text_offset"] == [0, *np.cumsum([len(t) for t in texts])[:-1].tolist()]
    assert columns["token_logprobs"] == [None, -3.0, -1.0, -0.5, -1.5]
    best = tiny.tokenizer.decode([75])
    assert columns["top_logprobs"][:3] == [None, {texts[1]: -3.0, best: -2.0}, {texts[2]: -1.0}]


def test_parts_of_a_character_have_their_own_bytes_and_names(tiny, handle):
    first, second, third = (_token(tiny, byte) for byte in "€".encode())
    handle.prompt, handle.tokens = [first, second, third], [first, second]
    top = np.array([[third], [third]])
    handle.prompt_logprobs = dataclasses.replace(handle.prompt_logprobs, top=top)
    asked = answer(tiny, echo=True, top=1)
    asked.asked.echoes[:] = ["€"]
    [choice] = Completions().whole(asked, [handle])["choices"]
    names = [rf"bytes:\x{byte:02x}" for byte in "€".encode()]
    assert choice["logprobs"]["tokens"] == [*names, *names[:2]]
    # The prompt is a character of three tokens, and the answer two tokens of the next one.
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 1]
    assert choice["logprobs"]["top_logprobs"][1] == {names[1]: -3.0, names[2]: -2.0}
    [choice] = Chats().whole(asked, [handle])["choices"]
    spelled = [entry["bytes"] for entry in choice["logprobs"]["content"]]
    assert spelled == [[0xE2], [0x82]]


def _token(lm, byte):
    """The token of a single byte."""
    return next(
        i for i in range(lm.config.vocab_size) if token_bytes(lm.tokenizer, i) == bytes([byte])
    )


def test_two_tokens_of_one_spelling_have_a_number_each(tiny, handle, monkeypatch):
    monkeypatch.setattr("mpjax.serve.answers.token_bytes", lambda *_: b"a")
    [choice] = Completions().whole(answer(tiny, echo=True, top=1), [handle])["choices"]
    top = choice["logprobs"]["top_logprobs"]
    assert top[1:3] == [{"a": -3.0, "token_id:75": -2.0}, {"a": -1.0}]


def test_candidates_stand_beside_each_token(tiny, handle):
    handle.top_logprobs = [[(90, -0.1), (80, -0.5)], [(81, -1.5), (91, -2.5)]]
    asked = answer(tiny, top=2)
    name = {i: tiny.tokenizer.decode([i]) for i in (80, 81, 90, 91)}
    [choice] = Completions().whole(asked, [handle])["choices"]
    assert choice["logprobs"]["top_logprobs"] == [
        {name[80]: -0.5, name[90]: -0.1},
        {name[81]: -1.5, name[91]: -2.5},
    ]
    [choice] = Chats().whole(asked, [handle])["choices"]
    first, _ = choice["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in first["top_logprobs"]] == [
        (name[90], -0.1),
        (name[80], -0.5),
    ]
    assert bytes(first["top_logprobs"][0]["bytes"]).decode() == name[90]
    [chunk] = Completions().chunk(asked, 0, Piece(handle, "b", 1, 2, offsets=[7]))["choices"]
    assert chunk["logprobs"]["text_offset"] == [7]


class Reasoning:
    """A tokenizer with channels."""

    style = Style(THINK, None, {})

    def decode(self, ids, skip_special):
        return "<think>" if ids == [70, 71, 72] else ""


def test_reasoning_is_told_apart_from_the_answer(handle):
    asked = Answer(Reasoning(), "tiny", Asked([[70, 71, 72]], 2, {}, [], 0))
    handle.certain = "Hm.</think>\n\nYes"
    handle._row_text = SimpleNamespace(text=handle.certain, marker_places=())
    [choice] = Chats().whole(asked, [handle])["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes", "Hm.")
    [choice] = Completions().whole(asked, [handle])["choices"]
    assert choice["text"] == handle.certain

    async def deltas():
        reader = asked.reader(handle)
        found = [Chats().chunk(asked, 0, piece) async for piece in pieces(reader, asked, handle)]
        return [chunk["choices"][0]["delta"] for chunk in found]

    assert asyncio.run(deltas()) == [{"reasoning_content": "Hm.", "content": "Yes"}, {}]
    handle.prompt = [1]
    [choice] = Chats().whole(asked, [handle])["choices"]
    assert choice["message"]["reasoning_content"] is None
