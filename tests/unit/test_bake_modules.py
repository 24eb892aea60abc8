import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy import bake_verbs, cli
from deploy.bake import container, modules
from deploy.bake.modules import JOB_BYTES, Heard, Module
from deploy.errors import DeployError
from deploy.lock.model import ImageLock

IMAGE = ImageLock(inputs="a" * 64, environment="b" * 64)


@given(st.integers(1, 256), st.integers(0, 1 << 40))
def test_no_more_compilers_than_processors_and_memory_allow_and_never_none(processors: int, memory: int) -> None:
    jobs = modules.jobs_that_fit(processors, memory)
    assert 1 <= jobs <= processors
    assert jobs == 1 or jobs * JOB_BYTES <= memory
    assert jobs == processors or (jobs + 1) * JOB_BYTES > memory


def test_ninjas_steps_are_progress_and_complete_modules_are_kept() -> None:
    heard, said = Heard(), list[tuple[str, int | None, int | None]]()

    def report(what: str, done: int | None, total: int | None) -> None:
        said.append((what, done, total))

    for line in (
        "ninja: Entering directory `/var/cache/engine/tmp'",
        "[3/19] /opt/nvcc -c a.cu -o sparse_mla_sm120/decode_dispatch.cuda.o",
        json.dumps({"module": "sampling", "seconds": 61.2, "bytes": 4096}),
        'b.cu(7): error: identifier "x" is undefined',
    ):
        heard.line(line, report)
    assert said == [("decode_dispatch.cuda.o", 3, 19), ("sampling is complete", None, None)]
    assert heard.modules == [Module("sampling", 61.2, 4096)]
    assert heard.complaints == ['b.cu(7): error: identifier "x" is undefined']


def nobody(what: str, done: int | None, total: int | None) -> None:
    """Is told and says nothing."""


def test_a_compilers_own_words_are_the_reason_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def complain(project: str, image: str, names: object, jobs: int, said: object, complaints: object) -> None:
        assert project == modules.workshop(IMAGE) and callable(said) and callable(complaints)
        said("[1/2] nvcc -o a.o")
        said("a.cu(1): error: no")
        raise DeployError("a module could not be compiled", str(complaints()), "again")

    monkeypatch.setattr(container, "compile_modules", complain)
    with pytest.raises(DeployError, match="error: no"):
        modules.compile_missing(IMAGE, "image", (), 2, nobody)


def test_an_option_before_the_subcommand_is_refused_and_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bake_verbs, "require_docker", lambda *_, **__: pytest.fail("it went on"))  # type: ignore[misc]
    result = CliRunner().invoke(cli.app, ["bake", "--to", "registry.lan:5000", "modules"])
    assert result.exit_code == 2 and "go after it" in result.output


def test_an_image_that_is_in_no_registry_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compile_missing(*_: object) -> None:
        pytest.fail("it compiled")

    monkeypatch.setattr(bake_verbs, "require_docker", lambda *_, **__: None)  # type: ignore[misc]
    monkeypatch.setattr(bake_verbs, "require_built", lambda _: IMAGE)  # type: ignore[misc]
    monkeypatch.setattr(modules, "compile_missing", compile_missing)
    command = ["bake", "modules", "--to", "registry.lan:5000", "--state", str(tmp_path)]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 1
    assert "the image is in no registry" in f"{result.exception} {result.output}"
