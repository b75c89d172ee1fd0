"""The help texts of the `mpjax bench` commands, printed below their options."""

from __future__ import annotations

EPILOG = """\b
Examples:
  mpjax bench gemm --formats uint4:g128,uint8:g128 --rows 1,16,64
  mpjax bench attention --formats KV8,KV4
  mpjax bench generate --precision W4A16KV8 --batch 1,16
  mpjax bench serve --requests 256 --prompt-tokens 1024 --new-tokens 512

\b
A time is the sum of the kernels that a call runs on the GPU, measured by
CUPTI. Repeated calls read different copies, together larger than the L2
cache. Results are saved as JSON with the device, versions and commit: in
benchmarks/results of a checkout, else in the current folder. The exit code is
1 if the error of any result, against the reference, is above its gate.
"""
GEMM_EPILOG = """\b
Examples:
  mpjax bench gemm
  mpjax bench gemm --formats uint4:g128 --shapes qwen3-8b.gate_up --rows 1,16
  mpjax bench gemm --implementation dequantize --output dequantize.json
  mpjax bench gemm --formats liquid4:g64/int8 --rows 1,16 --in-model
  mpjax bench gemm --experts --shapes gpt-oss-20b --formats float4:g32

\b
Measures x [M, K] times a packed weight [K, N], in bfloat16. Default formats:
uint4:g128 uint8:g128 float8:g128 int8/int8 liquid4:g64/int8 int4:g128/int8
table4:g64 table3:g64 float8:gK/float8.
  µs         one product, the median of five
  GB/s       bytes of the packed weight, x and the product, each counted once,
             over the time
  TFLOP/s    2 M K N operations over the time
  × floor    the time over the floor, in which an XLA reduction reads the
             same packed bytes, in the same run. Up to about 16 rows nothing
             is faster than 1; below 1.35 is good, below 1.15 very good
  speed-up   time of cuBLAS (jnp.dot in bfloat16) at the same shape over the
             time. With many rows operations limit, not bytes: 1 is good with
             16-bit activations, 1.5 and more with 8-bit ones
  error      mean error over mean magnitude, against the float32 reference on
             the same packed weight; the gate is 8e-3
  as         the implementation: triton or mosaic (fused kernels), dequantize
             (then cuBLAS), or xla

The plot needs matplotlib (pip install matplotlib). It has a line for each
format, and its rooflines.

\b
With --experts, rows are tokens, and each token draws its experts at random.
  hit        experts that have a token; the floor reads their bytes
  × cuBLAS   rate of operations over that of cuBLAS on one matrix with as many
             rows; 0.8 is good with many
  ragged_dot time of jax.lax.ragged_dot on experts in bfloat16 and rows that
             are sorted already; up to 64 tokens
"""
ATTENTION_EPILOG = """\b
Examples:
  mpjax bench attention
  mpjax bench attention --shapes b8-h32/8-d128-c32768 --formats KV16,KV4
  mpjax bench attention --shapes ragged --formats KV8,KV4
  mpjax bench attention --shapes prefill --formats uncached,KV8,KV4

\b
Measures attention of new tokens over a full paged cache, in bfloat16. A shape
b8-h32/8-d128-c32768-q2048-l65536 has 8 sequences, 32 query heads and 8 KV
heads of 128 channels, and 32768 tokens in the cache of each sequence, of
which 2048 are new. Without q there is one new token. With l, the first
sequence has 65536 tokens; cuDNN is given all lengths then.
  TB/s       bytes of the cache over the time
  TFLOP/s    operations of the two products of each query, with the keys and
             with the values that it attends to, over the time
  × floor    the time over the floor, in which an XLA reduction reads the
             same bytes, in the same run. With one new token, 1.1 is good
  speed-up   time of cuDNN (jax.nn.dot_product_attention) on a contiguous
             16-bit cache over the time. With one new token, 8 and 4 bits
             should gain as much as they save in bytes; with many, operations
             limit, and 0.8 is good. Many tokens over a cache take cuDNN two
             calls, whose times are added
  append µs  time to quantise the new tokens and write them to the cache; a
             model does this and the rotation of the keys in one kernel
  error      mean error over mean magnitude, against the reference on the same
             cache, of the last 32 new tokens of each sequence; the gate is
             8e-3. Empty above 524288 tokens in all
The plot has the shapes with one new token: each format and its roofline.
The format "uncached" is a prompt from its first token on, which attends to
its own keys and values in 16 bits, as in a model, before they are quantised.
"""
MIXERS_EPILOG = """\b
Examples:
  mpjax bench mixers
  mpjax bench mixers --shapes qwen3.6-27b --rows 1,64 --prompt-tokens 0
  mpjax bench mixers --rows 0 --prompt-tokens 32768

\b
Measures what layers do that keep a state: the gated delta rule of Qwen3.6,
OLMo Hybrid and Kimi Linear (with a decay for each channel), and Mamba2 of
Granite 4 and Nemotron-H. Products with weights are not in it.
  tokens    1: a token of each row, whose state is read and written once, by
            one kernel with its gates;
            more: a prompt of one row, in chunks
  TB/s      bytes of the states, read and written, over the time
  × floor   the time over the floor, in which an XLA kernel reads and writes
            as many bytes, in the same run; 1.3 is good
  × cuDNN   the time over that of causal attention by cuDNN with the heads of
            the model's attention layers, on a prompt of the same length
  error     mean error over mean magnitude of the outputs, or of the states,
            against one token after the other in plain jnp; the gate is 1e-5
"""
GENERATE_EPILOG = """\b
Examples:
  mpjax bench generate
  mpjax bench generate --precision W16A16KV16,W4A16KV8 --batch 1,16,64
  mpjax bench generate --precision W4A16KV8,W4A16KV2 \\
      --prompt-tokens 1024,16384,131072 --filled
  mpjax bench generate --speculate 2,4,8
  mpjax bench generate --adapters 0,1 --rank 16
  mpjax bench generate --batch 64 --filled --piece-tokens 128 --adapters 16,64
  mpjax bench generate --shapes qwen3-30b-a3b
  mpjax bench generate --shapes llama3-70b --devices 1,2 --batch 1,32 --filled
  mpjax bench generate --shapes llama3-70b --devices 1,2 --layers 16 \\
      --batch 8 --prompt-tokens 4096 --new-tokens 2 --piece-tokens 1024
  mpjax bench generate --from-disk

\b
Measures greedy generation with random weights in the shapes of Qwen3-8B, or
of others (--shapes), without stop tokens. A model gets more positions if the
longest context needs them. Of experts, the roofline has those that are hit if
each is as likely as any other.
  context      tokens in the cache when decoding begins
  first token  wall time to read the prompts and draw the first new token;
               empty where the cache was filled (--filled)
  tokens/s     new tokens of all rows per second, from the time of a step
  step         wall time of a decoding step of all rows
  kernels      sum of the times of a step's kernels, launched one after the
               other; in a real step a kernel may start before the previous
               one ends. Empty where the cache was filled
  roofline     time to read all weights, and the cache with half of the new
               tokens in it, at the rate of an XLA reduction over 2 GB
  of it        roofline over step: no implementation exceeds 100 %, above 60 %
               is good
  peak memory  highest memory use so far, shown in the row that reached it
  check        mean difference, in nats, between the log-probabilities of the
               first row's new tokens and those of a pass over the whole text
               without a cache, by other kernels; the gate is 1, or 1.5 with a
               cache of two bits. Empty above 8192 tokens, and where the cache
               was filled, since there is no text then

\b
With --speculate there is a second table: the time of a step of the loop that
speculates, over that of a plain step, where no row is proposed a token and
where all rows are proposed k, and where a head proposes them: for Qwen3.6 the
model's own, for others an EAGLE-3 head of the model's sizes. A head with
random weights gets no token accepted, so the speed-up is that of your text: its
tokens per step (`mpjax generate --speculate` prints them) over this time.

\b
With --adapters there is a table of the same cases with random adapters
beside all linear maps of the layers: the speed is that over the case without.
With 0, rows without adapters are in a program for rows that may have some; an
engine runs that of a model without where no row has one.

\b
The plot shows several contexts as lines below their rooflines, one context as
bars. Compiling takes some ten seconds for each case, and as long again for
its prompt; --filled reads only one prompt for each precision.
"""

SERVE_EPILOG = """\b
Examples:
  mpjax bench serve --requests 256 --prompt-tokens 1024 --new-tokens 512
  mpjax bench serve --requests 512 --prompt-tokens lognormal:1024:0.8:4096 \\
      --new-tokens lognormal:512:0.8:4096 --static 64
  mpjax bench serve --requests 32 --prompt-tokens 4096 --shared-tokens 3072
  mpjax bench serve --requests 32 --new-tokens 1000 --late-prompt 32768
  mpjax bench serve --max-gap inf --rounds 1 --trace trace.json
  mpjax bench serve --rate 8
  mpjax bench serve --model ./Qwen3-8B-AWQ --precision W4A16KV8 --max-gap inf

\b
Runs requests through an engine, with random weights in a published shape or
with a model, and random prompts, without stop tokens. All programs are compiled before. The
load runs --rounds times with other prompts, of which the last is measured.
  tokens/s     new tokens of all requests, from the first arrival to the last
               token
  first token  time from a request's arrival to its first token, P50 and P99
  token        time of each further token of a request, P50 and P99
  longest gap  between two reports of new tokens of a request; up to --steps
               tokens come together. With --late-prompt, after that has come
  shared       prompt tokens that were in the cache already
  preempted    how often a request made room for an older one
  idle         share of time, at most, in which the device waits for the host;
               up to 3 % is good
With --speculate there are also the proposed tokens, and the share of them
that was accepted. Random weights repeat themselves as no text does, so the
speed is not that of a text.
The JSON also has late_steps: programs before which the device was idle. A
second table has the figures under the keys of `vllm bench serve`.
--trace writes when each program of the last round began, what it read or
decoded and its seconds, for https://ui.perfetto.dev or chrome://tracing; of
several precisions, those of the last. The roofline of a decoding step is in
`mpjax bench generate`. The exit code is 1 if tokens are missing, or if more
than 18 programs were compiled.
"""
SUMS_EPILOG = """\b
Examples:
  mpjax bench sums --devices 2
  mpjax bench sums --dtypes float32 --sizes 8,64,256

\b
Measures a loop of 16 steps with 64 sums each, inside one jit. Between two sums
each device adds an array of its own; the time of such additions alone is
subtracted.
  size  bytes of the array that each device has, and gets the sum of
  sum, by inbox  XLA's sum, and mpjax's kernel, if these devices have one
  GB/s  size over the time of a sum
"""
