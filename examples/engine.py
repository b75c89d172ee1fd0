"""Serves requests in a continuous batch: an engine, stepped by hand and then by asyncio.

python examples/engine.py                 # the bundled model
python examples/engine.py Qwen3-8B-AWQ/   # any checkpoint folder
"""

from __future__ import annotations

import asyncio
import sys

import mpjax

path = sys.argv[1] if len(sys.argv) > 1 else mpjax.bundled_model()
lm = mpjax.load(path, precision="W4A16KV8", page_size=32)  # whole pages are shared


async def complete(engine: mpjax.Engine, prompt: str, seconds: float) -> str:
    """Submits a completion request after some seconds, while other requests run."""
    await asyncio.sleep(seconds)
    handle = engine.submit(prompt, max_new_tokens=24, sampling={"temperature": 0.7}, seed=1)
    return "".join([piece async for piece in handle])


async def complete_all(engine: mpjax.Engine) -> list[str]:
    """Completes three requests that arrive one after another."""
    prompts = ["def area(", "class Stack:", "for line in "]
    tasks = [complete(engine, prompt, 0.05 * number) for number, prompt in enumerate(prompts)]
    return await asyncio.gather(*tasks)


with mpjax.Engine(lm, slots=8, max_tokens=256) as engine:
    # Iterating runs the steps. The second prompt shares the first one's prefix in the cache.
    header = "import os\nimport re\n\n\n" * 16
    for name in ("first", "second"):
        engine.submit(f"{header}def {name}(", max_new_tokens=16, sampling={"stop_ids": ()})
        for event in engine:
            number, tokens = event.handle.number, len(event.tokens)
            print(f"request {number}: {tokens} tokens, {event.finish_reason}")

    for text in asyncio.run(complete_all(engine)):
        print(f"---\n{text}")
    numbers = engine.statistics()
    print(f"{numbers['new_tokens']} tokens, {numbers['shared_tokens']} of prompts were shared")
