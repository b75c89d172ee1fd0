"""Learns the scales of a model whose weights are packed in 2 bits (FLUTE), and saves the result."""

from __future__ import annotations

import inspect
import tempfile
import textwrap
from pathlib import Path

import mpjax

LENGTH, WINDOWS = 64, 8


def perplexity(lm: mpjax.LanguageModel) -> float:
    """The perplexity of a model on held-out text."""
    return mpjax.evaluate(lm, [other], window=LENGTH, progress=False).perplexity


source = inspect.getsource(textwrap)  # Python, as in training
text, other = source[: len(source) // 2], source[-3000:]
exact = mpjax.load(mpjax.bundled_model(), progress=False)
lm = mpjax.load(mpjax.bundled_model(), precision="WNF2A16KV16", progress=False)

# Each step moves the scales along the gradient of the distance from the 16-bit model's predictions.
# Without a reference, the loss is that of the text itself, as in FLUTE.
learned = mpjax.learn_scales(
    lm,
    [text],
    reference=exact,
    learning=mpjax.Learning(epochs=8, rate=0.05),
    calibration=mpjax.Calibration(window=LENGTH, tokens=WINDOWS * LENGTH, batch=WINDOWS),
    progress=False,
)
with tempfile.TemporaryDirectory() as folder:
    mpjax.save(learned, Path(folder) / "model")
    restored = mpjax.load(Path(folder) / "model", progress=False)
print(
    f"{lm.precision}: perplexity {perplexity(lm):.2f}, with learned scales "
    f"{perplexity(learned):.2f}, saved and loaded {perplexity(restored):.2f}; in 16 bits "
    f"{perplexity(exact):.2f}"
)
