"""Named attention shapes, which tests, benchmarks and tuning share."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """The sizes of an attention layer and of its batch of sequences.

    context: keys of each sequence.
    queries: new tokens of each sequence, which are its last tokens.
    longest: keys of the first sequence if it is longer than the others (then `queries` is 1); None
        if all are equal.
    rotary: channels of the rotary part, for attention over latents of head_dim channels; else None.
    """

    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    context: int
    queries: int = 1
    longest: int | None = None
    rotary: int | None = None

    @classmethod
    def parse(cls, name: str) -> AttentionShape:
        """Parses a name such as `b8-h32/8-d128-c32768-q2048` or `b8-h32/8-d128-c1024-l65536`.

        The letters stand for the batch, query heads / KV heads, the head dimension, the context,
        the queries, if more than 1, and the longest context. `b8-h16/1-d512+64-c8192` is attention
        over latents of 512 channels with a rotary part of 64.

        Raises ValueError for a string of another form, and for impossible sizes.
        """
        pattern = r"b(\d+)-h(\d+)/(\d+)-d(\d+)(?:\+(\d+))?-c(\d+)(?:-q(\d+)|-l(\d+))?"
        match = re.fullmatch(pattern, name)
        if match is None:
            raise ValueError(
                f"unknown shape {name!r}: expected the batch, query and KV heads, head dim, "
                "context and, if more than 1, new tokens, as in b8-h32/8-d128-c32768-q2048, or the "
                "longest context, as in b8-h32/8-d128-c1024-l65536"
            )
        *sizes, rotary, context, tokens, longest = match.groups()
        shape = cls(*(int(number or 1) for number in (*sizes, context, tokens)))
        more = {"longest": longest, "rotary": rotary}
        given = {name: int(number) for name, number in more.items() if number is not None}
        shape = dataclasses.replace(shape, **given)
        if 0 in dataclasses.astuple(shape) or shape.query_heads % shape.kv_heads:
            raise ValueError(
                f"the shape {name!r} can't be: its numbers are positive, and query heads a "
                "multiple of KV heads"
            )
        if shape.queries > shape.context:
            raise ValueError(f"the shape {name!r} has more new tokens than its context holds")
        if shape.rotary is not None and (shape.kv_heads != 1 or shape.longest is not None):
            raise ValueError(f"the latents of {name!r} are of one KV head, and of one length")
        if shape.longest is not None and shape.longest <= shape.context:
            raise ValueError(f"the longest context of {name!r} is no longer than the others")
        return shape

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of keys of each sequence."""
        return (self.longest or self.context, *[self.context] * (self.batch - 1))

    @property
    def name(self) -> str:
        """The name that `parse` accepts, for tables and test ids."""
        heads = f"b{self.batch}-h{self.query_heads}/{self.kv_heads}-d{self.head_dim}"
        heads += "" if self.rotary is None else f"+{self.rotary}"
        name = f"{heads}-c{self.context}"
        name += f"-q{self.queries}" if self.queries > 1 else ""
        return name + ("" if self.longest is None else f"-l{self.longest}")


LATENT = (
    AttentionShape(8, 16, 1, 512, 8192, rotary=64),
    AttentionShape(64, 16, 1, 512, 4096, rotary=64),
    AttentionShape(8, 20, 1, 512, 8192, rotary=64),
)
DECODE = (
    AttentionShape(1, 32, 8, 128, 4096),
    AttentionShape(1, 32, 8, 128, 32768),
    AttentionShape(1, 32, 8, 128, 131072),
    AttentionShape(8, 32, 8, 128, 4096),
    AttentionShape(8, 32, 8, 128, 32768),
    AttentionShape(32, 32, 8, 128, 1024),
    AttentionShape(32, 32, 8, 128, 4096),
    AttentionShape(32, 32, 8, 128, 8192),
    AttentionShape(128, 32, 8, 128, 2048),
    AttentionShape(64, 64, 8, 128, 4096),
    AttentionShape(8, 32, 32, 128, 8192),
    AttentionShape(8, 40, 8, 128, 32768),
)

# One sequence is by far the longest, and must not make the others wait.
RAGGED = (
    AttentionShape(8, 32, 8, 128, 1024, longest=16384),
    AttentionShape(32, 32, 8, 128, 2048, longest=65536),
    AttentionShape(128, 32, 8, 128, 512, longest=32768),
)

# A chunk of a long prompt, and whole prompts.
PREFILL = (
    AttentionShape(1, 32, 8, 128, 32768, 2048),
    AttentionShape(1, 32, 8, 128, 2048, 2048),
    AttentionShape(1, 32, 8, 128, 8192, 8192),
    AttentionShape(1, 32, 8, 128, 32768, 32768),
)

# Small enough for interpret mode: grouped, multi-query and ungrouped heads, of all head dimensions.
SMALL = (
    AttentionShape(1, 5, 1, 96, 100),
    AttentionShape(1, 12, 2, 256, 80),
    AttentionShape(2, 4, 2, 64, 160),
    AttentionShape(1, 7, 1, 64, 130),
    AttentionShape(2, 2, 2, 128, 70),
)
