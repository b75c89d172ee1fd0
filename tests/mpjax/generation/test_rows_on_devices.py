from __future__ import annotations

from tests.eight_devices import run


def test_rows_among_copies_of_a_divided_model():
    """Two copies on two devices each have the tokens, and the rewards, of one device."""
    assert run("tests.mpjax.rows_on_devices") == "rows\n"
