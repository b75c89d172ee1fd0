"""The training stage: makes a checkpoint and its record from the tokens of `prepare`."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from examples.train_bundled_model import export, optimize
from examples.train_bundled_model.optimize import DivergedError, Progress, Result
from examples.train_bundled_model.recipe import Recipe, TrainingError
from examples.train_bundled_model.tokenizer import VOCABULARY_SIZE
from mpjax.models import Llama

PARTS = ("train", "validation", "held_out")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")

# 4.46 million parameters, 8.92 MB in bfloat16. All inner sizes are multiples of 128, so that
# every weight can be stored in 4 bits with groups of 128.
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "max_position_embeddings": 1024,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": VOCABULARY_SIZE,
}


def run(
    data: Path,
    output: Path,
    recipes: Sequence[Recipe],
    *,
    time_limit: float = math.inf,
    model: dict[str, Any] = MODEL,
) -> dict[str, Any]:
    """Trains with each recipe, writes the best model to `output`, and returns its record.

    The best model has the lowest validation loss; it is written as soon as it is found. The record,
    also written as `training.json`, has everything to make the model again, and its perplexity on
    the held-out text, which had no part in any choice.

    time_limit: seconds after which no further recipe is begun.

    Raises TrainingError if the data are missing or don't fit, or if every recipe diverges.
    """
    started = time.perf_counter()
    tokens = read_tokens(data, model["vocab_size"])
    best: Result | None = None
    record: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for index, recipe in enumerate(recipes):
        if index and time.perf_counter() - started > time_limit:
            print(f"time limit reached: {len(recipes) - index} recipes are left out")
            break
        # The model has as many positions as its training context, since longer ones are untrained.
        config = model | {"max_position_embeddings": recipe.context}
        print(f"recipe {index + 1}/{len(recipes)}: {recipe}", flush=True)
        try:
            result = optimize.train(
                recipe,
                Llama.config_from_hf(config),
                tokens["train"],
                tokens["validation"],
                log=lambda line: print(line, flush=True),
            )
        except DivergedError as diverged:
            print(diverged, flush=True)
            continue
        rows.append(_row(result, len(tokens["train"])))
        if best is None or result.best.validation_loss < best.best.validation_loss:
            best = result
            export.write_checkpoint(best.model, config, output)
            record = _record(best, config, tokens)
        # The rows so far: an interrupted sweep leaves a complete record of what it did.
        export.write_json(record | {"sweep": rows}, output / "training.json")
    if best is None:
        raise DivergedError("training diverged with every recipe; lower the learning rate")
    print(summary(rows, record), flush=True)
    return record | {"sweep": rows}


def read_tokens(folder: Path, vocabulary: int) -> dict[str, NDArray[np.uint16]]:
    """The token streams that `prepare` wrote, by part: train, validation, held_out.

    Raises TrainingError, which names the file, if one is missing or doesn't fit the vocabulary.
    """
    tokens = {}
    for part in PARTS:
        file = folder / f"{part}.bin"
        if not file.is_file():
            raise TrainingError(
                f"{file} is missing: write it with "
                f"`python -m examples.train_bundled_model prepare --output {folder}`"
            )
        tokens[part] = np.fromfile(file, dtype="<u2").astype(np.uint16)
        if len(tokens[part]) < 2 or tokens[part].max() >= vocabulary:
            raise TrainingError(
                f"{file} must hold at least two tokens, all below the vocabulary's size "
                f"{vocabulary}; it has {len(tokens[part])}, up to {tokens[part].max(initial=0)}"
            )
    return tokens


def perplexities(model: Llama, recipe: Recipe, tokens: NDArray[np.uint16]) -> dict[str, float]:
    """exp(mean cross-entropy) on `tokens`, in windows of the context length without overlap.

    float32: the weights as trained, in float32 arithmetic. bfloat16_weights: the weights as they
    are stored, in float32 arithmetic, which is what a quantised model is compared with.
    bfloat16: the stored weights in bfloat16 arithmetic.
    """
    looks = optimize.windows(tokens, recipe.context, recipe.batch)
    stored = optimize.cast(model, "bfloat16")
    # "highest": float32 products on a GPU would otherwise be rounded to TensorFloat-32.
    with jax.default_matmul_precision("highest"):
        losses = {
            "float32": optimize.loss(model, looks, dtype="float32"),
            "bfloat16_weights": optimize.loss(stored, looks, dtype="float32"),
        }
    losses["bfloat16"] = optimize.loss(stored, looks, dtype="bfloat16")
    return {name: math.exp(float(loss)) for name, loss in losses.items()}


def summary(rows: Sequence[dict[str, Any]], record: dict[str, Any]) -> str:
    """A table of all recipes, one a line, and the held-out perplexity of the best."""
    best = min(row["validation_loss"] for row in rows)
    lines = [
        "",
        "  steps  epochs      rate  decay  noise  best at    train  validation  seconds",
    ]
    for row in rows:
        lines.append(
            f"{'*' if row['validation_loss'] == best else ' '} {row['steps']:5d}"
            f"{row['epochs']:8.1f}{row['learning_rate']:10.2g}{row['weight_decay']:7.2f}"
            f"{row['noise']:7.2f}{row['best_step']:9d}{row['train_loss']:9.4f}"
            f"{row['validation_loss']:12.4f}{row['seconds']:9.1f}"
        )
    perplexity = ", ".join(f"{n} {p:.4f}" for n, p in record["held_out_perplexity"].items())
    return "\n".join([*lines, f"* written; held-out perplexity: {perplexity}"])


def _row(result: Result, train_tokens: int) -> dict[str, Any]:
    recipe, best = result.recipe, result.best
    return {
        "steps": recipe.steps,
        "epochs": round(recipe.steps * recipe.batch * recipe.context / train_tokens, 2),
        "learning_rate": recipe.learning_rate,
        "weight_decay": recipe.weight_decay,
        "noise": recipe.noise,
        "best_step": best.step,
        "train_loss": round(best.train_loss, 5),
        "validation_loss": round(best.validation_loss, 5),
        "seconds": round(result.seconds, 2),
    }


def _record(
    result: Result, config: dict[str, Any], tokens: dict[str, NDArray[np.uint16]]
) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "recipe": dataclasses.asdict(result.recipe),
        "model": config,
        "parameters": sum(weight.size for weight in jax.tree.leaves(result.model)),
        "data": {
            part: {
                "tokens": len(stream),
                "sha256": hashlib.sha256(stream.astype("<u2").tobytes()).hexdigest(),
            }
            for part, stream in tokens.items()
        },
        "device": f"{device.platform}: {device.device_kind}",
        "versions": {
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in PACKAGES},
        },
        "best": _rounded(result.best),
        "held_out_perplexity": perplexities(result.model, result.recipe, tokens["held_out"]),
        "course": [_rounded(progress) for progress in result.course],
    }


def _rounded(progress: Progress) -> dict[str, float]:
    return {name: round(value, 5) for name, value in progress._asdict().items()}
