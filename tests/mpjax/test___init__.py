from __future__ import annotations

import importlib
import pkgutil
import types

import pytest

import mpjax

FLOORS = {"kernels", "models"}
NAMES = sorted(set(mpjax.__all__) - FLOORS)


def test_the_floors_are_public():
    assert set(mpjax.__all__) - set(NAMES) == FLOORS
    for name in FLOORS:
        assert getattr(mpjax, name) is importlib.import_module(f"mpjax.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_each_public_name_is_a_documented_function_or_class(name):
    value = getattr(mpjax, name)
    assert not isinstance(value, types.ModuleType)
    assert value.__name__ == name
    assert value.__doc__


def test_no_module_hides_a_public_name():
    """Importing `mpjax.x` binds `x` in the package, also over a function of that name."""
    modules = {module.name for module in pkgutil.iter_modules(mpjax.__path__)}
    assert not modules & set(NAMES)
    assert importlib.import_module("mpjax.evaluation.perplexity").evaluate is mpjax.evaluate


def test_other_names_are_missing():
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = mpjax.nonsense  # type: ignore[attr-defined]
    assert set(mpjax.__all__) <= set(dir(mpjax))
