"""Generates a text that repeats its prompt, with plain decoding and two speculative methods.

python examples/speculation.py                            # the bundled model, drafted by itself
python examples/speculation.py Qwen3-8B-AWQ/ Qwen3-0.6B/  # a model and a smaller one
"""

from __future__ import annotations

import sys

import mpjax

folders = [*sys.argv[1:], *2 * [str(mpjax.bundled_model())]]
lm = mpjax.load(folders[0])
draft = mpjax.load(folders[1], precision="W4A16KV8")
function = """def total_price(items, tax):
    total = 0
    for item in items:
        total = total + item["price"] * item["count"]
    return round(total * (1 + tax), 2)


"""
prompt = function + "def total_price(items, tax):\n    amount = 0\n"

plain = mpjax.generate(lm, prompt, max_new_tokens=48)
for proposer in (mpjax.Ngram(k=4, n=3), mpjax.Draft(draft, k=4)):
    found = mpjax.generate(lm, prompt, max_new_tokens=48, speculate=proposer)
    print(f"{type(proposer).__name__}: {found.speculation}, same text: {found.text == plain.text}")
