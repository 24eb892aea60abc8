"""SGLang plug-in of the test in a real engine: seeded random weights, and the way to sm_120's functions on another GPU.

`E2E_ROUTES` names the routes, separated by commas. Each sends a call that SGLang makes on this GPU to the function that
it calls on sm_120, so that the hooks on that function run inside SGLang's own model code. Nothing here runs in a
deployment.

- `attention`: FlashMLA's decode call goes to `flash_mla_with_kvcache_sm120`; without a hook that is SGLang's Triton
  kernel for sm_120 (`SGLANG_SM120_FLASHMLA_BACKEND=triton`).
- `experts`: `Mxfp4FlashinferCutlassMoEMethod` prepares the weights as on sm_120. FlashInfer's kernel for them exists
  for sm_120 alone: torch on the same weights stands in for it.
"""

from __future__ import annotations

import importlib
import os
import zlib
from typing import Any

import torch


def activate() -> None:
    """Entry point `sglang.srt.plugins`."""
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    register, kinds = registry.HookRegistry.register, registry.HookType
    register("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", random_weights, kinds.REPLACE)
    routes = os.environ.get("E2E_ROUTES", "").split(",")
    if "attention" in routes:
        target = "sglang.kernels.ops.attention.flash_mla_interface.flash_mla_with_kvcache"
        register(target, decode_as_on_sm120, kinds.AROUND)
    if "experts" in routes:
        module = "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe"
        register(f"{module}.Mxfp4FlashinferCutlassMoEMethod.__init__", say_sm120, kinds.AROUND)
        runner = "sglang.srt.layers.moe.moe_runner.flashinfer_cutlass._fused_experts_flashinfer_mxfp4_cutlass"
        register(runner, experts_in_torch, kinds.REPLACE)
        import flashinfer

        flashinfer.block_scale_interleave = interleave


def random_weights(model: Any, low: float = 0.0, high: float = 0.0, seed: int = 0) -> None:
    """Weights that keep activations of order 1, the same for a name in every process."""
    for name, weight in model.state_dict().items():
        generator = torch.Generator(device=weight.device)
        generator.manual_seed(zlib.crc32(name.encode()))
        fill(name, weight.data, generator, model.config.n_routed_experts)
    print("sm120_e2e: random weights in place", flush=True)


def fill(name: str, weight: torch.Tensor, generator: torch.Generator, experts: int) -> None:
    def normal() -> torch.Tensor:
        return torch.randn(weight.shape, generator=generator, device=weight.device)

    if "tid2eid" in name:
        first = torch.randint(0, experts, (len(weight), 1), generator=generator, device=weight.device)
        weight.copy_((first + 37 * torch.arange(weight.shape[1], device=weight.device)) % experts)
    elif weight.dtype in (torch.int8, torch.uint8):
        # Two FP4 values a byte.
        weight.view(torch.uint8).random_(0, 256, generator=generator)
    elif not weight.is_floating_point() or weight.ndim == 0:
        return
    elif weight.dtype == torch.float8_e8m0fnu:
        # The values of FP4 are of order 2.4.
        weight.view(torch.uint8).fill_(127 - 7)
    elif weight.ndim > 1 and ("scale_inv" in name or name.endswith("_scale")):
        # Those of FP8 are of order 1 here.
        weight.fill_(2.0**-6)
    elif weight.dtype == torch.float8_e4m3fn:
        for part in weight.view(-1).split(1 << 28):
            part.copy_(torch.randn(part.shape, generator=generator, device=part.device, dtype=torch.bfloat16))
    elif "norm" in name and weight.ndim == 1:
        weight.copy_(1 + 0.1 * normal())
    elif "attn_sink" in name or "bias" in name or weight.ndim == 1:
        weight.copy_(0.1 * normal())
    else:
        deviation = 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5
        # Rounded: what a checkpoint holds in bf16.
        weight.copy_((deviation * normal()).to(torch.bfloat16))


def decode_as_on_sm120(flash_mla: Any, *args: Any, **kwargs: Any) -> Any:
    """FlashMLA's arguments as `DeepseekV4AttnBackend` passes them, to the function that it calls on sm_120."""
    # Prefill stays where it is: SGLang's Triton kernel for sm_120 would take minutes.
    if args or len(kwargs["q"]) > 256:
        return flash_mla(*args, **kwargs)
    sm120 = importlib.import_module("sglang.kernels.ops.attention.flash_mla_sm120")
    names = (
        "q k_cache indices head_dim_v topk_length attn_sink softmax_scale extra_k_cache extra_indices_in_kvcache "
        "extra_topk_length"
    )
    return sm120.flash_mla_with_kvcache_sm120(**{name: kwargs.get(name) for name in names.split()})


def say_sm120(init: Any, *args: Any, **kwargs: Any) -> None:
    """The expert method's constructor, which asks the platform once how to keep the weights."""
    context = importlib.import_module("sglang.srt.runtime_context")
    with context.override_platform(is_sm120=True, is_sm90=False):
        init(*args, **kwargs)


def interleave(scale: torch.Tensor) -> torch.Tensor:
    """FlashInfer's `block_scale_interleave` for whole tiles, which it compiles for its own GPUs."""
    experts, rows, columns = scale.shape
    tiles = scale.view(experts, rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(-1)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16 weights [rows, columns] of an expert in FlashInfer's sm_120 layout."""
    table = torch.tensor(E2M1, device=packed.device, dtype=torch.bfloat16)
    codes = packed.view(torch.uint8).long()
    values = torch.stack([table[codes & 15], table[codes >> 4]], -1).flatten(1)
    rows, columns = values.shape[0], values.shape[1] // 32
    tiles = scale.view(torch.uint8).view(rows // 128, columns // 4, 32, 4, 4)
    powers = torch.exp2(tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns).float() - 127).to(torch.bfloat16)
    return values * powers.repeat_interleave(32, 1)


def experts_in_torch(dispatch_output: Any, quant_info: Any, runner_config: Any) -> Any:
    """`_fused_experts_flashinfer_mxfp4_cutlass` in torch: bf16 products with fp32 sums, the up rows first."""
    standard = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard")
    x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    limit = float(runner_config.swiglu_limit)
    for expert in topk.topk_ids.unique().tolist():
        if expert < 0:
            continue
        token, place = torch.nonzero(topk.topk_ids == expert, as_tuple=True)
        gate_up = unpack(quant_info.w13_weight[expert], quant_info.w13_weight_scale[expert])
        up, gate = (x[token] @ gate_up.T).float().chunk(2, dim=1)
        act = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        down = unpack(quant_info.w2_weight[expert], quant_info.w2_weight_scale[expert])
        product = (act.to(torch.bfloat16) @ down.T).float()
        out.index_add_(0, token, product * topk.topk_weights[token, place, None])
    return standard.StandardCombineInput(hidden_states=out.to(x.dtype))
