from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import typer

from mpjax.cli.requests import Request, count_tokens, gather, read_lines


def texts(*prompts, file=None, input=None):
    return [request.prompt for request in gather(prompts, file, input, 20, 0)]


def test_prompts_come_from_one_place(tmp_path, monkeypatch):
    file, lines = tmp_path / "prompt.txt", tmp_path / "prompts.jsonl"
    file.write_text("größer\n\n", encoding="utf-8")
    lines.write_text('{"prompt": "a"}')
    assert texts("def f") == ["def f"]
    assert texts("") == [""]
    assert texts("typed\n", "-") == ["typed\n", "-"]
    assert texts(file=file) == ["größer\n"]
    assert texts(input=lines) == ["a"]
    monkeypatch.setattr("sys.stdin", io.StringIO("piped\n"))
    assert texts("-") == ["piped"]
    for wrong in ({"file": file, "input": lines}, {}):
        with pytest.raises(typer.BadParameter, match="in one way"):
            texts(**wrong)
    with pytest.raises(typer.BadParameter, match="in one way"):
        texts("x", file=file)
    with pytest.raises(typer.BadParameter, match="there is no file /nowhere"):
        texts(input=Path("/nowhere"))
    with pytest.raises(typer.BadParameter, match="is a folder: expected JSON Lines"):
        texts(input=tmp_path)


@pytest.mark.parametrize(
    ("written", "prompt"), [(b"a\r\nb\r\n", "a\r\nb"), (b"a\rb\r", "a\rb\r"), (b"a\r\n\n", "a\r\n")]
)
def test_a_prompt_keeps_its_line_ends(written, prompt, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_bytes(written)
    assert texts(file=file) == [prompt]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(written), encoding="utf-8"))
    assert texts("-") == [prompt]


def test_lines_say_what_to_generate(tmp_path):
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "Why?"}]
    rows = [
        {"prompt": "ä"},
        {"id": {"of": ["any", "kind"]}, "messages": chat, "seed": 7},
        {"id": None, "prompt": "", "max_new_tokens": 1},
    ]
    # With the byte order mark and line ends of Windows, and a blank line.
    text = "\ufeff" + "\r\n".join([json.dumps(rows[0]), " ", *map(json.dumps, rows[1:])])
    path.write_text(text, encoding="utf-8", newline="")
    assert read_lines(path, 20, 5) == [
        Request(1, "ä", 20, 5, f"{path}, line 1"),
        Request({"of": ["any", "kind"]}, chat, 20, 7, f"{path}, line 3"),
        Request(None, "", 1, 7, f"{path}, line 4"),
    ]


def test_lines_on_stdin_are_utf_8_whatever_the_terminal_says(monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO('{"prompt": "é"}'.encode()), encoding="ascii")
    monkeypatch.setattr("sys.stdin", stdin)
    assert texts(input=Path("-")) == ["é"]


DEEP = '{"id": ' + "[" * 99_999 + "]" * 99_999 + ', "prompt": "a"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("def f", "is not valid JSON"),
        ('{"prompt": "a", "id": NaN}', "NaN is not a number in JSON"),
        (DEEP, "is nested too deeply"),
        ('"a"', 'holds "a": expected a JSON object'),
        (
            '{"prompt": "a", "temperature": 1}',
            'has the key "temperature"; there are id, prompt.* such as --temperature',
        ),
        ('{"id": 1}', 'has neither a "prompt" nor "messages"'),
        ('{"prompt": "a", "messages": []}', 'has both a "prompt" and "messages"'),
        ('{"messages": []}', r'"messages" is \[\], not a list of objects'),
        (
            '{"messages": [{"role": null}]}',
            r'is \[\{"role": null\}\], not a list of objects with a',
        ),
        ('{"messages": [{"role": "user", "content": 5}]}', "not a list of objects with a role and"),
        ('{"prompt": "a", "seed": -1}', '"seed" is -1: expected a whole number from 0 to'),
        ('{"prompt": "a", "max_new_tokens": 0}', "is 0: expected a whole number of 1 or more"),
    ],
    ids=lambda text: text[:40],
)
def test_a_line_that_can_not_be_read_is_named(line, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line)
    with pytest.raises(ValueError, match=rf"prompts\.jsonl, line 3.*{message}"):
        read_lines(path, 20, 0)


@pytest.mark.parametrize(
    ("first", "second"), [('"a"', '"a"'), ('{"x": 1, "y": 2}', '{"y": 2, "x": 1}'), ("2", None)]
)
def test_two_lines_have_no_id_in_common(first, second, tmp_path):
    """Nor one with the number of a line that has none."""
    path = tmp_path / "prompts.jsonl"
    own = "" if second is None else f'"id": {second}, '
    path.write_text(f'{{"id": {first}, "prompt": "a"}}\n{{{own}"prompt": "b"}}')
    message = (
        r"prompts\.jsonl, line 2 has the id .*, as .*prompts\.jsonl, line 1 has: give each line"
    )
    with pytest.raises(ValueError, match=message):
        read_lines(path, 20, 0)
    path.write_text('{"id": null, "prompt": "a"}\n{"id": null, "prompt": "b"}\n{"id": true}')
    with pytest.raises(ValueError, match="neither"):
        read_lines(path, 20, 0)


def test_tokens_are_counted_as_generate_does(tiny, chat_folder):
    import mpjax

    chat = [{"role": "user", "content": "Why?"}]
    lm = mpjax.load(chat_folder)
    assert lm.tokenizer is not None
    text = lm.tokenizer.chat(chat)
    assert count_tokens(lm, Request(1, chat, 20, 0, "prompt 1")) == len(lm.tokenizer.encode(text))
    assert count_tokens(tiny, Request(1, "x", 256, 0, "prompt 1")) == 1
    for prompt, new_tokens, message in (
        ("", 1, "line 7 is empty"),
        ("x", 257, "line 7 has 1 tokens, and with 257 new ones it would pass the 256 positions"),
        ("\udcff", 1, "line 7: character 0 of the text"),
        (chat, 1, 'line 7: .* has no chat template .*: write a plain text as "prompt" instead'),
    ):
        with pytest.raises(ValueError, match=message):
            count_tokens(tiny, Request(1, prompt, new_tokens, 0, "line 7"))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        count_tokens(dataclasses.replace(tiny, tokenizer=None), Request(1, "x", 1, 0, "line 7"))
