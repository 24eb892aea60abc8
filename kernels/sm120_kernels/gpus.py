"""GPUs as the roofline sees them: rates by the vendor's datasheet, and what of them is taken to be reached.

Plain data. Only the H200's figures come from runs of ours (`benchmarks/results/decode_step.json`); no RTX PRO 6000 was
at hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU and how it reaches its neighbours.

    Attributes:
        name: as the driver says it, or its beginning.
        bytes_per_second: of its memory, by the datasheet.
        reached: share of it that a large copy reaches.
        bf16_flop_per_second, fp8_flop_per_second: dense products, reached.
        link_bytes_per_second: to another GPU, one direction, reached.
        launch_seconds: one empty kernel in a CUDA graph.
        watts: power limit.
    """

    name: str
    bytes_per_second: float
    reached: float
    bf16_flop_per_second: float
    fp8_flop_per_second: float
    link_bytes_per_second: float
    launch_seconds: float
    watts: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a large copy reaches."""
        return self.bytes_per_second * self.reached


# Datasheet: 1792 GB/s, 600 W. Assumed: the share reached is the H200's, half of the dense matrix rates (503 and 1007
# TFLOP/s) is reached, 50 of the 63 GB/s of PCIe 5.0 x16, the H200's 0.9 us for an empty kernel.
RTX_PRO_6000 = Gpu("NVIDIA RTX PRO 6000 Blackwell", 1.792e12, 0.88, 2.5e14, 5.0e14, 50e9, 0.9e-6, 600.0)
# Datasheet: 4.8 TB/s, 700 W. Measured: copy 4.23 TB/s, 784 and 1268 TFLOP/s, 0.9 us. Assumed: 300 of NVLink's 450 GB/s.
H200 = Gpu("NVIDIA H200", 4.8e12, 0.88, 7.84e14, 1.268e15, 300e9, 0.9e-6, 700.0)
GPUS = {"rtx-pro-6000": RTX_PRO_6000, "h200": H200}


def find_gpu(name: str) -> Gpu | None:
    """The GPU that the driver calls so; None if this table has none."""
    return next((gpu for gpu in GPUS.values() if name.startswith(gpu.name)), None)
