import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.errors import DeployError
from deploy.lock import resolve
from deploy.lock.debian import read_rootfs_lock
from deploy.lock.diff import diff
from deploy.lock.model import EngineLock, ImageLock, Lock, LockedRole, dump, read_lock, write_lock
from deploy.lock.resolve import Sources, check_lock, derive, profile_roles, update_lock
from deploy.spec.load import load, parse
from deploy.spec.profiles import ENGINES
from tests.unit.locks import layer

REPOSITORY = Path(__file__).parents[2]
needs_compose = pytest.mark.skipif(not shutil.which("docker"), reason="there is no docker compose")
pytestmark = [needs_compose, pytest.mark.slow]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows of this repository, with a lock that agrees with it."""
    copy = tmp_path_factory.mktemp("pristine")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, copy / name)
    lock, _ = derive(copy, load(copy / "deploy.toml"), read_lock(copy))
    write_lock(copy, lock)
    return copy


@pytest.fixture
def repository(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "repository")


@pytest.fixture
def no_compose(monkeypatch: pytest.MonkeyPatch, pristine: Path) -> None:
    """What Compose says is taken from the lock, for tests of other things: asking takes a second each time."""
    roles = read_lock(pristine).roles

    def known(root: Path, spec_file: object, profile: str) -> dict[str, LockedRole]:
        return roles[profile]

    monkeypatch.setattr(resolve, "profile_roles", known)


@pytest.fixture
def no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without the image, whatever this one has."""
    monkeypatch.setattr("deploy.image.build.find_image", lambda tag, docker: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


def disagreements(repository: Path) -> list[str]:
    found = check_lock(repository, load(repository / "deploy.toml"))
    return [f"{item.part}: {item.what}" for item in found]


def update(repository: Path, *parts: resolve.Part, cache: Path | None = None) -> resolve.Update:
    return update_lock(repository, load(repository / "deploy.toml"), parts, Sources(cache=cache))


def append(name: str, text: str = "\n# changed\n") -> Callable[[Path], None]:
    def change(repository: Path) -> None:
        with (repository / name).open("a", encoding="utf-8") as file:
            file.write(text)

    return change


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(repository: Path) -> None:
        text = (repository / name).read_text(encoding="utf-8")
        assert old in text
        (repository / name).write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


def test_a_lock_just_made_agrees(repository: Path) -> None:
    assert disagreements(repository) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (append("kernels/sm120_kernels/__init__.py"), ["kernels: files", "image: inputs"]),
        (append("engine/engine_runtime/launch.py"), ["runtime: engine_runtime", "image: inputs"]),
        (append("engine/cpu_standins/sgl_kernel/__init__.py"), ["runtime: cpu_standins", "image: inputs"]),
        (append("Dockerfile"), ["image: environment", "image: inputs"]),
        (append("compose.yaml"), ["compose: compose.yaml"]),
        (append("uv.lock"), ["python: uv_lock"]),
        (replace("deploy/image/rootfs.toml", '"tini"', '"dumb-init"'), ["rootfs: dumb-init", "rootfs: tini"]),
        (replace("requirements-uv.txt", "sha256:d", "sha256:e"), ["python: uv_sha256"]),
        (
            replace("pyproject.toml", '"sglang-router==0.3.2"', '"sglang-router==0.3.3"'),
            [
                "wheels: sglang-router==0.3.3 is in pyproject.toml only",
                "wheels: sglang-router==0.3.2 is in uv.lock only",
            ],
        ),
    ],
)
def test_each_input_that_moved_on_is_named(
    repository: Path, no_compose: None, change: Callable[[Path], None], expected: list[str]
) -> None:
    change(repository)
    found = disagreements(repository)
    for start in expected:
        assert any(line.startswith(start) for line in found), (start, found)


def test_another_profile_is_one_line(repository: Path) -> None:
    replace("deploy.toml", 'profile = "pd"', 'profile = "cpu"')(repository)
    assert disagreements(repository) == ["profile: pd is locked, deploy.toml has another"]
    update(repository)
    replace("deploy.toml", 'profile = "cpu"', 'profile = "pd"')(repository)
    assert disagreements(repository) == ["profile: none is locked, deploy.toml has pd"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (replace("deploy.toml", "context_length = 131072", "context_length = 65536"), "pd decode --context-length"),
        (replace("compose.cpu.yaml", "--page-size=1", "--page-size=16"), "cpu prefill --page-size: 1 is locked, 16"),
        (append("deploy.toml", 'NCCL_DEBUG = "INFO"\n'), "cpu decode $NCCL_DEBUG"),
    ],
)
def test_each_changed_argument_and_variable_is_named(
    repository: Path, change: Callable[[Path], None], expected: str
) -> None:
    change(repository)
    assert any(expected in line for line in disagreements(repository))


FORMATTINGS: list[Callable[[str], str]] = [
    lambda text: text + "\n# a comment\n",
    lambda text: text.replace(" = ", "="),
    lambda text: text.replace("\n", "\n\n"),
    lambda text: "\n".join(line for line in text.splitlines() if not line.startswith("#")) + "\n",
    lambda text: text.replace("[0, 1, 2, 3]", "[\n  0,\n  1,\n  2,\n  3,\n]"),
    lambda text: text.replace("131072", "131_072"),
    lambda text: text.replace('"isolated"', "'isolated'", 1),
    lambda text: text.replace("\r\n", "\n").replace("\n", "\r\n"),
]


@given(st.lists(st.sampled_from(range(len(FORMATTINGS))), max_size=4))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_comments_and_formatting_of_the_spec_change_nothing(pristine: Path, formattings: list[int]) -> None:
    file = pristine / "deploy.toml"
    text = file.read_bytes().decode()
    for number in formattings:
        text = FORMATTINGS[number](text)
    spec_file = parse(text, file)
    before = read_lock(pristine)
    after, unresolved = derive(pristine, spec_file, before)
    assert unresolved == []
    assert dump(after) == dump(before)


def test_what_the_image_is_made_from_and_nothing_else_moves_its_input_hash(pristine: Path, no_compose: None) -> None:
    """One flipped bit in every file of the repository, each on its own."""
    spec_file = load(pristine / "deploy.toml")
    before = read_lock(pristine)
    assert before.image
    inside = resolve.read_inputs(pristine).files.values()
    for path in sorted(pristine.rglob("*")):
        name = str(path.relative_to(pristine))
        if not path.is_file() or name.startswith(("tests/", ".git/", "loadtest/")) or not path.stat().st_size:
            continue
        original = path.read_bytes()
        decides = original in inside and not name.startswith("deploy.")
        if name in ("pyproject.toml", "uv.lock", "requirements-uv.txt", "deploy.lock", "deploy.toml") or (
            decides and name == "patches/series"
        ):
            continue  # not every byte of these counts; tests of their own
        path.write_bytes(bytes([original[0] ^ 1]) + original[1:])
        try:
            hash_after = resolve.read_inputs(pristine).hash
        finally:
            path.write_bytes(original)
        assert (hash_after != before.image.inputs) == decides, name
    assert derive(pristine, spec_file, before)[0].image == before.image


def test_without_network_and_docker_the_lock_is_renewed(
    repository: Path, no_compose: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    append("kernels/sm120_kernels/__init__.py")(repository)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    found = update(repository)
    assert [change.section for change in found.changes if change.section == "kernels"] == ["kernels"]
    assert [(item.part, "docker" in item.fix) for item in found.unresolved] == [("image", True)]
    assert found.lock.image and found.lock.image.id == ""
    assert disagreements(repository) == []


def test_nothing_to_do_leaves_the_file_untouched(repository: Path, no_compose: None, no_image: None) -> None:
    before = (repository / "deploy.lock").stat().st_mtime_ns
    assert update(repository).changes == ()
    assert (repository / "deploy.lock").stat().st_mtime_ns == before


def test_a_part_that_cannot_be_resolved_leaves_the_lock_as_it_was(
    repository: Path, no_compose: None, no_image: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    append("kernels/sm120_kernels/__init__.py")(repository)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    before = (repository / "deploy.lock").read_bytes()
    with pytest.raises(DeployError) as raised:
        update(repository, "engine", cache=tmp_path / "empty")
    assert "network" in raised.value.fix
    with pytest.raises(DeployError, match="model folder"):
        update(repository, "model")
    with pytest.raises(DeployError) as raised:
        update(repository, "image")
    assert "deploy build" in raised.value.fix
    assert (repository / "deploy.lock").read_bytes() == before


def test_a_changed_patch_series_reads_the_wheel_again(
    repository: Path, no_compose: None, no_image: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "patches/1.patch").write_text("Mend it\n--- a/sglang/x.py\n+++ b/sglang/x.py\n@@ -1 +1 @@\n-a\n+b\n")
    append("patches/series", "1.patch\n")(repository)
    assert any(line.startswith("engine: ") for line in disagreements(repository))
    locked = read_lock(repository).engine
    assert locked

    def read(wheel: Path, sha256: str, files: dict[str, bytes]) -> EngineLock:
        return EngineLock(wheel=sha256, tree=locked.tree, patched_tree="0" * 64, patch=resolve.locked_patches(files))

    monkeypatch.setattr(resolve, "lock_engine", read)
    monkeypatch.setattr("deploy.fetch.fetch", lambda *arguments: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    found = update(repository)
    assert [(change.name, change.after) for change in found.changes if change.section == "patch"] == [
        ("1.patch", "Mend it")
    ]
    assert disagreements(repository) == []


def test_an_image_of_other_inputs_is_forgotten_and_one_of_these_kept(repository: Path, no_compose: None) -> None:
    lock = read_lock(repository)
    assert lock.image
    built = ImageLock(
        inputs=lock.image.inputs, environment=lock.image.environment, id=f"sha256:{'1' * 64}", layer=(layer("1", 1),)
    )
    spec_file = load(repository / "deploy.toml")
    kept, _ = derive(repository, spec_file, lock.model_copy(update={"image": built}))
    assert kept.image == built
    append("Dockerfile")(repository)
    forgotten, _ = derive(repository, spec_file, lock.model_copy(update={"image": built}))
    assert forgotten.image and forgotten.image.id == "" and forgotten.image.inputs != built.inputs


def with_model(repository: Path, repo: str = "", revision: str = "") -> Path:
    text = (repository / "deploy.toml").read_text(encoding="utf-8")
    text = text.replace('repo = ""', f'repo = "{repo}"').replace('revision = ""', f'revision = "{revision}"')
    (repository / "deploy.toml").write_text(text, encoding="utf-8")
    folder = repository / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_models_files_are_locked_when_they_are_there_and_noticed_when_they_change(
    repository: Path, no_compose: None, no_image: None
) -> None:
    folder = with_model(repository, "owner/name", "a" * 40)
    assert any(line.startswith("model: deploy.toml names owner/name@aaaa") for line in disagreements(repository))
    found = update(repository).lock.model
    assert found and (found.repo, found.revision, [file.path for file in found.file]) == (
        "owner/name",
        "a" * 40,
        ["config.json"],
    )
    assert disagreements(repository) == []
    (folder / "config.json").write_text("{ }")
    assert any("model is not what was locked: config.json" in line for line in disagreements(repository))
    shutil.rmtree(folder)
    assert disagreements(repository) == []


def test_a_named_model_that_is_not_here_stays_open(repository: Path, no_compose: None, no_image: None) -> None:
    shutil.rmtree(with_model(repository, "owner/name", "a" * 40))
    found = update(repository)
    assert [item.part for item in found.unresolved if item.part != "image"] == ["model"]
    assert "bring its files" in next(item.fix for item in found.unresolved if item.part == "model")


def test_a_new_lock_is_made_where_there_is_none(
    repository: Path, no_compose: None, no_image: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_lock(repository)
    rootfs = read_rootfs_lock(repository)
    (repository / "deploy.lock").unlink()
    monkeypatch.setattr(resolve, "resolve", lambda *arguments: rootfs)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(resolve, "_engine", lambda *arguments: before.engine)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    after = update(repository).lock
    kept = before.image and ImageLock(inputs=before.image.inputs, environment=before.image.environment)
    assert diff(before.model_copy(update={"image": kept}), after).changes == ()


def test_a_lock_without_packages_is_behind_and_says_what_to_do(repository: Path) -> None:
    write_lock(repository, Lock())
    (only,) = check_lock(repository, load(repository / "deploy.toml"))
    assert (only.part, only.fix) == ("rootfs", "deploy lock")


def test_a_missing_compose_file_is_named(repository: Path) -> None:
    (repository / "compose.p2p.yaml").unlink()
    with pytest.raises(DeployError, match=r"compose\.p2p\.yaml is missing"):
        disagreements(repository)


def test_compose_files_that_do_not_parse_are_an_error_with_composes_words(repository: Path) -> None:
    append("compose.cpu.yaml", "services: [\n")(repository)
    with pytest.raises(DeployError, match="compose files"):
        profile_roles(repository, load(repository / "deploy.toml"), "cpu")


@pytest.mark.parametrize(("gpus", "engines"), [("[0, 1]", 3), ("[0, 1, 2, 3]", 1)])
def test_the_roles_of_replicas_are_the_engines_that_the_spec_asks_for(gpus: str, engines: int, tmp_path: Path) -> None:
    spec = tmp_path / "deploy.toml"
    tables = "".join(
        f"[[replica]]\ngpus = {[gpu + number * 2 for gpu in json.loads(gpus)]}\nnuma_node = {number}\n"
        for number in range(engines)
    )
    spec.write_text(f'profile = "replicas"\n{tables}[engine]\nspeculation = "eagle"\n')
    roles = profile_roles(REPOSITORY, load(spec), "replicas")
    assert list(roles) == [*ENGINES["replicas"][:engines], "router"]
    for number in range(engines):
        arguments = roles["engine" if number == 0 else f"engine-{number + 1}"].arguments
        size = len(json.loads(gpus))
        assert f"--tp-size={size}" in arguments and "--speculative-algorithm=EAGLE" in arguments
        assert arguments[arguments.index("--numa-node") + 1 :][:size] == (str(number),) * size
    assert [word for word in roles["router"].arguments if word.startswith("http")] == [
        f"http://{name}:30000" for name in roles if name != "router"
    ]


def test_without_docker_compose_the_fix_is_named(repository: Path) -> None:
    with mock.patch.dict(os.environ, {"PATH": "/nowhere"}), pytest.raises(DeployError, match="docker compose"):
        disagreements(repository)


def test_the_roles_hold_nothing_of_this_host(repository: Path) -> None:
    """Neither paths nor limits: the same lock must come out everywhere."""
    text = (repository / "deploy.lock").read_text(encoding="utf-8")
    roles = tomllib.loads(text)["roles"]
    assert sorted(roles) == ["cpu", "pd"]
    assert str(REPOSITORY) not in str(roles) and str(Path.home()) not in str(roles)
    assert roles["pd"]["prefill"]["arguments"][:2] == ["prefill", "--model-path=/model"]
    assert roles["pd"]["decode"]["arguments"][-1] == "--disaggregation-mode=decode"
