"""The operations between two products in a decoder: norms, gated activations, quantisation.

Each reads whole rows of activations, one for each token.
"""
