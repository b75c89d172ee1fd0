"""Recipes: which weight format and method each linear map of a model gets."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpjax.arguments import read_text
from mpjax.kernels import KVFormat, WeightFormat
from mpjax.kernels.checks import shown
from mpjax.precision import Precision
from mpjax.quantization.methods import Method

DEFAULT_METHOD = "gptq"
DEFAULT_HEAD = WeightFormat("uint8", None, symmetric=True)  # H8


@dataclasses.dataclass(frozen=True)
class Rule:
    """The weight format and the method of all linear maps whose paths match a pattern.

    modules: the pattern, as a shell matches file names: `layers.*.mlp.down` or `layers.0.*`.
    weights: a packed format; or one of 16 bits, for maps that stay as they are.
    method: how weights are rounded; see Method.
    """

    modules: str
    weights: WeightFormat
    method: Method

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", WeightFormat.of(self.weights))
        object.__setattr__(self, "method", Method.of(self.method))

    def matches(self, path: str) -> bool:
        """Whether the rule is for the linear maps at a path."""
        return fnmatch.fnmatchcase(path, self.modules)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The rules for a model's linear maps, and its KV format.

    rules: the first that matches a map's path is the map's.
    bits: of the dtype that the model computes in, 16, or 32 for float32.
    head, embedding: the formats of these tables, which are rounded to nearest; None leaves them in
        16 bits. A tied table is both, and has one format.
    """

    rules: tuple[Rule, ...]
    kv: KVFormat = dataclasses.field(default_factory=KVFormat)
    bits: int = 16
    head: WeightFormat | None = None
    embedding: WeightFormat | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv", KVFormat.of(self.kv))
        for table in ("head", "embedding"):
            if (format := getattr(self, table)) is not None:
                object.__setattr__(self, table, WeightFormat.of(format))

    @classmethod
    def of(cls, precision: Precision | str, method: Method | str = DEFAULT_METHOD) -> Recipe:
        """The recipe in which all linear maps get the weights of a precision, by one method.

        The tables get the formats of the precision's H and E. If the weights are packed and it has
        no H, the head is H8, and so is a tied table; H16 keeps it in 16 bits.

        Raises ValueError for a precision without a single W part.
        """
        precision = Precision.of(precision)
        rule = Rule("*", _weights(precision), Method.of(method))
        tables = precision.tables
        if not tables and rule.weights.is_packed:
            tables = {"head": DEFAULT_HEAD}
        return cls((rule,), precision.kv, precision.bits, **tables)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Recipe:
        """The recipe in a TOML file. Raises ValueError that names the file and the fault.

            precision = "W4A16KV8"
            method = "awq+gptq"

            [[rules]]
            modules = "layers.*.mlp.down"
            precision = "W8A16KV16"

        `precision` and `method` at the top are for all maps that no rule matches. A rule has
        `modules` and one or both of `precision` (its KV part is ignored) and `method`.
        """
        try:
            return cls.parse(tomllib.loads(read_text(path)))
        except ValueError as error:  # tomllib's errors are ValueErrors, too
            raise ValueError(f"the recipe {Path(path)}: {error}") from error

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Recipe:
        """Reads the content of a recipe's file, as `read` describes it. Raises ValueError."""
        _require_keys(content, {"precision"}, {"method", "rules"}, "the recipe")
        rest = cls.of(content["precision"], content.get("method", DEFAULT_METHOD))
        rules = content.get("rules", [])
        if not isinstance(rules, list):
            raise ValueError(f"rules is {shown(rules)}: expected a list of tables, [[rules]]")
        found = [_rule(rule, rest.rules[0], rest.bits) for rule in rules]
        return dataclasses.replace(rest, rules=(*found, *rest.rules))

    @property
    def tables(self) -> dict[str, WeightFormat]:
        """The formats of the tables that it names, by `head` and `embedding`."""
        named = {"head": self.head, "embedding": self.embedding}
        return {table: format for table, format in named.items() if format is not None}

    def rule_of(self, path: str) -> Rule:
        """The rule of the linear maps at a path. Raises ValueError where there is none."""
        for rule in self.rules:
            if rule.matches(path):
                return rule
        raise ValueError(
            f'no rule of the recipe names {path}: add one, or one for all others with modules = "*"'
        )

    def require_used(self, paths: list[str]) -> None:
        """Raises ValueError for a rule that matches none of a model's linear maps."""
        for rule in self.rules:
            if rule.modules != "*" and not any(map(rule.matches, paths)):
                kinds = sorted({path.split(".", 2)[2] for path in paths})
                raise ValueError(
                    f"the rule for {rule.modules!r} matches no linear map of this model: expected "
                    f"a pattern of paths such as layers.0.{kinds[0]}, of {', '.join(kinds)}"
                )


def _rule(content: Any, rest: Rule, bits: int) -> Rule:
    if not isinstance(content, Mapping):
        raise ValueError(f"a rule is {shown(content)}: expected a table with modules")
    _require_keys(content, {"modules"}, {"precision", "method"}, "a rule")
    modules = content["modules"]
    if not isinstance(modules, str) or len(content) == 1:
        raise ValueError(
            f"the rule for {shown(modules)}: expected a pattern of paths, and a precision or method"
        )
    weights = rest.weights
    if (written := content.get("precision")) is not None:
        precision = Precision.of(written)
        weights = _weights(precision)
        if precision.bits != bits:
            raise ValueError(
                f"the rule for {modules!r} has the precision {precision}, and the recipe computes "
                f"in {bits} bits: expected A{bits}, or 8 bits"
            )
    return Rule(modules, weights, Method.of(content.get("method", rest.method)))


def _weights(precision: Precision) -> WeightFormat:
    if precision.weights is None:
        raise ValueError(
            f"{precision} does not say what weights become: expected a precision with one W part, "
            "such as W4A16KV8; rules of a recipe give other maps other formats"
        )
    return precision.weights


def _require_keys(
    content: Mapping[str, Any], required: set[str], optional: set[str], where: str
) -> None:
    for name in sorted(content.keys() - required - optional):
        known = ", ".join(sorted(required | optional))
        raise ValueError(f"{where} has a key {name!r:.80}: expected {known}")
    for name in sorted(required - content.keys()):
        raise ValueError(f"{where} has no {name}: expected one")
