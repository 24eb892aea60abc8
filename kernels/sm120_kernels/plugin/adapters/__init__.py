"""How SGLang's arguments become an op's, one class a replaced function.

`run` returns what SGLang's function returns and raises ValueError, before anything is launched, for what the op does
not take. `error` runs SGLang's function as well and says how far apart both are.
"""

from sm120_kernels.plugin.adapters.attention import IndexerLogits, SparseMlaDecode, TopkIndices, TopkIndicesV2
from sm120_kernels.plugin.adapters.base import Adapter, relative_error
from sm120_kernels.plugin.adapters.experts import HashedExperts, MoeFp4SmallBatch, ScoredExperts
from sm120_kernels.plugin.adapters.inputs import PrepareQueries, StoreAttentionInputs, StoredByInputs
from sm120_kernels.plugin.adapters.linears import Bf16Linear, CutlassFp8Linear, DeepGemmFp8Linear, InvRopeWoA
from sm120_kernels.plugin.adapters.streams import MhcPostPreNorm

__all__ = [
    "Adapter",
    "Bf16Linear",
    "CutlassFp8Linear",
    "DeepGemmFp8Linear",
    "HashedExperts",
    "IndexerLogits",
    "InvRopeWoA",
    "MhcPostPreNorm",
    "MoeFp4SmallBatch",
    "PrepareQueries",
    "ScoredExperts",
    "SparseMlaDecode",
    "StoreAttentionInputs",
    "StoredByInputs",
    "TopkIndices",
    "TopkIndicesV2",
    "relative_error",
]
