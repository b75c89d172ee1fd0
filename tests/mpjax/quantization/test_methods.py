from __future__ import annotations

import re

import jax.numpy as jnp
import pytest

from mpjax.kernels import WeightFormat
from mpjax.quantization.methods import ROUNDINGS, SCALINGS, Method, choose_codes, read_method
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
        ("gptq+awq", "the scalings awq, smooth, os, each once"),
        ("rtn+gptq", "one of rtn, range, clip, gptq, gptq-fresh behind them"),
        ("learn+gptq", "learn last"),
        ("gptq+learn+learn", "learn last"),
        ("", "expected rotate and hadamard first, if at all"),
        ("+", "then any of the scalings"),
        ("awq++gptq", "then any of the scalings"),
        ("awq+awq+rtn", "each once"),
        ("foo", "one or several of rotate, hadamard, awq"),
        ("awq+rotate+rtn", "rotate is of the whole model, and comes first in the method of the"),
        (4, "the method is 4: expected a text"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Method.parse(text)


def test_steps_of_the_whole_model_come_first():
    assert read_method("Rotate + os+gptq") == (("rotate",), Method(("os",), "gptq"))
    assert read_method("rotate") == (("rotate",), Method((), "range"))
    assert read_method("rotate+hadamard") == (("rotate", "hadamard"), Method((), "range"))
    assert read_method("hadamard+gptq") == (("hadamard",), Method((), "gptq"))
    assert read_method("awq+gptq") == ((), Method(("awq",), "gptq"))


@pytest.mark.parametrize(
    "text",
    ["hadamard+rotate+rtn", "rotate+rotate+gptq", "hadamard+hadamard+gptq", "gptq+hadamard"],
)
def test_steps_of_the_whole_model_have_one_order(text):
    message = f"the method is {text!r}: rotate and hadamard are of the whole model, and come first"
    with pytest.raises(ValueError, match=re.escape(message)):
        read_method(text)


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
