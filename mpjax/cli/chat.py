"""`mpjax chat`: a conversation in the terminal, formatted by the checkpoint's chat template."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpjax.cli import options, output
from mpjax.cli.compilation import Shapes

if TYPE_CHECKING:
    from mpjax.language_model import LanguageModel

NAME = "chat"
EPILOG = """\b
Examples:
  mpjax chat --model Qwen3-8B-AWQ --precision W4A16KV8
  mpjax chat --model Qwen/Qwen3-8B --precision W4A16KV8 --temperature 0.7
  mpjax chat --model Qwen3-8B --speculate draft:4:Qwen3-0.6B
  mpjax chat --model Qwen3-8B-AWQ --system "Answer in one sentence."

\b
In the conversation:
  /reset   forget the conversation     /exit    leave (as does Ctrl-D)
  Ctrl-C   stop the answer
"""


def command(
    model: options.Model = None,
    precision: options.PrecisionText = None,
    system: Annotated[
        str | None, typer.Option(help="System message: instructions before the conversation.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 512,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    dtype: options.ComputeDtype = None,
    max_positions: options.MaxPositions = None,
    devices: options.DeviceCount = 1,
    experts: options.Experts = options.ExpertsKind.divided,
    speculate: options.Speculate = None,
) -> None:
    """Chat with a model in the terminal."""
    sampling = options.sampling_options(temperature, top_k, top_p, min_p, repetition_penalty)
    lm = options.load(model, precision, dtype, max_positions, devices, experts)
    if lm.tokenizer is None or not lm.tokenizer.chat_templates:
        raise ValueError(
            f"{lm.source} has no chat template, like most base models: continue a text with "
            "`mpjax generate`, or choose a model that was trained for chats"
        )
    proposer = options.parse_speculate(speculate)
    start = [] if system is None else [{"role": "system", "content": system}]
    settings = {
        "sampling": sampling,
        "stop": stop or [],
        "seed": seed,
        "speculate": proposer,
    }
    conversation = Conversation(lm, max_new_tokens, settings, start)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (importing it gives `input` line editing and a history)
        typer.echo(
            "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
        )
    _converse(conversation)


class Conversation:
    """The messages of a conversation, and the model and settings that answer it.

    settings: arguments of `stream`.
    """

    def __init__(
        self,
        lm: LanguageModel,
        max_new_tokens: int,
        settings: Mapping[str, Any],
        start: list[dict[str, str]],
    ) -> None:
        self._lm, self._max_new_tokens, self._settings = lm, max_new_tokens, settings
        self._shapes = Shapes()
        self._start = start
        self.messages = list(start)

    def reset(self) -> None:
        """Forgets all messages but the system's."""
        self.messages = list(self._start)

    def answer(self, text: str) -> None:
        """Answers a text, writing to stdout as the answer comes, and adds both to the messages.

        After Ctrl-C, the part of the answer that was written is added.
        """
        import mpjax

        asked = [*self.messages, {"role": "user", "content": text}]
        tokenizer, positions = self._lm.tokenizer, self._lm.config.max_position_embeddings
        assert tokenizer is not None  # command() makes sure
        tokens = len(tokenizer.encode_chat(asked))
        room = positions - tokens
        if room < 1:
            raise ValueError(
                f"the conversation has {tokens} tokens, and the model {positions} positions: "
                "/reset it"
            )
        new_tokens = min(self._max_new_tokens, room)
        pieces = mpjax.stream(self._lm, asked, max_new_tokens=new_tokens, **self._settings)
        # The first piece comes from the prefill, the second from the decoding loop, which may have
        # to be compiled before.
        new = self._shapes.is_new(1, tokens, new_tokens)
        said = _write_answer(pieces, "Compiling" if new else "Reading", 2 if new else 1)
        self.messages = [*asked, {"role": "assistant", "content": said}]


def _write_answer(pieces: Iterator[str], activity: str, ahead: int) -> str:
    """Writes an answer as it comes, and returns it; after Ctrl-C, the part that was written.

    activity: the text of the spinner, which is shown until `ahead` pieces have come.
    """
    said = ""

    def say(piece: str) -> None:
        nonlocal said
        if not said:
            piece = piece.lstrip()  # the space between a template's text and the answer
        output.write(piece)
        said += piece

    beginning: list[str] = []
    try:
        try:
            with output.status(activity):
                for piece in itertools.islice(pieces, ahead):
                    beginning.append(piece)
        finally:
            say("".join(beginning))
        for piece in pieces:
            say(piece)
    except KeyboardInterrupt:
        output.write(" [stopped]")
    output.write("\n")
    return said


def _converse(conversation: Conversation) -> None:
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo(" (Ctrl-D or /exit leaves)")
            continue
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            output.note(f"unknown command {text}: expected /reset or /exit")
        elif text:
            try:
                conversation.answer(text)
            except (ValueError, MemoryError) as error:  # the conversation is too long, but is kept
                output.note(f"mpjax: {error}")
