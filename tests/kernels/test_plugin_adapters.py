"""Each adapter on SGLang's own arguments, kernels in Triton's interpreter, against SGLang's torch functions.

Where SGLang has no torch function that runs on the CPU, plain torch of the same formula takes its place. `rotated` is
such a one, and so are the experts' products on weights that SGLang's own table of FP4 values unpacks.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from sm120_kernels import kv_layout
from sm120_kernels.plugin import adapters, hooks
from sm120_kernels.plugin.table import HOOKS, Hook
from sm120_kernels.reference import store_attention_inputs as stored
from sm120_kernels.reference.fp8_block_linear import dequantise, random_weight, round_activations
from test_store_attention_inputs import arguments as store_arguments
from test_store_attention_inputs import check_compressor

pytest.importorskip("sglang")
pytestmark = pytest.mark.filterwarnings("ignore")


class Thing:
    """Stands for a module, a pool or a batch of SGLang: only what an adapter reads of it."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@dataclass(frozen=True)
class Case:
    """One call of a hooked function.

    Attributes:
        adapter: name of the hook's adapter.
        args, kwargs: as SGLang passes them.
        theirs: SGLang's function, on the CPU.
        bound: how far apart both may be.
        tensors: the tensors of a result.
    """

    adapter: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    theirs: Callable[..., Any]
    bound: float
    tensors: Callable[[Any], list[torch.Tensor]]


def hook_of(adapter: str) -> Hook:
    return next(hook for hook in HOOKS if hook.adapter == adapter)


def upstream(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module("sglang." + module), name)


def one(result: torch.Tensor) -> list[torch.Tensor]:
    return [result]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(torch.bfloat16)


def frequencies(positions: int = 1000) -> torch.Tensor:
    precompute = upstream("kernels.ops.attention.dsv4.rope.precompute_freqs_cis")
    return precompute(dim=64, seqlen=positions, original_seq_len=0, base=10000.0, factor=1.0, beta_fast=32, beta_slow=1)


def rotated(x: torch.Tensor, freqs_cis: torch.Tensor, positions: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """x [tokens, heads, 512] with its last 64 values turned by their position."""
    turn = freqs_cis[positions][:, None]
    pairs = torch.view_as_complex(x[..., 448:].float().unflatten(-1, (32, 2)).contiguous())
    turned = torch.view_as_real(pairs * (turn.conj() if inverse else turn)).flatten(-2)
    return torch.cat([x[..., :448].float(), turned], -1).to(x.dtype)


def mhc() -> Case:
    tokens, mixing = 2, generator(1)
    fn = (torch.randn(24, 16384, generator=mixing) / 128).to(torch.bfloat16).float()
    given = (
        bf16(tokens, 4096, seed=2),
        bf16(tokens, 4, 4096, seed=3),
        torch.rand(tokens, 4, generator=mixing),
        torch.rand(tokens, 4, 4, generator=mixing) / 4,
        torch.nn.Parameter(fn, requires_grad=False),
        torch.tensor([0.5, 0.4, 0.3]),
        torch.randn(24, generator=mixing) / 10,
        4,
        1e-6,
        1e-6,
        2.0,
        20,
        (torch.rand(4096, generator=mixing) + 0.5).to(torch.bfloat16),
        1e-6,
    )

    def theirs(y, streams, post, comb, fn, scale, base, mult, rms_eps, eps, factor, steps, weight, norm_eps, **_):
        ops = importlib.import_module("sglang.kernels.ops.layernorm.mhc")
        new = ops._mhc_post_torch(y, streams, post.unsqueeze(-1), comb)
        post, comb, x = ops._mhc_pre_torch(new, fn, scale, base, rms_eps, eps, eps, factor, steps)
        x = torch.nn.functional.rms_norm(x.float(), (4096,), weight.float(), norm_eps).to(torch.bfloat16)
        return new, x, post.squeeze(-1), comb, True

    return Case("MhcPostPreNorm", given, {"fn_transpose": True}, theirs, 1e-2, lambda result: list(result[:4]))


def fp8_linear(adapter: str, packed: bool = False) -> Case:
    weight, scale = random_weight(256, 512, generator=generator(4))
    if packed or adapter == "DeepGemmFp8Linear":
        scale = torch.exp2(torch.log2(scale).round())
    given = {
        "input": bf16(5, 512, seed=5),
        "weight": torch.nn.Parameter(weight, requires_grad=False),
        "block_size": [128, 128],
        "weight_scale": torch.nn.Parameter(scale, requires_grad=False),
        "input_scale": None,
        "bias": None,
    }
    if packed:
        # A row of exponents for each row of the weight, four a word, as DeepGEMM packs them.
        exponents = (scale.view(torch.int32) >> 23).to(torch.uint8).repeat_interleave(128, 0)
        given["weight_scale"] = torch.nn.Parameter(exponents.contiguous().view(torch.int32), requires_grad=False)

    def theirs(input, weight, **_):
        full = upstream("srt.layers.quantization.fp8_utils.block_quant_dequant")(
            weight.data, scale, [128, 128], torch.float32
        )
        return (round_activations(input.double()) @ full.double().T).to(torch.bfloat16)

    return Case(adapter, (), given, theirs, 1e-2, one)


def wo_a(ue8m0: bool = False) -> Case:
    groups, columns, heads, tokens = 2, 128, 4, 3
    weight, scale = random_weight(groups, columns, 1024, generator=generator(6), ue8m0=ue8m0)
    freqs_cis = frequencies()
    if ue8m0:
        words = scale.repeat_interleave(columns, 1).contiguous().view(torch.int32)
        # As DeepGEMM keeps them: column-major.
        scale_given = words.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        scale_given = scale
    layer = Thing(
        n_local_groups=groups,
        o_lora_rank=columns,
        qk_rope_head_dim=64,
        freqs_cis=freqs_cis,
        wo_a=Thing(
            weight=torch.nn.Parameter(weight.flatten(0, 1), requires_grad=False),
            weight_scale_inv=torch.nn.Parameter(scale_given, requires_grad=False),
        ),
    )

    def theirs(layer, o, positions):
        turned = rotated(o, freqs_cis, positions, inverse=True).view(tokens, groups, -1)
        full = dequantise(weight, scale).to(torch.bfloat16)
        return upstream("srt.models.deepseek_v4._apply_wo_a_bf16_matmul")(turned, full, is_decode=False).flatten(1)

    return Case(
        "InvRopeWoA", (layer, bf16(tokens, heads, 512, seed=7), torch.tensor([3, 700, 0])), {}, theirs, 4e-2, one
    )


def interleaved(scale: torch.Tensor) -> torch.Tensor:
    """FlashInfer's place for each scale, from `get_sf_out_offset_128x4`, one by one."""
    out = torch.empty_like(scale)
    experts, rows, columns = scale.shape
    for row in range(rows):
        for column in range(columns):
            place = (
                row // 128 * (columns // 4) * 512 + column // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            )
            out.view(experts, -1)[:, place] = scale[:, row, column]
    return out


def moe() -> Case:
    experts, hidden, intermediate, tokens, top_k = 4, 256, 128, 3, 2
    random = generator(8)
    standard = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard")
    table = upstream("srt.layers.quantization.fp8.DSV4_DEQUANT_FP4_TABLE")

    def weights(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        packed = torch.randint(0, 256, (experts, rows, columns // 2), generator=random).to(torch.uint8)
        scale = torch.randint(117, 121, (experts, rows, columns // 32), generator=random).to(torch.uint8)
        return packed, scale

    def unpacked(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        values = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], -1).flatten(2)
        return values.double() * torch.exp2(scale.double() - 127).repeat_interleave(32, 2)

    (w13, s13), (w2, s2) = weights(2 * intermediate, hidden), weights(hidden, intermediate)
    layer = Thing(
        _dsv4_mxfp4_backend="flashinfer_cutlass_sm120",
        num_experts=experts,
        num_local_experts=experts,
        w13_weight=torch.nn.Parameter(w13.view(torch.int8), requires_grad=False),
        w2_weight=torch.nn.Parameter(w2.view(torch.int8), requires_grad=False),
        w13_weight_scale_inv=torch.nn.Parameter(interleaved(s13).view(torch.float8_e8m0fnu), requires_grad=False),
        w2_weight_scale_inv=torch.nn.Parameter(interleaved(s2).view(torch.float8_e8m0fnu), requires_grad=False),
    )
    config = Thing(gemm1_alpha=None, apply_router_weight_on_input=False, swiglu_limit=10.0)
    method = Thing(moe_runner_config=config, _use_swiglu_step=False)
    topk = upstream("srt.layers.moe.topk.StandardTopKOutput")(
        topk_weights=torch.rand(tokens, top_k, generator=random),
        topk_ids=torch.tensor([[0, 3], [3, 1], [2, 0]], dtype=torch.int32),
        router_logits=torch.zeros(tokens, experts),
    )
    dispatched = standard.StandardDispatchOutput(bf16(tokens, hidden, seed=9), None, topk)

    def theirs(method, layer, dispatched):
        gate_up, down = unpacked(w13, s13), unpacked(w2, s2)
        out = torch.zeros(tokens, hidden, dtype=torch.float64)
        for token in range(tokens):
            for place in range(top_k):
                expert = int(topk.topk_ids[token, place])
                # FlashInfer has the up rows first.
                up, gate = (gate_up[expert] @ dispatched.hidden_states[token].double()).chunk(2)
                act = torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
                out[token] += topk.topk_weights[token, place] * (down[expert] @ act)
        return standard.StandardCombineInput(hidden_states=out.to(torch.bfloat16))

    return Case("MoeFp4SmallBatch", (method, layer, dispatched), {}, theirs, 1e-2, lambda r: [r.hidden_states])


def in_order(result: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    weights, ids = result
    order = ids.sort(dim=1)
    return [order.values, weights.gather(1, order.indices)]


def scored() -> Case:
    logits, bias = torch.randn(4, 256, generator=generator(10)), torch.randn(256, generator=generator(11)) / 10
    given = {
        "topk": 6,
        "scoring_func": "sqrtsoftplus",
        "num_fused_shared_experts": 0,
        "renormalize": True,
        "routed_scaling_factor": 1.5,
        "apply_routed_scaling_factor_on_output": True,
        "num_token_non_padded": None,
        "packed_out": None,
        "sqrtsoftplus_log1p": False,
    }

    def theirs(scores, bias, topk, **_):
        return upstream("srt.layers.moe.topk.biased_topk_impl")(
            scores,
            scores,
            bias,
            topk,
            True,
            scoring_func="sqrtsoftplus",
            routed_scaling_factor=1.5,
            apply_routed_scaling_factor_on_output=True,
        )

    return Case("ScoredExperts", (logits, bias), given, theirs, 1e-5, in_order)


def hashed() -> Case:
    table = torch.stack([torch.randperm(256, generator=generator(row))[:6] for row in range(50)]).to(torch.int32)
    given = {
        "router_logits": torch.randn(4, 256, generator=generator(12)),
        "input_ids": torch.tensor([49, 0, 7, 7]),
        "tid2eid": table,
        "num_fused_shared_experts": 0,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
    }

    def theirs(router_logits, input_ids, **_):
        layer = Thing(score_func="sqrtsoftplus", topk=6, num_shared_topk_slots=0, tid2eid=table.long())
        return upstream("srt.layers.moe.hash_topk.HashTopK")._forward_torch(layer, router_logits, input_ids)

    return Case("HashedExperts", (), given, theirs, 1e-5, in_order)


def bf16_linear() -> Case:
    given = bf16(5, 256, seed=13), bf16(70, 256, seed=14)
    return Case("Bf16Linear", given, {}, hooks.original(hook_of("Bf16Linear").target), 1e-3, one)


def queries() -> Case:
    heads, tokens, projected = 3, 4, bf16(4, 3 * 512, seed=15)
    freqs_cis, positions = frequencies(), torch.tensor([0, 999, 5, 5])
    layer = Thing(
        use_mega_attention=False,
        q_head_norm=True,
        wq_b=lambda q: (projected.clone(), None),
        n_local_heads=heads,
        freqs_cis=freqs_cis,
        eps=1e-6,
    )

    def theirs(layer, q, positions, q_out=None):
        normed = torch.nn.functional.rms_norm(projected.view(tokens, heads, 512).float(), (512,), eps=1e-6)
        return rotated(normed.to(torch.bfloat16), freqs_cis, positions)

    return Case("PrepareQueries", (layer, torch.zeros(4, 1024), positions), {}, theirs, 1e-2, one)


CASES = {
    "mhc": mhc,
    "fp8 cutlass": lambda: fp8_linear("CutlassFp8Linear"),
    "fp8 deepgemm": lambda: fp8_linear("DeepGemmFp8Linear"),
    "fp8 deepgemm, packed": lambda: fp8_linear("DeepGemmFp8Linear", packed=True),
    "wo_a": wo_a,
    "wo_a, packed": lambda: wo_a(ue8m0=True),
    "moe": moe,
    "scored experts": scored,
    "hashed experts": hashed,
    "bf16": bf16_linear,
    "queries": queries,
}


def values(name: str, hook: Hook) -> tuple[float, float]:
    """Calls served by ours and by SGLang, and nothing else of the metric `name`."""
    ours, theirs = (hooks._metrics()[0].labels(hook.op, hook.function, path)._value.get() for path in ("ours", name))
    return ours, theirs


def error_of(hook: Hook) -> float:
    return hooks._metrics()[1].labels(hook.op, hook.function)._value.get()


def prepare_own_steps(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """SGLang's three steps of wo_a, which need a GPU, as plain torch."""
    model = importlib.import_module("sglang.srt.models.deepseek_v4")

    def turn(x, k, freqs_cis, positions, inverse):
        full = torch.nn.functional.pad(x, (448, 0))
        x.copy_(rotated(full, freqs_cis, positions, inverse)[..., 448:])

    def product(values, scales, weight, weight_scale, recipe):
        if weight_scale.dtype == torch.int32:
            weight_scale = weight_scale[:, ::128].contiguous().view(torch.uint8)
        return torch.einsum("tgd,grd->tgr", values.double(), dequantise(weight, weight_scale)) * factor

    monkeypatch.setattr(model, "fused_rope_inplace", turn)
    monkeypatch.setattr(
        model, "sglang_per_token_group_quant_fp8", lambda x, group_size, scale_ue8m0: (x, torch.ones(len(x), 8))
    )
    monkeypatch.setattr(model, "_fp8_wo_a_einsum", product)


@pytest.mark.parametrize("name", CASES)
def test_the_op_gives_what_sglang_gives_and_checking_says_how_close(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    replacement = hooks.Replacement(hook_of(case.adapter), (), checked=True)
    prepare_own_steps(monkeypatch, factor=1.0)
    before = values("upstream", replacement.hook)
    ours = replacement(case.theirs, *case.args, **case.kwargs)
    assert values("upstream", replacement.hook) == (before[0] + 1, before[1])
    for left, right in zip(case.tensors(ours), case.tensors(case.theirs(*case.args, **case.kwargs)), strict=True):
        assert left.shape == right.shape and left.dtype == right.dtype
        assert adapters.relative_error(left.flatten(), right.flatten()) <= case.bound
    assert error_of(replacement.hook) <= case.bound

    def wrong(*args, **kwargs):
        result = case.theirs(*args, **kwargs)
        for tensor in case.tensors(result) if case.tensors is not in_order else [result[0]]:
            tensor *= 1.5
        return result

    prepare_own_steps(monkeypatch, factor=1.5)
    assert replacement._adapter.error(wrong, ours, *case.args, **case.kwargs) == pytest.approx(1 / 3, abs=0.05)


def changed(case: Case, change: dict[str, Any]) -> Case:
    places = {name: value for name, value in change.items() if isinstance(name, int)}
    args = tuple(places.get(place, value) for place, value in enumerate(case.args))
    return replace(case, args=args, kwargs=case.kwargs | {k: v for k, v in change.items() if isinstance(k, str)})


def other(thing: Thing, **attributes: Any) -> Thing:
    return Thing(**(thing.__dict__ | attributes))


REFUSED = {
    "prefill of mhc": ("mhc", lambda case: {0: bf16(300, 4096)}, "at most 256 rows"),
    "three streams": ("mhc", lambda case: {7: 3}, "4 streams"),
    "no norm": ("mhc", lambda case: {12: None}, "a norm after the mix"),
    "fp32 streams": ("mhc", lambda case: {1: case.args[1].float()}, "residual must be torch.bfloat16"),
    "prefill of fp8": ("fp8 cutlass", lambda case: {"input": bf16(65, 512)}, "at most 64 rows"),
    "quantised input": ("fp8 cutlass", lambda case: {"input_scale": torch.ones(5, 4)}, "not quantised yet"),
    "bias": ("fp8 deepgemm", lambda case: {"bias": torch.zeros(256)}, "no bias"),
    "other blocks": ("fp8 cutlass", lambda case: {"block_size": [32, 32]}, "128 x 128"),
    "fp16": ("fp8 cutlass", lambda case: {"input": case.kwargs["input"].half()}, "x must be torch.bfloat16"),
    "padded heads": ("wo_a", lambda case: {1: bf16(3, 64, 512)[:, :4]}, "o must be contiguous"),
    "many tokens": ("wo_a", lambda case: {1: bf16(65, 4, 512)}, "at most 64 rows"),
    "sm_90 experts": (
        "moe",
        lambda case: {1: other(case.args[1], _dsv4_mxfp4_backend="flashinfer_cutlass_sm90")},
        "FlashInfer's sm_120 kernel",
    ),
    "expert parallelism": ("moe", lambda case: {1: other(case.args[1], num_local_experts=2)}, "all experts"),
    "no clamp of ours": ("moe", lambda case: {0: other(case.args[0], _use_swiglu_step=True)}, "clamped SwiGLU"),
    "sigmoid": ("scored experts", lambda case: {"scoring_func": "sigmoid"}, "sqrtsoftplus"),
    "masked rows": ("scored experts", lambda case: {"num_token_non_padded": torch.tensor(3)}, "num_token_non_padded"),
    "bf16 bias": ("scored experts", lambda case: {1: case.args[1].bfloat16()}, "bias must be torch.float32"),
    "64 experts": ("hashed experts", lambda case: {"router_logits": torch.zeros(4, 64)}, "shape"),
    "fp32 weight": ("bf16", lambda case: {1: case.args[1].float()}, "weight must be torch.bfloat16"),
    "buffer of more heads": ("queries", lambda case: {"q_out": bf16(4, 64, 512)}, "own heads"),
    "no norm of queries": ("queries", lambda case: {0: other(case.args[0], q_head_norm=False)}, "with a norm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_op_does_not_take_goes_to_sglang_with_the_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, change, reason = REFUSED[name]
    case = CASES[base]()
    case = changed(case, change(case))
    said: list[str] = []
    monkeypatch.setattr(hooks.logger, "warning", lambda text, *args: said.append(text % args))
    replacement = hooks.Replacement(hook_of(case.adapter), (), checked=True)
    before = values("upstream", replacement.hook)
    for _ in range(2):
        assert replacement(lambda *args, **kwargs: "theirs", *case.args, **case.kwargs) == "theirs"
    assert values("upstream", replacement.hook) == (before[0], before[1] + 2)
    assert len(said) == 1 and reason in said[0]


def test_an_mhc_matrix_that_bf16_cannot_hold_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    streams = importlib.import_module("sm120_kernels.plugin.adapters.streams")
    monkeypatch.setattr(streams.logger, "warning", lambda text, *args: said.append(text % args))
    exact = torch.randn(24, 128, generator=generator(1)).to(torch.bfloat16)
    assert torch.equal(streams._to_bf16(exact.float()), exact) and said == []
    streams._to_bf16(exact + 1e-4 * exact.float())
    assert len(said) == 1 and "loses" in said[0]


def test_a_weight_is_converted_once_and_never_under_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    base = importlib.import_module("sm120_kernels.plugin.adapters.base")
    seen: list[torch.Tensor] = []
    converted = base.Converted(lambda weight: seen.append(weight) or weight + 1)
    weight, later = torch.zeros(2), torch.ones(2)
    assert converted(weight) is converted(weight) and len(seen) == 1
    monkeypatch.setattr(base, "capturing", lambda: True)
    converted(weight)
    with pytest.raises(ValueError, match="before graph capture"):
        converted(later)


def test_scales_go_back_from_flashinfers_order_to_rows() -> None:
    experts = importlib.import_module("sm120_kernels.plugin.adapters.experts")
    scale = torch.randint(0, 256, (2, 256, 8), generator=generator(16)).to(torch.uint8)
    assert torch.equal(experts.scales_in_rows(interleaved(scale)), scale)
    with pytest.raises(ValueError, match="whole tiles"):
        experts.scales_in_rows(scale[:, :64])


# ---- the caches


class Compression(Thing):
    """A `Compressor` of SGLang."""

    def get_state_pool(self, backend: Any) -> Thing:
        return Thing(kv_score_buffer=Thing(kv_score=self.state))


@dataclass
class Store:
    """What `_compute_kv_to_cache` is called with, and the op's arguments that it should come to."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: dict[str, Any]
    backend: Thing
    modules: list[Compression]


def store(ratio: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch, mode: str = "DECODE") -> Store:
    call = store_arguments(ratio, lengths)
    tokens, x = len(lengths), bf16(len(lengths), 256, seed=17)
    raw = {name: call[name] for name in ("window",)}
    modules, plans, slots = [], {}, {}
    for name in ("compressor", "index_compressor"):
        if name not in call:
            continue
        held = call[name]
        weight = bf16(held.columns, 256, seed=18 + len(modules)) / 16
        modules.append(
            Compression(
                ratio=ratio,
                head_dim=held.ape.shape[1],
                is_in_indexer=name == "index_compressor",
                ape=torch.nn.Parameter(held.ape.view(ratio, -1), requires_grad=False),
                norm=Thing(weight=torch.nn.Parameter(held.norm_weight, requires_grad=False)),
                wkv_gate=Thing(weight=torch.nn.Parameter(weight, requires_grad=False)),
                state=held.state,
            )
        )
        # In SGLang both compressors of a layer have one plan, one set of slots and rings of the same length.
        first = call["compressor"]
        call[name] = replace(held, plan=first.plan, slots=first.slots.long())
        plans[ratio] = upstream("kernels.ops.attention.dsv4.compress.CompressorDecodePlan")(
            ratio, first.plan.view(torch.uint8)
        )
        slots[ratio] = first.slots.long()
    pool = Thing(
        uniform_fp8=False,
        request_window=None,
        kv_layout=upstream("kernels.ops.attention.dsv4.kv_layout.KVLayout").V4,
        get_swa_raw_buffer=lambda layer_id: flat(raw["window"]),
        get_extra_key_buffer=lambda layer_id: flat(call["compressor"].cache),
        get_index_k_with_scale_buffer=lambda layer_id: call["index_compressor"].cache,
        layer_mapping={7: (ratio, 0, Thing(kv_layout=upstream("kernels.ops.attention.dsv4.kv_layout.KVLayout").V4))},
    )
    monkeypatch.setattr(
        importlib.import_module("sglang.srt.model_executor.forward_context"), "get_token_to_kv_pool", lambda: pool
    )
    backend = Thing(
        token_to_kv_pool=pool,
        enable_deepseek_v4_fp4_indexer=False,
        # Every backend has one, on or off.
        online_c128_mtp=Thing(enabled=lambda: False),
        get_swa_out_cache_loc=lambda batch: call["window_slots"],
        _get_paged_compress_metadata=plans.__getitem__,
        _get_out_loc=slots.__getitem__,
    )
    layer = Thing(
        layer_id=7,
        q_lora_rank=1024,
        eps=1e-6,
        freqs_cis=torch.view_as_complex(call["rope"].view(-1, 32, 2)),
        kv_norm=Thing(weight=torch.nn.Parameter(call["norm_weight"], requires_grad=False)),
        compressor=modules[0] if modules else None,
        indexer=Thing(compressor=modules[1]) if len(modules) > 1 else None,
        compress_ratio=ratio,
        alt_streams=None,
    )
    batch = Thing(forward_mode=getattr(upstream("srt.model_executor.forward_batch_info.ForwardMode"), mode))
    qkv_a = torch.cat([bf16(tokens, 1024, seed=19), call["kv"]], 1)
    args = (layer, x, call["positions"].long(), batch, backend)
    return Store(args, {"qkv_a": qkv_a}, call, backend, modules)


def flat(cache: torch.Tensor) -> torch.Tensor:
    """A pool's buffer under its 4-D view."""
    return cache.as_strided((len(cache), kv_layout.page_bytes(cache.shape[1])), (cache.stride(0), 1))


def copies(call: dict[str, Any]) -> dict[str, Any]:
    def fresh(cache: torch.Tensor) -> torch.Tensor:
        return flat(cache).clone().as_strided(cache.shape, cache.stride()) if cache.ndim == 4 else cache.clone()

    return {
        name: replace(call[name], state=call[name].state.clone(), cache=fresh(call[name].cache))
        for name in ("compressor", "index_compressor")
        if name in call
    }


@pytest.mark.parametrize(("ratio", "lengths"), [(0, [9, 1]), (4, [8, 5, 4]), (128, [256, 7])])
def test_a_decode_step_stores_the_window_and_runs_the_layers_compressors(
    ratio: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = store(ratio, lengths, monkeypatch)
    before = copies(given.call)
    hooks.Replacement(hook_of("StoreAttentionInputs"), (), checked=False)(never, *given.args, **given.kwargs)
    call = given.call
    key = stored.window_key(call["kv"], call["norm_weight"], call["rope"], call["positions"])
    held = stored.read(call["window"], call["window_slots"])
    assert adapters.relative_error(held, stored.quantise(key)) <= 1e-2
    columns, projected = 0, []
    for name, module in zip(before, given.modules, strict=True):
        projected.append(given.args[1].double() @ module.wkv_gate.weight.double().T)
        for which in (call, before):
            which[name] = replace(which[name], first_column=columns)
        columns += call[name].columns
    for name in before:
        check_compressor(call[name], before[name], call | {"projected": torch.cat(projected, 1).float()[None]})
    # The compressors' turn comes later in the layer, once.
    later = hooks.Replacement(hook_of("StoredByInputs"), (), checked=False)
    for module in given.modules:
        turn = {"x": given.args[1], "forward_batch": given.args[3], "layer_id": 7, "compressor": module}
        assert later(never, given.backend, **turn) is None
        assert later(lambda *args, **kwargs: "theirs", given.backend, **turn) == "theirs"


def never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("SGLang's own function was called")


def test_the_compressors_weights_are_put_together_and_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = store(4, [8], monkeypatch)
    before = [module.wkv_gate.weight.data.clone() for module in given.modules]
    with torch.inference_mode():
        adapters.StoreAttentionInputs(()).run(*given.args, **given.kwargs)
    parts = [module.wkv_gate.weight.data for module in given.modules]
    assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


@pytest.mark.parametrize("reason", ["prefill", "overlapped streams", "fp4 indexer", "bf16 state", "online"])
def test_compressors_that_cannot_go_along_keep_their_turn(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = store(4, [8, 5], monkeypatch, mode="EXTEND" if reason == "prefill" else "DECODE")
    if reason == "overlapped streams":
        given.args[0].alt_streams = [None]
        monkeypatch.setattr(
            importlib.import_module("sglang.srt.model_executor.runner"), "get_is_capture_mode", lambda: True
        )
    if reason == "fp4 indexer":
        given.backend.enable_deepseek_v4_fp4_indexer = True
    if reason == "bf16 state":
        given.modules[0].state = given.modules[0].state.bfloat16()
    if reason == "online":
        given.backend.online_c128_mtp = Thing(enabled=lambda: True)
    states = [module.state.clone() for module in given.modules]
    hooks.Replacement(hook_of("StoreAttentionInputs"), (), checked=False)(never, *given.args, **given.kwargs)
    assert all(torch.equal(module.state, state) for module, state in zip(given.modules, states, strict=True))
    held = stored.read(given.call["window"], given.call["window_slots"])
    key = stored.window_key(*(given.call[name] for name in ("kv", "norm_weight", "rope", "positions")))
    assert adapters.relative_error(held, stored.quantise(key)) <= 1e-2
    later = hooks.Replacement(hook_of("StoredByInputs"), (), checked=False)
    turn = {"x": given.args[1], "forward_batch": given.args[3], "layer_id": 7, "compressor": given.modules[0]}
    assert later(lambda *args, **kwargs: "theirs", given.backend, **turn) == "theirs"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"qkv_a": None}, "one projection"),
        ({"q_rope": torch.zeros(1)}, "one projection"),
        ({"uniform_fp8": True}, "layout"),
        ({"request_window": object()}, "layout"),
    ],
)
def test_another_cache_is_left_to_sglang(change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = store(0, [9], monkeypatch)
    for name in change.keys() & given.backend.token_to_kv_pool.__dict__.keys():
        setattr(given.backend.token_to_kv_pool, name, change[name])
    kwargs = given.kwargs | {name: value for name, value in change.items() if name in ("qkv_a", "q_rope")}
    with pytest.raises(ValueError, match=reason):
        adapters.StoreAttentionInputs(()).run(*given.args, **kwargs)


def test_checking_the_stores_compares_what_lies_in_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    given = store(4, [8, 12, 5], monkeypatch)
    first = hooks.Replacement(hook_of("StoreAttentionInputs"), (), checked=True)
    first(lambda *args, **kwargs: None, *given.args, **given.kwargs)
    assert error_of(first.hook) == 0
    for name, module, at in zip(("compressor", "index_compressor"), given.modules, (15, 16), strict=True):
        later = hooks.Replacement(HOOKS[at], (), checked=True)
        turn = {"x": given.args[1], "forward_batch": given.args[3], "layer_id": 7, "compressor": module}
        later(lambda *args, **kwargs: None, given.backend, **turn)
        assert error_of(later.hook) == 0
        adapters.StoreAttentionInputs(()).run(*given.args, **given.kwargs)

        def wrong(backend: Any, one: Any = given.call[name], **_: Any) -> None:
            one.state.mul_(2)

        later(wrong, given.backend, **turn)
        assert error_of(later.hook) == pytest.approx(0.5)

    def wrong_window(*args: Any, **kwargs: Any) -> None:
        flat(given.call["window"]).fill_(0)

    first(wrong_window, *given.args, **given.kwargs)
    assert error_of(first.hook) > 1 and not math.isnan(error_of(first.hook))
