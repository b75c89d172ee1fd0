"""Text in, text out."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.arguments import new_token_limits, require_known_ids
from mpjax.decoding import DecodingState, Limits, decode_program, jit_prefill
from mpjax.language_model import LanguageModel
from mpjax.memory import require_free
from mpjax.random_keys import row_keys
from mpjax.sampling import Sampling
from mpjax.text_stream import TextStream
from mpjax.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages

# Tokens between two looks at the text, where somebody watches it: each look costs a round trip to
# the device, and a stop string can only be noticed then.
CHUNK = 8


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns: one entry per prompt in each list.

    text: the completions, without stop strings; behind the prompts they are what the tokenizer
        decodes of both. tokens: their ids, stop token included.
    logprobs: of each token, natural logarithm, under the unmodified distribution.
    finish_reasons: `stop` (a stop token or string) or `length`.
    prompt_tokens: tokens of each prompt. prefill_seconds: until the first token of all rows, and
    decode_seconds after it, both including compilation where something was new.
    """

    text: list[str]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    prompt_tokens: list[int]
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows after the first, over the time that decoding took."""
        decoded = sum(len(row) - 1 for row in self.tokens)
        return decoded / self.decode_seconds if self.decode_seconds else 0.0


def generate(
    lm: LanguageModel,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    min_new_tokens: int = 0,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] | None = (),
    seeds: Sequence[int] | None = None,
    page_size: int = 128,
) -> Generation:
    """Completes a batch of prompts.

    prompts: texts, or chats (lists of `{"role": ..., "content": ...}`) that go through the
        checkpoint's chat template; one of either is a batch of one.
    max_new_tokens, min_new_tokens: of each row; stop tokens are held back until the minimum.
    sampling: greedy by default.
    stop: strings that end a row; the text ends before them.
    seeds: one per prompt, which alone decide what it draws, whatever its neighbours (but for
        rounding: kernels choose their tiles by the batch's size); row numbers by default.

    Raises ValueError for an empty prompt, a prompt that leaves no room, or arguments that don't
    fit; DeviceMemoryError, before anything is allocated, where the cache is too large.
    """
    steps = _run(
        lm, prompts, max_new_tokens, min_new_tokens, sampling, stop, seeds, page_size, watch=False
    )
    [progress] = collections.deque(steps, maxlen=1)
    return progress.result()


def stream(
    lm: LanguageModel,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    min_new_tokens: int = 0,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] | None = (),
    seed: int = 0,
    page_size: int = 128,
) -> Generator[str, None, Generation]:
    """Completes one prompt and yields its text as it comes: `generate` row by row, in pieces.

    The pieces joined are the text that `generate` returns. The generator's return value (of
    `yield from`, or StopIteration.value) is the Generation.
    """
    shown = 0
    for progress in _run(
        lm, [prompt], max_new_tokens, min_new_tokens, sampling, stop, [seed], page_size, watch=True
    ):
        [row] = progress.rows
        text = row.certain_text()
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)
    generation = progress.result()
    if len(generation.text[0]) > shown:
        yield generation.text[0][shown:]
    return generation


class _Row:
    """The text of one row so far, and whether a stop string has ended it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._stream: TextStream = tokenizer.stream(context=prompt)
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> None:
        """Takes the row's next tokens; none after a stop string."""
        for token in tokens:
            if self.stopped:
                return
            self.tokens.append(token)
            self._extend(self._stream.push([token]))

    def finish(self) -> str:
        """The whole text."""
        if not self.stopped:
            self._extend(self._stream.finish())
        return self.text

    def certain_text(self) -> str:
        """The text without an end that may turn out to be the start of a stop string."""
        if self.stopped:
            return self.text
        held = max(
            (
                size
                for string in self._stop
                for size in range(1, len(string))
                if self.text.endswith(string[:size])
            ),
            default=0,
        )
        return self.text[: len(self.text) - held]

    def _extend(self, piece: str) -> None:
        # What was there holds no stop string, only the beginning of one at most.
        begin = max(0, len(self.text) + 1 - self._longest)
        self.text += piece
        ends = [at for string in self._stop if (at := self.text.find(string, begin)) >= 0]
        if ends:
            self.text, self.stopped = self.text[: min(ends)], True


@dataclasses.dataclass
class _Progress:
    """A batch in the middle of generation, seen from the host."""

    state: DecodingState
    rows: list[_Row]
    stop_ids: tuple[int, ...]
    prompt_tokens: list[int]
    prefill_seconds: float
    decode_seconds: float = 0.0

    def read(self) -> None:
        """Brings the rows up to the state on the device."""
        tokens, counts = jax.device_get((self.state.tokens, self.state.counts))
        for row, ids, count in zip(self.rows, tokens.tolist(), counts.tolist(), strict=False):
            if not row.stopped:
                row.push(ids[len(row.tokens) : count])

    def stop_rows(self) -> None:
        """Ends, on the device, the rows that a stop string has ended."""
        stopped = np.zeros(self.state.finished.shape, bool)
        stopped[: len(self.rows)] = [row.stopped for row in self.rows]
        self.state = dataclasses.replace(self.state, finished=self.state.finished | stopped)

    def result(self) -> Generation:
        """The finished batch."""
        text = [row.finish() for row in self.rows]
        logprobs = jax.device_get(self.state.logprobs).tolist()
        return Generation(
            text=text,
            tokens=[row.tokens for row in self.rows],
            logprobs=[
                values[: len(row.tokens)] for row, values in zip(self.rows, logprobs, strict=False)
            ],
            finish_reasons=[
                "stop" if row.stopped or row.tokens[-1] in self.stop_ids else "length"
                for row in self.rows
            ],
            prompt_tokens=self.prompt_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
        )


def _run(
    lm: LanguageModel,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int,
    min_new_tokens: int,
    sampling: Sampling | None,
    stop: str | Sequence[str] | None,
    seeds: Sequence[int] | None,
    page_size: int,
    *,
    watch: bool,
) -> Iterator[_Progress]:
    """Yields after prefill, then after each chunk (watched, or with stop strings) or the end."""
    stop = [stop] if isinstance(stop, str) else list(stop or ())
    if others := [text for text in stop if not isinstance(text, str)]:
        raise ValueError(f"the stop string {others[0]!r} is no text; expected some, or a list")
    if "" in stop:
        raise ValueError("an empty stop string would end every text before it begins")
    min_new_tokens, max_new_tokens = new_token_limits(min_new_tokens, max_new_tokens)
    tokenizer = _tokenizer(lm)
    encoded = _encode(tokenizer, prompts)
    seeds = range(len(encoded)) if seeds is None else seeds
    if np.ndim(seeds) != 1:
        raise ValueError(f"seeds are {seeds!r}; expected a list with one for each prompt")
    if len(seeds) != len(encoded):
        raise ValueError(f"{len(seeds)} seeds for {len(encoded)} prompts; expected one for each")
    _check_lengths(lm, encoded, max_new_tokens)

    sampling = Sampling() if sampling is None else sampling
    batch, longest = len(encoded), max(map(len, encoded))
    padded, room = bucket(longest), bucket(max_new_tokens)
    tokens = np.zeros((batch, padded), np.int32)
    for row, ids in zip(tokens, encoded, strict=True):
        row[: len(ids)] = ids
    # A special token has no text, so a stop string that is one stops by its id.
    special = [i for text in stop if (i := tokenizer.backend.token_to_id(text)) is not None]
    special = [i for i in special if i in tokenizer.special_ids]
    stop_ids = (*(tokenizer.stop_ids or lm.config.stop_ids), *special)
    limits = Limits.of(batch, stop_ids, min_new_tokens, max_new_tokens)
    shape = jax.eval_shape(
        lambda: lm.model.create_cache(batch, padded + room, lm.kv_format, page_size)
    )
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shape))
    needed += _prefill_bytes(lm, batch * padded)
    require_free(
        needed, f"a {lm.kv_format} cache for {batch} × {padded + room} tokens, with prefill,"
    )

    begin = time.perf_counter()
    state = jit_prefill(
        lm.model,
        jnp.asarray(tokens),
        jnp.asarray([len(ids) for ids in encoded], jnp.int32),
        lm.model.create_cache(batch, padded + room, lm.kv_format, page_size),
        row_keys(list(seeds)),
        sampling,
        limits,
        room=room,
    )
    rows = [_Row(tokenizer, ids, stop) for ids in encoded]
    state.tokens.block_until_ready()
    progress = _Progress(
        state, rows, stop_ids, [len(ids) for ids in encoded], time.perf_counter() - begin
    )
    progress.read()
    yield progress
    decode = decode_program(lm.model, state)
    chunk = CHUNK if watch or stop else max_new_tokens
    done = 1
    while done < max_new_tokens:
        if stop:
            progress.stop_rows()
        if bool(progress.state.finished.all()):
            return
        # The clock stands while the caller has the text: that time is not decoding's.
        begin = time.perf_counter()
        done = min(done + chunk, max_new_tokens)
        progress.state = decode(lm.model, progress.state, sampling, limits, jnp.int32(done))
        progress.read()  # waits for the device
        progress.decode_seconds += time.perf_counter() - begin
        yield progress


def bucket(tokens: int) -> int:
    """The length that `tokens` are padded to, so that near lengths share a compiled program.

    Powers of two from 16 to 512, then multiples of 512.
    """
    if tokens > 512:
        return -(-tokens // 512) * 512
    return max(16, 1 << (tokens - 1).bit_length())


def _prefill_bytes(lm: LanguageModel, tokens: int) -> int:
    """What a layer's activations take at their widest, inside the MLP, for so many tokens."""
    config = lm.config
    wide = 3 * config.intermediate_size + 3 * config.hidden_size
    return tokens * wide * jnp.dtype(config.dtype).itemsize


def _tokenizer(lm: LanguageModel) -> Tokenizer:
    if lm.tokenizer is None:
        raise ValueError(
            f"{lm.source} has no tokenizer.json, so there is no text: add one, "
            "or pass token ids to generate_tokens"
        )
    return lm.tokenizer


def _encode(tokenizer: Tokenizer, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
    if not prompts and not isinstance(prompts, str):
        raise ValueError("there are no prompts; pass a text, or a list of texts")
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise ValueError(
            f"prompts are a {type(prompts).__name__}; expected a text, the messages of one chat, "
            "or a list of texts or chats (a single message is a list, too)"
        )
    single = isinstance(prompts, str) or isinstance(prompts[0], Mapping)
    batch = cast("Sequence[Prompt]", [prompts] if single else prompts)
    encoded = [
        tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
        for prompt in batch
    ]
    for index, ids in enumerate(encoded):
        if not ids:
            raise ValueError(
                f"prompt {index} is empty: it has no tokens, and a model continues at least one"
            )
    return encoded


def _check_lengths(lm: LanguageModel, encoded: Sequence[Sequence[int]], new_tokens: int) -> None:
    positions = lm.config.max_position_embeddings
    for index, ids in enumerate(encoded):
        if len(ids) + new_tokens > positions:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens, and with {new_tokens} new ones it would "
                f"pass the {positions} positions of this model: shorten it or ask for fewer"
            )
    require_known_ids(encoded, lm.config.vocab_size)
