from __future__ import annotations

import re

import jax.numpy as jnp
import pytest

from mpjax.kernels import WeightFormat
from mpjax.quantization.methods import ROUNDINGS, SCALINGS, Method, choose_codes, split_steps
from mpjax.quantization.statistics import Statistics, squared_error


@pytest.mark.parametrize(
    ("text", "scalings", "rounding"),
    [
        ("rtn", (), "rtn"),
        ("GPTQ", (), "gptq"),
        ("awq", ("awq",), "range"),
        (" awq+gptq ", ("awq",), "gptq"),
        ("os", ("os",), "range"),
        ("os + gptq", ("os",), "gptq"),
        ("smooth+os+rtn", ("smooth", "os"), "rtn"),
        ("rtn+learn", (), "rtn"),
        ("awq+learn", ("awq",), "range"),
        ("learn", (), "range"),
    ],
)
def test_methods_are_read(text, scalings, rounding):
    method = Method.parse(text)
    assert method == Method(scalings, rounding, learns="learn" in text)
    assert Method.parse(str(method)) == method
    assert method.needs_text == (text != "rtn")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gtpq", "no method 'gtpq' (did you mean 'gptq'?)"),
        ("gptq+awq", "scalings first"),
        ("rtn+gptq", "one of rtn, range, clip, gptq, gptq-fresh behind them"),
        ("learn+gptq", "learn last"),
        ("gptq+learn+learn", "learn last"),
        ("", "expected scalings first"),
        ("+", "expected scalings first"),
        ("awq++gptq", "expected scalings first"),
        ("awq+awq+rtn", "each once"),
        ("awq+rotate+rtn", "rotate is a step of the whole model"),
        ("hadamrd+gptq", "there is no method 'hadamrd'"),
        (4, "the method is 4: expected a text"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Method.parse(text)


def test_steps_of_the_whole_model_come_first():
    assert split_steps("Rotate + os+gptq") == (("rotate",), " os+gptq")
    assert split_steps("rotate") == (("rotate",), "range")
    assert split_steps("rotate+hadamard") == (("rotate", "hadamard"), "range")
    assert split_steps("hadamard+gptq") == (("hadamard",), "gptq")
    assert split_steps("awq+gptq") == ((), "awq+gptq")
    assert split_steps("hadamard+rotate+gptq") == (("hadamard",), "rotate+gptq")  # refused
    with pytest.raises(ValueError, match="rotate is a step of the whole model"):
        Method.parse(split_steps("rotate+rotate+gptq")[1])


def test_every_rounding_is_better_than_to_nearest(rng):
    x = jnp.asarray(rng.standard_normal((1, 256, 64)) @ rng.standard_normal((64, 64)), jnp.float32)
    statistics = Statistics.of(x, jnp.ones((1, 256), bool), 1)
    weight = jnp.asarray(rng.standard_t(4, (64, 16)), jnp.float32)
    errors = [
        float(squared_error(plain.dequantize() - weight, statistics.hessian).sum())
        for rounding in ROUNDINGS
        for plain in [choose_codes(weight, statistics, WeightFormat.parse("uint4:g32"), rounding)]
    ]
    nearest, searched, learned, compensated, fresh = errors
    assert max(compensated, fresh) < min(searched, learned)
    assert max(searched, learned) < nearest
    assert compensated < 0.6 * nearest
    assert set(SCALINGS) == {"awq", "smooth", "os"}


def test_formats_that_a_step_can_not_serve_are_refused():
    format = WeightFormat.parse("liquid4:g64/int8")
    with pytest.raises(ValueError, match=r"gptq-fresh can't serve .* the groups of liquid4"):
        Method.parse("gptq-fresh").require_usable(format)
    Method.parse("gptq").require_usable(format)
