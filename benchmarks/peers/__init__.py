"""mpjax beside other engines, from the same checkpoints and on the same loads.

    python -m benchmarks.peers.checkpoints FOLDER       # Qwen3-8B in AWQ, gpt-oss-20b in MXFP4
    python -m benchmarks.peers.run_mpjax FOLDER/qwen3-8b-awq OUT.json --precision A16KV16
    python -m benchmarks.peers.run_vllm FOLDER/qwen3-8b-awq OUT.json

`run_vllm` and `loads` import nothing of mpjax, so that vLLM may have an environment of its own. The
page docs/comparison.md shows a line for each file `benchmarks/results/peers-*.json`; a runner of
another engine calls `loads.run`.
"""
