"""The engine: requests that come and go, over one model and one cache.

`planner` and `pages` decide in plain Python what runs next and which pages it uses; `programs` are
what runs; `state` is what stays on the device; `engine` is what people call.
"""
