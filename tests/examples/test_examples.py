"""The examples run, and print what they are there to show."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpjax.conftest import write_tiny_model
from tests.sweeps import in_sweep

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def printed(capsys, monkeypatch):
    """`printed(name, *arguments)` runs an example, and gives what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def percentages(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+)%", text)]


@pytest.mark.parametrize("kind", ["lora", in_sweep("full")])
def test_grpo(kind, printed):
    """The reward grows, the weights follow, and the trainer has the numbers of its sampler."""
    text = printed("grpo.py", "--train", kind, "--steps", "20")
    rewards = [float(number) for number in re.findall(r"reward ([\d.]+)", text)]
    assert len(rewards) == 20
    assert rewards[0] < 0.4
    assert sum(rewards[-4:]) / 4 > 0.8
    assert "weights 19" in text
    difference = float(re.findall(r"log-probabilities ([\d.e+-]+),", text)[0])
    assert difference < (1e-5 if kind == "lora" else 0.2)


@pytest.mark.parametrize("kind", ["master", in_sweep("scales")])
def test_qat(kind, printed):
    """A few steps make much of what rounding to 2 bits has lost good, in the packed model."""
    text = printed("qat.py", "--train", kind, "--steps", "8")
    [(before, after)] = re.findall(r"perplexity ([\d.]+) before, ([\d.]+) after", text)
    assert float(after) < float(before) / 8


def test_train_drafter(printed):
    text = printed("train_drafter.py", "3")
    [(before, after)] = re.findall(r"loss ([\d.]+) before, ([\d.]+) after 3 steps", text)
    assert float(after) < float(before)
    assert text.count("the plain tokens: True") == 2


def test_adapters(printed):
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", printed("adapters.py"))]
    assert len(losses) == 7
    assert losses[-1] < losses[0] / 2


def test_generate(printed):
    _, *texts = re.split(r"--- (?:greedy|sampled)\n", printed("generate.py"))
    assert [text.startswith("def __init__(self, ") for text in texts] == [True, True, False, False]
    assert all(text.startswith("import os\nimport ") for text in texts[2:])


def test_engine(printed):
    text = printed("engine.py")
    assert len(re.findall(r"request 0: \d+ tokens", text)) > 1
    assert text.count("---") == 3
    [(new, shared)] = re.findall(r"(\d+) tokens, (\d+) of prompts were shared", text)
    assert int(new) == 2 * 16 + 3 * 24
    assert int(shared) > 0


@pytest.mark.sweep
def test_speculation(printed):
    text = printed("speculation.py")
    steps = re.findall(r"(Ngram|Draft): ([\d.]+) tokens/step, .* accepted, same text: True", text)
    assert [name for name, _ in steps] == ["Ngram", "Draft"]
    assert all(float(number) > 1.3 for _, number in steps)


def test_kernels(printed):
    text = printed("kernels.py")
    assert "1048576 bytes become 278528" in text
    [error] = percentages(text)
    assert 5 < error < 15  # of rounding normal values to four bits
    assert "(2, 1, 8, 64)" in text


def test_learned_scales(printed):
    text = printed("learned_scales.py")
    assert text.startswith("WNF2A16KV16: perplexity ")
    before, learned, loaded, exact = (float(number) for number in re.findall(r"\d+\.\d{2}", text))
    assert exact < learned < 0.5 * before
    assert loaded == learned


@pytest.mark.sweep
def test_processes(tmp_path):
    """Two processes with two CPU devices each draw the same text from one model."""
    folder = write_tiny_model(tmp_path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {
        **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        "PYTHONPATH": str(EXAMPLES.parent),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    arguments = [sys.executable, str(EXAMPLES / "processes.py"), address, "2"]
    started = [
        subprocess.Popen(
            [*arguments, str(number), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        done = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], done
    first, second = (out.splitlines()[-1] for out, _ in done)  # behind what Gloo prints
    assert first.startswith("2 of 4 devices: '"), done
    assert first == second


def test_modules(printed):
    assert "the sequences have [17, 10] tokens" in printed("modules.py")


def test_paged_attention(printed):
    text = printed("paged_attention.py")
    assert text.count("[164, 101] tokens") == 2
    eight, four = percentages(text)
    assert 0 < eight < 2 < four < 20
