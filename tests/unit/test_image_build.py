import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from python_on_whales import DockerClient

from deploy.errors import DeployError
from deploy.host.errors import HostError
from deploy.image import build
from deploy.image.inputs import ImageInputs
from deploy.image.progress import BuildEvent
from deploy.lock.debian import LockedPackage

FAILED_STEP = {
    "vertexes": [{"digest": "d", "name": "[patched 1/1] RUN python", "error": "exit code: 1", "started": "x"}],
    "logs": [{"vertex": "d", "data": "cGF0Y2ggMDEucGF0Y2ggZG9lcyBub3QgYXBwbHkK"}],  # patch 01.patch does not apply
}


def program(path: Path, text: str) -> list[str]:
    """A stand-in for `docker`: prints what the text makes it print."""
    path.write_text(text, encoding="utf-8")
    return [sys.executable, str(path)]


def package(content: bytes = b"deb", name: str = "a", essential: bool = False) -> LockedPackage:
    return LockedPackage(
        name=name,
        version="1",
        architecture="amd64",
        archive="debian",
        path="pool/a.deb",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        essential=essential,
    )


def inputs(packages: tuple[LockedPackage, ...] = ()) -> ImageInputs:
    return ImageInputs({"Dockerfile": b"FROM scratch\n", "tools/x.sh": b"true\n"}, packages, "1.2.3")


def docker(
    root: Path, images: tuple[str, ...] = (), buildx: str = "github.com/docker/buildx 0.13.1 0.13.1"
) -> DockerClient:
    """A stand-in for a Docker engine that keeps its data in a folder."""

    def list_images(filters: dict[str, str]) -> list[str]:
        return list(images) if filters else []

    client = SimpleNamespace(
        system=SimpleNamespace(info=lambda: SimpleNamespace(docker_root_dir=str(root))),
        image=SimpleNamespace(list=list_images),
        buildx=SimpleNamespace(is_installed=lambda: bool(buildx), version=lambda: buildx),
    )
    return cast("DockerClient", client)


def test_a_failed_step_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    command = program(tmp_path / "docker.py", f"print({json.dumps(json.dumps(FAILED_STEP))}); raise SystemExit(1)")
    events: list[BuildEvent] = []
    with pytest.raises(DeployError, match="could not be built") as raised:
        build.run_build(command, events.append)
    assert "patching SGLang" in raised.value.why
    assert "patch 01.patch does not apply" in raised.value.why
    assert events[0].state == "failed"


def test_buildx_failing_in_plain_words_is_reported_in_them(tmp_path: Path) -> None:
    command = program(tmp_path / "docker.py", "raise SystemExit('ERROR: no builder \"x\" found')")
    with pytest.raises(DeployError) as raised:
        build.run_build(command, lambda event: None)
    assert 'no builder "x" found' in raised.value.why


def test_a_disk_that_fills_up_is_named_as_such(tmp_path: Path) -> None:
    command = program(tmp_path / "docker.py", "raise SystemExit('write /x: no space left on device')")
    with pytest.raises(HostError, match="disk filled up") as raised:
        build.run_build(command, lambda event: None)
    assert "docker builder prune" in raised.value.fix


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_is_cancelled_before_we_go_on(tmp_path: Path, interruption: type[BaseException]) -> None:
    started = json.dumps({"vertexes": [{"digest": "d", "name": "[engine 1/1] RUN x", "started": "x"}]})
    command = program(
        tmp_path / "docker.py",
        f"""
import os, signal, sys, time

def cancel(number, frame):
    time.sleep(0.5)
    open({str(tmp_path / "cancelled")!r}, "w").close()
    sys.exit(1)

signal.signal(signal.SIGTERM, cancel)
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
print({started!r}, flush=True)
time.sleep(600)
""",
    )

    def interrupt(event: BuildEvent) -> None:
        raise interruption

    begun = time.monotonic()
    with pytest.raises(interruption):
        build.run_build(command, interrupt)
    assert time.monotonic() - begun < build.CANCEL_SECONDS
    assert (tmp_path / "cancelled").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_disk_that_is_too_small_is_refused_with_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: Path) -> Any:
        return SimpleNamespace(free=9_500_000_000)

    monkeypatch.setattr("deploy.image.build.shutil.disk_usage", usage)
    with pytest.raises(DeployError, match="too small") as raised:
        build.check_disk(docker(tmp_path), inputs(), tmp_path, wheel_cache=False, rebuild=False)
    assert "13.0 GB" in raised.value.why
    assert "9.5 GB are free" in raised.value.why
    assert str(tmp_path) in raised.value.why
    with pytest.raises(DeployError) as raised:
        build.check_disk(docker(tmp_path, images=("one",)), inputs(), tmp_path, wheel_cache=True, rebuild=True)
    assert "24.0 GB" in raised.value.why


def test_an_image_that_shares_the_large_layers_makes_a_small_disk_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(path: Path) -> Any:
        return SimpleNamespace(free=2_000_000_000)

    monkeypatch.setattr("deploy.image.build.shutil.disk_usage", usage)
    build.check_disk(docker(tmp_path, images=("one",)), inputs(), tmp_path, wheel_cache=False, rebuild=False)


def test_the_packages_need_their_own_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()

    def usage(path: Path) -> Any:
        return SimpleNamespace(free=100_000_000 if path.name == "cache" else 10**12)

    monkeypatch.setattr("deploy.image.build.shutil.disk_usage", usage)
    with pytest.raises(HostError) as raised:
        build.check_disk(docker(tmp_path), inputs(), tmp_path / "cache", wheel_cache=False, rebuild=False)
    assert str(tmp_path / "cache") in raised.value.why


def test_an_engine_on_another_host_is_not_measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: Path) -> Any:
        return SimpleNamespace(free=500_000_000)

    monkeypatch.setattr("deploy.image.build.shutil.disk_usage", usage)
    build.check_disk(docker(tmp_path / "elsewhere"), inputs(), tmp_path, wheel_cache=False, rebuild=False)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [("", "not installed"), ("github.com/docker/buildx v0.12.1 30feaa1", "0.12.1")],
)
def test_a_buildx_that_cannot_be_followed_is_refused(tmp_path: Path, answer: str, complaint: str) -> None:
    with pytest.raises(DeployError) as raised:
        build.check_docker(docker(tmp_path, buildx=answer))
    assert complaint in raised.value.why
    assert "0.13" in raised.value.fix


@pytest.mark.parametrize(
    "answer", ["github.com/docker/buildx 0.13.1 0.13.1+ds1-3", "github.com/docker/buildx v1.0.0 x"]
)
def test_a_newer_buildx_is_accepted(tmp_path: Path, answer: str) -> None:
    build.check_docker(docker(tmp_path, buildx=answer))


def test_an_engine_that_does_not_answer_is_not_taken_for_a_missing_image(tmp_path: Path) -> None:
    complaint = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
    client = DockerClient(client_call=program(tmp_path / "docker.py", f"raise SystemExit({complaint!r})"))
    with pytest.raises(DeployError, match="does not answer") as raised:
        build.find_image("x:y", client)
    assert "Cannot connect" in raised.value.why


def test_uv_must_be_the_pinned_one(tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho uv 1.2.3 '(abc 2026-01-01)'\n", encoding="utf-8")
    uv.chmod(0o755)
    build.check_uv(uv, "1.2.3")
    with pytest.raises(DeployError, match="pinned"):
        build.check_uv(uv, "1.2.4")
    with pytest.raises(DeployError, match="does not run"):
        build.check_uv(tmp_path / "none", "1.2.3")


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_context_is_the_inputs_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    uv = tmp_path / "uv"
    uv.write_bytes(b"program")
    before = os.umask(umask)
    try:
        build.write_context(tmp_path / "context", inputs(), uv)
    finally:
        os.umask(before)
    found = {
        str(path.relative_to(tmp_path / "context")): oct(path.stat().st_mode & 0o777)
        for path in (tmp_path / "context").rglob("*")
        if path.is_file()
    }
    assert found == {"Dockerfile": "0o644", "tools/x.sh": "0o644", "tools/uv": "0o755"}
    assert (tmp_path / "context/tools").stat().st_mode & 0o777 == 0o755


def test_the_unpacked_packages_are_made_once_for_each_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[Path]] = []

    def write(debs: list[Path], target: Path) -> None:
        made.append(debs)
        target.write_bytes(b"tar")

    monkeypatch.setattr(build, "write_bootstrap", write)
    essential, other = package(b"1", "libc6", essential=True), package(b"2", "tini")
    files = dict([(essential, tmp_path / "1.deb"), (other, tmp_path / "2.deb")])
    first = build.bootstrap(tmp_path, files)
    assert build.bootstrap(tmp_path, files) == first
    assert made == [[tmp_path / "1.deb"]]
    changed = dict([(package(b"3", "libc6", essential=True), tmp_path / "3.deb")])
    second = build.bootstrap(tmp_path, changed)
    assert [path.name for path in tmp_path.glob("bootstrap-*")] == [second.name]


def test_packages_are_laid_out_by_when_they_are_installed(tmp_path: Path) -> None:
    first, second = package(b"1", "libc6", essential=True), package(b"2", "tini")
    files = dict([(first, tmp_path / "one"), (second, tmp_path / "two")])
    for name in files.values():
        name.write_bytes(b"deb")
    build.link_packages(tmp_path / "debs", files)
    assert (tmp_path / "debs/essential/libc6.deb").samefile(tmp_path / "one")
    assert (tmp_path / "debs/other/tini.deb").samefile(tmp_path / "two")
    assert (tmp_path / "debs/expected").read_text() == "libc6 1 amd64\ntini 1 amd64\n"


def test_the_wheel_cache_is_no_argument_of_the_image(tmp_path: Path) -> None:
    without = build.build_arguments(inputs(), tmp_path, tmp_path, None, wheel_cache=False, rebuild=False)
    kept = build.build_arguments(inputs(), tmp_path, tmp_path, Path("/ca.pem"), wheel_cache=True, rebuild=False)
    assert {argument.split(",")[0] for argument in set(kept) - set(without)} == {
        "--secret=id=ca",
        "--secret=id=keep_wheels",
    }


def test_a_second_build_waits_and_finds_nothing_left_over(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build/left-by-a-killed-build").touch()
    order: list[str] = []
    inside = threading.Event()

    def second() -> None:
        inside.wait()
        with build.one_build_at_a_time(tmp_path, lambda event: order.append(f"{event.step}: {event.state}")):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with build.one_build_at_a_time(tmp_path, lambda event: None) as directory:
        assert list(directory.iterdir()) == []
        inside.set()
        while not order:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    wait = "wait for another build on this host"
    assert order == [f"{wait}: started", "first", f"{wait}: finished", "second"]
    assert not (tmp_path / "build").exists()
