"""Recipe and Rule: the weight format and the method of each linear map of a model."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpjax.arguments import read_text
from mpjax.kernels import KVFormat, WeightFormat
from mpjax.kernels.checks import shown
from mpjax.models import LinearPlace
from mpjax.precision import Precision
from mpjax.quantization.blocks import BlockRule
from mpjax.quantization.learning.descent import Learning
from mpjax.quantization.methods import HADAMARD, ROTATE, Method, read_method

DEFAULT_METHOD = "gptq"
DEFAULT_LEARNING = Learning()
FROM_THE_LAST = re.compile(r"^layers\.-(\d+)\.")
UNQUOTED = re.compile(
    r"\s*(precision|method|modules)\s*=\s*([^\s\"'\[#](?:[^\"'#]*[^\s\"'#])?)\s*(?:#.*)?"
)
PLAIN = WeightFormat("bfloat16")  # stands for the model's own dtype
DEFAULT_HEAD = WeightFormat("uint8", None, symmetric=True)  # H8


@dataclasses.dataclass(frozen=True)
class Rule:
    """The weight format and the method of all linear maps whose paths match a pattern.

    modules: a shell pattern (fnmatch): `layers.*.mlp.down` or `layers.0.*`.
    weights: a packed format; or a 16-bit one, for maps that aren't quantised.
    method: how weights are rounded; see Method.
    blocks: for `int4` weights (W4Ax), the widths of activation blocks.
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
        """Whether it quantises weights with calibration text."""
        has_choice = self.method.needs_text or (self.has_blocks and self.blocks.needs_text)
        return self.weights.is_packed and has_choice

    def matches(self, path: str) -> bool:
        """Whether the pattern matches a path."""
        return fnmatch.fnmatchcase(path, self.modules)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The rules for a model's linear maps, and the formats of its tables and cache.

    rules: the first rule that matches a map's path applies.
    bits: of the model's compute dtype: 16, or 32 for float32.
    head, embedding: the formats of these tables, which are rounded to nearest; None keeps 16 bits.
        A tied table has one format for both.
    rotates: whether the residual stream and values are rotated first; see `rotations`. A tied table
        is then untied.
    hadamard: whether down projections' inputs get a Hadamard transform; see `hadamard`.
    learning: settings of the step `learn`.
    precise: paths of maps that the last, catch-all rule keeps in 16 bits (`LinearMaps.is_precise`).
    """

    rules: tuple[Rule, ...]
    kv: KVFormat = dataclasses.field(default_factory=KVFormat)
    bits: int = 16
    head: WeightFormat | None = None
    embedding: WeightFormat | None = None
    rotates: bool = False
    hadamard: bool = False
    learning: Learning = DEFAULT_LEARNING
    precise: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv", KVFormat.of(self.kv))
        for table in ("head", "embedding"):
            if (format := getattr(self, table)) is not None:
                object.__setattr__(self, table, WeightFormat.of(format))

    @classmethod
    def of(cls, precision: Precision | str, method: Method | str = DEFAULT_METHOD) -> Recipe:
        """The recipe that quantises all linear maps to a precision, by one method.

        The tables get the formats of the precision's H and E. If the weights are packed and it has
        neither, the head (or tied table) is H8; H16 keeps it in 16 bits. A method string may begin
        with `rotate` and `hadamard`, in this order, as in `rotate+hadamard+os+gptq`. Raises
        ValueError for a precision without exactly one W part.
        """
        precision = Precision.of(precision)
        steps, method = ((), method) if isinstance(method, Method) else read_method(method)
        rule = Rule("*", _weights(precision), method, BlockRule(precision.wide_blocks))
        tables = precision.tables
        if not tables and rule.weights.is_packed:
            tables = {"head": DEFAULT_HEAD}
        head, embedding = (tables.get(name) for name in ("head", "embedding"))
        turns = ROTATE in steps, HADAMARD in steps
        return cls((rule,), precision.kv, precision.bits, head, embedding, *turns)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Recipe:
        """Reads a recipe from a TOML file. Raises ValueError with the file and the fault.

            precision = "W4A16KV8"
            method = "awq+gptq"

            [[rules]]
            modules = ["layers.0.*", "layers.-1.*", "layers.*.mlp.down"]
            precision = "W8A16KV16"

        The top-level `precision` and `method` apply to all maps that no rule matches. A rule has
        `modules`, which is a pattern or a list of patterns, and one or both of `precision` (its KV
        part is ignored) and `method`. Negative numbers count layers from the last, which is -1. The
        table `learning` may set the fields of Learning.
        """
        try:
            text = read_text(path).removeprefix("\ufeff")  # a byte order mark
            return cls.parse(_parse_toml(text))
        except ValueError as error:
            raise ValueError(f"the recipe {Path(path)}: {error}") from error

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Recipe:
        """Converts the parsed TOML of a recipe; see `read`. Raises ValueError."""
        _require_keys(content, {"precision"}, {"method", "rules", "learning"}, "the recipe")
        rest = cls.of(content["precision"], content.get("method", DEFAULT_METHOD))
        rules = content.get("rules", [])
        if not isinstance(rules, list):
            raise ValueError(f"rules is {shown(rules)}: expected a list of tables, [[rules]]")
        found = [rule for it in rules for rule in _rules(it, rest.rules[0], rest.bits)]
        learning = Learning.parse(content.get("learning", {}))
        return dataclasses.replace(rest, rules=(*found, *rest.rules), learning=learning)

    @property
    def tables(self) -> dict[str, WeightFormat]:
        """The formats of `head` and `embedding` that are set."""
        named = {"head": self.head, "embedding": self.embedding}
        return {table: format for table, format in named.items() if format is not None}

    @property
    def needs_text(self) -> bool:
        """Whether a rule or the KV format needs calibration text."""
        return any(rule.needs_text for rule in self.rules) or self.kv.scaling == "static"

    def to_toml(self) -> str:
        """The TOML of this recipe, for `read`.

        Raises ValueError for recipes that a file can't express: without a catch-all rule at the
        end, or with a BlockRule that has an error bound or unsorted channels.
        """
        *rules, rest = self.rules
        if rest.modules != "*":
            raise ValueError(f"the last rule is for {rest.modules!r}: expected one for *")

        top = self._named(rest).with_tables(self.tables or {"head": WeightFormat("bfloat16")})
        steps = [ROTATE] * self.rotates + [HADAMARD] * self.hadamard
        method = "+".join([*steps, str(rest.method)])
        lines = [f'precision = "{top}"', f'method = "{method}"']
        alike = itertools.groupby(rules, lambda rule: (str(self._named(rule)), rule.method))
        for (precision, steps), group in alike:
            lines += ["", "[[rules]]", "modules = ["]
            lines += [f'    "{rule.modules}",' for rule in group]
            lines += ["]", f'precision = "{precision}"', f'method = "{steps}"']
        if self.learning != DEFAULT_LEARNING:
            lines += ["", "[learning]", *self.learning.to_toml()]
        return "\n".join(lines) + "\n"

    def _named(self, rule: Rule) -> Precision:
        """The precision of a rule; raises ValueError for blocks that a precision can't express."""
        blocks = rule.blocks
        if rule.has_blocks and (blocks.error is not None or not blocks.is_ordered):
            raise ValueError(
                f"the rule for {rule.modules!r} has {blocks}, and a recipe's file has no place for "
                "an error or unsorted channels: expected a share of blocks alone"
            )
        return Precision(rule.weights, self.kv, (), self.bits, blocks.one_in)

    def of_model(self, places: Iterable[LinearPlace], count: int) -> Recipe:
        """The recipe for a model with `count` layers: negative layer indices become positive.

        places: of the model's linear maps.
        """
        precise = tuple(place.path for place in places if place.is_precise)

        def numbered(match: re.Match[str]) -> str:
            number = count - int(match[1])
            return f"layers.{number}." if 0 <= number < count else match[0]  # matches no map

        rules = [
            dataclasses.replace(rule, modules=FROM_THE_LAST.sub(numbered, rule.modules))
            for rule in self.rules
        ]
        return dataclasses.replace(self, rules=tuple(rules), precise=precise)

    def with_activation_error(self, error: float) -> Recipe:
        """The recipe in which W4Ax chooses 8-bit blocks by a bound of the output error.

        error: see BlockRule. Raises ValueError for a recipe without W4Ax.
        """
        if not any(rule.has_blocks for rule in self.rules):
            raise ValueError(
                "an error of activations is for W4Ax alone, and no rule has that precision"
            )
        rules = (
            dataclasses.replace(rule, blocks=dataclasses.replace(rule.blocks, error=error))
            if rule.has_blocks
            else rule
            for rule in self.rules
        )
        return dataclasses.replace(self, rules=tuple(rules))

    def rule_of(self, path: str) -> Rule:
        """The rule of the linear maps at a path. Raises ValueError if no rule matches."""
        for number, rule in enumerate(self.rules):
            if rule.matches(path):
                is_rest = rule.modules == "*" and number == len(self.rules) - 1
                is_kept = is_rest and path in self.precise
                return dataclasses.replace(rule, weights=PLAIN) if is_kept else rule
        raise ValueError(
            f'no rule of the recipe names {path}: add one, or one for all others with modules = "*"'
        )

    def require_used(self, paths: list[str]) -> None:
        """Raises ValueError for a rule that applies to no linear map of a model.

        The last, catch-all rule may apply to none.
        """
        left = list(paths)
        for number, rule in enumerate(self.rules):
            is_last = rule.modules == "*" and number == len(self.rules) - 1
            if not is_last and not any(map(rule.matches, left)):
                raise ValueError(f"the rule for {rule.modules!r} {_why_unused(rule, paths)}")
            left = [path for path in left if not rule.matches(path)]


def _why_unused(rule: Rule, paths: list[str]) -> str:
    if any(map(rule.matches, paths)):
        return (
            "is never used, because the rules before it match all of its linear maps, and the "
            "first counts: put it before them, or leave it out"
        )
    kinds = sorted({path.split(".", 2)[2] for path in paths})
    return (
        "matches no linear map of this model: expected a pattern of paths such as "
        f"layers.0.{kinds[0]}, of {', '.join(kinds)}"
    )


def _parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML. Raises ValueError, with a hint for missing quotes."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        for number, line in enumerate(text.splitlines(), start=1):
            if match := UNQUOTED.fullmatch(line):
                raise ValueError(
                    f'line {number} has a text without quotes: write {match[1]} = "{match[2]:.80}"'
                ) from error
        raise


def _rules(content: Any, rest: Rule, bits: int) -> list[Rule]:
    """The rules of one TOML table, one for each of its patterns."""
    if not isinstance(content, Mapping):
        raise ValueError(f"a rule is {shown(content)}: expected a table with modules")
    _require_keys(content, {"modules"}, {"precision", "method"}, "a rule")
    modules = content["modules"]
    patterns = [modules] if isinstance(modules, str) else modules
    are_texts = isinstance(patterns, list) and all(isinstance(it, str) for it in patterns)
    if not are_texts or not patterns or len(content) == 1:
        raise ValueError(
            f"the rule for {shown(modules)}: expected a pattern of paths or a list of patterns, "
            "and a precision or method"
        )
    weights, blocks = rest.weights, rest.blocks
    if (written := content.get("precision")) is not None:
        precision = Precision.of(written)
        weights, blocks = _weights(precision), BlockRule(precision.wide_blocks)
        if precision.tables:
            raise ValueError(
                f"the rule for {shown(modules)} has the precision {precision}, but no rule is for "
                "the head and the embedding: put H and E into the precision at the top"
            )
        if precision.bits != bits:
            raise ValueError(
                f"the rule for {shown(modules)} has the precision {precision}, and the recipe "
                f"computes in {bits} bits: expected A{bits}, or 8 bits"
            )
    method = Method.of(content.get("method", rest.method))
    return [Rule(pattern, weights, method, blocks) for pattern in patterns]


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
