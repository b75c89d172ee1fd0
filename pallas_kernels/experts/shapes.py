"""Named shapes of the experts of real models, for benchmarks and tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mpjax.kernels.experts.gate import Gate


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """The product of tokens with `per_token` of `experts` matrices [channels, outputs].

    gate: of the first product of an expert; None for the second, whose products are weighted.
    """

    name: str
    per_token: int
    experts: int
    channels: int
    outputs: int
    gate: Gate | None = None


@dataclasses.dataclass(frozen=True)
class ExpertMLPShape:
    """Both products of experts, with the properties of one product with equally many weights."""

    name: str
    gate_up: ExpertShape
    down: ExpertShape

    @property
    def per_token(self) -> int:
        """The experts of a token."""
        return self.gate_up.per_token

    @property
    def experts(self) -> int:
        """The number of all experts."""
        return self.gate_up.experts

    @property
    def channels(self) -> int:
        """The number of channels of x."""
        return self.gate_up.channels

    @property
    def outputs(self) -> int:
        """The number of an expert's weights, divided by `channels`."""
        return self.gate_up.outputs + self.down.channels * self.down.outputs // self.channels

    @property
    def gate(self) -> Gate | None:
        """The gate between the products."""
        return self.gate_up.gate


AnyShape = ExpertShape | ExpertMLPShape

QWEN3_30B_A3B = (
    ExpertShape("qwen3-30b-a3b.gate_up", 8, 128, 2048, 1536, Gate()),
    ExpertShape("qwen3-30b-a3b.down", 8, 128, 768, 2048),
)

MIXTRAL_8X7B = (
    ExpertShape("mixtral-8x7b.gate_up", 2, 8, 4096, 28672, Gate()),
    ExpertShape("mixtral-8x7b.down", 2, 8, 14336, 4096),
)

GPT_OSS_20B = (
    ExpertShape("gpt-oss-20b.gate_up", 4, 32, 2880, 5760, Gate(7.0, 1.702)),
    ExpertShape("gpt-oss-20b.down", 4, 32, 2880, 2880),
)

# Shapes by the name of their model.
MODELS = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "mixtral-8x7b": MIXTRAL_8X7B,
    "gpt-oss-20b": GPT_OSS_20B,
}


def layer_of(shape: ExpertShape) -> AnyShape:
    """Both products of a model's experts if `shape` is one of them; else `shape` itself."""
    return next(
        (ExpertMLPShape(f"{name}.mlp", *pair) for name, pair in MODELS.items() if shape in pair),
        shape,
    )


def named(names: Iterable[str]) -> tuple[ExpertShape, ...]:
    """The shapes of names, without repetition: a model's (`mixtral-8x7b`), or one with `.down`.

    Raises ValueError, which lists the known names, for an unknown name.
    """
    known = {shape.name: (shape,) for model in MODELS.values() for shape in model} | MODELS
    found: dict[ExpertShape, None] = {}
    for name in names:
        if name not in known:
            raise ValueError(
                f"unknown shape {name!r}: expected a model with experts ({', '.join(MODELS)}) or "
                f"one of its products, such as {next(iter(known))}"
            )
        found.update(dict.fromkeys(known[name]))
    return tuple(found)


def named_mlps(names: Iterable[str]) -> tuple[AnyShape, ...]:
    """As `named`; a name with `.mlp` stands for both products of a model's experts."""
    mlps = {f"{name}.mlp": ExpertMLPShape(f"{name}.mlp", *pair) for name, pair in MODELS.items()}
    found: dict[AnyShape, None] = {}
    for name in names:
        found.update(dict.fromkeys([mlps[name]] if name in mlps else named([name])))
    return tuple(found)
