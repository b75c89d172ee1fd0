"""Measurements on a CUDA GPU: every figure in the docs comes from a file that one of these wrote.

`mpjax bench` is their command line. Each benchmark has a part that is arithmetic on measured times,
which any machine can test, and a part that measures, which needs the GPU.
"""
