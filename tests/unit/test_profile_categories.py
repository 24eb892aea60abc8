"""Which part of a layer a kernel belongs to, by its name."""

from pathlib import Path

import pytest
import sm120_kernels

from deploy.profile.categories import CATEGORIES, OPS, category_of, is_ours, our_kernels

KERNELS = Path(sm120_kernels.__file__).parent


@pytest.mark.parametrize(
    ("name", "category"),
    [
        # This repository's.
        ("_sparse_mla_decode_kernel", "attention"),
        ("_indexer_logits_kernel", "indexer"),
        ("_select_kernel", "top-k"),
        ("linear_kernel", "linear"),
        ("_gate_up_kernel", "experts"),
        ("_post_kernel", "mHC"),
        ("_store_attention_inputs_kernel", "glue"),
        # NCCL, SGLang, FlashInfer, CUTLASS, cuBLAS, DeepGEMM, TileLang, torch.
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-reduce"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 4>(...)", "all-reduce"),
        ("void flash_fwd_splitkv_mla_kernel<Traits<bf16>, true>(Flash_fwd_mla_params)", "attention"),
        ("tilelang_fp8_paged_mqa_logits_kernel", "indexer"),
        ("deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u, 128u>", "indexer"),
        ("void topk_transform_v1_kernel<512>", "top-k"),
        ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(...)", "top-k"),
        ("mhc_fused_post_pre_kernel", "mHC"),
        ("hc_prenorm_gemm", "mHC"),
        ("cutlass::device_kernel<flashinfer::gemm::MoeGemmMxfp4>", "experts"),
        ("void moe_fused_gate_kernel<float>", "experts"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "linear"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "linear"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>", "glue"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "glue"),
        ("Memcpy DtoD (Device -> Device)", "glue"),
        ("Memset (Device)", "glue"),
        # The host's operators, as the CPU stack's traces have them.
        ("aten::mm", "linear"),
        ("aten::addmm", "linear"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::index_put_", "glue"),
        ("aten::rsqrt", "glue"),
        ("detach_", "glue"),
        ("c10d::allreduce_", "all-reduce"),
        ("a_kernel_nobody_has_seen_yet_zzz", "other"),
    ],
)
def test_a_name_has_its_category(name: str, category: str) -> None:
    assert category_of(name) == category
    assert category in CATEGORIES


def test_every_op_has_a_category_and_every_kernel_is_found() -> None:
    ops = {file.stem for file in (KERNELS / "ops").glob("*.py")} - {"__init__"}
    assert set(OPS) == ops
    launched = our_kernels()
    assert {"_sparse_mla_decode_kernel", "_combine_kernel", "_gate_up_kernel", "_finish_kernel"} <= set(launched)
    # Some ops launch another op's kernel.
    assert set(launched.values()) <= ops
    assert all(category_of(name) != "other" for name in launched)


def test_only_our_kernels_are_ours() -> None:
    assert is_ours("_sparse_mla_decode_kernel")
    assert not is_ours("_sparse_mla_decode_kernel_of_another") and not is_ours("aten::mm")
    # A part of a kernel is never launched alone.
    assert not is_ours("_swiglu")
