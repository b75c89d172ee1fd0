"""What every command says of wrong usage and of files that it can't read: one table."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from mpjax.bench import measure
from mpjax.cli.application import app

# By the beginning of a command and its rest: the exit code, and a part of what it says. {tiny} is a
# model, {target} a free path, {text} a text, {blank} one without words, {latin} one in Latin-1,
# {lines} a file of prompts.
MESSAGES = {
    "bench": {
        "gemm --formats uint4:g5": (2, "group size 5"),
        "gemm --formats uint4 --rows 1,x": (2, "'x' is not a number"),
        "gemm --formats uint4 --rows 0": (2, "positive"),
        "gemm --formats uint4 --shapes gpt": (2, "unknown shape 'gpt'"),
        "attention --formats KV1": (2, "KV1"),
        "attention --shapes b1": (2, "unknown shape 'b1'"),
        "generate --precision W4A16KV8,W": (2, "can't read the precision 'W'"),
        "generate --batch 0": (2, "positive"),
        "generate --new-tokens 1": (2, "--new-tokens"),
        "generate --prompt-tokens 50000,x": (2, "'x' is not a number"),
        "serve --prompt-tokens x": (2, "can't read the lengths 'x'"),
        "serve --precision W4A32KV8": (2, "random weights are all in one format"),
        "serve --model m --layers 4": (2, "--layers choose random weights, but --model is given"),
        "serve --no-engine": (2, "nothing is measured without an engine"),
        "serve --no-engine --static 4 --trace t.json": (2, "--no-engine runs none"),
        "mixers --shapes gpt-2": (2, "unknown shape 'gpt-2'"),
        "mixers --prompt-tokens 1": (2, "2 or more tokens"),
        "magic": (2, "magic"),
        "gemm --formats bfloat16": (2, "bfloat16 is not packed"),
        "gemm --implementation magic": (2, "magic"),
        "gemm --experts --shapes qwen3-8b.qkv": (2, "qwen3-8b.qkv"),
        "attention --formats uncached --shapes decode": (2, "uncached: expected shapes"),
        "generate --precision W16+W4A16KV8": (2, "random weights are all in one format"),
        "generate --precision W4A32KV8": (2, "compute in 16"),
        "generate --precision W4A16KV8s": (2, "needs a calibration"),
        "generate --precision W8A16KV8 --from-disk": (2, "W8A16KV8: the checkpoint on disk"),
        "generate --speculate 4,0": (2, "expected a whole number from 1 to 32"),
        "generate --devices 1,4096": (2, "devices is 4096, and JAX sees"),
        "generate --prompt-tokens 6 --piece-tokens 4": (2, "which pieces of 4 don't divide"),
        "generate --shapes gpt-2": (2, "unknown shapes 'gpt-2': expected one of qwen3-8b"),
        "generate --shapes llama3-70b --layers 81": (2, "layers is 81, and llama3-70b has 80"),
        "serve --precision W4A16KV8s": (2, "no calibration"),
        "serve --devices 4096": (2, "devices is 4096, and JAX sees"),
        "sums --devices 4096": (2, "devices is 4096, and JAX sees"),
        "sums --sizes 8,0": (2, "expected one or more positive numbers"),
    },
    "generate --model {tiny} --max-new-tokens 20": {
        "'' --temperature 1": (1, "prompt 0 is empty"),
        "x --max-new-tokens 300": (1, "256 positions"),
        "x --max-new-tokens 300 --max-positions 280": (1, "280 positions"),
        "x --max-positions 0": (2, "Usage: "),
        "x --precision W16A16KV8 --dtype float64": (2, "Usage: "),
        "x --precision W4": (2, "Usage: "),
        "x --top-p 7 --temperature 1": (2, "Usage: "),
        "x --max-new-tokens 0": (2, "Usage: "),
        "x --min-new-tokens 30": (2, "Usage: "),
        "x --json --echo": (2, "Usage: "),
        "x --json --output results.jsonl": (2, "Usage: "),
        "x --batch 0": (2, "Usage: "),
        "x --output /dev/null/results.jsonl": (1, "/dev/null"),
        "--input {lines} --output {lines}": (2, "is also --input"),
        "--input {lines} --output {text}": (2, "or replace it with --overwrite"),
        "'def f' --prompt-file {text}": (2, "in one way"),
        "": (2, "in one way"),
        "--prompt-file /nowhere": (2, "does not exist"),
        "--input /nowhere": (2, "there is no file /nowhere"),
        "--input {tiny}": (2, "is a folder: expected JSON Lines"),
        "x --speculate fast": (2, "speculate is 'fast': expected ngram"),
        "x --speculate draft:4:./nowhere": (1, "nowhere does not exist"),
        "x --speculate eagle:3:./nowhere": (1, "nowhere does not exist"),
        "x --speculate eagle": (2, "or eagle:3:FOLDER_OR_ID"),
        "x --top-k 5": (2, "temperature is not"),
        "x --precision W3": (2, "W3A16 is not implemented"),
    },
    "train-drafter": {
        "{tiny} {tiny} --text {text}": (2, "is not empty: choose another folder"),
        "{tiny} out --text {text} --rate 0": (2, "rate is 0.0: expected a positive, finite"),
    },
    "tune": {
        "": (2, "exactly one of --model, --shapes"),
        "--model qwen3-8b --shapes 256x64": (2, "exactly one of --model, --shapes"),
        "--model qwen3-8b --attention decode": (2, "exactly one of --model, --shapes"),
        "--experts mixtral-8x7b --attention decode": (2, "exactly one of --model"),
        "--experts qwen3-8b": (2, "unknown shape 'qwen3-8b': expected a model with experts"),
        "--attention b1-h32": (2, "unknown shape 'b1-h32'"),
        "--attention decode --kv-formats KV3": (2, "KV3"),
        "--shapes 256": (2, "can't read the shape '256'"),
        "--shapes 256x0": (2, "can't read the shape '256x0'"),
        "--shapes 256x64 --rows 0": (2, "'0' is not a number"),
        "--shapes 256x64 --formats uint5": (2, "unknown weight format 'uint5'"),
    },
    "convert {tiny}": {
        "": (2, "Usage: "),
        "{target} --precision W4": (2, "Usage: "),
        "{text}": (2, "is a file"),
        "{target} --precision A16KV8s": (2, "the cache of A16KV8s needs scales"),
        "{target} --precision A16KV8 --calibrate {text}": (2, "the cache of A16KV8 has no scales"),
        "{target} --calibrate {text}": (2, "the cache of KV16 has no scales to measure"),
    },
    "quantize {tiny} {target}": {
        "--budget 4.5": (2, "--budget needs --text to measure on"),
        "--budget 4.5 --precision W4A16KV8": (2, "has a W part"),
        "--budget 4 --activation-error 0.1": (2, "either --budget or --activation-error"),
        "--budget 4.5 --recipe {text}": (2, "either --budget or --recipe"),
        "--precision WNF2A16KV16 --method rtn --learn 1": (2, "needs --text"),
        "--precision W4A16KV8 --learn 1 --devices 2": (2, "learned on one device"),
        "--precision W4A16KV8 --method rtn --devices 99": (1, "devices is 99"),
        "": (2, "nor --recipe nor --budget is given"),
        "--precision W4A16KV8 --recipe {text}": (2, "--precision or --recipe, not both"),
        "--method rtn --recipe {text}": (2, "--method or --recipe, not both"),
        "--precision W4A16KV8 --method hadamard+rotate+rtn": (2, "in this order"),
        "--precision W4A16KV8 --method gtpq": (2, "did you mean 'gptq'"),
        "--precision W4A16KV8 --method ''": (2, "the method is ''"),
        "--precision W4A16KV8": (1, "the method gptq needs text"),
        "--precision nonsense": (2, "nonsense"),
        "--precision W4A16KV8 --text {blank}": (1, "has no text: expected one"),
    },
    "evaluate {tiny} --text {text} --batch 2": {
        "--precision W3": (2, "W3A16 is not implemented"),
        "--window 0": (2, "--window"),
        "--window 300 --precision A16KV16": (1, "256, the positions"),
        "--window 9 --max-positions 8 --precision A16KV16": (1, "8, the positions"),
        "--text /nowhere": (2, "does not exist"),
        "--json --format markdown": (2, "one format"),
        "--plot plot.svg": (2, "give --against"),
        "--stride 9 --window 8 --precision A16KV16": (1, "at most 8, the window"),
        "--against /nowhere --precision A16KV16": (1, "/nowhere"),
        "--output /dev/null/results.json": (1, "/dev/null"),
        "--precisions W16A16,W4A16KV8s --against itself": (1, "KV8s needs scales of channels"),
        "--precision A16KV16 --text {latin}": (1, "is not a text in UTF-8"),
    },
    "": {
        "unknown": (2, "Usage: "),
        "generate --unknown": (2, "Usage: "),
        "convert only-one": (2, "Usage: "),
        "--unknown": (2, "Usage: "),
        "generate x --model '/nowhere/at all'": (1, "/nowhere/at all does not exist"),
        "chat --model {tiny}": (1, "has no chat template, like most base models"),
        "serve --process 1": (1, "--process and --coordinator are for several processes"),
        "serve --processes 2": (1, "--coordinator is missing: expected the machine of process 0"),
        "serve --processes 2 --coordinator x:y": (1, "--coordinator is 'x:y'"),
        "serve --processes 2 --process 2": (1, "--process is 2: expected 0 to 1"),
        "serve --processes 2 --max-adapters 1": (1, "--max-adapters needs one process"),
        "serve --model missing --api-key ''": (2, "--api-key is empty: give a key"),
    },
}
CASES = [
    (f"{begin} {rest}", *said) for begin, cases in MESSAGES.items() for rest, said in cases.items()
]


@pytest.fixture(scope="module")
def places(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("messages")
    written = {
        "text": b"the quick brown fox",
        "blank": b" \n\n",
        "latin": "größer".encode("latin-1"),
        "lines": b'{"prompt": "a"}\n',
    }
    for name, content in written.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in (*written, "target")} | {"tiny": tiny_folder}


@pytest.mark.parametrize(("command", "code", "message"), CASES, ids=[case[0] for case in CASES])
def test_what_is_wrong_is_said(command, code, message, places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "require_gpu", lambda: pytest.fail("measured"))
    before = {path: path.read_bytes() for path in places["text"].parent.iterdir()}
    result = CliRunner().invoke(app, shlex.split(command.format_map(places)))
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert message in " ".join(result.stderr.split())
    if code == 2:
        assert "Usage: " in result.stderr
    else:
        assert result.stderr.startswith("mpjax: ")
        assert result.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in places["text"].parent.iterdir()} == before
    assert not list(tmp_path.iterdir())
