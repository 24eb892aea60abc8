import tomllib
from pathlib import Path

import pytest

from deploy.errors import DeployError
from deploy.lock.wheels import Target, group_disagreements, installed_wheels

REPOSITORY = Path(__file__).parents[2]
TARGET = Target("3.11.2", 36)
UV_LOCK = (REPOSITORY / "uv.lock").read_text(encoding="utf-8")


def package(name: str, *wheels: str, version: str = "1", dependencies: str = "", extra: str = "") -> str:
    listed = ", ".join(
        f'{{ url = "https://index.example/{wheel}", hash = "sha256:{"0" * 64}", size = 1 }}'
        for wheel in wheels or [f"{name}-{version}-py3-none-any.whl"]
    )
    return f"""
[[package]]
name = "{name}"
version = "{version}"
source = {{ registry = "https://index.example" }}
dependencies = [{dependencies}]
wheels = [{listed}]
{extra}"""


def lock(group: str, *packages: str) -> str:
    root = f"""
[[package]]
name = "app"
version = "0"
source = {{ editable = "." }}
[package.dev-dependencies]
engine = [{group}]
"""
    return root + "".join(packages)


def chosen(text: str) -> dict[str, str]:
    return {name: wheel.file for name, wheel in installed_wheels(text, TARGET).items()}


def test_what_the_engine_needs_is_installed_and_nothing_else() -> None:
    found = chosen(
        lock(
            '{ name = "server", extra = ["fast"] }',
            package(
                "server",
                dependencies='{ name = "library" }, { name = "windows-only", marker = "sys_platform == \'win32\'" }',
                extra="[package.optional-dependencies]\n"
                'fast = [{ name = "accelerator" }]\nslow = [{ name = "unused" }]\n',
            ),
            package("library", dependencies='{ name = "old", marker = "python_full_version < \'3.12\'" }'),
            package("accelerator"),
            package("old"),
            package("windows-only"),
            package("unused"),
            package("console"),
        )
    )
    assert sorted(found) == ["accelerator", "library", "old", "server"]


def test_of_two_versions_the_one_that_the_dependency_names_is_taken() -> None:
    group = (
        '{ name = "fork", version = "2", marker = "python_full_version < \'3.12\'" },'
        '{ name = "fork", version = "1", marker = "python_full_version >= \'3.12\'" }'
    )
    assert chosen(lock(group, package("fork"), package("fork", version="2"))) == {"fork": "fork-2-py3-none-any.whl"}


@pytest.mark.parametrize(
    ("wheels", "best"),
    [
        (["a-1-py3-none-any.whl", "a-1-cp311-cp311-manylinux_2_28_x86_64.whl"], 1),
        (["a-1-cp312-cp312-manylinux_2_28_x86_64.whl", "a-1-cp311-cp311-manylinux_2_28_x86_64.whl"], 1),
        (["a-1-cp38-abi3-manylinux2014_x86_64.whl", "a-1-cp311-cp311-manylinux_2_40_x86_64.whl"], 0),
        (["a-1-cp311-cp311-manylinux_2_28_aarch64.whl", "a-1-py3-none-manylinux2014_x86_64.whl"], 1),
        (["a-1-cp311-cp311-musllinux_1_2_x86_64.whl", "a-1-cp311-cp311-manylinux_2_17_x86_64.whl"], 1),
        (["a-1-cp311-cp311-manylinux_2_17_x86_64.whl", "a-1-cp311-cp311-manylinux_2_28_x86_64.whl"], 1),
    ],
)
def test_the_wheel_that_fits_the_images_python_and_glibc_best_is_taken(wheels: list[str], best: int) -> None:
    assert chosen(lock('{ name = "a" }', package("a", *wheels))) == {"a": wheels[best]}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "TOML"),
        ("[[package]]\nname = 'a'\nversion = '1'\nsource = {}\n", "StopIteration"),
        (lock('{ name = "gone" }'), "no package gone"),
        (lock('{ name = "a" }', package("a", "a-1-cp312-cp312-linux_x86_64.whl")), "a 1 has no wheel"),
    ],
)
def test_a_lock_that_cannot_be_installed_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(DeployError) as raised:
        installed_wheels(text, TARGET)
    assert complaint in raised.value.why
    assert "uv lock" in raised.value.fix


def test_the_repositorys_wheels_are_in_uv_lock_and_fit_the_image() -> None:
    known = {
        wheel["url"]: wheel["hash"]
        for package in tomllib.loads(UV_LOCK)["package"]
        for wheel in package.get("wheels", ())
    }
    found = installed_wheels(UV_LOCK, TARGET)
    assert {"sglang", "sglang-router", "torch", "triton", "nixl"} <= found.keys()
    assert {"pytest", "locust", "typer-slim"} & found.keys() == set()
    for wheel in found.values():
        assert known[wheel.url] == f"sha256:{wheel.sha256}"
        assert "cp312" not in wheel.file and "aarch64" not in wheel.file


def test_the_repositorys_project_and_uv_lock_agree() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert group_disagreements(project, UV_LOCK) == []
    assert group_disagreements(project.replace('"sglang==0.5.23"', '"sglang==0.5.24"'), UV_LOCK) == [
        "sglang==0.5.24 is in pyproject.toml only",
        "sglang==0.5.23 is in uv.lock only",
    ]
