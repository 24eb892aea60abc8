"""The compose files read as text; tests/docker shows what Docker makes of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ("compose.yaml", "compose.p2p.yaml", "compose.cpu.yaml", "compose.replicas.yaml", "compose.replicas-tp4.yaml")
ENGINES = ("engine", "engine-2", "engine-3", "engine-4")
# What prefill and decode must agree on, or the KV cache cannot cross.
SHARED = (
    "--model-path",
    "--served-model-name",
    "--tp-size",
    "--page-size",
    "--context-length",
    "--kv-cache-dtype",
    "--attention-backend",
    "--disaggregation-transfer-backend",
    "--port",
)


class Loader(yaml.SafeLoader):
    """Knows Compose's own tags."""


def merge_tag(loader: Loader, node: yaml.Node) -> Any:
    del loader, node


for tag in ("!reset", "!override"):
    Loader.add_constructor(tag, merge_tag)


def load(name: str) -> Any:
    return yaml.load((ROOT / name).read_text(), Loader)


def options(command: list[str]) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in command if "=" in argument)


@pytest.mark.parametrize("name", FILES)
def test_every_variable_has_a_default_so_that_compose_up_needs_no_environment(name: str) -> None:
    text = (ROOT / name).read_text()
    without = [match for match in re.findall(r"\$\{?\w+[^}]?", text) if not re.fullmatch(r"\$\{\w+[:]", match)]
    assert without == []


@pytest.mark.parametrize("name", FILES)
def test_a_variable_has_the_same_default_wherever_it_is_used_in_a_file(name: str) -> None:
    defaults: dict[str, set[str]] = {}
    for variable, default in re.findall(r"\$\{(\w+):-([^}]*)\}", (ROOT / name).read_text()):
        defaults.setdefault(variable, set()).add(default)
    assert {variable: found for variable, found in defaults.items() if len(found) > 1} == {}


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cpu.yaml"])
def test_both_roles_agree_on_everything_that_the_transfer_depends_on(name: str) -> None:
    services = load(name)["services"]
    prefill, decode = options(services["prefill"]["command"]), options(services["decode"]["command"])
    assert {key: prefill.get(key) for key in SHARED} == {key: decode.get(key) for key in SHARED}


@pytest.mark.parametrize("name", FILES)
def test_nothing_that_breaks_split_roles_is_set(name: str) -> None:
    text = "\n".join(line for line in (ROOT / name).read_text().splitlines() if not line.lstrip().startswith("#"))
    for word in ("expandable_segments", "--speculative", "privileged: true", "seccomp", "apparmor", "--api-key"):
        assert word not in text


def test_only_the_router_publishes_a_port_and_only_on_loopback_by_default() -> None:
    services = load("compose.yaml")["services"]
    assert [name for name, service in services.items() if "ports" in service] == ["router"]
    assert services["router"]["ports"] == ["${BIND_ADDRESS:-127.0.0.1}:${PORT:-30000}:30000"]


@pytest.mark.parametrize("name", ["compose.yaml", "compose.p2p.yaml"])
def test_every_container_is_read_only_unprivileged_and_without_capabilities(name: str) -> None:
    for service, settings in load(name)["services"].items():
        if "image" not in settings:
            continue
        assert settings["read_only"] is True, service
        assert settings["user"] == "65532:65532", service
        assert settings["cap_drop"] == ["ALL"], service
        assert settings["security_opt"] == ["no-new-privileges:true"], service


def test_the_routers_grace_ends_before_dockers() -> None:
    router = load("compose.yaml")["services"]["router"]
    grace = re.fullmatch(r"\$\{STOP_GRACE_PERIOD:-(\d+)s\}", router["stop_grace_period"])
    assert grace
    assert int(options(router["command"])["--shutdown-grace-period-secs"]) < int(grace[1])


def router(name: str) -> tuple[list[str], dict[str, str]]:
    """Switches and options of a router, without what only one profile needs."""
    command: list[str] = load(name)["services"]["router"]["command"]
    return [word for word in command if word.startswith("--") and "=" not in word], options(command)


def test_both_routers_probe_queue_and_end_alike() -> None:
    pd, replicas = router("compose.yaml"), router("compose.replicas.yaml")
    differing = {key for key in pd[1].keys() | replicas[1].keys() if pd[1].get(key) != replicas[1].get(key)}
    assert differing == {
        "--policy",
        "--balance-abs-threshold",
        "--balance-rel-threshold",
        "--retry-max-retries",
        "--retry-initial-backoff-ms",
        "--retry-backoff-multiplier",
        "--retry-max-backoff-ms",
    }
    assert set(pd[0]) - set(replicas[0]) == {"--pd-disaggregation", "--prefill", "--decode", "--disable-retries"}


def test_retries_last_until_the_probes_have_seen_a_dead_engine() -> None:
    given = {
        key: float(value) for key, value in router("compose.replicas.yaml")[1].items() if re.search(r"^\d+$", value)
    }
    waits = [
        min(
            given["--retry-initial-backoff-ms"] * given["--retry-backoff-multiplier"] ** number,
            given["--retry-max-backoff-ms"],
        )
        for number in range(int(given["--retry-max-retries"]) - 1)
    ]
    assert sum(waits) / 1000 > given["--health-check-interval-secs"] * given["--health-failure-threshold"]


def test_all_engines_are_started_alike_and_wait_for_nobody() -> None:
    services = load("compose.replicas.yaml")["services"]
    assert list(services) == [*ENGINES, "router"]
    for engine in ENGINES:
        assert services[engine]["command"] == services["engine"]["command"]
        assert "depends_on" not in services[engine]
