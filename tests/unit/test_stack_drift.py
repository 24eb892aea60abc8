from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sm120_kernels.plugin.table import HOOKS

from deploy.lock.model import EngineLock, HostLock, KernelsLock, Lock, LockedHook, LockedPatch, RuntimeLock
from deploy.lock.tree import tree_hash
from deploy.stack.drift import Drift, image_drifts, role_drifts, version_drifts
from deploy.stack.observe import Inside, Observed
from deploy.stack.roles import locked_role
from tests.unit.locks import image, layer

A, B = "a" * 64, "b" * 64
FILES = {
    "sglang": {"queue.py": A, "cache.py": B},
    "sm120_kernels": {"__init__.py": A},
    "engine_runtime": {"launch.py": A},
    "cpu_standins": {"sgl_kernel/__init__.py": A},
}
REPORT = {"model_path": "/model", "page_size": 1, "numa_node": [0, 1], "sleep_on_idle": True, "tp_size": 4}
COMMAND = ["prefill", "--model-path=/model", "--page-size=1", "--numa-node", "0", "1", "--sleep-on-idle"]
DISAGGREGATION: dict[str, Any] = {"disaggregation_mode": "prefill"}
HOOK = HOOKS[0]
ENVIRONMENT = {"UCX_TLS": "all", HOOK.switch: "1"}
PREFILL = locked_role("prefill", COMMAND, ENVIRONMENT)
ROUTER = locked_role("router", ["router"], {})
LOCK = Lock(
    engine=EngineLock(
        wheel=A,
        tree=A,
        patched_tree=tree_hash(FILES["sglang"]),
        patch=(LockedPatch(name="1.patch", title="Mend", sha256=A, files=("sglang/queue.py",)),),
        patched={"sglang/queue.py": A},
    ),
    kernels=KernelsLock(
        tree=tree_hash(FILES["sm120_kernels"]),
        hook=(LockedHook(target=HOOK.target, op=HOOK.op, switch=HOOK.switch, upstream_sha256=A),),
    ),
    runtime=RuntimeLock(
        engine_runtime=tree_hash(FILES["engine_runtime"]), cpu_standins=tree_hash(FILES["cpu_standins"])
    ),
    host=HostLock(driver="580", docker_engine="25.0", docker_compose="2.24.4"),
    roles={"pd": {"prefill": PREFILL, "router": ROUTER}, "cpu": {"prefill": PREFILL}},
    image=image("1", layer("1", 1), manifest=f"sha256:{'2' * 64}"),
)
ID = f"sha256:{'1' * 64}"


def prefill(**changes: Any) -> Observed:
    inside = Inside(files=FILES, report={**REPORT, **DISAGGREGATION}, hooks=[HOOK.target])
    return replace(Observed("prefill", ID, PREFILL, Path("/m"), inside), **changes)


def inside(**changes: Any) -> Observed:
    seen = prefill().inside
    assert seen
    return prefill(inside=seen.model_copy(update=changes))


def router() -> Observed:
    return Observed("router", ID, ROUTER, None, Inside(files=FILES))


def drifts(*observed: Observed, profile: str = "pd", **states: str) -> list[str]:
    return [str(drift) for drift in role_drifts(LOCK, profile, observed, states)]


def test_what_runs_as_locked_has_no_drift() -> None:
    assert drifts(prefill(), router()) == []


def test_an_image_is_known_by_its_configuration_or_its_manifest() -> None:
    assert image_drifts("router", LOCK.image, f"sha256:{'2' * 64}") == []
    assert image_drifts("router", None, ID)[0].expected.startswith("none is locked")


CHANGED = {**FILES, "sglang": {**FILES["sglang"], "queue.py": B}}


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (prefill(image="sha256:other"), [f"image: expected {ID} or sha256:{'2' * 64}, found sha256:other"]),
        (
            prefill(started=locked_role("prefill", [*COMMAND[:2], "--page-size=64", *COMMAND[3:]], ENVIRONMENT)),
            ["argument --page-size: expected 1, found 64"],
        ),
        (
            prefill(started=locked_role("prefill", [*COMMAND, "--debug"], ENVIRONMENT)),
            ["argument --debug: expected not set, found set"],
        ),
        (
            prefill(started=locked_role("prefill", [COMMAND[0], COMMAND[2], COMMAND[1], *COMMAND[3:]], ENVIRONMENT)),
            ["arguments: "],
        ),
        (
            prefill(started=locked_role("prefill", COMMAND, {**ENVIRONMENT, "UCX_TLS": "tcp", "LD_PRELOAD": "x"})),
            [
                "variable LD_PRELOAD: expected not set, found x",
                "variable UCX_TLS: expected all, found tcp",
            ],
        ),
        (
            inside(files=CHANGED),
            [
                f"patched file sglang/queue.py: expected {A}, found {B}",
                f"files of sglang: expected {tree_hash(FILES['sglang'])}, found {tree_hash(CHANGED['sglang'])}",
            ],
        ),
        (
            inside(files={**FILES, "sm120_kernels": {}}),
            [f"files of sm120_kernels: expected {tree_hash(FILES['sm120_kernels'])}, found {tree_hash({})}"],
        ),
        (inside(files={**FILES, "engine_runtime": {"launch.py": B}}), ["files of engine_runtime: "]),
        (inside(files={**FILES, "cpu_standins": {}}), ["files of cpu_standins: "]),
        (inside(hooks=[]), [f"hook {HOOK.target}: expected replaced by {HOOK.op}, found not replaced"]),
        (
            inside(report={**REPORT, **DISAGGREGATION, "page_size": 64}),
            ["server's page_size: expected 1, found 64"],
        ),
        (inside(report=REPORT), ["server's disaggregation_mode: expected prefill, found not reported"]),
        (inside(report=None, silence="timed out"), ["server's report: expected an answer, found timed out"]),
        (prefill(inside=None, blind="no python"), ["files inside: expected readable, found no python"]),
    ],
)
def test_each_drift_is_a_line_with_expected_and_found(observed: Observed, expected: list[str]) -> None:
    found = drifts(observed, router())
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(f"prefill: {start}")


def test_a_missing_and_a_surplus_container_are_drifts() -> None:
    assert drifts(prefill(), router="exited") == ["router: container: expected running, found exited"]
    assert drifts(prefill(), router(), profile="cpu") == ["router: container: expected none, found running"]


def test_a_hook_whose_switch_is_off_must_not_be_there() -> None:
    off = locked_role("prefill", COMMAND, {"UCX_TLS": "all"})
    lock = LOCK.model_copy(update={"roles": {"pd": {"prefill": off}}})
    [found] = role_drifts(lock, "pd", [prefill(started=off)], {})
    assert str(found) == f"prefill: hook {HOOK.target}: expected not replaced, found replaced by {HOOK.op}"


def test_a_profile_that_is_not_locked_is_a_drift() -> None:
    assert role_drifts(Lock(), "pd", [prefill()], {}) == [Drift("stack", "profile", "one of none", "pd")]


@pytest.mark.parametrize(
    ("least", "found", "agree"),
    [("580", "580.65.06", True), ("580", "575.57.08", False), ("25.0", "26.1.5+dfsg1", True), ("580", None, False)],
)
def test_a_version_must_be_at_least_the_locked_one(least: str, found: str | None, agree: bool) -> None:
    assert (version_drifts("driver", least, found) == []) is agree
