"""Measures vLLM: python -m benchmarks.peers.run_vllm FOLDER OUT.json.

vLLM's defaults, except what is named here: FlashInfer's sampler is off, and fewer CUDA graphs are
captured. A folder with a config.json alone is read with `--load-format dummy --quantization fp8`,
which makes random weights in FP8.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks.peers import loads

GRAPHS = [1, 2, 4, 8, *range(16, 33, 8), *range(48, 257, 16), *range(288, 513, 32)]


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the engine's own options."""
    parser.add_argument("--quantization", help="by default as config.json says")
    parser.add_argument("--load-format", default="auto")


def start(given: argparse.Namespace) -> loads.Engine:
    """Starts an engine, which captures its CUDA graphs."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    import torch  # here, so that the seconds of the start contain it
    import vllm

    engine = vllm.LLM(
        model=str(given.folder),
        quantization=given.quantization,
        load_format=given.load_format,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=loads.MOST_TOKENS,
        compilation_config={"cudagraph_capture_sizes": GRAPHS},
        seed=0,
    )

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> None:
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        parameters = [
            vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
            for new in new_tokens
        ]
        answers = engine.generate(asked, parameters, use_tqdm=False)
        assert [len(answer.outputs[0].token_ids) for answer in answers] == new_tokens

    about = {
        "engine": "vLLM",
        "weights": given.quantization or "as in the folder",
        "device": torch.cuda.get_device_name(),
    }
    return loads.Engine(generate, about, {"vllm": vllm.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    loads.main(__doc__ or "", options, start)
