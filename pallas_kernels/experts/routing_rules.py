"""How the experts of a token are chosen and weighted."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from mpjax.kernels.checks import shown, static_number, whole_number

Scoring = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore = Literal["max", "top_two"]
LEAST_SUM = 1e-20  # added to a sum of weights before weights are divided by it (DeepSeek-V3)


@dataclasses.dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighted; static and hashable.

    per_token: the number of experts of a token.
    scoring: the function from logits to scores, in float32: a softmax over all experts; a sigmoid;
        or `sparsemixer` (PhiMoE, arXiv 2409.12136), in which the score of each choice is its
        softmax over those experts x, not chosen before it, with
        best − x ≤ 2 · jitter · max(|x|, best). These scores are not renormalised.
    renormalize: whether the weights of a token's experts, their scores, are divided by their sum.
        With softmax, that gives the softmax over only the chosen logits.
    scale: a factor of all weights, after renormalisation.
    groups, groups_per_token: group-limited routing (DeepSeek): experts are divided into `groups` of
        consecutive experts, and a token's experts are chosen from its best `groups_per_token`
        groups; None: from all.
    group_score: the score of a group: its largest score (DeepSeek-V2), or the sum of its two
        largest (DeepSeek-V3).
    jitter: of sparsemixer.

    Raises ValueError for values that don't fit together.
    """

    per_token: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int | None = None
    groups_per_token: int | None = None
    group_score: GroupScore = "max"
    jitter: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_token", whole_number("Routing: per_token", self.per_token))
        if not isinstance(self.renormalize, bool):
            raise ValueError(f"Routing: renormalize is {shown(self.renormalize)}: expected a bool")
        scale = static_number("Routing: scale", self.scale, float, "a positive number")
        object.__setattr__(self, "scale", 1.0 if scale is None else scale)
        jitter = static_number("Routing: jitter", self.jitter, float, "a positive number")
        object.__setattr__(self, "jitter", jitter)
        for name, value, known in (
            ("scoring", self.scoring, get_args(Scoring)),
            ("group_score", self.group_score, get_args(GroupScore)),
        ):
            if not isinstance(value, str) or value not in known:
                expected = " or ".join(known)
                raise ValueError(f"Routing: {name} is {shown(value)}: expected {expected}")
        if (self.groups is None) != (self.groups_per_token is None):
            raise ValueError(
                f"Routing: groups is {shown(self.groups)} and groups_per_token "
                f"{shown(self.groups_per_token)}: expected both, or neither"
            )
        is_mixer = self.scoring == "sparsemixer"
        if is_mixer and (self.groups is not None or self.renormalize or jitter is None):
            raise ValueError(
                f"Routing: scoring is 'sparsemixer', groups {shown(self.groups)}, renormalize "
                f"{self.renormalize} and jitter {jitter}: expected no groups, no renormalisation, "
                "and a jitter"
            )
        for name in ("groups", "groups_per_token"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(f"Routing: {name}", value))

    @property
    def ranks_logits(self) -> bool:
        """Whether experts are ranked by logits if there is no selection bias.

        Softmax keeps the order of logits, but may round different logits to equal scores. Sums of
        two scores can be ordered differently from sums of their logits.
        """
        sums_scores = self.groups is not None and self.group_score == "top_two"
        return self.scoring != "sigmoid" and not sums_scores

    def why_not(self, experts: int) -> str | None:
        """The reason why a token can't be routed to one of `experts` experts, or None if it can."""
        if self.per_token > experts:
            return f"{self.per_token} experts per token are more than the {experts} that there are"
        if self.groups is None or self.groups_per_token is None:
            return None
        if experts % self.groups:
            return f"{experts} experts can't be divided into {self.groups} groups"
        size = experts // self.groups
        if not 0 < self.groups_per_token <= self.groups:
            return f"{self.groups_per_token} groups per token: expected 1 to {self.groups}"
        if self.per_token > self.groups_per_token * size:
            return (
                f"{self.per_token} experts per token are more than {self.groups_per_token} groups "
                f"of {size} have"
            )
        if self.group_score == "top_two" and size < 2:
            return f"groups of {size} expert have no two largest scores"
        return None
