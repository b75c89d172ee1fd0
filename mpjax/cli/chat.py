"""`mpjax chat`: a conversation in the terminal, formatted by the checkpoint's chat template."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpjax.cli import options, output
from mpjax.cli.compilation import Shapes
from mpjax.text.answers import AnswerReader
from mpjax.text.tool_calls import Part

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


Models that reason before they answer, such as gpt-oss and Qwen3, mark where
the answer begins. A terminal shows the reasoning dimmed; elsewhere the answer
is written alone. Later answers don't see it.
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
    adapter: options.Adapter = None,
    reasoning: Annotated[
        bool | None,
        typer.Option(
            "--reasoning/--no-reasoning",
            show_default="in a terminal",
            help="Show what the model reasons before it answers.",
        ),
    ] = None,
) -> None:
    """Chat with a model in the terminal."""
    given = options.sampling_options(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    adapters = options.parse_adapters([adapter])
    reading = {"adapters": adapters, **options.head_options(speculate)}
    lm = options.load(model, precision, dtype, max_positions, devices, experts, **reading)
    if lm.tokenizer is None or not lm.tokenizer.chat_templates:
        raise ValueError(
            f"{lm.source} has no chat template, like most base models: continue a text with "
            "`mpjax generate`, or choose a model that was trained for chats"
        )
    proposer = options.parse_speculate(speculate)
    start = [] if system is None else [{"role": "system", "content": system}]
    settings = {
        "sampling": options.choose_sampling(lm, given),
        "stop": stop or [],
        "seed": seed,
        "speculate": proposer,
        "adapter": next(iter(adapters), None),
    }
    shows = sys.stdout.isatty() if reasoning is None else reasoning
    conversation = Conversation(lm, max_new_tokens, settings, start, shows_reasoning=shows)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (importing it gives `input` line editing and a history)
        typer.echo(
            "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
        )
    _converse(conversation)


class Conversation:
    """A conversation: its messages, the model that answers, and the settings.

    settings: arguments of `stream`. shows_reasoning: whether reasoning is printed too.
    """

    def __init__(
        self,
        lm: LanguageModel,
        max_new_tokens: int,
        settings: Mapping[str, Any],
        start: list[dict[str, str]],
        *,
        shows_reasoning: bool = False,
    ) -> None:
        self._lm, self._max_new_tokens, self._settings = lm, max_new_tokens, settings
        self._shapes = Shapes()
        self._start, self._shows_reasoning = start, shows_reasoning
        self.messages = list(start)

    def reset(self) -> None:
        """Removes all messages but the system message."""
        self.messages = list(self._start)

    def answer(self, text: str) -> None:
        """Streams the answer to a text to stdout, and adds both to the messages.

        After Ctrl-C, the part of the answer that was written is added.
        """
        import mpjax

        asked = [*self.messages, {"role": "user", "content": text}]
        tokenizer, positions = self._lm.tokenizer, self._lm.config.max_position_embeddings
        assert tokenizer is not None  # command() makes sure
        tokens = len(tokenizer.encode_chat(asked))
        room = positions - tokens + 1  # the last token needs no position
        if room < 1:
            raise ValueError(
                f"the conversation has {tokens} tokens, and the model {positions} positions: "
                "/reset it"
            )
        new_tokens = min(self._max_new_tokens, room)
        pieces = mpjax.stream(self._lm, asked, max_new_tokens=new_tokens, **self._settings)
        # The first piece comes from prefill, the second from the decoding loop, whose program may
        # have to be compiled first.
        new = self._shapes.is_new(1, tokens, new_tokens)
        reader = AnswerReader(tokenizer.style, tokenizer.chat(asked))
        writer = _Writer(reader, shows_reasoning=self._shows_reasoning)
        said = _write_answer(pieces, "Compiling" if new else "Reading", 2 if new else 1, writer)
        self.messages = [*asked, {"role": "assistant", "content": said}]


class _Writer:
    """Prints a streamed answer.

    reader: splits the answer into reasoning and text.
    shows_reasoning: whether reasoning is printed, dimmed in a terminal.

    said: the answer so far, without reasoning.
    """

    def __init__(self, reader: AnswerReader, *, shows_reasoning: bool = False) -> None:
        self._reader, self._shows_reasoning = reader, shows_reasoning
        self._is_dim, self._has_reasoned = sys.stdout.isatty(), False
        self.said = ""

    def write(self, piece: str) -> None:
        """Prints the part of the next piece that is certainly text or reasoning."""
        self._write(self._reader.push(piece))

    def end(self) -> None:
        """Prints the remaining text; warns if the answer was only reasoning."""
        self._write(self._reader.finish())
        output.write("\n")
        if self._has_reasoned and not self.said:
            output.note("the answer ended in its reasoning: allow more --max-new-tokens")

    def _write(self, parts: Iterable[Part]) -> None:
        for part in parts:
            text = part.text
            if part.kind == "reasoning":
                self._has_reasoned = True
                if self._shows_reasoning:
                    output.write(typer.style(text, dim=True) if self._is_dim else text)
                continue
            shown = text if self.said else text.lstrip()  # drops white space before the answer
            if shown and not self.said and self._has_reasoned and self._shows_reasoning:
                output.write("\n\n")
            output.write(shown)
            self.said += shown


def _write_answer(pieces: Iterator[str], activity: str, ahead: int, writer: _Writer) -> str:
    """Prints a streamed answer and returns it; after Ctrl-C, the part that was printed.

    activity: the text of the spinner, which is shown until `ahead` pieces have arrived.
    """
    beginning: list[str] = []
    try:
        try:
            with output.status(activity):
                for piece in itertools.islice(pieces, ahead):
                    beginning.append(piece)
        finally:
            writer.write("".join(beginning))
        for piece in pieces:
            writer.write(piece)
    except KeyboardInterrupt:
        output.write(" [stopped]")
    writer.end()
    return writer.said


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
            except (ValueError, MemoryError) as error:  # too long: the conversation is kept
                output.note(f"mpjax: {error}")
