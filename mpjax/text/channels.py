"""Splits an answer into reasoning and text for the user.

Chat templates define the markers: "<think>" and "</think>" enclose the reasoning of Qwen3 and
DeepSeek-R1, "[THINK]" and "[/THINK]" that of Ministral 3. In the harmony format of gpt-oss,
an answer is several messages, each with a header that names its channel:
"<|channel|>analysis<|message|>" begins reasoning, and "<|channel|>final<|message|>" the text for
the user (OpenAI, "OpenAI harmony response format").
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Container, Mapping

from mpjax.text.symbols import Marker
from mpjax.text.tool_calls import Part, merged

FOR_USERS = ("final", "commentary")  # the channels whose messages are for the user
FUNCTIONS = "functions."  # begins the recipient of a message that calls a tool


@dataclasses.dataclass(frozen=True)
class Channels:
    """The markers of a chat template, and the kind of text that follows each.

    states: the kind of text that follows each marker: `text`, `reasoning`, `hidden` (such as a
        role's name), `name` (a channel's name), or `named`: text if the last channel name is one of
        FOR_USERS or missing, else reasoning.
    required: markers that the source of a template with these channels contains.
    reasons_once: whether reasoning occurs only once, at the begin of the answer. Later markers are
        then plain text, such as in an answer about the markers.
    """

    states: Mapping[str, str]
    required: tuple[str, ...]
    reasons_once: bool = False

    @classmethod
    def of_template(cls, source: str) -> Channels | None:
        """The channels of a chat template, in Jinja source; None if it names no markers."""
        found = (each for each in KNOWN if all(marker in source for marker in each.required))
        return next(found, None)


class Splitter:
    """Splits a streamed answer into reasoning and text.

    prompt: the text before the answer; if it ends with a marker, the answer begins in the state
    behind that marker. White space before the first marker and after each one is dropped.
    tokens: the markers, of channels and of tool calls, that are single tokens of the model. at: the
    character offsets in the answer at which the model wrote a marker as a single token; the caller
    adds to them as the answer grows. Elsewhere a marker's characters are text. None if the offsets
    are unknown: then markers count everywhere. Each marker of a tool call becomes a part, whose
    text is a Marker.
    call: the Markers that enclose the tool's name in the header of a message that calls a tool;
    without them, such messages are reasoning.
    """

    def __init__(
        self,
        channels: Channels | None,
        prompt: str = "",
        *,
        tokens: Collection[str] = (),
        at: Container[int] | None = None,
        call: tuple[str, str] | None = None,
    ) -> None:
        self._channels = channels or Channels({}, ())
        self._states, self._tokens, self._at, self._call = self._channels.states, tokens, at, call
        markers = sorted({*self._states, *tokens}, key=len, reverse=True)
        self._pattern = _any_of(markers)
        self._firsts = _any_of(sorted({marker[0] for marker in markers}))
        self._prefixes = {marker[:size] for marker in markers for size in range(1, len(marker))}
        self._longest = len(markers[0]) - 1 if markers else 0
        self._state, self._name, self._header, self._held = "text", "", "", ""
        self._place = 0  # offset in the answer of the text that is split next
        self._has_begun = True  # whether white space is kept, since other text precedes it
        self._is_new = True  # whether everything so far is white space or begins reasoning
        for marker in self._states:  # a role may follow the marker
            if re.search(re.escape(marker) + r"\w*\s*$", prompt):
                self._enter(self._states[marker])

    @property
    def reasoning(self) -> str:
        """Whether reasoning comes next: "open" (it has begun), "maybe" or "no"."""
        if self._state == "reasoning":
            return "open"
        return "maybe" if self._is_new and "reasoning" in self._states.values() else "no"

    def push(self, piece: str) -> list[Part]:
        """Adds a piece of the answer; returns the certain parts, without channel markers."""
        text = self._held + piece
        held = self._beginning(text)
        if self._states and self._is_new and not text[: len(text) - held].strip():
            held = len(text)  # white space: a marker may follow
        self._held = text[len(text) - held :]
        return self._divide(text[: len(text) - held])

    def finish(self) -> list[Part]:
        """The remaining parts, at the end of the answer."""
        rest, self._held = self._held, ""
        return self._divide(rest)

    def _beginning(self, text: str) -> int:
        """The number of characters at the end of the text that may begin a marker."""
        for found in self._firsts.finditer(text, max(0, len(text) - self._longest)):
            if text[found.start() :] in self._prefixes:
                return len(text) - found.start()
        return 0

    def _divide(self, text: str) -> list[Part]:
        parts: list[Part] = []
        begin = 0
        for found in self._pattern.finditer(text):
            marker, before = found.group(), text[begin : found.start()]
            if marker in self._tokens and not self._is_token(found.start()):
                continue
            if not (self._is_new and self._enters(marker) and not before.strip()):
                parts += self._plain(before)
            begin = found.end()
            if self._enters(marker):
                parts += self._enter(self._states[marker])
            elif marker in self._states or self._state != "text":
                parts += self._plain(marker)
            else:
                parts.append(Part("text", Marker(marker)))
                self._is_new = False
        parts += self._plain(text[begin:])
        self._place += len(text)
        return merged(parts)

    def _is_token(self, index: int) -> bool:
        """Whether the model wrote the marker at this index of the text as a single token."""
        return self._at is None or self._place + index in self._at

    def _plain(self, text: str) -> list[Part]:
        """The parts of a text without markers."""
        if self._state in ("hidden", "name"):
            self._header += text
            self._name += text if self._state == "name" else ""
            return []
        if not self._has_begun:  # white space behind a marker
            text = text.lstrip()
            self._has_begun = bool(text)
        if not text:
            return []
        self._is_new = False
        return [Part(self._state, text)]

    def _enters(self, marker: str) -> bool:
        """Whether a marker changes the state here, rather than being text."""
        if marker not in self._states:
            return False
        if not self._channels.reasons_once:
            return True
        return self._is_new if self._states[marker] == "reasoning" else self._state == "reasoning"

    def _enter(self, state: str) -> list[Part]:
        """Enters the state behind a marker; returns the header of a call if that ends here."""
        parts: list[Part] = []
        if state == "named":
            recipient = re.search(r"\bto=(\S+)", self._header)
            name = self._name.split()
            state = "text" if not name or name[0] in FOR_USERS else "reasoning"
            if recipient is not None:
                state = "reasoning"
                called = recipient.group(1)
                if self._call is not None and called.startswith(FUNCTIONS):
                    open, middle = map(Marker, self._call)
                    parts = [Part("text", t) for t in (open, called[len(FUNCTIONS) :], middle)]
                    state = "text"
            self._header = ""
        self._header += " "  # in place of the marker
        if state != "hidden":
            self._name = ""
        self._state, self._has_begun = state, False
        self._is_new &= state == "reasoning"
        return parts


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """A pattern that matches any of the texts, or nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


HARMONY = Channels(
    {
        "<|start|>": "hidden",
        "<|channel|>": "name",
        "<|constrain|>": "hidden",
        "<|message|>": "named",
        "<|end|>": "hidden",
        "<|call|>": "hidden",
        "<|return|>": "hidden",
    },
    ("<|channel|>", "<|message|>"),
)
THINK = Channels({"<think>": "reasoning", "</think>": "text"}, ("</think>",), reasons_once=True)
MISTRAL_THINK = Channels(
    {"[THINK]": "reasoning", "[/THINK]": "text"}, ("[THINK]", "[/THINK]"), reasons_once=True
)
KNOWN = (HARMONY, THINK, MISTRAL_THINK)
