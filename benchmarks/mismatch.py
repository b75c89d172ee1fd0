"""Measures how log-probabilities of an engine and of `token_logprobs` differ.

python -m benchmarks.mismatch [MODEL] [--precision W4A16KV16] [--dtype fp16]

An engine continues eight prompts at temperature 1 in the usual mode, `token_logprobs` computes the
log-probabilities of the same tokens through the same model, and `mpjax.mismatch` compares them.
Each is also compared with `token_logprobs` of the same weights with float32 activations: two
computations that are rounded independently differ by as much as each does from that.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np

import mpjax

PROMPTS = (
    "def mean(values):",
    "class Stack:",
    "import os\n",
    "for name in names:",
    "The capital of France is",
    "Once upon a time",
    "def add(a, b):",
    "x = [",
)
NEW = 64


def sample(lm: mpjax.LanguageModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Texts int32 [rows, tokens], their lengths, and log-probabilities [rows, NEW] of the last."""
    how = {"temperature": 1.0, "stop_ids": ()}
    found = mpjax.generate(
        lm, PROMPTS, max_new_tokens=NEW, sampling=how, seeds=list(range(len(PROMPTS)))
    )
    prompts = [lm.tokenizer.encode(prompt) for prompt in PROMPTS]  # type: ignore[union-attr]
    rows = [[*prompt, *new] for prompt, new in zip(prompts, found.tokens, strict=True)]
    lengths = np.array([len(row) for row in rows])
    tokens = np.array([row + [0] * (lengths.max() - len(row)) for row in rows], np.int32)
    return tokens, lengths, np.array(found.logprobs, np.float32)


def scores(lm: mpjax.LanguageModel, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The log-probabilities [rows, NEW] of each text's last tokens in a trainer."""
    found = np.asarray(jax.jit(mpjax.token_logprobs)(lm.for_device, tokens, lengths))
    columns = lengths[:, None] - 1 - NEW + np.arange(NEW)
    return np.take_along_axis(found, columns, 1)


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mismatch")
    parser.add_argument("model", nargs="?", help="folder or file; by default the bundled model")
    parser.add_argument("--precision", default="W4A16KV16", help="by default %(default)s")
    parser.add_argument("--dtype", default="bf16", help="of activations; by default %(default)s")
    options = parser.parse_args()
    path = options.model or mpjax.bundled_model()
    lm = mpjax.load(path, precision=options.precision, dtype=options.dtype)
    tokens, lengths, sampler = sample(lm)
    trainer = scores(lm, tokens, lengths)
    wide = options.precision.replace("A16", "A32")
    exact = scores(mpjax.load(path, precision=wide), tokens, lengths)
    print(f"sampler to trainer: {mpjax.mismatch(sampler, trainer)}")
    print(f"sampler to float32: {mpjax.mismatch(sampler, exact)}")
    print(f"trainer to float32: {mpjax.mismatch(trainer, exact)}")


if __name__ == "__main__":
    main()
