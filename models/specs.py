"""The kinds of mixers and MLPs that layers of every family may have."""

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import SublayerSpec
from mpjax.models.experts import ExpertsSpec
from mpjax.models.mlp import GatedMLPSpec, UngatedMLPSpec
from mpjax.models.per_layer import PerLayerSpec
from mpjax.models.streams import StreamsSpec

SPECS: tuple[type[SublayerSpec], ...] = (
    *(GroupedQuerySpec, GatedMLPSpec, UngatedMLPSpec),
    *(ExpertsSpec, PerLayerSpec, StreamsSpec),
)
