from __future__ import annotations

import pytest

from mpjax.kernels import Routing


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"per_token": 0}, "per_token is 0"),
        ({"scoring": "relu"}, "scoring is 'relu': expected softmax or sigmoid"),
        ({"group_score": "sum"}, "group_score is 'sum': expected max or top_two"),
        ({"groups": 2}, "groups is 2 and groups_per_token None: expected both, or neither"),
    ],
)
def test_fields_that_are_wrong(fields, message):
    with pytest.raises(ValueError, match=f"^Routing: {message}"):
        Routing(**{"per_token": 2} | fields)


def test_fields_become_numbers():
    routing = Routing(2, scale=2, groups=4, groups_per_token=2)
    assert routing.scale == 2.0
    assert routing.why_not(8) is None
    assert "3 groups" in (Routing(2, groups=3, groups_per_token=1).why_not(8) or "")


def test_sums_of_scores_are_not_ranked_as_logits():
    assert Routing(2).ranks_logits
    assert Routing(2, group_score="top_two").ranks_logits
    assert not Routing(2, groups=4, groups_per_token=2, group_score="top_two").ranks_logits
    assert not Routing(2, "sigmoid").ranks_logits
