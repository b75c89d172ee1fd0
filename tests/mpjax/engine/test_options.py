from __future__ import annotations

import math

import numpy as np
import pytest

from mpjax.engine.options import (
    require_gap,
    require_observer,
    require_priority,
    require_table_states,
    require_top_logprobs,
)

pytestmark = pytest.mark.any_version


def test_options_that_fit_are_taken():
    for gap in (None, 1, 0.5, np.float32(0.5), math.inf):
        require_gap(gap)
    require_priority(-3)
    require_top_logprobs(20)
    require_observer(print)
    require_observer(None)


@pytest.mark.parametrize(
    ("require", "value", "message"),
    [
        (require_gap, True, "max_gap is True: expected seconds above 0"),
        (require_table_states, -1, "table_states is -1: expected the most states of a table, 0 to"),
        (require_gap, 0, "max_gap is 0: expected seconds above 0"),
        (require_gap, math.nan, "max_gap is nan: expected seconds above 0"),
        (require_priority, True, "priority is True: expected a whole number"),
        (require_top_logprobs, 21, "logprobs is 21: .* 0 to 20"),
        (require_top_logprobs, True, "logprobs is True: .* 0 to 20"),
        (require_observer, 3, "observer is 3: expected a function of a ProgramRun"),
    ],
)
def test_options_that_do_not_fit_are_named(require, value, message):
    with pytest.raises(ValueError, match=message):
        require(value)
