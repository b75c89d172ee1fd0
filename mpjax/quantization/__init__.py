"""Rounding a model's weights so that its outputs change least, with statistics of real text.

Methods are pure functions of (weight, statistics, format). Some choose a *fold*: scales that move
magnitude from activations to weights, or from one linear map to the one before it, and leave the
model's outputs as they are. Others choose the codes.
"""
