from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.cli import chat
from mpjax.cli.application import app
from mpjax.text.answers import AnswerReader, Style
from mpjax.text.channels import THINK


@pytest.fixture
def talk(chat_folder):
    def call(said, *arguments):
        command = ["chat", "--model", str(chat_folder), "--max-new-tokens", "16", *arguments]
        return CliRunner().invoke(app, command, input=said)

    return call


@pytest.fixture
def heard(monkeypatch):
    """The messages and options that the model got; its answers are A, B, C, ..."""
    asked = []

    def stream(lm, messages, **options):
        asked.append((messages, options))
        if messages[-1]["content"] == "interrupt me":
            yield "half "
            raise KeyboardInterrupt
        yield " "  # as a SentencePiece token's after "[/INST]"
        yield chr(ord("A") + len(asked) - 1)

    monkeypatch.setattr(mpjax, "stream", stream)
    return asked


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_the_conversation_is_remembered_until_it_is_reset(talk, heard):
    result = talk("one\n\n  two \n/reset\nthree\n/exit\nnever\n", "--system", "be brief")
    system = {"role": "system", "content": "be brief"}
    assert [messages for messages, _ in heard] == [
        [system, user("one")],
        [system, user("one"), assistant("A"), user("two")],
        [system, user("three")],
    ]
    assert (result.exit_code, result.stdout) == (0, "A\nB\nC\n")


def test_the_models_own_sampling_is_taken_and_shown(chat_folder, heard, tmp_path):
    folder = tmp_path / "own"
    shutil.copytree(chat_folder, folder)
    written = {"temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(written))
    for arguments, chosen in (
        ((), mpjax.Sampling(0.6, top_p=0.9)),
        (("--temperature", "0"), mpjax.Sampling()),
    ):
        command = ["chat", "--model", str(folder), *arguments]
        result = CliRunner().invoke(app, command, input="one\n")
        assert heard.pop()[1]["sampling"] == chosen
        assert result.stderr.startswith(f"sampling: {chosen}; the model's own is temperature 0.6,")


def test_an_interrupt_stops_the_answer_alone(talk, heard):
    result = talk("interrupt me\nmore\n")
    assert (result.exit_code, result.stdout) == (0, "half  [stopped]\nB\n")
    assert heard[1][0] == [user("interrupt me"), assistant("half "), user("more")]


@pytest.fixture
def reasoned(chat_folder, tmp_path, monkeypatch):
    """Two turns with a model that says these answers: the output, and the first as remembered."""

    def call(answers, *arguments):
        folder, asked, left = tmp_path / "model", [], [*answers]
        if not folder.exists():
            shutil.copytree(chat_folder, folder)
            file = folder / "chat_template.jinja"
            file.write_text(file.read_text(encoding="utf-8") + "{# <think> </think> #}", "utf-8")

        def stream(lm, messages, **options):
            asked.append(messages)
            yield from left.pop(0)

        monkeypatch.setattr(mpjax, "stream", stream)
        command = ["chat", "--model", str(folder), *arguments]
        return CliRunner().invoke(app, command, input="why\nand\n"), asked[1][1]

    return call


def test_reasoning_is_left_out_or_stands_before_the_answer(reasoned):
    answers = ["<thi", "nk>\nHm", ".</think>\n\nYes", "."], ["No."]
    result, remembered = reasoned(answers)
    assert (result.stdout, remembered) == ("Yes.\nNo.\n", assistant("Yes."))
    result, remembered = reasoned(answers, "--reasoning")
    assert (result.stdout, remembered) == ("Hm.\n\nYes.\nNo.\n", assistant("Yes."))


def test_an_answer_that_is_all_reasoning_says_so(reasoned):
    result, remembered = reasoned([["<think>\nHm"], ["No."]])
    assert (result.stdout, remembered) == ("\nNo.\n", assistant(""))
    assert "the answer ended in its reasoning: allow more --max-new-tokens" in result.stderr


def test_a_terminal_shows_reasoning_dimmed(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    writer = chat._Writer(AnswerReader(Style(THINK, None, {})), shows_reasoning=True)
    writer.write("<think>Hm.</think>Yes.")
    writer.end()
    assert capsys.readouterr().out == "\x1b[2mHm.\x1b[0m\n\nYes.\n"


def test_unknown_commands_are_not_said(talk, heard):
    result = talk("/help\nhi\n")
    assert "unknown command /help: expected /reset or /exit" in result.stderr
    assert [messages for messages, _ in heard] == [[user("hi")]]


def test_an_answer_gets_what_room_is_left(talk, heard):
    result = talk("x " * 100 + "\n" + "y " * 300 + "\nshort\n", "--max-new-tokens", "200")
    assert result.exit_code == 0
    assert ", and the model 256 positions: /reset it" in result.stderr
    assert len(heard) == 2  # the second was refused, and is not part of the conversation
    assert 0 < heard[0][1]["max_new_tokens"] < 200
    assert [m["content"] for m in heard[1][0]][1:] == ["A", "short"]
    result = talk("y " * 300 + "\n", "--max-positions", "900")
    assert (result.exit_code, result.stderr) == (0, "")
