from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.text.prompts import encode, is_single
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.tokenizer_folders import byte_level

TEMPLATES = {
    "default": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "shouting": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
}
LETTERS = Tokenizer(byte_level([], 256), chat_templates=TEMPLATES)
CHAT = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
IDS = [7, 0, 255]


def letters(text):
    return LETTERS.encode(text)


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        tuple(IDS),
        np.asarray(IDS),
        np.asarray(IDS, np.uint8),
        jnp.asarray(IDS),
        [np.int64(7), jnp.int32(0), 255],
    ],
    ids=["list", "tuple", "int64", "uint8", "jax", "scalars"],
)
def test_token_ids_stay_as_they_are(prompt):
    """One prompt of them, a batch of one, and one of several."""
    assert encode(LETTERS, prompt, 256) == encode(LETTERS, [prompt], 256) == [IDS]
    assert encode(LETTERS, [prompt, "ab", [5]], 256) == [IDS, letters("ab"), [5]]
    assert all(type(index) is int for index in encode(LETTERS, prompt, 256)[0])


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_an_array_of_two_dimensions_is_a_batch(array):
    assert encode(LETTERS, array([IDS, IDS[::-1]]), 256) == [IDS, IDS[::-1]]
    assert encode(LETTERS, (array(IDS), array([1])), 256) == [IDS, [1]]


def test_ranges_are_ids_too():
    assert encode(LETTERS, range(3), 256) == [[0, 1, 2]]


def test_texts_and_chats():
    assert encode(LETTERS, "ab", 256) == encode(LETTERS, ("ab",), 256) == [letters("ab")]
    assert encode(LETTERS, CHAT, 256) == encode(LETTERS, [CHAT], 256) == [letters("ab")]
    assert encode(LETTERS, ["x", CHAT], 256) == [letters("x"), letters("ab")]


def test_a_chat_template_by_name_or_as_source():
    assert encode(LETTERS, CHAT, 256, "shouting") == [letters("AB")]
    assert encode(LETTERS, [CHAT, "x"], 256, "shouting") == [letters("AB"), letters("x")]
    base = Tokenizer(byte_level([], 256))
    assert encode(base, CHAT, 256, "{{ messages[1].content }}{{ messages[0].content }}") == [
        letters("ba")
    ]
    with pytest.raises(ValueError, match=r"no chat template.*: pass chat_template="):
        encode(base, CHAT, 256)


def test_what_is_one_prompt():
    assert all(map(is_single, ["", "a", IDS, np.asarray(IDS), CHAT]))
    assert not any(map(is_single, [[], ["a"], [IDS], np.asarray([IDS]), [CHAT], None, {}, b"a"]))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts are empty"),
        ("", "prompt 0 is empty"),
        (["x", np.zeros(0, int)], "prompt 1 is empty"),
        ([[1], [2, 256]], "prompt 1 has the token id 256: expected 0 to 255"),
        ([1, 2**70], f"prompt 0 has the token id {2**70}"),
        ([1, "a"], r"prompt 0 is \[1, 'a'\]: expected a text, token ids, or the messages"),
        (["a", None], "prompt 1 is a NoneType: expected a text"),
        ([1.5, 2.5], "prompt 0 is a float: expected"),
        (np.ones(3, np.float32), r"prompt 0 is an array of float32 \[3\]: expected a text, token"),
        (np.ones((2, 3, 4), int), r"prompt 0 is an array of int64 \[3, 4\]: expected"),
        (np.asarray(3), r"prompts are an array of int64 \[\]: expected"),
        (CHAT[0], "prompts are a dict: .* a list"),
        (iter(["x"]), "prompts are a list_iterator"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        encode(LETTERS, prompts, 256)


@pytest.mark.parametrize("prompts", ["x", IDS, ["x", IDS]])
def test_a_chat_template_is_for_chats(prompts):
    with pytest.raises(ValueError, match="chat_template is given, and no prompt is a chat"):
        encode(LETTERS, prompts, 256, "shouting")


def test_a_chat_template_is_known_or_a_template():
    with pytest.raises(ValueError, match=r"'shuoting': expected a chat .* \(default, shouting\)"):
        encode(LETTERS, CHAT, 256, "shuoting")
