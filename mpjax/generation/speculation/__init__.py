"""Speculative decoding: tokens are proposed, and the model verifies several in one step.

A proposer (`ngram.py`, `draft.py`) guesses the next tokens. The model verifies the row's newest
token and the guesses in one step, which costs little more than a step of one token, because both
read all weights once. `acceptance.py` decides how many guesses are accepted, so that the
distribution is that of plain decoding. `steps.py` repeats this on the device.
"""
