"""Quantises a model's weights with calibration text, so that its outputs change least.

A method is a chain of steps, each a pure function of (weight, statistics, format). *Scaling* steps
choose channel scales, which are folded into two neighbouring parameters (`folds`): the model's
function doesn't change, and rounding loses less. The last step, the *rounding*, chooses the codes.
"""
