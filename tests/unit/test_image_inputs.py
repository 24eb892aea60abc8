import shutil
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import DeployError
from deploy.image.inputs import (
    ENVIRONMENT_FILES,
    SOURCES,
    ImageInputs,
    image_tag,
    parse_uv_version,
    read_inputs,
    reduce_environment,
)
from deploy.lock.debian import LockedPackage

REPOSITORY = Path(__file__).parents[2]
INPUTS = sorted({*SOURCES, "deploy.lock", "pyproject.toml", "requirements-uv.txt", "uv.lock"})

PROJECT = """
[project]
name = "app"
[dependency-groups]
engine = ["server==1"]
"""
LOCK = """
version = 1
revision = 3
requires-python = ">=3.11"
[[package]]
name = "app"
version = "0.1.0"
source = { editable = "." }
dependencies = [{ name = "console" }]
[package.dev-dependencies]
engine = [{ name = "server" }]
[[package]]
name = "console"
version = "3"
source = { registry = "index" }
[[package]]
name = "library"
version = "2"
source = { registry = "index" }
[[package]]
name = "plugin"
version = "4"
source = { registry = "index" }
dependencies = [{ name = "server" }]
[[package]]
name = "server"
version = "1"
source = { registry = "index" }
dependencies = [{ name = "library", extra = ["fast"] }]
[package.optional-dependencies]
more = [{ name = "plugin" }]
"""

packages = st.builds(
    LockedPackage,
    name=st.sampled_from(["a", "b"]),
    version=st.sampled_from(["1", "2"]),
    architecture=st.just("amd64"),
    archive=st.just("debian"),
    path=st.just("pool/a.deb"),
    size=st.just(1),
    sha256=st.sampled_from(["0" * 64, "1" * 64]),
    essential=st.booleans(),
)
inputs = st.builds(
    ImageInputs,
    files=st.dictionaries(st.sampled_from(["Dockerfile", "patches/series", "x"]), st.binary(max_size=3), max_size=3),
    packages=st.lists(packages, max_size=2).map(tuple),
    uv_version=st.sampled_from(["0.1", "0.2"]),
)


@given(inputs, inputs)
def test_two_sets_of_inputs_have_the_same_hash_exactly_if_they_are_equal(one: ImageInputs, two: ImageInputs) -> None:
    assert (one.hash == two.hash) == (one == two)


@given(inputs, st.data())
def test_any_changed_byte_of_a_file_changes_the_hash(before: ImageInputs, data: st.DataObject) -> None:
    files = {path: content for path, content in before.files.items() if content}
    if not files:
        return
    path = data.draw(st.sampled_from(sorted(files)))
    content = bytearray(files[path])
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    after = ImageInputs({**before.files, path: bytes(content)}, before.packages, before.uv_version)
    assert after.hash != before.hash


@cache
def own_inputs() -> ImageInputs:
    return read_inputs(REPOSITORY)


@given(st.data())
def test_any_changed_byte_of_any_of_the_repositorys_own_inputs_changes_its_hash(data: st.DataObject) -> None:
    before = own_inputs()
    path = data.draw(st.sampled_from(sorted(name for name, content in before.files.items() if content)))
    content = bytearray(before.files[path])
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    after = ImageInputs({**before.files, path: bytes(content)}, before.packages, before.uv_version)
    assert after.hash != before.hash
    large = path.startswith(ENVIRONMENT_FILES)
    assert (after.environment_hash != before.environment_hash) == large


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of this repository's inputs, to be changed."""
    litter = shutil.ignore_patterns("__pycache__")
    for name in INPUTS:
        source, target = REPOSITORY / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=litter)
        else:
            shutil.copyfile(source, target)
    return tmp_path


def append(name: str, text: str = "\n# changed\n") -> Callable[[Path], None]:
    def change(repository: Path) -> None:
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)

    return change


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(repository: Path) -> None:
        path = repository / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


@pytest.mark.parametrize(
    "change",
    [
        append("Dockerfile"),
        append("deploy/image/rootfs.sh"),
        append("deploy/image/install_wheels.sh"),
        append("deploy/image/apply_patches.py"),
        append("kernels/sm120_kernels/__init__.py"),
        append("kernels/sm120_kernels/ops/new.py"),
        append("kernels/pyproject.toml"),
        append("engine/engine_runtime/__init__.py"),
        append("engine/cpu_standins/new.py"),
        append("patches/series"),
        append("patches/new.patch"),
        replace("deploy.lock", "essential = true\n", ""),
        replace("requirements-uv.txt", "uv==", "uv==9"),
        replace("uv.lock", 'name = "sglang"\nversion = "', 'name = "sglang"\nversion = "9'),
    ],
)
def test_what_decides_the_image_changes_its_tag(repository: Path, change: Callable[[Path], None]) -> None:
    before = image_tag(repository)
    change(repository)
    assert image_tag(repository) != before


@pytest.mark.parametrize(
    "change",
    [
        append("README.md"),
        append("deploy.toml", "\n"),
        append("compose.yaml"),
        append("tests/unit/test_new.py"),
        append("kernels/benchmarks/new.py"),
        append("deploy/image/build.py"),
        append("loadtest/__init__.py"),
        append("pyproject.toml"),
        append("kernels/sm120_kernels/__pycache__/x.cpython-311.pyc"),
        append("kernels/sm120_kernels/.editor.swp"),
        append("deploy.lock", '[model]\nrevision = "x"\n'),
        replace("uv.lock", 'name = "pytest"\nversion = "', 'name = "pytest"\nversion = "9'),
    ],
)
def test_what_does_not_decide_the_image_leaves_its_tag(repository: Path, change: Callable[[Path], None]) -> None:
    before = image_tag(repository)
    change(repository)
    assert image_tag(repository) == before


def test_a_changed_kernel_leaves_the_large_layers(repository: Path) -> None:
    before = read_inputs(repository).environment_hash
    append("kernels/sm120_kernels/__init__.py")(repository)
    append("patches/series")(repository)
    assert read_inputs(repository).environment_hash == before
    append("deploy/image/install_wheels.sh")(repository)
    assert read_inputs(repository).environment_hash != before


@pytest.mark.parametrize("name", INPUTS)
def test_a_missing_input_is_named(repository: Path, name: str) -> None:
    path = repository / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DeployError) as raised:
        image_tag(repository)
    assert name in raised.value.why


def test_the_engines_environment_is_its_group_and_what_that_needs() -> None:
    project, lock = reduce_environment(PROJECT, LOCK)
    assert tomllib.loads(project)["dependency-groups"] == {"engine": ["server==1"]}
    reduced = tomllib.loads(lock)
    assert [package["name"] for package in reduced["package"]] == ["engine-environment", "library", "server"]
    assert reduced["package"][0]["dev-dependencies"] == {"engine": [{"name": "server"}]}


def test_extras_that_only_others_ask_for_do_not_move_the_engines_environment() -> None:
    asked = LOCK.replace('name = "console" }', 'name = "console" }, { name = "server", extra = ["more"] }')
    without = LOCK.replace('[package.optional-dependencies]\nmore = [{ name = "plugin" }]\n', "")
    assert len({asked, without, LOCK}) == 3
    assert reduce_environment(PROJECT, asked) == reduce_environment(PROJECT, without)
    wanted = LOCK.replace('engine = [{ name = "server" }]', 'engine = [{ name = "server", extra = ["more"] }]')
    names = {package["name"] for package in tomllib.loads(reduce_environment(PROJECT, wanted)[1])["package"]}
    assert names == {"engine-environment", "library", "plugin", "server"}


def test_a_part_of_the_environment_has_the_same_versions() -> None:
    _, lock = reduce_environment(PROJECT, LOCK, frozenset({"library"}))
    found = [(package["name"], package["version"]) for package in tomllib.loads(lock)["package"]]
    assert found == [("engine-environment", "0"), ("library", "2")]


@pytest.mark.parametrize(
    ("project", "lock", "complaint"),
    [
        ("[project]\nname = app\n", LOCK, "line 2"),
        ("[project]\n", LOCK, "dependency-groups"),
        (PROJECT, "version = 1\n", "package"),
        (PROJECT, LOCK.replace('name = "library"\nversion', 'name = "renamed"\nversion'), "library"),
    ],
)
def test_an_environment_that_does_not_hold_together_is_refused(project: str, lock: str, complaint: str) -> None:
    with pytest.raises(DeployError) as raised:
        reduce_environment(project, lock)
    assert complaint in raised.value.why


def test_uv_must_be_pinned() -> None:
    assert parse_uv_version("# tool\nuv==1.2.3 --hash=sha256:00\n") == "1.2.3"
    with pytest.raises(DeployError, match="pin"):
        parse_uv_version("uv>=1\n")
