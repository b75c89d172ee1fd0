"""The sampling in a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpjax import Sampling
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.checkpoint.gguf.sampling import NAMES, OFF, PREFIX, read_sampling
from mpjax.errors import CheckpointError
from mpjax.sampling.generation_config import OBEYED

pytestmark = pytest.mark.any_version


def read(**values):
    found = {f"{PREFIX}{key}": value for key, value in values.items()}
    return read_sampling(Metadata(Path("m.gguf"), found | {"general.name": "m"}))


def test_the_keys_of_llama_cpp_are_read():
    assert read() is None
    half = 0.699999988079071  # 0.7 in float32
    found = read(temp=half, top_k=20, top_p=0.5, min_p=0.0, penalty_repeat=1.0, penalty_last_n=64)
    assert found == Sampling(0.7, 20, 0.5, 0.0, 1.0)
    assert read(temp=-1.0, top_k=5) == Sampling()
    assert read(temp=1.0, top_k=-3) == Sampling(1.0)
    off = {"mirostat": 0, "mirostat_tau": 5.0, "xtc_probability": 0.0, "xtc_threshold": 0.1}
    assert read(temp=1.0, **off) == Sampling(1.0)


@pytest.mark.parametrize(
    "values",
    [
        {"penalty_repeat": 1.5, "penalty_last_n": 64},
        {"mirostat": 2, "temp": 1.0},
        {"xtc_probability": 0.5},
        {"sequence": "temperature;top_k"},
    ],
)
def test_what_is_not_followed_is_named(values):
    [key] = values.keys() - {"penalty_repeat", "temp"}
    with pytest.warns(UserWarning, match=rf"m\.gguf: general\.sampling\.\* has {key} "):
        read(**values)


def test_values_of_other_kinds_are_refused():
    with pytest.raises(CheckpointError, match=r"general\.sampling\.temp' is 'hot': expected a"):
        read(temp="hot")
    with pytest.raises(CheckpointError, match=r"top_p is 2\.0: expected a number above 0"):
        read(top_p=2.0)


def test_every_key_of_the_gguf_package_is_known():
    gguf = pytest.importorskip("gguf")
    keys = vars(gguf.Keys.General).values()
    names = {key.removeprefix(PREFIX) for key in keys if str(key).startswith(PREFIX)}
    followed = {name for name in names if NAMES.get(name, name) in OBEYED}
    assert followed == {"temp", "top_k", "top_p", "min_p", "penalty_repeat"}
    named = {key for off in OFF.values() for key in off} | {"penalty_last_n", "sequence"}
    assert names - followed == named
