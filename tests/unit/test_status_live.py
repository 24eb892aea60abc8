"""The live view: which GPUs belong to which engine, and what is shown."""

import time
from dataclasses import dataclass, field
from typing import Any

import lookalike
from lookalike import EIGHT_GPUS, host
from rich.console import Console

from deploy.errors import DeployError
from deploy.host.probe_host import probe
from deploy.status.diagnosis import Kind
from deploy.status.live import Live, draw, gpu_indices, role_devices

GPUS = probe(host(EIGHT_GPUS)).gpus


def service(devices: list[str], extra: str = "") -> dict[str, Any]:
    return {
        "command": ["decode", "--tp-size=4"],
        "environment": {"EXTRA_ARGUMENTS": extra},
        "deploy": {"resources": {"reservations": {"devices": [{"driver": "cdi", "device_ids": devices}]}}},
    }


ISOLATED = {
    "services": {
        "prefill": service([f"nvidia.com/gpu={index}" for index in range(4)]),
        "decode": service([f"nvidia.com/gpu={lookalike.uuid(index)}" for index in range(4, 8)]),
    }
}
ALL = [f"nvidia.com/gpu={index}" for index in range(8)]


@dataclass
class FakeStack:
    """Stands for a stack with GPUs, which this machine lacks."""

    pages: dict[str, str] = field(default_factory=dict[str, str])
    files: tuple[str, ...] = ("compose.yaml",)
    engines: tuple[str, ...] = ("prefill", "decode")

    def config(self) -> dict[str, Any]:
        return ISOLATED

    def metrics(self, role: str) -> str:
        if role not in self.pages:
            raise DeployError("no metrics", "", "")
        return self.pages[role]


def page(tokens: int) -> str:
    return (
        "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 16.0\n"
        f'# TYPE sglang:realtime_tokens counter\nsglang:realtime_tokens_total{{mode="decode"}} {tokens}\n'
    )


def shown(views: Any) -> str:
    console = Console(width=160, record=True, quiet=True)
    with console.capture():
        pass
    console.quiet = False
    with console.capture() as captured:
        console.print(draw(views))
    return captured.get()


def test_a_role_has_the_gpus_that_compose_gives_it_by_index_or_uuid() -> None:
    assert gpu_indices(role_devices(ISOLATED, "prefill"), GPUS) == [0, 1, 2, 3]
    assert gpu_indices(role_devices(ISOLATED, "decode"), GPUS) == [4, 5, 6, 7]


def test_with_p2p_the_base_gpu_id_tells_the_roles_apart() -> None:
    config = {"services": {"prefill": service(ALL, "--base-gpu-id 0 --x"), "decode": service(ALL, "--base-gpu-id 4")}}
    assert gpu_indices(role_devices(config, "prefill"), GPUS) == [0, 1, 2, 3]
    assert gpu_indices(role_devices(config, "decode"), GPUS) == [4, 5, 6, 7]


def test_a_configuration_without_gpus_has_none() -> None:
    for config in ({}, {"services": None}, {"services": {"decode": {"deploy": None, "command": None}}}):
        assert role_devices(config, "decode") == []


def test_the_view_shows_engines_gpus_and_a_diagnosis() -> None:
    busy = host(EIGHT_GPUS).edited("nvidia-smi --query-gpu", ", 0 %, 0 %, 180 MHz", ", 100 %, 12 %, 2300 MHz")
    for index in range(8):
        busy = busy.edited("nvidia-smi --query-gpu", f"{31 + index}.40 W, {30 + index}", "190.00 W, 55")
    stack = FakeStack({"decode": page(1000)})
    live = Live(busy)
    live.look(stack)  # type: ignore[arg-type]
    time.sleep(0.05)
    stack.pages["decode"] = page(1100)
    views = {view.role: view for view in live.look(stack)}  # type: ignore[arg-type]
    assert views["prefill"].engine is None and [gpu.index for gpu in views["decode"].gpus] == [4, 5, 6, 7]
    assert views["decode"].diagnosis.kind == Kind.LATENCY
    assert (views["decode"].tokens_per_second or 0) > 100
    text = shown(views.values())
    for words in ("does not answer", "100%", "190 of 600 W", "decode: latency-bound"):
        assert words in text
    assert views["decode"].as_dict()["diagnosis"]["kind"] == "latency-bound"


def test_an_engine_without_gpus_has_numbers_and_no_diagnosis() -> None:
    stack = FakeStack({"decode": page(5), "prefill": page(7)})
    text = shown(Live(lookalike.no_gpu()).look(stack))  # type: ignore[arg-type]
    assert "decode" in text and "16" in text and "GPU" not in text
