from __future__ import annotations

from pathlib import Path

import pytest

from mpjax.checkpoint.progress import bytes_bar

FOLDER = Path("models/tiny-llama")


@pytest.mark.parametrize(("progress", "shown"), [(None, False), (False, False), (True, True)])
@pytest.mark.parametrize("action", ["Loading", "Saving"])
def test_a_bar_is_shown_on_stderr_where_it_is_wanted(action, progress, shown, capfd):
    with bytes_bar(action, FOLDER, progress, 3000) as advance:
        advance(1000)
        advance(2000)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert (f"{action} tiny-llama" in captured.err) == shown
    assert ("3.0/3.0 kB" in captured.err) == shown
    assert ("0:00:00" in captured.err) == shown
