"""Loads a model in W4A16KV8 and completes two prompts, greedily and by sampling.

python examples/generate.py                 # the bundled model
python examples/generate.py Qwen3-8B-AWQ/   # any checkpoint folder
"""

from __future__ import annotations

import sys

import mpjax

lm = mpjax.load(sys.argv[1] if len(sys.argv) > 1 else mpjax.bundled_model(), precision="W4A16KV8")
prompts = ["def __init__(self, ", "import os\nimport "]

greedy = mpjax.generate(lm, prompts, max_new_tokens=48)
sampled = mpjax.generate(
    lm,
    prompts,
    max_new_tokens=48,
    sampling=mpjax.Sampling(temperature=0.8, top_p=0.95),
    seeds=[1, 2],  # one for each row; a row's samples don't depend on other rows
    stop="\n\n",
)
for prompt, first, second in zip(prompts, greedy.text, sampled.text, strict=True):
    print(f"--- greedy\n{prompt}{first}\n--- sampled\n{prompt}{second}")
