"""Benchmarks on a CUDA GPU; every figure in the docs comes from a result file of one of them.

`mpjax bench` is their command line. In each benchmark, arithmetic on measured times is separate
from the measuring itself: the former can be tested on any machine, the latter needs the GPU.
"""
