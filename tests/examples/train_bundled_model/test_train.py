"""The training stage from token files to a checkpoint and its record, on a tiny model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.train_bundled_model import train
from examples.train_bundled_model.__main__ import main
from examples.train_bundled_model.corpus import BUNDLED
from examples.train_bundled_model.recipe import Recipe, TrainingError, sweep

TINY = train.MODEL | {
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
RECIPE = Recipe(
    steps=20, learning_rate=1e-2, batch=4, context=16, interval=10, compute_dtype="float32"
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Texts in which each token follows from the one before."""
    folder = tmp_path / "data"
    folder.mkdir()
    for part, size in {"train": 600, "validation": 100, "held_out": 70}.items():
        (np.arange(size) % 32).astype("<u2").tofile(folder / f"{part}.bin")
    return folder


def run(data, recipes, **keywords):
    output = data.parent / "output"
    return output, train.run(data, output, recipes, model=TINY, **keywords)


def test_a_run_writes_a_checkpoint_and_its_record(data, capsys):
    output, record = run(data, [RECIPE])
    assert {file.name for file in output.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "training.json",
    }
    assert json.loads((output / "training.json").read_text()) == record
    assert json.loads((output / "config.json").read_text()) == record["model"]
    assert record["model"] == TINY | {"max_position_embeddings": 16}
    assert Recipe(**record["recipe"]) == RECIPE
    tensors = load_file(output / "model.safetensors")
    assert record["parameters"] == sum(tensor.size for tensor in tensors.values())
    for part, size in {"train": 600, "validation": 100, "held_out": 70}.items():
        digest = hashlib.sha256((data / f"{part}.bin").read_bytes()).hexdigest()
        assert record["data"][part] == {"tokens": size, "sha256": digest}
    assert [progress["step"] for progress in record["course"]] == [10, 20]
    assert record["best"] == record["course"][-1]
    assert record["best"]["validation_loss"] < math.log(32)
    assert set(record["held_out_perplexity"]) == {"float32", "bfloat16_weights", "bfloat16"}
    assert all(1 < value < 32 for value in record["held_out_perplexity"].values())
    assert {"python", "jax", "flax", "optax"} <= set(record["versions"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("* written; held-out perplexity: float32")
    assert printed[-2].startswith("*    20")


def test_a_sweep_outlives_a_recipe_that_diverges(data, capsys):
    diverging = dataclasses.replace(RECIPE, learning_rate=math.inf)
    _, record = run(data, [diverging, RECIPE])
    assert Recipe(**record["recipe"]) == RECIPE
    assert len(record["sweep"]) == 1
    assert "diverged" in capsys.readouterr().out
    with pytest.raises(TrainingError, match="every recipe"):
        run(data, [diverging])


def test_missing_data_say_how_to_make_them(data):
    (data / "validation.bin").unlink()
    with pytest.raises(TrainingError, match=r"validation\.bin is missing.*prepare --output"):
        run(data, [RECIPE])


def test_command_line_defaults_are_the_recipe(monkeypatch):
    calls = []
    monkeypatch.setattr(train, "run", lambda *args, **keywords: calls.append((args, keywords)))
    main(["train", "--data", "d"])
    values = ["--steps", "30", "--learning-rate", "0.1", "--compute-dtype", "float32"]
    main(["train", "--data=d", "--output=o", "--sweep", "--time-limit=240", *values])
    assert calls[0] == ((Path("d"), BUNDLED, [Recipe()]), {"time_limit": math.inf})
    base = Recipe(steps=30, learning_rate=0.1, compute_dtype="float32")
    assert calls[1] == ((Path("d"), Path("o"), sweep(base)), {"time_limit": 240.0})


def test_command_line_errors_are_sentences(tmp_path, capsys):
    for wrong in (["--noise", "2"], []):
        with pytest.raises(SystemExit) as stopped:
            main(["train", "--data", str(tmp_path), *wrong])
        assert stopped.value.code == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[0] == "error: noise is a share from 0 to 1, got 2.0"
    assert errors[1].startswith(f"error: {tmp_path}/train.bin is missing")
