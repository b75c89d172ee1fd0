"""Quantises a model's weights with statistics of a text, so that its outputs change least.

A method is a chain of steps, each a pure function of (weight, statistics, format). *Scaling* steps
choose scales of channels, which are folded into two neighbouring parameters (`folds`): the model
computes the same, and rounding costs less. The last step, the *rounding*, chooses the codes.
"""
