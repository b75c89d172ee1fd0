from __future__ import annotations

import pytest

from mpjax.serve.messages import read_messages

pytestmark = pytest.mark.any_version


def test_a_content_is_one_text():
    parts = [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    found = read_messages([{"role": "user", "content": parts, "name": "me"}, call])
    assert found == [{"role": "user", "content": "Why?", "name": "me"}, call]


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
    ],
)
def test_other_messages_are_refused(messages, error):
    with pytest.raises(ValueError, match=error):
        read_messages(messages)
