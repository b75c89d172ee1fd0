"""Planning, shared by operations: from a problem to the implementation and the tiles that run it.

An operation has a type of problems (shapes, formats, the limits of a GPU), a rule that plans any of
them, and tables of plans that were measured on one kind of GPU. A measured plan overrides the rule.
"""

from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.planner import Planner, conditions
from mpjax.kernels.plans.tables import TableError

__all__ = ["Entry", "Plan", "Planner", "TableError", "conditions"]
