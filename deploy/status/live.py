"""The live view of a running stack: samples of each engine over a sliding window, and what they mean."""

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Group
from rich.table import Table
from rich.text import Text

from deploy.errors import DeployError
from deploy.host.machine import Machine
from deploy.host.probe_gpus import find_gpus, sample_gpus
from deploy.host.report import Gpu
from deploy.stack.compose import Stack
from deploy.status.diagnosis import Diagnosis, Kind, diagnose, tokens_per_second
from deploy.status.sample import EngineSample, GpuSample, Sample, parse_engine

WINDOW_SAMPLES = 8
"""About ten seconds: longer than STUCK_SECONDS, short enough to follow what happens."""
_BAD = {Kind.STUCK: "bold red", Kind.THROTTLED: "yellow", Kind.WAITING: "yellow", Kind.PCIE: "yellow"}


class _Devices(BaseModel):
    device_ids: list[str] | None = None


class _Reservations(BaseModel):
    devices: list[_Devices] = []


class _Resources(BaseModel):
    reservations: _Reservations = _Reservations()


class _Deploy(BaseModel):
    resources: _Resources = _Resources()


class _Service(BaseModel):
    """What matters here of a service in Compose's own JSON."""

    command: list[str] | None = None
    environment: dict[str, str | None] | None = None
    deploy: _Deploy | None = None


@dataclass(frozen=True)
class RoleView:
    """One engine now; `engine` is None if it does not answer, `tokens_per_second` until two samples are there."""

    role: str
    engine: EngineSample | None
    tokens_per_second: float | None
    gpus: tuple[GpuSample, ...]
    diagnosis: Diagnosis

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {**asdict(self), "diagnosis": {**asdict(self.diagnosis), "text": str(self.diagnosis)}}


class Live:
    """Takes samples of the engines of a running stack, again and again.

    Args:
        machine: this host.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._files: list[Path] | None = None
        self._gpus: dict[str, list[int]] = {}
        self._windows: dict[str, deque[Sample]] = {}

    def look(self, stack: Stack) -> list[RoleView]:
        """Take one sample of everything (about a second) and say what the window means."""
        if stack.files != self._files:
            gpus = find_gpus(self._machine)
            config = stack.config() if gpus else {}
            self._gpus = {role: gpu_indices(role_devices(config, role), gpus) for role in stack.engines}
            self._windows = {role: deque[Sample](maxlen=WINDOW_SAMPLES) for role in stack.engines}
            self._files = stack.files
        with ThreadPoolExecutor(len(self._windows) + 1) as pool:
            engines = {role: pool.submit(_engine, stack, role) for role in self._windows}
            hardware = pool.submit(sample_gpus, self._machine) if any(self._gpus.values()) else None
            gpus_now = {gpu.index: gpu for gpu in hardware.result()} if hardware else {}
        views: list[RoleView] = []
        for role, window in self._windows.items():
            own = tuple(gpus_now[index] for index in self._gpus[role] if index in gpus_now)
            engine = engines[role].result()
            window.append(Sample(time.monotonic(), role, own, engine))
            samples = list(window)
            views.append(RoleView(role, engine, tokens_per_second(samples), own, diagnose(samples)))
        return views


def _engine(stack: Stack, role: str) -> EngineSample | None:
    try:
        return parse_engine(stack.metrics(role))
    except (DeployError, ValueError):
        return None


def role_devices(config: Mapping[str, Any], role: str) -> list[str]:
    """CDI names of a role's GPUs in rank order, from the effective compose configuration.

    With transport p2p each container has all GPUs, and `--base-gpu-id` says where the role's own begin.
    """
    services: Any = config.get("services") or {}
    service = _Service.model_validate(services.get(role) or {})
    reserved = service.deploy.resources.reservations.devices if service.deploy else []
    devices = [name for entry in reserved for name in entry.device_ids or []]
    arguments = " ".join([*(service.command or []), (service.environment or {}).get("EXTRA_ARGUMENTS") or ""])
    base = re.search(r"--base-gpu-id[ =](\d{1,3})", arguments)
    size = re.search(r"--tp-size[ =](\d{1,3})", arguments)
    first = int(base[1]) if base else 0
    return devices[first : first + int(size[1]) if size else None]


def gpu_indices(devices: Sequence[str], gpus: Sequence[Gpu]) -> list[int]:
    """Indices of the GPUs with these CDI names."""
    by_name = {name: gpu.index for gpu in gpus for name in (str(gpu.index), gpu.uuid) if name}
    wanted = [device.rpartition("=")[2] for device in devices]
    return [by_name[name] for name in wanted if name in by_name]


def draw(views: Sequence[RoleView]) -> Group:
    """Engines, GPUs and the diagnosis, for the terminal."""
    engines = _table("engine", "tok/s", "running", "queued", "KV cache", "transfer", "accepted")
    for view in views:
        engine = view.engine
        if engine is None:
            engines.add_row(view.role, "does not answer")
            continue
        speed = "" if view.tokens_per_second is None else f"{view.tokens_per_second:.1f}"
        transfer = f"{engine.transfer_gb_s:.2f} GB/s" if engine.transfer_gb_s else ""
        accepted = f"{engine.acceptance:.2f}" if engine.acceptance else ""
        usage = f"{engine.kv_usage:.0%}"
        engines.add_row(view.role, speed, f"{engine.running:.0f}", f"{engine.queued:.0f}", usage, transfer, accepted)
    parts: list[Table | Text] = [engines]
    if any(view.gpus for view in views):
        gpus = _table("GPU", "engine", "busy", "memory util.", "power", "memory", "°C", "clock", "PCIe")
        for view in views:
            for gpu in view.gpus:
                gpus.add_row(
                    str(gpu.index),
                    view.role,
                    _percent(gpu.utilisation),
                    _percent(gpu.memory_utilisation),
                    _of(gpu.power, gpu.power_limit, "W"),
                    _percent(gpu.memory_used),
                    "" if gpu.temperature is None else f"{gpu.temperature:.0f}",
                    _of(gpu.clock, gpu.clock_max, "MHz"),
                    "" if gpu.transfer is None else f"{gpu.transfer / 1e9:.1f} GB/s",
                )
        parts.append(gpus)
    for view in views:
        # A CPU engine has no GPU to look at; that is no news.
        if view.gpus:
            parts.append(Text(f"{view.role}: {view.diagnosis}", style=_BAD.get(view.diagnosis.kind, "")))
    return Group(*parts)


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right")
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _of(part: float | None, whole: float | None, unit: str) -> str:
    return "" if part is None else f"{part:.0f} of {whole:.0f} {unit}" if whole else f"{part:.0f} {unit}"
