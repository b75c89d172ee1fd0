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
from mpjax.quantization.blocks import BlockRule
from mpjax.quantization.methods import Method

DEFAULT_METHOD = "gptq"


@dataclasses.dataclass(frozen=True)
class Rule:
    """The weight format and the method of all linear maps whose paths match a pattern.

    modules: as a shell matches file names, such as `layers.*.mlp.down` or `layers.0.*`.
    weights: a packed format; or one of 16 bits, for maps that stay as they are.
    method: how they are rounded; see Method.
    blocks: of `int4` weights (W4Ax), the widths of their activations' blocks.
    """

    modules: str
    weights: WeightFormat
    method: Method
    blocks: BlockRule = dataclasses.field(default_factory=BlockRule)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", WeightFormat.of(self.weights))
        object.__setattr__(self, "method", Method.of(self.method))

    @property
    def has_blocks(self) -> bool:
        """Whether activations are rounded in blocks of 4 and 8 bits."""
        return self.weights.codes == "int4"

    @property
    def needs_text(self) -> bool:
        """Whether it needs statistics of a text."""
        return self.method.needs_text or (self.has_blocks and self.blocks.needs_text)

    def matches(self, path: str) -> bool:
        """Whether the rule is for the linear maps at a path."""
        return fnmatch.fnmatchcase(path, self.modules)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The rules of a model, of which the first that matches counts, and its KV format.

    bits: of what the model computes in: 32 for float32, or 16.
    """

    rules: tuple[Rule, ...]
    kv: KVFormat = dataclasses.field(default_factory=KVFormat)
    bits: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv", KVFormat.of(self.kv))

    @classmethod
    def of(cls, precision: Precision | str, method: Method | str = DEFAULT_METHOD) -> Recipe:
        """The recipe in which all linear maps get the weights of a precision, by one method.

        Raises ValueError for a precision without a single W part.
        """
        precision = Precision.of(precision)
        blocks = BlockRule(precision.wide_blocks)
        rule = Rule("*", _weights(precision), Method.of(method), blocks)
        return cls((rule,), precision.kv, precision.bits)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Recipe:
        """The recipe in a TOML file. Raises ValueError that names the file and the fault.

            precision = "W4A16KV8"
            method = "awq+gptq"

            [[rules]]
            modules = "layers.*.mlp.down"
            precision = "W8A16KV16"

        `precision` and `method` at the top are for all maps that no rule matches. A rule has
        `modules`, and a `precision`, whose KV part does not count, or a `method`, or both.
        """
        try:
            return cls.parse(tomllib.loads(read_text(path)))
        except ValueError as error:  # of TOML, too
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
        return cls((*found, *rest.rules), rest.kv, rest.bits)

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
    weights, blocks = rest.weights, rest.blocks
    if (written := content.get("precision")) is not None:
        precision = Precision.of(written)
        weights, blocks = _weights(precision), BlockRule(precision.wide_blocks)
        if precision.bits != bits:
            raise ValueError(
                f"the rule for {modules!r} has the precision {precision}, and the recipe computes "
                f"in {bits} bits: expected A{bits}, or 8 bits"
            )
    return Rule(modules, weights, Method.of(content.get("method", rest.method)), blocks)


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
