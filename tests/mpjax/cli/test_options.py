from __future__ import annotations

import pytest
import typer

import mpjax
from mpjax.cli import options
from mpjax.precision import Precision


def test_a_precision_that_can_not_be_read_is_wrong_usage():
    assert options.parse_precision("W4g32A16KV8") == Precision.parse("W4g32A16KV8")
    with pytest.raises(typer.BadParameter, match="can't read the precision 'W3'"):
        options.parse_precision("W3")


def test_a_proposer_that_can_not_be_read_is_wrong_usage():
    assert options.parse_speculate(None) is None
    assert options.parse_speculate("ngram:5").k == 5
    with pytest.raises(typer.BadParameter, match="speculate is 'fast': expected ngram"):
        options.parse_speculate("fast")


def test_sampling_values_out_of_range_are_wrong_usage():
    found = options.sampling_options(0.7, 5, 0.9, 0.1, 1.1)
    assert found == mpjax.Sampling(0.7, 5, 0.9, 0.1, 1.1)
    assert options.sampling_options(None, None, None, None, None).greedy
    with pytest.raises(typer.BadParameter, match=r"top_p is 2\.0"):
        options.sampling_options(0.7, None, 2.0, None, None)
    with pytest.raises(typer.BadParameter, match="temperature is not"):
        options.sampling_options(None, 5, None, None, None)


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
