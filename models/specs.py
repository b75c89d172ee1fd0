"""The kinds of mixers and MLPs that layers of every family may have."""

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import SublayerSpec
from mpjax.models.experts import ExpertsSpec
from mpjax.models.mlp import GatedMLPSpec, UngatedMLPSpec

SPECS: tuple[type[SublayerSpec], ...] = GroupedQuerySpec, GatedMLPSpec, UngatedMLPSpec, ExpertsSpec
