from __future__ import annotations

import dataclasses

import pytest
import typer

import mpjax
from mpjax.cli import options
from mpjax.errors import CheckpointError
from mpjax.precision import Precision


def test_a_precision_that_can_not_be_read_is_wrong_usage():
    assert options.parse_precision("W4g32A16KV8") == Precision.parse("W4g32A16KV8")
    with pytest.raises(typer.BadParameter, match="precision 'W3': W3A16 is not implemented"):
        options.parse_precision("W3")


def test_a_proposer_that_can_not_be_read_is_wrong_usage():
    assert options.parse_speculate(None) is None
    assert options.parse_speculate("ngram:5").k == 5
    with pytest.raises(typer.BadParameter, match="speculate is 'fast': expected ngram"):
        options.parse_speculate("fast")
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        options.parse_speculate("draft:4:./nowhere")


def test_sampling_values_out_of_range_are_wrong_usage():
    assert options.sampling_options(temperature=0.7, top_k=5, top_p=None) == {
        "temperature": 0.7,
        "top_k": 5,
    }
    with pytest.raises(typer.BadParameter, match=r"top_p is 2\.0"):
        options.sampling_options(top_p=2.0)


def test_options_change_the_models_own_sampling_and_that_is_shown(tiny, capsys):
    assert options.choose_sampling(tiny, {}).greedy
    assert options.choose_sampling(tiny, {"temperature": 0.5}) == mpjax.Sampling(0.5)
    with pytest.raises(typer.BadParameter, match="temperature is not"):
        options.choose_sampling(tiny, {"top_k": 5})
    assert capsys.readouterr().err == ""  # nobody but the options says how tokens are drawn
    lm = dataclasses.replace(tiny, sampling=mpjax.Sampling(0.6, top_p=0.9))
    assert options.choose_sampling(lm, {"top_k": 5}) == mpjax.Sampling(0.6, 5, 0.9)
    own = "the model's own is temperature 0.6, top_p 0.9\n"
    assert capsys.readouterr().err == f"sampling: temperature 0.6, top_k 5, top_p 0.9; {own}"
    assert options.choose_sampling(lm, {"temperature": 0}).greedy
    assert capsys.readouterr().err == f"sampling: greedy; {own}"


def test_load_passes_on_what_was_said(monkeypatch):
    seen = []
    monkeypatch.setattr(mpjax, "load", lambda *args, **keywords: seen.append((args, keywords)))
    options.load(None, None, None)
    options.load("folder", "W4A16KV8", options.Dtype.float16, 99, 2, options.ExpertsKind.whole)
    keywords = {
        "precision": Precision.parse("W4A16KV8"),
        "dtype": "float16",
        "max_positions": 99,
        "devices": 2,
        "experts": "whole",
    }
    assert seen == [
        (
            (mpjax.bundled_model(),),
            {"precision": None, "dtype": None, "max_positions": None, "devices": 1}
            | {"experts": "divided"},
        ),
        (("folder",), keywords),
    ]


def test_a_precision_is_read_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(mpjax, "load", lambda *args, **keywords: pytest.fail("loaded"))
    with pytest.raises(typer.BadParameter):
        options.load("folder", "W5", None)
