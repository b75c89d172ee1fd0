from __future__ import annotations

import pytest

from mpjax.engine.options import EngineOptions, RequestOptions

pytestmark = pytest.mark.any_version


def test_options_have_usual_values():
    assert EngineOptions.of({"ride": True}) == EngineOptions(ride=True)
    assert RequestOptions.of({"logprobs": 20}) == RequestOptions(logprobs=20)


@pytest.mark.parametrize(
    ("options", "how", "message"),
    [
        (EngineOptions, {"max_gapp": 1}, r"Engine\(\) got .* 'max_gapp' \(did you mean 'max_gap'"),
        (EngineOptions, {"temperature": 1}, "Engine.* keyword argument 'temperature'$"),
        (RequestOptions, {"top_p": 1}, r"'top_p': pass sampling=Sampling\(top_p=\.\.\.\)$"),
    ],
)
def test_unknown_options_are_named(options, how, message):
    with pytest.raises(TypeError, match=message):
        options.of(how)


@pytest.mark.parametrize(
    ("options", "how", "message"),
    [
        (EngineOptions, {"max_gap": True}, "max_gap is True: expected seconds above 0"),
        (EngineOptions, {"ride": 1}, "ride is 1"),
        (RequestOptions, {"priority": True}, "priority is True: expected a whole number"),
        (RequestOptions, {"logprobs": 21}, "logprobs is 21: .* 0 to 20"),
    ],
)
def test_wrong_options_are_named(options, how, message):
    with pytest.raises(ValueError, match=message):
        options.of(how)
