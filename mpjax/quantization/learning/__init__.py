"""Learning the scales, and tables, of weights that are quantised, by gradient descent.

FLUTE (Guo et al. 2024, §4.2) learns scales against the loss of the whole model. Against the outputs
of one layer, it costs little memory, and other steps of a method can come before it.
"""
