import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_runtime import jit
from hypothesis import given
from hypothesis import strategies as st

LEAF = "sm120f/norm/build-0123/deps-4567"


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def folders(root: Path) -> dict[str, str]:
    return {variable: str(root / name) for name, (variable, _, _) in jit.FOLDERS.items()}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return folders(tmp_path)


def test_baked_modules_are_found_in_the_cache_and_stay_in_the_image(tmp_path: Path) -> None:
    library = touch(tmp_path / "image" / LEAF / "norm.so")
    for _ in range(2):
        assert jit.link_baked(tmp_path / "image", tmp_path / "cache") == 1
    assert (tmp_path / "cache" / LEAF / "norm.so").resolve() == library
    assert (tmp_path / "cache" / LEAF).is_symlink()


def test_a_link_to_another_images_module_goes_and_what_this_host_compiled_stays(tmp_path: Path) -> None:
    gone = tmp_path / "cache/sm120f/norm/build-0123/deps-old"
    gone.parent.mkdir(parents=True)
    gone.symlink_to(tmp_path / "another image")
    own = touch(tmp_path / "cache" / LEAF / "norm.so")
    touch(tmp_path / "image" / LEAF / "norm.so")
    jit.link_baked(tmp_path / "image", tmp_path / "cache")
    assert not gone.is_symlink()
    assert own.is_file() and not own.parent.is_symlink()


def test_an_image_without_baked_modules_links_nothing(tmp_path: Path) -> None:
    assert jit.link_baked(tmp_path / "absent", tmp_path / "cache") == 0


def test_linked_modules_are_no_compilations(tmp_path: Path, environment: dict[str, str]) -> None:
    touch(tmp_path / "image" / LEAF / "norm.so")
    before = jit.entries(environment)
    jit.link_baked(tmp_path / "image", Path(environment["SGLANG_JIT_CACHE_DIR"]))
    assert sum(jit.count(before, environment, tmp_path / "log").values()) == 0


@given(st.dictionaries(st.sampled_from(sorted(jit.FOLDERS)), st.integers(0, 4)), st.integers(0, 4), st.integers(0, 3))
def test_everything_compiled_since_the_start_counts_once(
    tmp_path_factory: pytest.TempPathFactory, made: dict[str, int], triton: int, old: int
) -> None:
    folder = tmp_path_factory.mktemp("caches")
    environment = folders(folder)

    def compile_some(name: str, first: int, number: int) -> None:
        variable, below, ending = jit.FOLDERS[name]
        for place in range(first, first + number):
            for file in (f"kernel{ending}", "kernel_lib.json", "lock"):
                touch(Path(environment[variable]) / below / "deep" / str(place) / file)

    for name in jit.FOLDERS:
        compile_some(name, 0, old)
    before = jit.entries(environment)
    for name, number in made.items():
        compile_some(name, old, number)
    log = folder / "log"
    log.write_text("kernel name KEY\n" * triton)
    found = jit.count(before, environment, log)
    assert found == {"triton": triton} | {name: made.get(name, 0) for name in jit.FOLDERS}


def test_a_module_that_is_compiled_anew_in_its_place_counts(environment: dict[str, str], tmp_path: Path) -> None:
    module = touch(Path(environment["FLASHINFER_WORKSPACE_BASE"], ".cache/flashinfer/0.7.2/120f/cached_ops/m/m.so"))
    before = jit.entries(environment)
    assert sum(jit.count(before, environment, tmp_path / "log").values()) == 0
    os.utime(module, ns=(0, module.stat().st_mtime_ns + 1))
    assert jit.count(before, environment, tmp_path / "log")["flashinfer"] == 1


def test_compilers_whose_folder_is_not_set_are_not_named(tmp_path: Path) -> None:
    assert jit.count({}, {"SGLANG_DG_CACHE_DIR": str(tmp_path)}, tmp_path / "absent") == {"triton": 0, "deep-gemm": 0}


def test_counts_in_words_name_only_who_compiled() -> None:
    assert jit.words({"triton": 0, "sglang": 0}) == "0"
    assert jit.words({"triton": 2, "sglang": 0, "flashinfer": 1}) == "3 (triton 2, flashinfer 1)"


def test_the_report_holds_the_start_and_what_came_after(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "SECONDS_BEFORE_READY", 0.01)
    monkeypatch.setattr(jit, "SECONDS_AFTER", 0.01)
    report = tmp_path / "report/jit.json"
    ready, said = threading.Event(), list[str]()
    touch(Path(environment["SGLANG_DG_CACHE_DIR"]) / "old/kernel.cubin")
    given_to = (ready.is_set, environment, said.append, tmp_path / "log", report)
    threading.Thread(target=jit.follow, args=given_to, daemon=True).start()
    time.sleep(0.1)
    assert not report.exists()
    touch(Path(environment["SGLANG_DG_CACHE_DIR"]) / "new/kernel.cubin")
    ready.set()
    wait_for(report.exists)
    assert json.loads(report.read_text())["at_start"] == {"triton": 0} | dict.fromkeys(jit.FOLDERS, 0) | {
        "deep-gemm": 1
    }
    touch(Path(environment["TILELANG_CACHE_DIR"]) / "later/kernel_lib.so")
    wait_for(lambda: json.loads(report.read_text())["since"]["tilelang"] == 1)
    assert said == [
        "engine_runtime: compiled at start: 1 (deep-gemm 1)",
        "engine_runtime: compiled since the start: 1 (tilelang 1)",
    ]


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("not within 5 s")


def test_a_cache_that_cannot_be_written_is_said_and_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "image/sm_120/module/build-1/deps-1").mkdir(parents=True)
    (tmp_path / "no-folder").write_text("")
    monkeypatch.setattr(jit, "BAKED_SGLANG", tmp_path / "image")

    def counts_nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(jit, "follow", counts_nothing)
    jit.begin(lambda: True, {"SGLANG_JIT_CACHE_DIR": str(tmp_path / "no-folder")})
    assert "cannot be linked: [Errno 20]" in capsys.readouterr().out


def test_a_kernel_that_triton_has_begun_and_not_ended_is_being_compiled(tmp_path: Path) -> None:
    log, now = tmp_path / "compiled", time.monotonic()

    def triton() -> int:
        # Other compilers may be at work on this machine.
        return jit.running(log).count("triton")

    assert triton() == 0
    log.with_suffix(".begun").write_text(f"{now:.0f} A\n{now:.0f} B\n{now - 2 * jit.COMPILATION_S:.0f} STUCK\n")
    assert triton() == 2
    log.write_text("library launcher.so L\nkernel norm B\n")
    assert triton() == 1
    log.write_text("kernel norm B\nkernel norm A\n")
    assert triton() == 0


def test_a_compilers_process_is_seen_while_it_runs(tmp_path: Path) -> None:
    compiler = tmp_path / "ptxas"
    shutil.copy(shutil.which("sleep") or "", compiler)
    with subprocess.Popen([compiler, "60"]) as process:
        try:
            assert "ptxas" in jit.running(tmp_path / "compiled")
        finally:
            process.kill()
