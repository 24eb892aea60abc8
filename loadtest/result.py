"""The result of a run: `result.json`. docs/metrics.md documents it; SCHEMA grows when a field changes meaning."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from loadtest.metrics import Metrics
from loadtest.validity import Finding

SCHEMA = "dsv4-loadtest/1"

Verdict = Literal["valid", "rejected", "partial"]


class Window(BaseModel):
    """Wall-clock seconds; `started` is the start of the warm-up."""

    model_config = ConfigDict(frozen=True)

    started: float
    begin: float
    end: float


class AccountResult(BaseModel):
    """What all engines of a role counted from before the run until after its last answer, and what we asked of them."""

    model_config = ConfigDict(frozen=True)

    counted: dict[str, float]
    ours: dict[str, float]


class EngineStatistics(BaseModel):
    """One engine's gauges over the window."""

    model_config = ConfigDict(frozen=True)

    mean: dict[str, float]
    maximum: dict[str, float]


class GpuStatistics(BaseModel):
    """Mean over the window; watts and percent."""

    model_config = ConfigDict(frozen=True)

    gpu: str
    power: float | None
    utilisation: float | None


class LevelResult(BaseModel):
    """One level, one repetition. `metrics` is there only when the verdict is `valid`."""

    model_config = ConfigDict(frozen=True)

    name: str
    users: int | None
    rate: float | None = None
    repetition: int = 1
    folder: str
    verdict: Verdict
    findings: list[Finding]
    window: Window
    metrics: Metrics | None
    batches: list[float] = Field(default_factory=list[float], description="output throughput in tenths of the window")
    accounts: dict[str, AccountResult] = Field(default_factory=dict[str, AccountResult])
    engines: dict[str, EngineStatistics] = Field(default_factory=dict[str, EngineStatistics])
    gpus: list[GpuStatistics] = Field(default_factory=list[GpuStatistics])
    generator: dict[str, float] = Field(default_factory=dict[str, float])


class Environment(BaseModel):
    """What was measured and with what."""

    model_config = ConfigDict(frozen=True)

    url: str
    model: str
    engines: dict[str, dict[str, Any] | None] = Field(default_factory=dict[str, "dict[str, Any] | None"])
    lock: dict[str, Any] = Field(default_factory=dict[str, Any])
    image: str | None = None
    host: dict[str, Any] = Field(default_factory=dict[str, Any])
    generator: dict[str, Any] = Field(default_factory=dict[str, Any])


class Target(BaseModel):
    """`--target THROUGHPUT@C`. Times in seconds a step; `factor` is what is still missing (1 or less: reached)."""

    model_config = ConfigDict(frozen=True)

    throughput: float
    users: int
    measured: float | None
    reached: bool
    step_budget: float
    step: float | None
    factor: float | None


class Result(BaseModel):
    """A whole run."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    schema_: str = Field(default=SCHEMA, alias="schema")
    id: str
    created: str
    command: list[str]
    label: str | None = None
    source: str = "deploy bench"
    workload: dict[str, Any]
    environment: Environment
    levels: list[LevelResult]
    target: Target | None = None

    @property
    def verdict(self) -> Verdict:
        verdicts = {level.verdict for level in self.levels}
        if "partial" in verdicts or not self.levels:
            return "partial"
        return "rejected" if "rejected" in verdicts else "valid"
