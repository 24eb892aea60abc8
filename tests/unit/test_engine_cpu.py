import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from engine_runtime import cpu


class Config:
    def __init__(self) -> None:
        self.pthrDelay = 7


class Agent:
    """The part of nixl_agent's constructor that the plug-in builds on."""

    def __init__(self, name: str, conf: Any = None, instantiate_all: bool = False) -> None:
        del conf, instantiate_all
        config = API.nixlBind.nixlAgentConfig()
        config.pthrDelay = 0
        self.native = API.nixlBind.nixlAgent(name, config)
        self.nixl_mems = {"DRAM": "dram segment", "VRAM": "vram segment", "FILE": "file segment"}


API: Any = None


@pytest.fixture(autouse=True)
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for the module nixl._api, which only the image has."""
    fake: Any = ModuleType("nixl._api")
    fake.nixl_agent = Agent
    fake.nixlBind = SimpleNamespace(
        nixlAgent=lambda name, config: SimpleNamespace(name=name, delay=config.pthrDelay),  # pyright: ignore
        nixlAgentConfig=Config,
    )
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", fake)
    monkeypatch.setattr(sys.modules[__name__], "API", fake)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    return fake


def test_device_memory_becomes_host_memory_and_nothing_else_changes(api: Any) -> None:
    cpu.activate()
    agent = api.nixl_agent("name", conf=None)
    assert agent.nixl_mems == {"DRAM": "dram segment", "VRAM": "dram segment", "FILE": "file segment"}
    assert agent.native.name == "name"


def test_the_progress_thread_rests_although_nixl_sets_its_delay_to_zero(api: Any) -> None:
    cpu.activate()
    assert api.nixl_agent("name").native.delay == cpu.PROGRESS_THREAD_DELAY_US > 0


def test_activating_twice_wraps_once(api: Any) -> None:
    cpu.activate()
    once = api.nixl_agent, api.nixlBind.nixlAgent
    cpu.activate()
    assert (api.nixl_agent, api.nixlBind.nixlAgent) == once
    assert cpu.applied()


@pytest.mark.parametrize("value", ["0", "true", ""])
def test_on_a_gpu_machine_nixl_stays_untouched(api: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", value)
    cpu.activate()
    assert api.nixl_agent is Agent
    assert not cpu.applied()


@pytest.mark.parametrize("missing", ["nixl_agent", "nixlBind.nixlAgent", "nixlBind.nixlAgentConfig"])
def test_another_nixl_ends_the_process_because_sglang_swallows_exceptions(api: Any, missing: str) -> None:
    owner, _, name = missing.rpartition(".")
    delattr(getattr(api, owner) if owner else api, name)
    with pytest.raises(SystemExit, match="does not fit this NIXL"):
        cpu.activate()


def test_a_nixl_without_the_delay_ends_the_process(api: Any) -> None:
    api.nixlBind.nixlAgentConfig = object
    with pytest.raises(SystemExit, match="pthrDelay"):
        cpu.activate()


def test_an_absent_nixl_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(SystemExit, match="nixl"):
        cpu.activate()
