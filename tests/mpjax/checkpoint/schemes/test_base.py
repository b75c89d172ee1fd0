from __future__ import annotations

import numpy as np
import pytest

from mpjax.checkpoint.schemes.awq import AWQScheme
from mpjax.checkpoint.schemes.base import Scheme
from mpjax.checkpoint.schemes.fp8 import FP8Scheme
from mpjax.checkpoint.schemes.gptq import GPTQScheme
from mpjax.errors import CheckpointError


def test_what_a_scheme_need_not_say():
    scheme = AWQScheme(32)
    assert scheme.quant_method == "awq"
    assert scheme.choices == (scheme,)
    assert scheme.unsupported_activations is None
    assert not scheme.rounds_statically
    assert scheme.for_experts() is scheme
    assert not scheme.has_cache_scales
    assert scheme.extra_bytes({}, (64, 32)) == 0
    assert (scheme.ignored, scheme.on_host) == ((), ())


def test_what_it_must_say():
    class Silent(Scheme):
        title = "silent"

    with pytest.raises(TypeError, match="abstract"):
        Silent()  # type: ignore[abstract]


def test_permutations_take_bytes():
    scheme = GPTQScheme(4, 32)
    assert scheme.extra_bytes({"g_idx": np.zeros(64)}, (64, 32)) == 4 * 64
    assert scheme.extra_bytes({}, (64, 32)) == 0


def test_a_module_that_config_json_does_not_speak_of():
    methods = "'fp8' or 'compressed-tensors' or 'modelopt'"
    message = rf"^up is an FP8 module \(weight\), but .* quant_method {methods}: take"
    with pytest.raises(CheckpointError, match=message):
        FP8Scheme.refuse("up", {"weight": np.zeros(1)}, None)
