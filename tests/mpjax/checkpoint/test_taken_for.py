"""Architectures that are unknown here and fit a family, and what `mpjax info` says of them."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.cli.application import app
from mpjax.errors import CheckpointError
from mpjax.models import FAMILIES
from mpjax.models.registry import families, taken_for
from tests.mpjax.checkpoint.write_checkpoint import LLAMA, random_tensors, write_checkpoint

NEW = LLAMA | {"architectures": ["NewForCausalLM"], "new_key": 3, "empty_key": None}
TOKENS = np.arange(12, dtype=np.int32)[None]


@pytest.fixture
def folder(tmp_path, rng):
    tensors = random_tensors(LLAMA, rng)
    write_checkpoint(tmp_path / "llama", LLAMA, tensors)
    return write_checkpoint(tmp_path / "new", NEW, tensors)


def test_an_unknown_architecture_is_loaded_as_a_family_that_it_fits(folder):
    with pytest.raises(CheckpointError, match="unsupported architecture: 'New") as e:
        mpjax.load(folder)
    hint = str(e.value).partition("; it has the keys and tensors of ")[2]
    assert "load it with family='llama'" in hint
    assert "qwen3" not in hint.partition(":")[0].split(", ")  # which has norms of heads
    with pytest.warns(UserWarning, match=r"taken for that of llama, which has no new_key: the mod"):
        found = mpjax.load(folder, family="llama").model(TOKENS)
    expected = mpjax.load(folder.parent / "llama").model(TOKENS)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.filterwarnings("ignore:.*taken for")
def test_a_family_that_does_not_fit_is_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"lacks 4 tensors .*q_norm"):
        mpjax.load(folder, family="Qwen3")
    with pytest.raises(ValueError, match=r"family is 'lama' \(did you mean 'llama'\?\): expected"):
        mpjax.load(folder, family="lama")
    mpjax.save(mpjax.load(folder, family="llama"), tmp_path / "saved")
    with pytest.raises(ValueError, match="names is 'tunix': a saved model has its own"):
        mpjax.load(tmp_path / "saved", names="tunix")
    with pytest.raises(ValueError, match="family is 'llama': a saved model has its own"):
        mpjax.load(tmp_path / "saved", family="llama")


def test_every_family_has_a_name():
    assert {*families().values()} == {*FAMILIES.values()}
    for name, kind in families().items():
        [architecture] = taken_for({}, name)["architectures"]
        assert FAMILIES[architecture] is kind
    assert taken_for({}, "Qwen3ForCausalLM") == {"architectures": ["Qwen3ForCausalLM"]}


def test_a_key_that_stops_a_known_architecture_is_named_without_a_hint(folder):
    llama = folder.parent / "llama"
    write_checkpoint(llama, LLAMA | {"hidden_act": "relu"}, {})
    with pytest.raises(CheckpointError) as caught:
        mpjax.load(llama)
    assert "hidden_act is 'relu'" in str(caught.value)
    assert "family=" not in str(caught.value)


def test_info_says_what_would_run(folder):
    found = CliRunner().invoke(app, ["info", str(folder)])
    assert found.exit_code
    assert "NewForCausalLM" in found.stdout
    assert "can run" in found.stdout
    assert "family='llama'" in str(found.exception) + found.output
