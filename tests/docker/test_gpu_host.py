"""compose.yaml as on the 8-GPU host, with stand-in GPUs and a stand-in process in each container."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import ENGINES, SERVICES, check_confinement, check_reach, writable
from conftest import API_KEY, Project, new_project, running

ROLE_GPUS = {"prefill": [0, 1, 2, 3], "decode": [4, 5, 6, 7], "router": []}


def gpu_variables(names: list[str]) -> dict[str, str]:
    roles = {"PREFILL": names[:4], "DECODE": names[4:]}
    return {f"{role}_GPU_{slot}": name for role, gpus in roles.items() for slot, name in enumerate(gpus)}


def seen_gpus(project: Project, service: str) -> list[int]:
    """Indexes of the stand-in GPUs that the service's first process has: device files, variables and mounts agree."""
    files = project.execute(service, "sh", "-c", "ls /dev /run/fakegpu 2>/dev/null; true").split()
    devices = sorted(int(name.removeprefix("fakegpu")) for name in files if name.startswith("fakegpu"))
    mounts = sorted(int(name) for name in files if name.isdigit())
    environment = project.execute(service, "cat", "/proc/1/environ")
    variables = sorted(int(index) for index in re.findall(r"FAKE_GPU_(\d)=1", environment))
    assert devices == mounts == variables
    return devices


@pytest.fixture(scope="module")
def variables(
    image: str, model: Path, fake_gpus: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    key = tmp_path_factory.mktemp("key") / "api-key"
    key.write_text("sk-a-secret-of-the-test\n")
    return {"IMAGE": image, "MODEL_PATH": str(model), "API_KEY_FILE": str(key), **gpu_variables(fake_gpus)}


@pytest.fixture(scope="module")
def project(variables: dict[str, str]) -> Iterator[Project]:
    with running(new_project("compose.yaml", "tests/docker/standin.yaml", **variables)) as started:
        yield started


def test_without_any_variable_prefill_gets_gpus_0_to_3_and_decode_4_to_7() -> None:
    config = Project("dsv4", (new_project("compose.yaml").files), {}).config()
    for service, expected in ROLE_GPUS.items():
        devices = config["services"][service].get("deploy", {}).get("resources", {}).get("reservations", {})
        names = [name for device in devices.get("devices", []) for name in device["device_ids"]]
        assert names == [f"nvidia.com/gpu={index}" for index in expected]


def test_every_argument_of_the_gpu_host_is_one_that_the_locked_sglang_knows(image: str) -> None:
    files = ("compose.yaml", "compose.p2p.yaml")
    services = Project("dsv4", new_project(*files).files, {}).config()["services"]
    script = (
        "import json, sys\n"
        "from engine_runtime.launch import arguments\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        "for service in json.load(sys.stdin):\n"
        "    args = prepare_server_args(arguments(service['command'], service['environment'])[1])\n"
        "    print(args.disaggregation_mode, args.base_gpu_id, *args.numa_node)\n"
    )
    done = subprocess.run(
        [
            *("docker", "run", "--rm", "--interactive", "--network=none", "--env=SGLANG_USE_CPU_ENGINE=1"),
            *("--env=PYTHONPATH=/opt/cpu_standins", image, "python", "-c", script),
        ],
        input=json.dumps([services[engine] for engine in ENGINES]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == ["prefill 0 0 0 0 0 1 1 1 1", "decode 4 0 0 0 0 1 1 1 1"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_sees_exactly_the_gpus_of_its_role(project: Project, service: str) -> None:
    assert seen_gpus(project, service) == ROLE_GPUS[service]


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_runs_unprivileged_on_a_read_only_root(project: Project, service: str) -> None:
    check_confinement(project, service)


@pytest.mark.parametrize("service", ENGINES)
def test_engines_can_fill_the_cache_that_survives_a_restart(project: Project, service: str) -> None:
    assert writable(project, service, "/var/cache/engine")


@pytest.mark.parametrize("service", ENGINES)
def test_engines_can_run_the_wrapper_that_sglang_writes_for_each_rank(project: Project, service: str) -> None:
    script = "printf '#!/bin/sh\\necho ran' > /tmp/wrapper && chmod 755 /tmp/wrapper && /tmp/wrapper"
    assert project.execute(service, "sh", "-c", script) == "ran\n"


def test_only_the_engines_may_bind_their_memory_to_a_numa_node(project: Project) -> None:
    # set_mempolicy is in Docker's filter unless SYS_NICE is in the bounding set; policy 0 changes nothing.
    script = (
        "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(238, 0, None, 0), ctypes.get_errno())"
    )
    answers = {service: project.execute(service, "python", "-c", script).split() for service in SERVICES}
    assert answers["router"] == ["-1", "1"]
    assert answers["prefill"] == answers["decode"] == ["0", "0"]


def test_only_the_router_can_be_reached_and_only_from_this_machine(project: Project) -> None:
    check_reach(project)


def test_prefill_and_decode_have_no_common_shared_memory_or_processes(project: Project) -> None:
    for namespace in ("ipc", "pid", "net"):
        names = {service: project.execute(service, "readlink", f"/proc/self/ns/{namespace}") for service in SERVICES}
        assert len(set(names.values())) == len(SERVICES), namespace


def test_the_api_key_is_a_file_that_only_the_router_has_and_nothing_shows_it(project: Project) -> None:
    assert project.execute("router", "cat", "/run/secrets/api_key").strip() == API_KEY
    for service in ENGINES:
        assert project.execute(service, "sh", "-c", "ls -A /run/secrets 2>/dev/null; true") == ""
    for service in SERVICES:
        assert API_KEY not in json.dumps(project.inspect(service))
        assert API_KEY not in project.execute(service, "cat", "/proc/1/environ", "/proc/1/cmdline")


def test_limits_and_shared_memory_are_those_of_the_configuration(project: Project) -> None:
    for service in ENGINES:
        blocks, size = project.execute(service, "stat", "--file-system", "--format=%b %S", "/dev/shm").split()
        assert int(blocks) * int(size) == 32 << 30
        limits = project.execute(service, "cat", "/proc/1/limits")
        wanted = {"Max locked memory": project.variables["MEMLOCK"], "Max open files": project.variables["NOFILE"]}
        for name, value in wanted.items():
            [line] = [line for line in limits.splitlines() if line.startswith(name)]
            assert line.split()[3:5] == ["unlimited" if value == "-1" else value] * 2


def test_a_crashed_container_comes_back_by_itself(project: Project) -> None:
    before = project.inspect("router")
    os.kill(before["State"]["Pid"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (after := project.inspect("router"))["RestartCount"] == before["RestartCount"] or not after["State"][
        "Running"
    ]:
        assert time.monotonic() < deadline, after["State"]
        time.sleep(0.2)
    assert after["State"]["Pid"] != before["State"]["Pid"]


def test_an_unknown_gpu_is_refused_by_name_and_leaves_nothing(variables: dict[str, str]) -> None:
    project = new_project(
        "compose.yaml", "tests/docker/standin.yaml", **variables | {"DECODE_GPU_2": "tests.invalid/gpu=17"}
    )
    try:
        done = project.compose("up", "--detach", "--wait", check=False)
        assert done.returncode != 0
        assert "tests.invalid/gpu=17" in done.stderr
    finally:
        project.down()
    assert project.leftovers() == []


def test_a_missing_model_folder_is_refused_and_not_created(variables: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "not-there"
    project = new_project("compose.yaml", "tests/docker/standin.yaml", **variables | {"MODEL_PATH": str(folder)})
    try:
        done = project.compose("up", "--detach", "--wait", check=False)
        assert done.returncode != 0
        assert str(folder) in done.stderr
        assert not folder.exists()
    finally:
        project.down()


def test_with_p2p_both_engines_see_all_gpus_and_share_processes_and_shared_memory(variables: dict[str, str]) -> None:
    files = ("compose.yaml", "compose.p2p.yaml", "tests/docker/standin.yaml")
    with running(new_project(*files, **variables)) as project:
        for engine in ENGINES:
            files_seen = project.execute(engine, "sh", "-c", "ls -d /dev/fakegpu*").split()
            assert files_seen == [f"/dev/fakegpu{index}" for index in range(8)]
        for namespace in ("ipc", "pid"):
            prefill, decode = (project.execute(engine, "readlink", f"/proc/self/ns/{namespace}") for engine in ENGINES)
            assert prefill == decode
            assert project.execute("router", "readlink", f"/proc/self/ns/{namespace}") != prefill
        check_reach(project)
    assert project.leftovers() == []


def test_down_leaves_no_container_network_or_volume(variables: dict[str, str]) -> None:
    project = new_project("compose.yaml", "tests/docker/standin.yaml", **variables)
    with running(project):
        kinds = {leftover.split()[0] for leftover in project.leftovers()}
        assert kinds == {"container", "network", "volume"}
    assert project.leftovers() == []
