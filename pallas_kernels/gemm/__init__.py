"""Products of activations and packed weights, x [M, K] · W [K, N]."""
