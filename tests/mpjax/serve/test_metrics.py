from __future__ import annotations

import pytest

from mpjax.serve.metrics import NUMBERS, exposition

pytestmark = pytest.mark.any_version


def test_each_number_has_its_kind():
    text = exposition({name: index for index, name in enumerate(NUMBERS)})
    assert "# TYPE mpjax_running gauge\nmpjax_running 0\n" in text
    assert "# TYPE mpjax_new_tokens_total counter\nmpjax_new_tokens_total 7\n" in text
