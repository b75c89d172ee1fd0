"""The kinds of constraints, each translated to a grammar for llguidance."""

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

# Without a bound, models may write white space until max_new_tokens.
SPACES = r"[ \n\t\r]{1,16}"


class Constraint(abc.ABC):
    """A constraint that the whole new text of a row satisfies."""

    @abc.abstractmethod
    def grammar(self) -> str:
        """The grammar for llguidance's matcher. Raises ValueError for an invalid constraint."""

    def pattern_of_text(self) -> str:
        """A regular expression of the same texts. Raises ValueError if there is none."""
        raise ValueError("it is not known to be regular")


@dataclasses.dataclass(frozen=True)
class JsonSchema(Constraint):
    """A JSON value that is valid for a schema.

    schema: a mapping, a JSON string, or True or False. Properties are generated in the order of the
        schema. Keywords that can't be enforced, such as `not` and `uniqueItems`, are errors when
        the constraint is used.
    spaces: a regular expression of the white space between JSON tokens, at most 16 characters by
        default; "" for none.
    """

    schema: Mapping[str, Any] | str | bool
    spaces: str = SPACES

    def grammar(self) -> str:
        """The grammar for llguidance. Raises ValueError if the schema is not JSON."""
        options = {"whitespace_flexible": True, "whitespace_pattern": self.spaces}
        if not self.spaces:
            options = {"whitespace_flexible": False}
        text = json.dumps(self._read())
        made: str = _llguidance().LLMatcher.grammar_from_json_schema(text, overrides=options)
        return made

    def pattern_of_text(self) -> str:
        """A regular expression of the schema's values. Raises ValueError if it is not regular."""
        return schema_pattern(self._read(), self.spaces)

    def _read(self) -> Any:
        """The schema as an object, parsed if it is a string. Raises ValueError if there is none."""
        schema = self.schema
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise ValueError(f"the JSON schema is no JSON: {error}") from None
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"the JSON schema is {shown(schema)}: expected a mapping, or its text")
        if schema is False:
            raise ValueError("the JSON schema is false, which no value matches")
        try:
            text = json.dumps({} if schema is True else dict(schema))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the JSON schema has a value that JSON lacks: {error}") from None
        return json.loads(text)


@dataclasses.dataclass(frozen=True)
class JsonObject(Constraint):
    """Any JSON object. The prompt should ask for one."""

    def grammar(self) -> str:
        """The grammar for llguidance."""
        return JsonSchema({"type": "object"}).grammar()


@dataclasses.dataclass(frozen=True)
class Regex(Constraint):
    r"""A text that a regular expression matches from begin to end, without look-around.

    pattern: in the syntax that Python's `re` and Rust's `regex` have in common. \d, \w and \s match
        ASCII only.
    """

    pattern: str

    def grammar(self) -> str:
        """The grammar for llguidance. Raises ValueError if the pattern is not a string."""
        made: str = _llguidance().LLMatcher.grammar_from_regex(self.pattern_of_text())
        return made

    def pattern_of_text(self) -> str:
        r"""The pattern, with sets of ASCII characters for \d, \w and \s. Raises ValueError."""
        require_type("Regex: pattern", self.pattern, str)
        return ascii_classes(self.pattern)


@dataclasses.dataclass(frozen=True)
class Choice(Constraint):
    """One of several texts."""

    texts: Sequence[str]

    def grammar(self) -> str:
        """The grammar for llguidance. Raises ValueError for anything but a list of texts."""
        return Regex(self.pattern_of_text()).grammar()

    def pattern_of_text(self) -> str:
        """The alternation of the texts. Raises ValueError for anything but a list of texts."""
        found = self.texts
        if isinstance(found, str) or not isinstance(found, Sequence) or not found:
            raise ValueError(f"Choice: texts are {shown(found)}: expected a list of texts")
        if not all(isinstance(one, str) and one for one in found):
            raise ValueError(f"Choice: texts are {shown(found)}: expected texts that are not empty")
        return "|".join(map(re.escape, found))


@dataclasses.dataclass(frozen=True)
class Grammar(Constraint):
    """A text of a context-free grammar.

    text: in llguidance's dialect of Lark, with the root rule `start`; or, if it contains `::=`, in
        GBNF, with the root rule `root`.
    """

    text: str

    def grammar(self) -> str:
        """The grammar for llguidance. Raises ValueError for invalid GBNF."""
        require_type("Grammar: text", self.text, str)
        if "::=" not in self.text:
            return self.text
        try:
            made: str = _llguidance().grammar_from("gbnf", self.text)
        except Exception as error:  # the parser may raise anything
            raise ValueError(f"the grammar is no GBNF: {error}") from error
        return made


@dataclasses.dataclass(frozen=True)
class ChatAnswer(Constraint):
    """The answer of a chat: reasoning, tool calls, and text for the user.

    outer: a grammar in llguidance's Lark. answer: the constraint of the text that `outer` names
        `@answer`, or None.
    """

    outer: str
    answer: Constraint | None = None

    def grammar(self) -> str:
        """The joint grammar for llguidance. Raises ValueError as the answer's grammar does."""
        if self.answer is None:
            return self.outer
        inner = self.answer.grammar()
        own = json.loads(inner)["grammars"][0] if inner.startswith("{") else {"lark_grammar": inner}
        return json.dumps({"grammars": [{"lark_grammar": self.outer}, {**own, "name": "answer"}]})


# The argument `constraint` of generating functions: one for all prompts, or one for each.
Constraints = Constraint | Sequence[Constraint | None] | None


def read_constraints(constraint: Constraints, rows: int) -> list[Constraint | None]:
    """The constraint of each row. Raises ValueError for a list whose length is not `rows`."""
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
    """The module llguidance. Raises ValueError, which says what to install, if it is missing."""
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            "constraints need the package llguidance: pip install 'mpjax[grammar]'"
        ) from None
    return llguidance
