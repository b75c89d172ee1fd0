from __future__ import annotations

import inspect
import json
import re

import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.cli import generate
from mpjax.cli.application import app

SUMMARY = (
    r"\d+ prompt tokens, (\d+) new: first after [\d.]+ s with compiling(?:, [\d.,]+ tokens/s)?\n"
)
HOT = mpjax.Sampling(temperature=1.2, top_k=40)
HOT_OPTIONS = ["--temperature", "1.2", "--top-k", "40", "--seed", "3"]


@pytest.fixture
def run(tiny_folder):
    def call(*arguments, **settings):
        command = ["generate", "--model", str(tiny_folder), "--max-new-tokens", "20", *arguments]
        return CliRunner().invoke(app, command, **settings)

    return call


@pytest.fixture(scope="module")
def expected(tiny):
    return mpjax.generate(tiny, "def f", max_new_tokens=20, sampling=HOT, seeds=[3]).text[0]


def test_stdout_is_the_text_and_stderr_the_speed(run, expected):
    result = run("def f", *HOT_OPTIONS)
    assert result.exit_code == 0
    assert result.stdout == expected
    match = re.fullmatch(SUMMARY, result.stderr)
    assert match
    assert match[1] == "20"
    assert "tokens/s" in result.stderr


def test_speculation_changes_the_speed_alone(run):
    repeated = ("x x x x x x", "--json")
    result = run(*repeated, "--speculate", "ngram:3:1")
    assert json.loads(result.stdout)["text"] == json.loads(run(*repeated).stdout)["text"]
    assert re.search(r"[\d.]+ tokens/step, \d+% of [1-9]\d* proposed tokens", result.stderr)


def test_one_prompt_is_generated_once(run, monkeypatch):
    """The text appears as it is drawn, not after a warm-up."""
    calls, original = [], mpjax.stream
    monkeypatch.setattr(mpjax, "stream", lambda *a, **k: calls.append(a[1]) or original(*a, **k))
    assert run("def f", *HOT_OPTIONS).exit_code == 0
    assert calls == ["def f"]


KEYS = ["id", "text", "finish_reason", "prompt_tokens", "tokens", "logprobs"]


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_json_is_a_line_with_what_generate_returns(run, tiny):
    result = run("def f", *HOT_OPTIONS, "--json")
    assert result.exit_code == 0
    [line] = lines(result.stdout)
    assert list(line) == KEYS
    found = mpjax.generate(tiny, "def f", max_new_tokens=20, sampling=HOT, seeds=[3])
    assert line == {
        "id": 1,
        "text": found.text[0],
        "finish_reason": "length",
        "prompt_tokens": found.prompt_tokens[0],
        "tokens": found.tokens[0],
        "logprobs": pytest.approx(found.logprobs[0]),
    }
    assert re.fullmatch(r"1 prompt, \d+ tokens, 20 new: [\d.]+ s with compiling\n", result.stderr)


def test_several_prompts_come_under_headers(run, tiny, expected):
    other = "import os\n" + "x" * 60
    result = run("def f", other, *HOT_OPTIONS, "--echo")
    text = mpjax.generate(tiny, other, max_new_tokens=20, sampling=HOT, seeds=[4]).text[0]
    assert result.stdout == (
        f"==> def f <==\ndef f{expected}\n\n==> import os... <==\n{other}{text}\n"
    )
    assert result.stderr.startswith("2 prompts, ")


def test_a_file_of_prompts_becomes_a_file_of_results(run, expected, tmp_path):
    asked, written = tmp_path / "prompts.jsonl", tmp_path / "new" / "results.jsonl"
    asked.write_text(
        '{"id": "größer", "prompt": "import os", "max_new_tokens": 3}\n\n'
        '{"prompt": "def f", "seed": 3}\n',
        encoding="utf-8",
    )
    result = run("--input", str(asked), "--output", str(written), *HOT_OPTIONS)
    assert (result.exit_code, result.stdout) == (0, "")
    first, second = lines(written.read_text(encoding="utf-8"))
    assert (first["id"], len(first["tokens"])) == ("größer", 3)
    assert (second["id"], second["text"]) == (3, expected)
    assert [path.name for path in written.parent.iterdir()] == ["results.jsonl"]

    piped = run("--input", "-", *HOT_OPTIONS, input=asked.read_bytes())
    assert [line["text"] for line in lines(piped.stdout)] == [first["text"], second["text"]]
    asked.write_text('{"prompt": "def f", "seed": 3}\n')
    [alone] = lines(run("--input", str(asked), "--output", "-", *HOT_OPTIONS).stdout)
    logprobs = pytest.approx(second["logprobs"], abs=1e-5)
    assert alone == second | {"id": 1, "logprobs": logprobs}


def test_nothing_is_written_unless_all_is_done(run, tmp_path, monkeypatch):
    asked, written = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    asked.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    written.write_text("old")
    arguments = ("--input", str(asked), "--output", str(written), "--overwrite")
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"mpjax: {asked}, line 2 is empty")

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    asked.write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(mpjax, "Engine", interrupted)
    assert run(*arguments).exit_code == 130
    assert written.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl", "results.jsonl"]


# Options of which results depend, with another value each, and the others.
MATTERS = {
    "max_new_tokens": ["--max-new-tokens", "9"],
    "min_new_tokens": ["--min-new-tokens", "2"],
    "temperature": ["--temperature", "0.5"],
    "top_k": ["--temperature", "1", "--top-k", "3"],
    "top_p": ["--temperature", "1", "--top-p", "0.5"],
    "min_p": ["--temperature", "1", "--min-p", "0.5"],
    "repetition_penalty": ["--repetition-penalty", "1.5"],
    "seed": ["--seed", "7"],
    "stop": ["--stop", "x"],
    "speculate": ["--speculate", "ngram"],
    "adapter": ["--adapter", "x"],
}
OF_THE_MODEL = {"model", "precision", "dtype", "max_positions", "devices", "experts"}
OF_PROMPTS = {"prompt", "prompt_file", "input"}
OF_THE_OUTPUT = {"output_file", "overwrite", "json", "batch_size", "echo"}


def test_a_run_goes_on_only_with_the_same_options(run, tiny, tmp_path, monkeypatch):
    """Of every option it is known whether results depend on it."""
    parameters = {*inspect.signature(generate.command).parameters}
    assert parameters == {*MATTERS} | OF_THE_MODEL | OF_PROMPTS | OF_THE_OUTPUT
    jobs = []

    def complete(lm, requests, engine, options, kept):
        jobs.append(kept._job)
        return []

    monkeypatch.setattr(mpjax, "load", lambda *arguments, **options: tiny)
    monkeypatch.setattr("mpjax.cli.batch.complete", complete)
    output = ["--output", str(tmp_path / "results.jsonl"), "--overwrite"]
    hot = ["--temperature", "1"]
    for more in ([], hot, ["--batch", "3"], *MATTERS.values()):
        result = run("a b", "c", *output, *more)
        assert result.exit_code == 0, result.stderr
    first, *others = jobs
    assert others.pop(1) == first  # another size of batches
    assert len({first, *others}) == 1 + len(others)
    run("a b", "d", *output)
    assert jobs[-1] not in jobs[:-1]


def test_a_resumed_run_counts_what_it_generates(run, tiny, tmp_path, monkeypatch):
    def complete(lm, requests, engine, options, kept):
        if not kept.results:
            kept.add(1, result)
            raise KeyboardInterrupt
        return [result] * len(requests)

    result = {"prompt_tokens": 2, "tokens": [1, 2, 3]}
    monkeypatch.setattr(mpjax, "load", lambda *arguments, **options: tiny)
    monkeypatch.setattr("mpjax.cli.batch.complete", complete)
    arguments = ("a b", "c", "d", "--output", str(tmp_path / "results.jsonl"))
    assert run(*arguments).exit_code == 130
    kept, summary = run(*arguments).stderr.splitlines()
    assert kept == "results kept of an earlier run: 1; going on with them"
    assert summary.startswith("2 prompts, 4 tokens, 6 new: ")
    assert len(lines((tmp_path / "results.jsonl").read_text())) == 3


def test_a_file_that_is_written_while_the_model_is_loaded_is_kept(run, tiny, tmp_path, monkeypatch):
    def load(*arguments, **options):
        written.write_text("by another process")
        return tiny

    written = tmp_path / "results.jsonl"
    monkeypatch.setattr(mpjax, "load", load)
    monkeypatch.delattr(mpjax, "Engine")
    result = run("x", "--output", str(written))
    assert result.exit_code == 2
    assert "is there already: choose another file" in result.stderr
    assert written.read_text() == "by another process"
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
