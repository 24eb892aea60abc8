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
    """

    target: str
    op: str
    adapter: str
    upstream_sha256: str

    @property
    def switch(self) -> str:
        """The environment variable that turns it on."""
        return PREFIX + self.op.upper()

    @property
    def module(self) -> str:
        """The module part of `target`."""
        return self.target.rpartition(".")[0]

    @property
    def function(self) -> str:
        """The function part of `target`."""
        return self.target.rpartition(".")[2]


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
