"""Forced tokens: a constraint allows each of them alone, so they are prefilled and not drawn.

The host finds a run of them when it reads the token before. The row then awaits its programs in
flight, and one scored piece computes the run's keys, values and log-probabilities, and draws the
next token.
"""

from __future__ import annotations

from mpjax.engine.handle import New, PromptLogprobs
from mpjax.engine.planner import Piece
from mpjax.engine.request import Request
from mpjax.engine.row import Row
from mpjax.engine.sizes import Sizes

LEAST_FORCED = 4  # fewer are drawn faster than the engine waits for the row and runs a piece


def has_pieces(sizes: Sizes) -> bool:
    """Whether an engine of these sizes prefills forced tokens.

    Not with speculation, whose steps read several tokens; in blocks of a KV format; nor where
    programs are compiled for one size, which has no small scored piece.
    """
    return not (sizes.proposed or sizes.block or sizes.single)


def look_ahead(row: Row, coming: int, sizes: Sizes) -> None:
    """Adds a row's forced tokens, or makes it await its tokens in flight if forced ones may follow.

    coming: the most tokens of the row in flight; 0 for none. sizes: the engine's.
    """
    settings, row.awaits = row.owner.settings, False
    if not (settings.is_forcible and has_pieces(sizes)) or row.is_reading:
        return
    # The piece also draws the token after the forced ones, for which the row must have room.
    most = min(row.most - (len(row.tokens) - row.prompt), row.space) - 1
    run = settings.matcher.forced(coming + LEAST_FORCED, most)
    if run and coming:
        row.awaits = True
    elif run:
        row.force(run)


def take_forced(request: Request, piece: Piece) -> New:
    """Pops the forced tokens of a request whose last piece, `piece`, is prefilled and scored."""
    begin, number = piece.end - piece.forced - 1, request.settings.top_logprobs
    scores = [one for one in request.scores if one.start >= begin]
    found = PromptLogprobs.join(scores, piece.forced + 1, number)
    new = New(request.row.take_forced(), found.logprobs.tolist())
    if number:
        pairs = zip(found.top.tolist(), found.top_logprobs.tolist(), strict=True)
        new.top_logprobs.extend(list(zip(*pair, strict=True)) for pair in pairs)
    return new
