from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.kernels import quantize
from mpjax.models import ExpertsSpec, LayerSpec, Mixtral, Packed
from mpjax.quantization.learning import model as module
from mpjax.quantization.learning.learned_linear import Learned
from tests.models.small import CONFIG
from tests.sweeps import in_sweep

TEXTS = ["the quick brown fox jumps over the lazy dog " * 4, "def f(x):\n    return x\n" * 6]
LITTLE = mpjax.Calibration(window=32, tokens=128, batch=2)


@pytest.fixture(scope="module")
def rounded(tiny_folder):
    return mpjax.load(tiny_folder, precision="WNF2A32KV16")


@pytest.fixture
def watch(monkeypatch):
    """The losses of each call."""
    seen = []
    real = module.descend

    def descend(*arguments):
        found = real(*arguments)
        seen.append(found[1])
        return found

    monkeypatch.setattr(module, "descend", descend)
    return seen


def batches_of(lm):
    return LITTLE.windows(TEXTS, lm.tokenizer, lm.config)


def loss_of(lm, teacher=None):
    """The mean loss of all positions of the batches, from whole logits."""
    losses = []
    for tokens, is_real in batches_of(lm):
        found = jax.nn.log_softmax(lm.model(jnp.asarray(tokens)))
        if teacher is None:
            chosen = jnp.take_along_axis(found[:, :-1], tokens[:, 1:, None], -1)[..., 0]
            losses.append(-chosen[is_real[:, 1:]])
        else:
            exact = jax.nn.log_softmax(teacher.model(jnp.asarray(tokens)))
            losses.append((jnp.exp(exact) * (exact - found)).sum(-1)[is_real])
    return float(jnp.concatenate(losses).mean())


@pytest.mark.parametrize("has_teacher", [in_sweep(False), True])
def test_the_gradient_is_that_of_the_whole_model(rounded, tiny, has_teacher, monkeypatch):
    """As jax.grad finds it, through all layers at once."""
    monkeypatch.setattr(module, "LOGITS_BYTES", 2 * 2048 * 4 * 5)  # five tokens of a row at a time
    model = nnx.clone(rounded.model)
    batches = batches_of(rounded)
    teacher = module.Teacher.of(tiny, batches, "float32") if has_teacher else None
    module._make_learned(model, False, None)
    lesson = module._Lesson(model, batches, teacher)
    assert lesson.chunk == 5
    state = [nnx.state(layer, Learned) for layer in model.layers]
    tokens, is_real = batches[1]
    graph, learned, rest = nnx.split(model, Learned, ...)

    @jax.jit
    def whole(learned):
        found = jax.nn.log_softmax(nnx.merge(graph, learned, rest)(tokens))
        if has_teacher:
            exact = jax.nn.log_softmax(tiny.model(tokens))
            losses = (jnp.exp(exact) * (exact - found)).sum(-1)
            return jnp.where(is_real, losses, 0).sum() / np.float32(is_real.sum())
        losses = -jnp.take_along_axis(found[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return jnp.where(is_real[:, 1:], losses, 0).sum() / np.float32(is_real[:, 1:].sum())

    expected = jax.tree.leaves(jax.grad(whole)(learned))
    found = jax.tree.leaves(lesson.gradient(state, 1))
    assert len(found) == len(expected) == 8
    for leaves in zip(found, expected, strict=True):
        scale = float(jnp.abs(leaves[1]).max())
        np.testing.assert_allclose(*leaves, rtol=1e-2, atol=1e-3 * scale)


def test_the_loss_falls_and_is_that_of_the_model_that_is_returned(
    rounded, tiny, tiny_folder, watch
):
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(rounded.model))]
    learning = mpjax.Learning(4, 0.02)
    arguments = {"learning": learning, "calibration": LITTLE}
    found = mpjax.learn_scales(rounded, TEXTS, reference=tiny, **arguments)
    [losses] = watch
    assert losses[0] == pytest.approx(loss_of(rounded, tiny), rel=1e-3)
    assert min(losses) == pytest.approx(loss_of(found, tiny), rel=1e-3)
    assert min(losses) < 0.8 * losses[0]
    assert found.precision == rounded.precision
    assert found.updates is not rounded.updates
    for leaves in zip(before, jax.tree.leaves(nnx.state(rounded.model)), strict=True):
        np.testing.assert_array_equal(*leaves)


@pytest.mark.parametrize("options", [{}, {"rechoose": True}])
def test_the_text_alone_can_teach_and_codes_can_be_chosen_anew(rounded, tiny, watch, options):
    reference = tiny if options else None
    learning = mpjax.Learning(2, 0.01, table=bool(options))
    found = mpjax.learn_scales(
        rounded, TEXTS, reference=reference, learning=learning, calibration=LITTLE, **options
    )
    [losses] = watch
    assert min(losses) < losses[0]
    assert min(losses) == pytest.approx(loss_of(found, reference), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tiny", {}, "has no packed weights"),
        ("rounded", {"rechoose": True}, "pass a LanguageModel as reference"),
        ("rounded", {"rechoose": True, "reference": "rounded"}, "is quantised"),
        ("rounded", {"documents": [" "]}, "documents are empty"),
        ("rounded", {"learning": 3}, "learning is 3"),
    ],
)
def test_what_can_not_be_learned_is_said(request, name, options, message):
    lm = request.getfixturevalue(name)
    options = {"documents": TEXTS, "calibration": LITTLE} | options
    if "reference" in options:
        options["reference"] = request.getfixturevalue(options["reference"])
    with pytest.raises(ValueError, match=message):
        mpjax.learn_scales(lm, options.pop("documents"), **options)


def test_scales_of_blocks_are_refused_with_their_place(tiny_folder):
    lm = mpjax.load(tiny_folder, precision="WFP8A32KV16")
    with pytest.raises(ValueError, match=r"scales of attention\.qkv can't be learned: float8:g128"):
        mpjax.learn_scales(dataclasses.replace(lm), TEXTS, calibration=LITTLE)


def test_packed_experts_are_refused():
    layers = (LayerSpec(CONFIG.layers[0].attention, ExpertsSpec(32, num_experts=4)),)
    model = Mixtral(dataclasses.replace(CONFIG, layers=layers), nnx.Rngs(0))
    experts: Any = model.layers[0].mlp.experts
    experts.down.kernel = Packed(quantize(experts.down.kernel.get_value(), "uint4:g32"))
    lm = mpjax.LanguageModel(model, None, mpjax.Precision.parse("A32KV16").kv, Path())
    with pytest.raises(ValueError, match=r"mlp\.experts\.down has experts with packed weights"):
        mpjax.learn_scales(lm, TEXTS)


def test_codes_are_not_chosen_anew_for_weights_in_another_order(tiny):
    """W4Ax sorts the channels between gate, up and down, and keeps no order of them."""
    recipe = mpjax.Recipe.parse(
        {
            "precision": "W16A16KV16",
            "rules": [{"modules": "*.down", "precision": "W4AxKV16", "method": "rtn"}],
        }
    )
    lm = mpjax.quantize(tiny, recipe, TEXTS, calibration=LITTLE)
    with pytest.raises(ValueError, match=r"mlp\.down, which was not rounded from the reference"):
        mpjax.learn_scales(lm, TEXTS, reference=tiny, rechoose=True, calibration=LITTLE)
