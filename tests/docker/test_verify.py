"""`deploy verify` and `deploy diff … running` against the real CPU stack: first as locked, then with real drifts."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Project, docker, new_project, running

from deploy.lock.model import Lock, read_lock, write_lock
from deploy.lock.resolve import built_image, derive
from deploy.spec.load import load

VERIFY_SECONDS = 10
DIFF_SECONDS = 5  # with room for a busy machine


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that the tests may damage."""
    return Path(shutil.copytree(model, tmp_path_factory.mktemp("checkpoint") / "tiny"))


@pytest.fixture(scope="module")
def project(image: str, checkpoint: Path) -> Iterator[Project]:
    with running(new_project("compose.yaml", "compose.cpu.yaml", IMAGE=image, MODEL_PATH=str(checkpoint))) as started:
        yield started


@pytest.fixture(scope="module")
def clone(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout with a lock that knows the image as this machine built it."""
    root = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name not in (".state", "deploy.lock"):
            (root / path.name).symlink_to(path)
    lock, unresolved = derive(ROOT, load(ROOT / "deploy.toml"), read_lock(ROOT))
    assert unresolved == []
    assert lock.image
    built, missing = built_image(lock.image)
    assert missing is None
    write_lock(root, lock.model_copy(update={"image": built}))
    return root


def deploy(clone: Path, project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from pathlib import Path; import deploy.lock_verbs as v; from deploy.entry import run;"
        "v.ROOT = Path(sys.argv.pop(1)); run(v.app)"
    )
    state = clone.parent / "state"
    own = {"COMPOSE_PROJECT_NAME": project.name, "DEPLOY_STATE": str(state), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(clone), *arguments]
    return subprocess.run(command, env=os.environ | own, cwd=clone, capture_output=True, text=True, timeout=120)


def drifts(clone: Path, project: Project, *arguments: str) -> list[str]:
    """The lines that `verify` prints; its exit code says whether there are any."""
    done = deploy(clone, project, "verify", *arguments)
    lines = done.stdout.splitlines()
    assert done.returncode == (1 if lines else 0), done.stderr
    return lines


def test_verify_says_how_much_each_engine_had_to_compile(clone: Path, project: Project) -> None:
    deadline = time.monotonic() + 30
    while len(found := json.loads(deploy(clone, project, "verify", "--json").stdout)["compiled"]) < 2:
        assert time.monotonic() < deadline, found
    for role in ("prefill", "decode"):
        assert found[role]["at_start"].keys() >= {"triton", "sglang", "flashinfer", "tilelang", "deep-gemm"}
        assert f"engine_runtime: compiled at start: {sum(found[role]['at_start'].values())}" in project.log(role)
        assert f"{role}: compiled " in deploy(clone, project, "verify").stderr
    # Kernels for a GPU that the image brings none for, in decode alone.
    before, counted = (json.loads(project.execute("decode", "python", "-m", "engine_runtime.jit")) for _ in range(2))
    assert before == counted
    compile_some = "from sm120_kernels import bake; print(len(bake.compile_ops(90, ['route_experts']).compiled))"
    made = int(project.execute("decode", "python", "-W", "ignore", "-c", compile_some).split()[-1])
    after = json.loads(project.execute("decode", "python", "-m", "engine_runtime.jit"))
    assert made > 0 and after["triton"] == before["triton"] + made
    assert json.loads(project.execute("prefill", "python", "-m", "engine_runtime.jit"))["triton"] == before["triton"]


def test_the_stack_runs_as_locked_and_verify_says_so_in_time(clone: Path, project: Project) -> None:
    begun = time.monotonic()
    done = deploy(clone, project, "verify", "--json")
    took = time.monotonic() - begun
    found = json.loads(done.stdout)
    assert found["drifts"] == []
    assert done.returncode == 0
    assert found["roles"] == ["prefill", "decode", "router"]
    assert found["files"] == len(read_lock(clone).tiny_model.file)  # pyright: ignore[reportOptionalMemberAccess]
    assert took < VERIFY_SECONDS
    assert drifts(clone, project, "--full") == []


def test_every_option_of_both_engines_is_in_the_servers_own_report(clone: Path, project: Project) -> None:
    """A lock with other values shows that none of them is skipped."""
    lock = read_lock(clone)
    roles = {
        name: role.model_copy(update={"arguments": tuple(other(argument) for argument in role.arguments)})
        for name, role in lock.roles["cpu"].items()
    }
    changed = lock.model_copy(update={"roles": {**lock.roles, "cpu": roles}})
    seen = lines_with(changed, clone, project)
    for role in ("prefill", "decode"):
        for argument in lock.roles["cpu"][role].arguments:
            option, equals, _ = argument.partition("=")
            if option.startswith("--") and equals:
                key = option.removeprefix("--").replace("-", "_")
                assert any(line.startswith(f"{role}: server's {key}: ") for line in seen), key


def other(argument: str) -> str:
    option, equals, value = argument.partition("=")
    return f"{option}={value}1" if equals else argument


def lines_with(lock: Lock, clone: Path, project: Project) -> list[str]:
    """What `verify` prints with another lock."""
    before = read_lock(clone)
    write_lock(clone, lock)
    try:
        return drifts(clone, project)
    finally:
        write_lock(clone, before)


def test_damage_to_the_models_files_is_found(clone: Path, project: Project, checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    original = weights.read_bytes()
    try:
        weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        (line,) = drifts(clone, project)
        assert line.startswith(f"model: {weights}: expected sha256 ") or line.startswith(
            f"model: {weights}: expected sample "
        )
        weights.write_bytes(original[:-1])
        (checkpoint / "extra.json").write_text("{}")
        assert drifts(clone, project, "--full") == [
            f"model: {checkpoint / 'extra.json'}: expected no such file, found 2 bytes",
            f"model: {weights}: expected {len(original)} bytes, found {len(original) - 1} bytes",
        ]
    finally:
        (checkpoint / "extra.json").unlink(missing_ok=True)
        weights.write_bytes(original)
    assert drifts(clone, project) == []


def test_the_difference_to_what_runs_is_empty_and_quick(clone: Path, project: Project) -> None:
    begun = time.monotonic()
    done = deploy(clone, project, "diff", "deploy.lock", "running", "--json")
    assert time.monotonic() - begun < DIFF_SECONDS
    assert json.loads(done.stdout)["changes"] == []


@pytest.fixture
def altered(project: Project, image: str, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The router from another image, with another argument and variable, and with another file over one of ours."""
    tag = f"{project.name}:altered"
    (tmp_path / "Dockerfile").write_text(f"FROM {image}\nLABEL altered=yes\n")
    docker("build", "--quiet", "--tag", tag, "--provenance=false", str(tmp_path))
    source = (ROOT / "engine/engine_runtime/health.py").read_text()
    (tmp_path / "health.py").write_text(source + "# altered\n")
    (tmp_path / "health.py").chmod(0o644)
    target = "/opt/venv/lib/python3.11/site-packages/engine_runtime/health.py"
    override = {
        "services": {
            "router": {
                "image": tag,
                "environment": {"EXTRA_ARGUMENTS": "--log-level=debug", "UNLOCKED": "1"},
                "volumes": [f"{tmp_path / 'health.py'}:{target}:ro"],
            }
        }
    }
    (tmp_path / "compose.altered.yaml").write_text(json.dumps(override))
    changed = Project(project.name, (*project.files, tmp_path / "compose.altered.yaml"), project.variables)
    try:
        changed.compose("up", "--detach", "--no-deps", "router")
        yield {"image": docker("image", "inspect", "--format", "{{.Id}}", tag).strip()}
    finally:
        project.compose("up", "--detach", "--no-deps", "router")
        docker("image", "rm", "--force", tag)


def test_another_image_argument_variable_and_file_are_each_a_line(
    clone: Path, project: Project, altered: dict[str, Any]
) -> None:
    lock = read_lock(clone)
    assert lock.image and lock.runtime
    lines = drifts(clone, project)
    assert f"router: image: expected {lock.image.id}, found {altered['image']}" in lines
    assert "router: argument --log-level: expected info, found debug" in lines
    assert "router: variable UNLOCKED: expected not set, found 1" in lines
    assert any(
        line.startswith(f"router: files of engine_runtime: expected {lock.runtime.engine_runtime}, found ")
        for line in lines
    )
    assert all(line.startswith("router: ") for line in lines)
    done = deploy(clone, project, "diff", "deploy.lock", "running", "--json")
    changes = {(change["section"], change["name"]): change for change in json.loads(done.stdout)["changes"]}
    assert changes["image", "id"]["after"] == altered["image"]
    assert changes["argument", "cpu router --log-level"]["after"] == "debug"


def test_a_container_that_stands_still_is_a_drift(clone: Path, project: Project) -> None:
    project.compose("stop", "router")
    try:
        assert drifts(clone, project) == ["router: container: expected running, found exited"]
    finally:
        project.compose("up", "--detach", "--no-deps", "router")


def test_nothing_running_is_an_error_with_a_fix(clone: Path, project: Project) -> None:
    nobody = Project(f"{project.name}-none", project.files, project.variables)
    done = deploy(clone, nobody, "diff", "deploy.lock", "running")
    assert done.returncode == 1
    assert "deploy up" in done.stderr and "Traceback" not in done.stderr
    lines = drifts(clone, nobody)
    assert any("expected running, found none" in line for line in lines)
