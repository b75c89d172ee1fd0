"""The operations between two products in a decoder: norms, gated activations, quantisation.

Each operates on whole rows of activations, one for each token.
"""
