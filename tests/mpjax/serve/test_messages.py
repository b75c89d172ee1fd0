from __future__ import annotations

import pytest

from mpjax.serve.errors import RequestError
from mpjax.serve.messages import read_messages

pytestmark = pytest.mark.any_version


def test_a_content_is_one_text():
    parts = [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    found = read_messages([{"role": "user", "content": parts, "name": "me"}, call])
    assert found == [{"role": "user", "content": "Why?", "name": "me"}, call]


def test_what_clients_send_back_of_an_answer_changes_nothing():
    sent = {"role": "assistant", "content": "a", "refusal": None, "audio": None}
    [found] = read_messages([sent | {"function_call": None}])
    assert found == {"role": "assistant", "content": "a"}
    part = {"type": "refusal", "refusal": "no"}
    for refusal in ({"content": None, "refusal": "no"}, {"content": [part]}):
        [found] = read_messages([{"role": "assistant"} | refusal])
        assert found == {"role": "assistant", "content": "no"}
    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    [found] = read_messages([{"role": "user", "content": [cached]}])
    assert found == {"role": "user", "content": "a"}
    [found] = read_messages([{"role": "function", "name": "f", "content": None}])
    assert found["content"] == ""


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (None, "messages is null: expected a list of at least one message, such as"),
        ("hi", 'messages is "hi": expected a list of at least one message'),
        ([], r"messages is \[\]: expected a list of at least one message"),
        ([1], r"messages\[0\] is 1: expected an object with a role and a content"),
        ([{"role": "zzz", "content": ""}], r'role of messages\[0\] is "zzz": expected one of sys'),
        ([{"role": ["user"], "content": ""}], r'role of messages\[0\] is \["user"\]'),
        ([{"content": "hi"}], r"role of messages\[0\] is null: expected one of system"),
        ([{"role": "user"}], r"content of messages\[0\] is null: expected a text"),
        ([{"role": "assistant"}], r"content of messages\[0\] is null: expected a text"),
        ([{"role": "user", "content": 5}], r"content of messages\[0\] is 5: expected a text"),
        ([{"role": "user", "content": ["a"]}], r'content of messages\[0\] has "a": .* texts only'),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r'has \{"type": "image_url"\}:'),
        ([{"role": "user", "content": [{"type": "image_url", "text": "x"}]}], "texts only"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "texts only"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": {}}]}],
            r'"messages\[0\]\.content\.image_url" is no key',
        ),
        ([{"role": "assistant", "content": "", "audio": {"id": "a"}}], r"messages\[0\]\.audio is"),
        (
            [{"role": "assistant", "content": "a", "refusal": "no"}],
            r"\.refusal is \"no\": expected",
        ),
        ([{"role": "user", "refusal": "no"}], r"messages\[0\]\.refusal is"),
        ([{"role": "assistant", "content": "", "function_call": {}}], r"\.function_call is \{\}"),
    ],
)
def test_other_messages_are_refused(messages, error):
    with pytest.raises(RequestError, match=error) as found:
        read_messages(messages)
    assert found.value.parameter.startswith("messages")
