"""Which part of a layer a kernel or operator belongs to, and whether it is this repository's. Pure.

By name, first match wins. What no line knows is "other", so that a new kernel shows and is not taken for another.
"""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Category = Literal[
    "attention",
    "indexer",
    "top-k",
    "linear",
    "experts",
    "mHC",
    "all-reduce",
    "glue",
    "other",
    "idle",
]
CATEGORIES: tuple[Category, ...] = (
    "attention",
    "indexer",
    "top-k",
    "linear",
    "experts",
    "mHC",
    "all-reduce",
    "glue",
    "other",
    "idle",
)

OPS: dict[str, Category] = {
    "sparse_mla_decode": "attention",
    "indexer_logits": "indexer",
    "topk_indices": "top-k",
    "fp8_block_linear": "linear",
    "bf16_linear_partials": "linear",
    "inv_rope_wo_a": "linear",
    "moe_fp4_small_batch": "experts",
    "mhc_post_pre_norm": "mHC",
    "prepare_queries": "glue",
    "store_attention_inputs": "glue",
    "route_experts": "glue",
}
"""Of each op of `kernels/sm120_kernels/ops`."""

PATTERNS: tuple[tuple[Category, str], ...] = (
    (
        "all-reduce",
        r"nccl|all_?reduce|cross_device_reduce|all_?gather|reduce_?scatter|c10d::|gloo:|one_?shot|two_?shot",
    ),
    ("mHC", r"mhc|sinkhorn|hc_prenorm|hc_(pre|post|head)|hyper_?connection"),
    # Routing picks experts; the indexer picks tokens.
    (
        "experts",
        r"moe|expert|grouped_?(gemm|topk)|group_gemm|topk_?(softmax|sigmoid|sqrt)|hash_topk|mxf?p?4|nvfp4|fp4|marlin",
    ),
    ("indexer", r"indexer|mqa_logits|index_?(score|logits|k_)|paged_mqa|hadamard"),
    ("top-k", r"top_?k|radix_?(select|sort|topk)|bitonic|gatherTopK|aten::sort"),
    (
        "attention",
        r"mla|flash_?(attn|infer|fwd)|fmha|sparse_?attn|split_?kv|scaled_dot_product|attention|attn|page_?split"
        r"|compress",
    ),
    (
        "linear",
        r"gemm|gemv|nvjet|cublas|matmul|xmma|wgmma|scaled_mm|splitk|split_k|aten::(addmm|mm|bmm|linear|baddbmm)$"
        r"|mkldnn|onednn|linear",
    ),
    (
        "glue",
        r"norm|rope|rotary|elementwise|vectorized|quant|cast|copy|memcpy|memset|fill|silu|swiglu|act_and_mul|sigmoid"
        r"|softmax|embedding|gather|scatter|index|reduce|cat(array|_|$)|concat|arange|clamp|residual|add|mul|store|sampl"
        r"|argmax|aten::|^detach_?$|unrolled|cumsum|scan",
    ),
)
_COMPILED: tuple[tuple[Category, re.Pattern[str]], ...] = tuple(
    (category, re.compile(pattern, re.IGNORECASE)) for category, pattern in PATTERNS
)


@cache
def our_kernels() -> dict[str, str]:
    """The op of each Triton kernel that this repository launches, read from the source: no GPU package is needed.

    A trace names a Triton kernel after its function. Functions without "kernel" in their name are parts of others.
    """
    spec = find_spec("sm120_kernels")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found: dict[str, str] = {}
    for folder in folders:
        for file in sorted((Path(folder) / "ops").glob("*.py")):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.name.endswith("kernel") and _is_jit(node):
                    found[node.name] = file.stem
    return found


def _is_jit(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


@cache
def is_ours(name: str) -> bool:
    """Is it a kernel of this repository?"""
    return name in our_kernels()


@cache
def category_of(name: str) -> Category:
    """Category of a kernel or operator; "other" where no line knows it."""
    if (op := our_kernels().get(name)) is not None:
        return OPS.get(op, "other")
    for category, pattern in _COMPILED:
        if pattern.search(name):
            return category
    return "other"
