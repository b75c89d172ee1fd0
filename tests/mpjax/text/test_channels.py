from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.text.answers import message_of
from mpjax.text.channels import HARMONY, MISTRAL_THINK, THINK, Channels, Splitter
from mpjax.text.tokenizer import Tokenizer
from mpjax.text.tool_calls import Part
from tests.mpjax.tokenizer_folders import (
    HARMONY_TEMPLATE,
    LLAMA_TEMPLATE,
    QWEN_TEMPLATE,
    harmony,
)

pytestmark = pytest.mark.any_version

ANSWER = (
    "<|channel|>analysis<|message|> They ask 1 < 2. <|end|><|start|>assistant<|channel|>final"
    "<|message|>Yes, 1 <| 2.<|return|>"
)
ABOUT_TAGS = "The tag </think> ends it, <think> begins it."
CASES = [
    (HARMONY, "", ANSWER, ("They ask 1 < 2. ", "Yes, 1 <| 2.")),
    (HARMONY, "", "No channel.", ("", "No channel.")),
    (HARMONY, "", "<|start|>assistant<|message|>None.<|end|>", ("", "None.")),
    (HARMONY, "", "<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>", ("{}", "")),
    (HARMONY, "", "<|channel|>analysis<|message|>It ends <|e", ("It ends <|e", "")),
    (THINK, "", "<think>\nHm.\n</think>\n\nYes.", ("Hm.\n", "Yes.")),
    (THINK, "assistant\n<think>\n", "Hm.</think>Yes.", ("Hm.", "Yes.")),
    (THINK, "<think>\n\n</think>\n\n", "Yes.", ("", "Yes.")),
    (THINK, "", "\n <think>\nHm.</think>Yes.", ("Hm.", "Yes.")),
    (THINK, "<think>\n", "<think>Hm.</think>Yes.", ("Hm.", "Yes.")),
    (THINK, "", ABOUT_TAGS, ("", ABOUT_TAGS)),
    (THINK, "</think>\n\n", "<think> begins it.", ("", "<think> begins it.")),
    (THINK, "", f"<think>Hm, <think>.</think>{ABOUT_TAGS}", ("Hm, <think>.", ABOUT_TAGS)),
    (THINK, "", "    return 1", ("", "    return 1")),
    (HARMONY, "", "    return 1<|end|>", ("", "    return 1")),
    (HARMONY, "", " <|start|>assistant<|message|>None.<|end|>", ("", "None.")),
    (THINK, "", " \n", ("", " \n")),
    (MISTRAL_THINK, "", "[THINK]Hm [1].[/THINK]Yes [THINK].", ("Hm [1].", "Yes [THINK].")),
]


def divide(channels, prompt, pieces):
    splitter = Splitter(channels, prompt)
    parts = [part for piece in pieces for part in splitter.push(piece)]
    assert "" not in [part.text for part in parts]
    found = message_of([*parts, *splitter.finish()])
    return found.reasoning, found.text


@given(st.sampled_from(CASES), st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_any_pieces_give_the_same_parts(case, sizes):
    channels, prompt, text, expected = case
    pieces = []
    while text:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[:size])
        text = text[size:]
    assert divide(channels, prompt, pieces) == expected


def test_what_is_certain_comes_at_once():
    splitter = Splitter(THINK)
    assert splitter.push("<think>") == []
    assert splitter.push(" a <b") == [Part("reasoning", "a <b")]
    assert splitter.push("<") == []
    assert splitter.push("/c") == [Part("reasoning", "</c")]


def test_a_template_tells_its_channels():
    found = [Channels.of_template(text) for text in (HARMONY_TEMPLATE, QWEN_TEMPLATE, "{{ x }}")]
    assert found == [HARMONY, THINK, None]
    assert Channels.of_template(LLAMA_TEMPLATE) is None
    assert Channels.of_template("'[THINK]' + block['thinking'] + '[/THINK]'") is MISTRAL_THINK


def test_texts_keep_the_markers_of_channels(tmp_path):
    """Though they are special tokens; those that end a text are left out."""
    tokenizer = Tokenizer.from_folder(harmony(tmp_path))
    assert tokenizer.style.channels is HARMONY
    ids = tokenizer.encode(ANSWER)
    text = ANSWER.removesuffix("<|return|>")
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream(context=tokenizer.encode("<|start|>assistant"))
    assert "".join(stream.push([index]) for index in ids) + stream.finish() == text
