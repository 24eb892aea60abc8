"""SGLang plug-in for machines without a GPU: the KV cache crosses NIXL in host memory.

SGLang describes every KV buffer to NIXL as "VRAM". On a CPU engine they are host memory, which UCX refuses under that
name. SGLang only logs a plug-in that fails; this one ends the process, because an engine without it would start and
then fail at the first request.
"""

import importlib
import os
from typing import Any

# NIXL's Python API fixes this at 0 and its progress thread then keeps one core busy.
PROGRESS_THREAD_DELAY_US = 10_000
_MARK = "_engine_runtime_cpu"


def wanted() -> bool:
    """Whether this process belongs to a CPU engine."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def activate() -> None:
    """Entry point `sglang.srt.plugins`; does nothing on a GPU machine.

    Raises:
        SystemExit: NIXL is not the one this was written for. SGLang would swallow an Exception.
    """
    if not wanted():
        return
    try:
        apply(importlib.import_module("nixl._api"))
    except Exception as error:
        raise SystemExit(f"the CPU plug-in does not fit this NIXL: {error!r}") from error


def applied() -> bool:
    """Whether NIXL in this process goes through the plug-in."""
    api = importlib.import_module("nixl._api")
    return hasattr(api.nixl_agent, _MARK) and hasattr(api.nixlBind.nixlAgent, _MARK)


def apply(api: Any) -> None:
    """Let "VRAM" mean "DRAM" in every new NIXL agent, and its progress thread rest. A second call changes nothing.

    Args:
        api: The module `nixl._api`, or one with the same names.

    Raises:
        AttributeError: A name that this builds on is missing.
    """
    if hasattr(api.nixl_agent, _MARK):
        return
    # Looked up here so that another NIXL fails at the start and not when the first agent is made.
    _ = api.nixlBind.nixlAgentConfig().pthrDelay
    native_agent = api.nixlBind.nixlAgent

    def resting_agent(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_THREAD_DELAY_US
        return native_agent(name, config)

    agent_class: Any = api.nixl_agent

    class HostMemoryAgent(agent_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            agent_class.__init__(self, *args, **kwargs)
            memory_types: dict[str, Any] = self.nixl_mems
            memory_types["VRAM"] = memory_types["DRAM"]

    setattr(resting_agent, _MARK, True)
    setattr(HostMemoryAgent, _MARK, True)
    api.nixlBind.nixlAgent = resting_agent
    api.nixl_agent = HostMemoryAgent
