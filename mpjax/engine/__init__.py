"""The engine: continuous batching of requests over one model and one cache.

`planner` and `pages` choose in plain Python the next program and its pages; `programs` has the
compiled functions; `state` the arrays on the device; `engine` the public class.
"""
