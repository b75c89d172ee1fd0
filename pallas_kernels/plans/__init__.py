"""From a problem to a plan: which implementation computes an operation here, with which tiles.

An operation has a type for its problems (shapes, formats, the limits of a GPU), a rule that plans
any of them, and tables of plans that were measured on one kind of GPU, which go before the rule.
"""

from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.plans.planner import Planner, conditions
from mpjax.kernels.plans.tables import TableError

__all__ = ["Entry", "Plan", "Planner", "TableError", "conditions"]
