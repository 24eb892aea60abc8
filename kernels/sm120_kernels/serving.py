"""What the ops are called with in the running system: the sizes of DeepSeek-V4-Flash and of compose.yaml.

Each module in ``sm120_kernels.ops`` has ``serving_calls()`` beside its ``compile_cases()``: the calls of its launcher
at these sizes as the plug-in's adapters make them, on tensors of torch's default device that hold nothing but zeros
(and -1 where that means none). The bake compiles them without a GPU, a test on a GPU runs them.
"""

HIDDEN = 4096
HEADS = 64
OUTPUT_GROUPS = 8
INTERMEDIATE = 2048
"""Of an expert."""
WINDOW = 128
CONTEXT = 131072
"""Tokens, compose.yaml's default."""
RANKS = (4, 2)
"""Tensor-parallel sizes of the profiles."""
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)
"""Rows of a decode step: SGLang 0.5.23's CUDA graphs up to 64 requests."""
