from __future__ import annotations

import pytest

from mpjax.kernels import early_launch

pytestmark = pytest.mark.any_version


def test_weights_may_be_copied_early_in_the_context_alone(monkeypatch):
    monkeypatch.setattr(early_launch, "why_not", lambda: None)
    assert not early_launch.may_copy_weights()
    with early_launch.weights_in_place():
        assert early_launch.may_copy_weights()
    assert not early_launch.may_copy_weights()


def test_older_versions_launch_no_kernel_early(monkeypatch):
    reason = early_launch.why_not((0, 10, 2))
    assert reason is not None
    assert "0.11" in reason
    assert early_launch.why_not((0, 11, 2)) is None
    monkeypatch.setattr(early_launch, "why_not", lambda: reason)
    with early_launch.weights_in_place():
        assert not early_launch.may_copy_weights()
