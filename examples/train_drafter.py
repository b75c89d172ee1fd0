"""An EAGLE-3 head for the bundled model: trained on Python files, it proposes on others.

python examples/train_drafter.py [STEPS]     # 300 steps take some minutes on two cores
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mpjax

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300

folder = mpjax.bundled_model()
lines = (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
*texts, first, second, third = (json.loads(line)["text"] for line in lines)

lm = mpjax.load(folder, dtype="float32", progress=False)
with tempfile.TemporaryDirectory() as path:
    head = Path(path, "head")
    training = mpjax.DrafterTraining(STEPS, batch=8, length=128, passes=2)
    losses = mpjax.train_drafter(lm, texts, head, training)
    print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after {STEPS} steps")
    lm = mpjax.load(folder, drafter=head, progress=False)

# Beginnings of three files that were not among the texts, greedily continued.
prompts = [text[:600] for text in (first, second, third)]
options: dict[str, Any] = {"max_new_tokens": 96, "sampling": {"temperature": 0}}
plain = mpjax.generate(lm, prompts, **options)
for k in (1, 3):
    found = mpjax.generate(lm, prompts, speculate=mpjax.Eagle(k), **options)
    print(f"k={k}: {found.speculation}; the plain tokens: {found.tokens == plain.tokens}")
