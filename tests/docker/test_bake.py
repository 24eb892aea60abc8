"""What the image brings compiled is what an engine looks up, and what a host compiled reaches the next one.

No GPU is here: torch is told that there is one of compute capability 12.0, and no kernel runs. What the engines of the
other host compiled is a stand-in: files put into the cache's volume.
"""

import json
import re
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from conftest import ROOT, docker, free_port
from python_on_whales import DockerClient
from registry import Proxy, proxy, registry

from deploy.bake import artifact, container
from deploy.errors import DeployError
from deploy.image.inputs import IMAGE_NAME
from deploy.image.registry import Client, parse_registry
from deploy.lock.model import ImageLock
from deploy.stack.compose import Stack
from deploy.stack.state import State

PRELUDE = """
import ctypes, importlib, json, os, sys, tempfile
from pathlib import Path
sys.path.insert(0, "/modules")
import bake_modules
os.environ |= {"SGLANG_JIT_CACHE_DIR": "/tmp/sglang-jit", "SGLANG_CRASH_ON_JIT_COMPILE": "1"}
bake_modules.stand_in_driver(Path(tempfile.mkdtemp()))
import torch
bake_modules.pretend_gpu(torch)
"""
SGLANG = f"""{PRELUDE}
from engine_runtime import jit
linked = jit.link_baked(jit.BAKED_SGLANG, Path("/tmp/sglang-jit"))
calls = bake_modules.sglang_calls(torch)
for path, arguments in calls:
    module, _, name = path.rpartition(".")
    getattr(importlib.import_module(f"{{bake_modules.OPS}}.{{module}}"), name)(*arguments)
print(json.dumps([linked, len(calls)]))
"""
ABSENT = SGLANG.replace("jit.BAKED_SGLANG", 'Path("/absent")')
KERNELS = """
import json
from sm120_kernels import bake
print(json.dumps(bake.compile_ops(120, bake.served_ops()).compiled))
"""
CODE = """
import json, subprocess, sys
from pathlib import Path
import triton
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
found = {}
for path in sorted(Path("/opt/baked/sglang-jit").rglob("*.so")):
    listed = subprocess.run([tool, "--list-elf", path], check=True, capture_output=True, text=True).stdout
    found[path.stem] = [line.split()[-1] for line in listed.splitlines() if line.startswith("ELF file")]
print(json.dumps(found))
"""


CUOBJDUMP = "/opt/venv/lib/python3.11/site-packages/triton/backends/nvidia/bin/cuobjdump"
MODULE = "mxfp8_quantization_sm100"
LOAD = f"""{PRELUDE}
from engine_runtime import caches
from flashinfer.quantization import fp8_quantization
fp8_quantization.get_mxfp8_quantization_sm100_module()
print(json.dumps(caches.count(caches.CACHE)))
"""


LIBRARIES = f"""{PRELUDE}
import subprocess
import compile_modules
wanted = set()
for path in compile_modules.FLASHINFER.values():
    wanted |= {{flag for flag in compile_modules.called(path).extra_ldflags or [] if flag.startswith("-l")}}
wanted |= {{"-lcudart", "-lcuda"}}
missing = [flag for flag in sorted(wanted) if subprocess.run(["gcc", "-shared", "-o", "/tmp/a.so", flag]).returncode]
print(json.dumps([sorted(wanted), missing]))
"""


def python(image: str, code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the image as an engine runs: no network, nothing writable but /tmp."""
    named = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    command = ["docker", "run", "--rm", "--interactive", "--network", "none", "--read-only", "--cap-drop", "ALL"]
    command += ["--tmpfs", "/tmp:mode=1777,exec", "--volume", f"{ROOT / 'deploy/image'}:/modules:ro", *named]
    command += [*options, "--entrypoint", "python", image, "-W", "ignore", "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, timeout=300)


def answer(done: subprocess.CompletedProcess[str]) -> object:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_sglang_finds_every_module_of_this_model_and_compiles_none(image: str) -> None:
    linked, called = answer(python(image, SGLANG))  # type: ignore[misc]
    assert linked == called > 10


def test_without_the_baked_modules_sglang_would_compile(image: str) -> None:
    done = python(image, ABSENT)
    assert done.returncode and "has no usable cached build" in done.stderr


def test_every_module_holds_code_for_sm_120_and_for_no_other_gpu(image: str) -> None:
    found = answer(python(image, CODE))
    assert isinstance(found, dict) and len(found) > 10
    for name, binaries in found.items():
        # cuobjdump leaves out the f of sm_120f.
        kinds = {match[1] for one in binaries if (match := re.search(r"\.(sm_\w+)\.cubin$", one))}
        assert kinds and kinds <= {"sm_120", "sm_120f", "sm_120a"}, (name, binaries)


def test_our_kernels_are_found_and_none_is_compiled(image: str) -> None:
    assert answer(python(image, KERNELS, TRITON_CACHE_DIR="/tmp/triton")) == []


def test_another_setting_of_triton_would_compile_them(image: str) -> None:
    one = KERNELS.replace("bake.served_ops()", "['route_experts']")
    assert answer(python(image, one, TRITON_CACHE_DIR="/tmp/triton", TRITON_DISABLE_LINE_INFO="0")) != []


@dataclass(frozen=True)
class Place:
    """A registry behind a proxy, with an image that caches can lie beside."""

    proxy: Proxy
    image: ImageLock

    def client(self) -> Client:
        return Client(parse_registry(f"127.0.0.1:{self.proxy.port}"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    port = free_port()
    with registry(tmp_path / "registry", port), proxy(port) as before:
        # In the place of the pushed engine image, whose gigabytes are beside the point.
        (tmp_path / "small").mkdir()
        (tmp_path / "small/Dockerfile").write_text(f"FROM scratch\nCOPY Dockerfile /\nLABEL of={uuid.uuid4().hex}\n")
        name = f"127.0.0.1:{port}/{IMAGE_NAME}:small"
        docker("build", "--quiet", "--provenance=false", "--tag", name, str(tmp_path / "small"))
        docker("push", "--quiet", name)
        docker("image", "rm", name)
        with Client(parse_registry(f"127.0.0.1:{before.port}")) as client:
            manifest = client.manifest("small").digest
        yield Place(before, ImageLock(inputs=uuid.uuid4().hex * 2, environment="0" * 64, manifest=manifest))


@pytest.fixture
def stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stack, Stack]]:
    """The stacks of two hosts, as far as their caches go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = []
    for _ in range(2):
        monkeypatch.setenv("COMPOSE_PROJECT_NAME", f"dsv4-test-{uuid.uuid4().hex[:8]}")
        stack = Stack(ROOT, Path("/dev/null"), "cpu")
        assert stack.project
        container.make_volume(stack.project)
        made.append(stack)
    yield made[0], made[1]
    for stack in made:
        subprocess.run(["docker", "volume", "rm", "--force", container.volume_name(stack.project)], capture_output=True)


def inside(stack: Stack, image: str, script: str) -> str:
    """A shell beside a stack's cache, as the engine's user."""
    mount = f"{container.volume_name(stack.project)}:{container.CACHE}"
    return docker(
        "run", "--rm", "--network", "none", "--volume", mount, "--workdir", container.CACHE, "--entrypoint", "sh",
        image, "-c", script,
    )  # fmt: skip


COMPILE = """
mkdir -p triton/KEY sglang-jit/sm120f/norm/build-1/deps-2 deep-gemm/locks flashinfer
head -c 300000 /dev/urandom > triton/KEY/kernel.cubin; echo built > flashinfer/module.so
: > deep-gemm/locks/one.lock; ln -s /opt/baked sglang-jit/sm120f/norm/build-1/deps-3
touch -d 2026-02-03T04:05:06Z flashinfer/module.so
"""
LIST = "find . -type f -exec stat --format '%n %s %Y %u' {} + | sort; find . -type f -exec sha256sum {} + | sort"


def test_a_module_compiled_without_a_gpu_is_what_an_engine_loads_where_nothing_may_be_compiled(
    stacks: tuple[Stack, Stack], image: str, tmp_path: Path
) -> None:
    first, second = (stack.project for stack in stacks)
    said: list[str] = []
    container.compile_modules(first, image, [MODULE], 2, said.append)
    (made,) = (json.loads(line) for line in said if line.startswith("{"))
    assert made["module"] == MODULE and made["bytes"] > 10_000

    def load(project: str) -> subprocess.CompletedProcess[str]:
        mount = f"{container.volume_name(project)}:{container.CACHE}:ro"
        return python(
            image, LOAD, "--volume", mount, FLASHINFER_DISABLE_JIT="1", FLASHINFER_WORKSPACE_BASE="/tmp/workspace"
        )

    done = load(second)
    assert done.returncode and "MissingJITCacheError" in done.stderr
    # Packed, it is one file: what only the compiler needed stays where it is.
    assert container.pack(first, image, tmp_path / "packed").files == 1
    assert container.unpack(second, image, tmp_path / "packed") == 1
    assert answer(load(second)) == {"files": 1, "bytes": made["bytes"]}
    listed = inside(stacks[1], image, f"{CUOBJDUMP} --list-elf $(find . -name {MODULE}.so)")
    kinds = set(re.findall(r"\.(sm_\w+)\.cubin", listed))
    assert kinds and kinds <= {"sm_120", "sm_120f", "sm_120a"}, listed
    again: list[str] = []
    container.compile_modules(first, image, [MODULE], 2, again.append)
    assert again == []


def test_the_linker_finds_the_libraries_of_every_module(image: str) -> None:
    """A module that takes hours of compilers fails at its last step without one."""
    compiler = ("--volume", f"{ROOT / 'deploy/bake/compile_modules.py'}:/opt/compile_modules.py:ro")
    done = python(image, LIBRARIES, *compiler, PYTHONPATH="/opt", FLASHINFER_WORKSPACE_BASE="/tmp/workspace")
    wanted, missing = answer(done)  # type: ignore[misc]
    assert {"-lcuda", "-lcudart", "-lnvrtc"} <= set(wanted) and missing == []


def test_an_unknown_module_is_named_with_those_there_are(stacks: tuple[Stack, Stack], image: str) -> None:
    with pytest.raises(DeployError, match=r"sampling_2: not one of .*sampling"):
        container.compile_modules(stacks[0].project, image, ["sampling_2"], 1, print)


def test_what_one_host_compiled_is_on_the_next_before_its_engines_start(
    place: Place, stacks: tuple[Stack, Stack], image: str, tmp_path: Path
) -> None:
    first, second = stacks
    inside(first, image, COMPILE)
    steps: list[tuple[int, int]] = []
    with place.client() as client:
        baked = artifact.bake(
            first.project, place.image, image, "cpu", client, lambda done, total: steps.append((done, total))
        )
        assert baked.packed.files == 2
        assert steps and steps[-1][0] == steps[-1][1] == baked.packed.size
        locked = artifact.with_cache(place.image, baked.cache)
        inside(second, image, "mkdir -p triton/KEY; echo mine > triton/KEY/own.cubin")
        state = State(tmp_path / "state")
        said = artifact.restore(second.project, locked, image, "cpu", client, state)
        assert said.startswith("2 files, 0.3 MB from 127.0.0.1")
        there = inside(second, image, LIST)
        for line in inside(first, image, LIST).splitlines():
            assert line in there or "locks" in line
        assert "own.cubin" in there and "deps-3" not in inside(second, image, "find .")
        assert " 65532\n" in there and " 0\n" not in there
        assert artifact.restore(second.project, locked, image, "cpu", client, state) == "already here"
        # A volume that is new is filled anew.
        docker("volume", "rm", container.volume_name(second.project))
        assert artifact.restore(second.project, locked, image, "cpu", client, state).startswith("2 files")


def test_a_cache_is_for_one_kind_of_gpu_and_its_absence_stops_nothing(
    place: Place, stacks: tuple[Stack, Stack], image: str, tmp_path: Path
) -> None:
    first, second = stacks
    inside(first, image, COMPILE)
    state = State(tmp_path / "state")
    with place.client() as client:
        baked = artifact.bake(first.project, place.image, image, "cpu", client, lambda done, total: None)
        locked = artifact.with_cache(place.image, baked.cache)
        assert artifact.restore(second.project, locked, image, "sm_120", client, state).startswith(
            "none baked for sm_120"
        )
        gone = locked.model_copy(update={"cache": (baked.cache.model_copy(update={"manifest": "sha256:" + "0" * 64}),)})
        assert "has none for cpu" in artifact.restore(second.project, gone, image, "cpu", client, state)
    away = replace(parse_registry("127.0.0.1:1"))
    with Client(away) as client:
        assert "does not answer" in artifact.restore(second.project, locked, image, "cpu", client, state)
    assert inside(second, image, "find . -type f") == ""


def test_another_cache_in_the_place_of_the_locked_one_is_refused(
    place: Place, stacks: tuple[Stack, Stack], image: str, tmp_path: Path
) -> None:
    first, second = stacks
    inside(first, image, COMPILE)
    with place.client() as client:
        cache = artifact.bake(first.project, place.image, image, "cpu", client, lambda done, total: None).cache
        blob = next((tmp_path / "registry").rglob(f"{cache.blob.removeprefix('sha256:')}/data"))
        content = bytearray(blob.read_bytes())
        content[1000] ^= 1
        blob.write_bytes(content)
        locked = artifact.with_cache(place.image, cache)
        with pytest.raises(DeployError):
            artifact.restore(second.project, locked, image, "cpu", client, State(tmp_path / "state"))
    assert inside(second, image, "find . -type f") == ""


def test_an_empty_cache_and_an_image_in_no_registry_are_refused_with_the_way_out(
    place: Place, stacks: tuple[Stack, Stack], image: str
) -> None:
    with place.client() as client:
        with pytest.raises(DeployError) as empty:
            artifact.bake(stacks[0].project, place.image, image, "cpu", client, lambda done, total: None)
        assert "deploy up" in empty.value.fix
        with pytest.raises(DeployError) as unpushed:
            artifact.bake(
                stacks[0].project, place.image.model_copy(update={"manifest": ""}), image, "cpu", client, print
            )
        assert unpushed.value.fix == "deploy push"


def test_no_container_is_left_behind_when_unpacking_fails(
    stacks: tuple[Stack, Stack], image: str, tmp_path: Path
) -> None:
    (tmp_path / "damaged").write_bytes(b"no archive")
    with pytest.raises(DeployError, match="could not be unpacked"):
        container.unpack(stacks[1].project, image, tmp_path / "damaged")
    names = [one.name for one in DockerClient().container.list(all=True)]
    assert not [name for name in names if name.startswith(f"{stacks[1].project}-caches")]
