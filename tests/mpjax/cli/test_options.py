from __future__ import annotations

import dataclasses

import pytest
import typer

import mpjax
from mpjax.cli import options


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
