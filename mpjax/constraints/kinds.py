"""The kinds of constraints that people write, each as a grammar of llguidance."""

from __future__ import annotations

import abc
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mpjax.constraints.byte_automaton import ascii_classes
from mpjax.constraints.schema_pattern import schema_pattern
from mpjax.kernels.checks import require_type, shown

# Without a bound, models fill a text with spaces until it has its most tokens.
SPACES = r"[ \n\t\r]{1,16}"


class Constraint(abc.ABC):
    """What the whole new text of a row may be."""

    @abc.abstractmethod
    def grammar(self) -> str:
        """The grammar, as llguidance's matchers take it. Raises ValueError for a wrong one."""

    def pattern_of_text(self) -> str:
        """A regular expression of the same texts. Raises ValueError where there is none."""
        raise ValueError("it is not known to be regular")


@dataclasses.dataclass(frozen=True)
class JsonSchema(Constraint):
    """A JSON value that is valid for a schema.

    schema: a mapping, or its JSON text; true and false are schemas, too. Properties come in the
        order of the schema. Keywords that can't be enforced, such as `not` and `uniqueItems`, are
        errors where the constraint is used.
    spaces: a regular expression of the white space between two parts, at most 16 characters by
        default; "" for none.
    """

    schema: Mapping[str, Any] | str | bool
    spaces: str = SPACES

    def grammar(self) -> str:
        """The grammar. Raises ValueError for what is no JSON."""
        options = {"whitespace_flexible": True, "whitespace_pattern": self.spaces}
        if not self.spaces:
            options = {"whitespace_flexible": False}
        text = json.dumps(self._read())
        made: str = _llguidance().LLMatcher.grammar_from_json_schema(text, overrides=options)
        return made

    def pattern_of_text(self) -> str:
        """All values of the schema. Raises ValueError for a schema that is not regular."""
        return schema_pattern(self._read(), self.spaces)

    def _read(self) -> Any:
        """The schema as JSON's values. Raises ValueError for what is none."""
        schema = self.schema
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise ValueError(f"the JSON schema is no JSON: {error}") from None
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"the JSON schema is {shown(schema)}: expected a mapping, or its text")
        try:
            text = json.dumps(dict(schema) if isinstance(schema, Mapping) else schema)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the JSON schema has a value that JSON lacks: {error}") from None
        return json.loads(text)


@dataclasses.dataclass(frozen=True)
class JsonObject(Constraint):
    """Any JSON object. The prompt should ask for one."""

    def grammar(self) -> str:
        """The grammar."""
        return JsonSchema({"type": "object"}).grammar()


@dataclasses.dataclass(frozen=True)
class Regex(Constraint):
    r"""A text that a regular expression matches from begin to end, without look-around.

    pattern: in the syntax that Python's `re` and Rust's `regex` have in common. \d, \w and \s are
        characters of ASCII.
    """

    pattern: str

    def grammar(self) -> str:
        """The grammar. Raises ValueError for what is no text."""
        made: str = _llguidance().LLMatcher.grammar_from_regex(self.pattern_of_text())
        return made

    def pattern_of_text(self) -> str:
        r"""The pattern, with ASCII's characters for \d, \w and \s. Raises ValueError."""
        require_type("Regex: pattern", self.pattern, str)
        return ascii_classes(self.pattern)


@dataclasses.dataclass(frozen=True)
class Choice(Constraint):
    """One of several texts."""

    texts: Sequence[str]

    def grammar(self) -> str:
        """The grammar. Raises ValueError for anything but texts."""
        return Regex(self.pattern_of_text()).grammar()

    def pattern_of_text(self) -> str:
        """One or another of the texts. Raises ValueError for anything but texts."""
        found = self.texts
        if isinstance(found, str) or not isinstance(found, Sequence) or not found:
            raise ValueError(f"Choice: texts are {shown(found)}: expected a list of texts")
        if not all(isinstance(one, str) and one for one in found):
            raise ValueError(f"Choice: texts are {shown(found)}: expected texts that are not empty")
        return "|".join(map(re.escape, found))


@dataclasses.dataclass(frozen=True)
class Grammar(Constraint):
    """A text of a context-free grammar.

    text: in llguidance's dialect of Lark, whose rule is `start`; or, with `::=`, in GBNF, whose
        rule is `root`.
    """

    text: str

    def grammar(self) -> str:
        """The grammar. Raises ValueError for GBNF that can't be read."""
        require_type("Grammar: text", self.text, str)
        if "::=" not in self.text:
            return self.text
        try:
            made: str = _llguidance().grammar_from("gbnf", self.text)
        except Exception as error:  # whatever its reader raises
            raise ValueError(f"the grammar is no GBNF: {error}") from error
        return made


@dataclasses.dataclass(frozen=True)
class ChatAnswer(Constraint):
    """The answer of a chat: reasoning, calls of tools, and a text.

    outer: a grammar of llguidance's Lark. answer: the constraint of what it calls `@answer`, if it
        does.
    """

    outer: str
    answer: Constraint | None = None

    def grammar(self) -> str:
        """The grammar of both. Raises ValueError as that of the answer does."""
        if self.answer is None:
            return self.outer
        inner = self.answer.grammar()
        own = json.loads(inner)["grammars"][0] if inner.startswith("{") else {"lark_grammar": inner}
        return json.dumps({"grammars": [{"lark_grammar": self.outer}, {**own, "name": "answer"}]})


# What functions that generate take as `constraint`: for all prompts, or one for each.
Constraints = Constraint | Sequence[Constraint | None] | None


def read_constraints(constraint: Constraints, rows: int) -> list[Constraint | None]:
    """The constraint of each row. Raises ValueError for a list of another length."""
    found = constraint if isinstance(constraint, list | tuple) else [constraint] * rows
    if len(found) != rows:
        raise ValueError(
            f"constraint has {len(found)} entries for a batch of {rows}: expected one for all "
            "prompts, or a list with one for each"
        )
    for one in found:
        if one is not None:
            require_type("constraint", one, Constraint, hint=", such as mpjax.JsonSchema(...)")
    return list(found)


def _llguidance() -> Any:
    """The library. Raises ValueError with what to install."""
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            "constraints need the package llguidance: pip install 'mpjax[grammar]'"
        ) from None
    return llguidance
