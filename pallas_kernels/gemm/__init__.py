"""Fused dequantise-GEMM."""
