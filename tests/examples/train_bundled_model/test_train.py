"""The training stage from token files to a checkpoint and its record, on a tiny model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import jax.numpy as jnp
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


def test_a_sweep_writes_the_best_recipe_only(data):
    bad = dataclasses.replace(RECIPE, learning_rate=1e-5)
    output, record = run(data, [bad, RECIPE, bad])
    assert Recipe(**record["recipe"]) == RECIPE
    assert [row["learning_rate"] for row in record["sweep"]] == [1e-5, 1e-2, 1e-5]
    losses = [row["validation_loss"] for row in record["sweep"]]
    assert losses[1] == min(losses) == record["best"]["validation_loss"]
    _, alone = run(data, [RECIPE])
    assert alone["held_out_perplexity"] == record["held_out_perplexity"]
    assert json.loads((output / "training.json").read_text()) == alone


def test_a_sweep_outlives_a_recipe_that_diverges(data, capsys):
    diverging = dataclasses.replace(RECIPE, learning_rate=math.inf)
    _, record = run(data, [diverging, RECIPE])
    assert Recipe(**record["recipe"]) == RECIPE
    assert len(record["sweep"]) == 1
    assert "diverged" in capsys.readouterr().out
    with pytest.raises(TrainingError, match="every recipe"):
        run(data, [diverging])


def test_after_the_time_limit_no_recipe_is_begun(data, capsys):
    _, record = run(data, sweep(RECIPE), time_limit=0.0)
    assert len(record["sweep"]) == 1
    assert "4 recipes are left out" in capsys.readouterr().out


def test_stored_weights_give_the_recorded_perplexity(data):
    """From model.safetensors alone, with the model written out in numpy."""
    output, record = run(data, [RECIPE])
    tensors = {
        name: tensor.astype(np.float64)
        for name, tensor in load_file(output / "model.safetensors").items()
    }
    tokens = (np.arange(70) % 32).astype(np.int64)
    losses: list[float] = []
    for first in range(0, 69, 16):
        window = tokens[first : first + 17]
        logits = _llama(tensors, window[:-1])
        picked = logits[np.arange(len(window) - 1), window[1:]]
        losses += list(np.log(np.exp(logits).sum(1)) - picked)
    expected = np.exp(np.mean(losses))
    assert record["held_out_perplexity"]["bfloat16_weights"] == pytest.approx(expected, rel=1e-4)


def _llama(tensors: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * tensors[name]

    def project(x, name):
        return x @ tensors[f"model.layers.0.{name}_proj.weight"].T

    def turn(x):  # [tokens, heads * 16]
        x = x.reshape(len(x), -1, 16)
        angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(8) / 8)
        turned = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    x = tensors["model.embed_tokens.weight"][tokens]
    y = norm(x, "model.layers.0.input_layernorm.weight")
    query, key = turn(project(y, "self_attn.q")), turn(project(y, "self_attn.k"))
    scores = np.einsum("thd,kd->htk", query, key[:, 0]) / 4
    scores = np.where(np.tri(len(x)), np.exp(scores), 0)
    attended = scores / scores.sum(-1, keepdims=True) @ project(y, "self_attn.v")
    x = x + project(attended.swapaxes(0, 1).reshape(len(x), -1), "self_attn.o")
    y = norm(x, "model.layers.0.post_attention_layernorm.weight")
    gate = project(y, "mlp.gate")
    x = x + project(gate / (1 + np.exp(-gate)) * project(y, "mlp.up"), "mlp.down")
    return norm(x, "model.norm.weight") @ tensors["model.embed_tokens.weight"].T


def test_missing_data_say_how_to_make_them(data):
    (data / "validation.bin").unlink()
    with pytest.raises(TrainingError, match=r"validation\.bin is missing.*prepare --output"):
        run(data, [RECIPE])


@pytest.mark.parametrize("tokens", [[1, 32], [1]])
def test_data_that_do_not_fit_are_named(data, tokens):
    np.asarray(tokens, "<u2").tofile(data / "held_out.bin")
    with pytest.raises(TrainingError, match=r"held_out\.bin must hold"):
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


def test_the_model_matches_its_tokenizer():
    config = json.loads((BUNDLED / "tokenizer.json").read_text())
    assert len(config["model"]["vocab"]) == train.MODEL["vocab_size"]
    [end_of_text] = config["added_tokens"]
    assert end_of_text["id"] == train.MODEL["eos_token_id"]
    assert jnp.dtype(train.MODEL["dtype"]) == jnp.bfloat16
