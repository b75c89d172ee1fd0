"""Learns the scales and tables of quantised weights by gradient descent.

FLUTE (Guo et al. 2024, §4.2) learns scales against the loss of the whole model. Learning against
the outputs of one layer needs little memory, and can follow other steps of a method.
"""
