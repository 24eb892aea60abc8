"""Compiles SGLang's own JIT modules of this model at once, each of which a first request would wait for.

SGLang compiles one after the other when first called; fourteen at a time take under a minute. What fails here is
compiled at its first use.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
from sglang.kernels.ops.activation import silu_and_mul_clamp
from sglang.kernels.ops.attention.dsv4 import attn, compress, norm_rope, topk
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.kernels.ops.moe import dsv4

BF16, FP32 = torch.bfloat16, torch.float32
MODULES = [
    (norm_rope._jit_fused_rope_module,),
    (norm_rope._jit_main_q_norm_rope_module, BF16, 512, 64, True),
    (norm_rope._jit_main_k_norm_rope_flashmla_module, BF16, 512, 64, 256, KVLayout.V4),
    (norm_rope._jit_main_q_indexer_rope_hadamard_quant_module, BF16),
    (topk._jit_topk_v2_module,),
    (topk._jit_topk_v1_module,),
    (dsv4._jit_hash_topk_module,),
    (dsv4._jit_mask_topk_module,),
    (silu_and_mul_clamp._jit_silu_and_mul_clamp_module, BF16),
    (silu_and_mul_clamp._jit_silu_mul_quant_contig_module, 128, False, False, True),
    (compress._jit_compress_plan_module,),
    (attn._jit_metadata_module,),
    *((compress._jit_compress_norm_rope_module, FP32, *sizes, 64, page, False, KVLayout.V4)
      for sizes, page in (((512,), 64), ((512,), 2), ((128,), 64))),
    *((compress._jit_compress_module, dim, FP32, FP32, FP32, ratio) for dim, ratio in ((512, 4), (512, 128), (128, 4))),
]  # fmt: skip


def build(call: tuple) -> str:
    began = time.time()
    try:
        call[0](*call[1:])
        outcome = "built"
    except Exception as error:
        outcome = repr(error)[-200:]
    return f"{call[0].__name__}: {outcome}, {time.time() - began:.0f} s"


with ThreadPoolExecutor(14) as pool:
    for line in pool.map(build, MODULES):
        print(line, flush=True)
