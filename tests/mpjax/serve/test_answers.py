"""What the server's tests don't see: text and its tokens side by side."""

from __future__ import annotations

import numpy as np
import pytest

from mpjax.engine.handle import Handle, PromptLogprobs
from mpjax.serve.answers import Answer, Chats, Completions, Piece
from mpjax.serve.requests import Asked

pytestmark = pytest.mark.any_version


@pytest.fixture
def handle():
    handle = Handle(None, 0, [70, 71, 72], None)
    handle.tokens, handle.logprobs = [80, 81], [-0.5, -1.5]
    handle.finish_reason = "stop"
    arrays = np.array([-3.0, -1.0]), np.array([75, 72]), np.array([-2.0, -1.0])
    handle.prompt_logprobs = PromptLogprobs(*arrays)
    return handle


def answer(tiny, **changes):
    asked = Asked([[70, 71, 72]], 2, {}, [], 0, **({"logprobs": True} | changes))
    return Answer(tiny.tokenizer, "tiny", asked)


def test_offsets_are_those_of_the_texts_of_tokens(tiny, handle):
    found = Completions().whole(answer(tiny, echo=True, with_top=True), [handle])
    [choice] = found["choices"]
    columns = choice["logprobs"]
    texts = [tiny.tokenizer.decode([i]) for i in (70, 71, 72, 80, 81)]
    assert columns["tokens"] == texts
    assert columns["text_offset"] == [0, *np.cumsum([len(t) for t in texts])[:-1].tolist()]
    assert columns["token_logprobs"] == [None, -3.0, -1.0, -0.5, -1.5]
    best = tiny.tokenizer.decode([75])
    assert columns["top_logprobs"][:3] == [None, {texts[1]: -3.0, best: -2.0}, {texts[2]: -1.0}]


def test_choices_of_a_prompt_share_it(tiny, handle):
    found = answer(tiny, choices=2).usage([handle, handle])
    assert (found["prompt_tokens"], found["completion_tokens"]) == (3, 4)


@pytest.mark.parametrize("style", [Completions(), Chats()])
def test_chunks_have_the_tokens_of_their_piece(tiny, handle, style):
    piece = Piece(handle, "b", 1, 2, "stop")
    [choice] = style.chunk(answer(tiny), 4, piece)["choices"]
    assert (choice["index"], choice["finish_reason"]) == (4, "stop")
    logprobs = choice["logprobs"]
    one = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs["content"]]
    assert one == [-1.5]
    [plain] = style.chunk(answer(tiny, logprobs=False), 0, piece)["choices"]
    assert plain["logprobs"] is None
    assert style.last(answer(tiny))["choices"] == []
