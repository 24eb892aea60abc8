"""Which functions of SGLang are replaced, by which op, under which switch.

Plain data that imports neither torch nor SGLang: the controller locks it, the plug-in installs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "SGLANG_SM120_"
# The switch of the measurements this project comes from.
ALIASES = {"SGLANG_SM120_MMA_FLASHMLA": "SGLANG_SM120_SPARSE_MLA_DECODE"}
ON, OFF = ("1", "true"), ("", "0", "false")


@dataclass(frozen=True)
class Hook:
    """One replaced function.

    Attributes:
        target: dotted path of the function.
        op: of this package that does its work.
        adapter: name of the class in `adapters` that translates the arguments.
        upstream_sha256: `upstream.function_sha256` of the function the adapter was written against.
        alias_of: dotted path under which the function is defined, where that is not the target.
        relies_on: dotted paths and hashes of functions that the adapter does not replace but counts on: they give the
            weights and caches the form that it reads.
    """

    target: str
    op: str
    adapter: str
    upstream_sha256: str
    alias_of: str = ""
    relies_on: tuple[tuple[str, str], ...] = ()

    @property
    def switch(self) -> str:
        """The environment variable that turns it on."""
        return PREFIX + self.op.upper()

    @property
    def owner(self) -> str:
        """The module or class that holds the target."""
        return self.target.rpartition(".")[0]

    @property
    def function(self) -> str:
        """The function's name in its owner."""
        return self.target.rpartition(".")[2]

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """Dotted path and hash of each function that must not have changed."""
        return (self.alias_of or self.target, self.upstream_sha256), *self.relies_on


# A linear layer's weight stays [N, K]; DeepGEMM may get its scales packed.
_FP8_WEIGHTS = (
    "sglang.srt.layers.quantization.fp8.Fp8LinearMethod.process_weights_after_loading_block_quant",
    "996399cd3d1d5693b87085c1ed3997dd6c426bc7b1d0794b9a4b234aa0308e02",
)
_PACKED_SCALES = (
    "sglang.srt.layers.quantization.fp8_utils._unpack_ue8m0_scale_for_triton",
    "8638ed5e46b65fd6febc4c22f9680cd5f5c7d2529ac5ccdf293e3a7a05f9174c",
)

HOOKS = (
    Hook(
        "sglang.kernels.ops.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120",
        "sparse_mla_decode",
        "SparseMlaDecode",
        "d44e7a1c813cf45f96c6b32b03d318744027b8f4a57549f1891a3e689941d758",
    ),
    Hook(
        "sglang.kernels.ops.attention.dsa.tilelang_kernel.tilelang_fp8_paged_mqa_logits",
        "indexer_logits",
        "IndexerLogits",
        "f400ee202c23ded758cb0ba29f4b06c76e39a5fbea6c6b6531b2404b23e38f42",
    ),
    Hook(
        "sglang.srt.layers.attention.dsv4.indexer.fp8_paged_mqa_logits_torch_sm120",
        "indexer_logits",
        "IndexerLogits",
        "246408618109305cad2662c0a83c4e6b3748f826f7383f7ed9ad14426034f459",
    ),
    Hook(
        "sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged",
        "topk_indices",
        "TopkIndices",
        "d1b12a5c8b5f7c2c917d4cf871ec5134e80fb196f9a4edfe8449d1ee04449615",
    ),
    Hook(
        "sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged_v2",
        "topk_indices",
        "TopkIndicesV2",
        "7fc7f0dd3f6581eab420688f918ef5a7e2a07c42d7641c0a91d9def21a5ab08d",
    ),
    Hook(
        "sglang.srt.models.deepseek_common.amd.deepseek_v4_fused_mhc.apply_mhc_post_pre_boundary",
        "mhc_post_pre_norm",
        "MhcPostPreNorm",
        "58539fa75346500f13e511fbaa73a4059edd3d7970c2de86d6c0dcfdc37fb68c",
        relies_on=(
            (
                "sglang.kernels.ops.layernorm.mhc.mhc_fused_post_pre",
                "a2b7e9c501db81c529d8475212eff49ccb7a0704371e1f566e2058c4df943b83",
            ),
        ),
    ),
    Hook(
        "sglang.srt.layers.quantization.fp8_utils.cutlass_w8a8_block_fp8_linear_with_fallback",
        "fp8_block_linear",
        "CutlassFp8Linear",
        "d9c73c41ca2eea42c99eb0eda5613e3299b397f43f7e66dfc2f0a7030f40b3d3",
        relies_on=(_FP8_WEIGHTS,),
    ),
    Hook(
        "sglang.srt.layers.quantization.fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback",
        "fp8_block_linear",
        "DeepGemmFp8Linear",
        "73f6570baf4fb5fdbf3a8ac832df95ba7ef1e8db4353b8b1c12f27b0e86dc58b",
        relies_on=(_FP8_WEIGHTS, _PACKED_SCALES),
    ),
    Hook(
        "sglang.srt.models.deepseek_v4.fused_inverse_rope_wo_a",
        "inv_rope_wo_a",
        "InvRopeWoA",
        "727262b75520a27573d9403b312f6842dbe83079fa6be2271e3ea5514ee56c9b",
        relies_on=(
            (
                "sglang.srt.models.deepseek_v4.DeepseekV4ForCausalLM._setup_fp8_wo_a_scales",
                "12ab0d9747612fe13b0c1960fe39356d23db292f651518ee74d553bc9eaf4687",
            ),
            # The steps that the check runs are lines of it.
            (
                "sglang.srt.models.deepseek_v4.MQALayer.forward",
                "dcc7e432ec13f258bce39abb3e1edc350aab08e1715ccdcd4d07609c40548892",
            ),
            _PACKED_SCALES,
        ),
    ),
    Hook(
        "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe.Mxfp4FlashinferCutlassMoEMethod.apply",
        "moe_fp4_small_batch",
        "MoeFp4SmallBatch",
        "e172a011bca08bd5e3715b29170ed17f0d636f23732e5e2e72cf4d962b3c02f9",
        relies_on=(
            (
                "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe.Mxfp4FlashinferCutlassMoEMethod"
                ".process_weights_after_loading",
                "edff8f858ac9ca56a615bd1c73df815fd6569a1f84a240dcc0e6c78965600465",
            ),
            (
                "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe.Mxfp4FlashinferCutlassMoEMethod"
                ".load_up_proj_weight_first",
                "253cfc415ce1fd64f6f9e68313830aa43abfcdc612afb2d3730f43e063bbc213",
            ),
            (
                "sglang.srt.layers.moe.moe_runner.flashinfer_cutlass._fused_experts_flashinfer_mxfp4_cutlass",
                "e1c1910d913a349a8a51656fe096220831f359e2b1b9b7eeba475b1f592491f7",
            ),
        ),
    ),
    Hook(
        "sglang.kernels.ops.moe.moe_fused_gate.moe_fused_gate",
        "route_experts",
        "ScoredExperts",
        "96fe4e49add8445793f1f23c9642d7ac469547a84a342e5f99905f92b0292099",
    ),
    Hook(
        "sglang.kernels.ops.moe.dsv4.hash_topk",
        "route_experts",
        "HashedExperts",
        "e787f88a6a9077feae45d8e4b881fe0edae6a50c3b8773ab08c7886a7cdba6ea",
    ),
    Hook(
        "sglang.kernels.ops.gemm.bf16_fp32.linear_bf16_fp32",
        "bf16_linear_partials",
        "Bf16Linear",
        "eb3dff94ac9f3dc0e282b368b3a9ee5e222d3024584824dca372528d4c3a5843",
    ),
    Hook(
        "sglang.srt.models.deepseek_v4.MQALayer._compute_q_b",
        "prepare_queries",
        "PrepareQueries",
        "3ac42dd001020497c8fc3806153a4d414cd7fac284dc339158c4a16184b1f034",
    ),
    Hook(
        "sglang.srt.models.deepseek_v4.MQALayer._compute_kv_to_cache",
        "store_attention_inputs",
        "StoreAttentionInputs",
        "678224fac8995d641968e79084b738b52370e8218c345dda0648e1f297e30b93",
        relies_on=(
            # Both run the compressors once in each layer, on the same input.
            (
                "sglang.srt.models.deepseek_v4.MQALayer._forward_prepare",
                "e45619be35c3ba0fd23c4c58b6be2d8f1c287fc08de33db012a2a344be44d3b1",
            ),
            (
                "sglang.srt.models.deepseek_v4.MQALayer._forward_prepare_multi_stream",
                "00d5a176ff2fc84d837ca20e12fb4009c25c8a112bae6753cf2953aa3ec39b03",
            ),
            (
                "sglang.srt.layers.attention.dsv4.compressor_v2.CompressorBackendMixin._forward_compress_all_in_one",
                "24567b458f0a209ae67d2ace897c29e93f821cc7666b18312960b3b1f6c0de73",
            ),
            (
                "sglang.srt.layers.attention.dsv4.compressor.Compressor._apply_ape_hotfix",
                "81ea3d340f1c3daeda0e60cace935822efecdebaf96b83491e09bfe96773a01f",
            ),
        ),
    ),
    *(
        Hook(
            f"sglang.srt.layers.attention.dsv4.compressor_v2.CompressorBackendMixin.{name}",
            "store_attention_inputs",
            "StoredByInputs",
            "75c154c04f5a14185c6718bdcb08e99f419975cda15b86b8e85fbbe94ad5a5bb",
            alias_of="sglang.srt.layers.attention.dsv4.compressor_v2.CompressorBackendMixin.forward_unified",
        )
        for name in ("forward_core_compressor", "forward_indexer_compressor")
    ),
)


def enabled(environment: Mapping[str, str]) -> tuple[Hook, ...]:
    """The hooks whose switch is on.

    Raises:
        ValueError: a switch of this table has a value that is neither on nor off.
    """
    on: set[str] = set()
    for name in {hook.switch for hook in HOOKS} | ALIASES.keys():
        value = environment.get(name, "")
        if value in ON:
            on.add(ALIASES.get(name, name))
        elif value not in OFF:
            raise ValueError(f"{name}={value!r}: expected 1 or 0")
    return tuple(hook for hook in HOOKS if hook.switch in on)
