"""Plans of attention: from a `Problem`, the tiles and programs that process the cache.

`plan_of` looks a problem up in the tables of plans that were measured on this kind of GPU
(`operation`). Without an entry, it calls the rule: `split_rule` chooses tiles and the number of
programs of a sequence, `rule` the programs of the residual and the depth of the pipeline, and
`register_rule` the registers. `configuration` defines which configurations can run.
"""

from mpjax.kernels.attention.plans.configuration import (
    MOST_ROWS,
    NARROW_ROWS,
    OTHER_BYTES,
    AttentionConfig,
)
from mpjax.kernels.attention.plans.operation import (
    OPERATION,
    PAGE_SIZE,
    Key,
    config_of,
    forced,
    plan_of,
)
from mpjax.kernels.attention.plans.problem import CacheShape, Problem
from mpjax.kernels.attention.plans.rule import plan_by_rule
from mpjax.kernels.plans import Entry, Plan

__all__ = [
    "MOST_ROWS",
    "NARROW_ROWS",
    "OPERATION",
    "OTHER_BYTES",
    "PAGE_SIZE",
    "AttentionConfig",
    "CacheShape",
    "Entry",
    "Key",
    "Plan",
    "Problem",
    "config_of",
    "forced",
    "plan_by_rule",
    "plan_of",
]
