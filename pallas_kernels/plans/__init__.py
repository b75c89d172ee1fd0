"""Planning, shared by operations: from a problem to its implementation and tiles.

An `Operation` has a type of problems (shapes, formats, the limits of a GPU), a rule that plans any
of them, and candidates that `mpjax tune` measures. A measured plan, in the tables of one kind of
GPU (`tables`), overrides the rule.
"""

from mpjax.kernels.plans.operation import Operation
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.planner import conditions, forced, measured, plan_of
from mpjax.kernels.plans.tables import TableError

__all__ = [
    "Entry",
    "Operation",
    "Plan",
    "TableError",
    "conditions",
    "forced",
    "measured",
    "plan_of",
]
