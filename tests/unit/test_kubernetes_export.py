"""What an export writes, held against the compose files: no schema and no cluster needed."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleets import IMAGE, MODEL, ROOT, TOML, cluster, compose, files, needs_compose, roles
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import DeployError
from deploy.kubernetes.export import change_of, model_key, peers_key, write
from deploy.kubernetes.pods import DRAIN_SECONDS, FIXED_WORKERS, escaped, quantity
from deploy.kubernetes.roles import read_roles, seconds, size
from deploy.lock.model import HostLock, Lock
from deploy.stack.roles import locked_roles

pytestmark = [needs_compose, pytest.mark.slow]
FLEETS = tuple(TOML)


def expanded(text: str) -> str:
    """What Kubernetes makes of an argument or variable (k8s.io/kubernetes/third_party/forked/golang/expansion)."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else f"<{found[1]}>", text)


def objects(name: str, folder: str = "base") -> list[dict[str, Any]]:
    found = {path: text for path, text in files(name).items() if path.startswith(f"{folder}/")}
    return [item for text in found.values() for item in yaml.safe_load_all(text) if "kind" in item]


def pods(name: str) -> dict[str, dict[str, Any]]:
    """The pod of each role."""
    found: dict[str, dict[str, Any]] = {}
    for item in objects(name):
        spec = item.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        for template in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")):
            if template:
                found[template["spec"]["containers"][0]["name"]] = template
    return found


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


@pytest.mark.parametrize("name", FLEETS)
def test_arguments_and_environment_of_every_engine_are_byte_for_byte_what_compose_gives_it(name: str) -> None:
    _, config = compose(name)
    locked = locked_roles(config)
    for role, pod in pods(name).items():
        if role == "router":
            continue
        given = container(pod)
        environment = {item["name"]: expanded(item["value"]) for item in given["env"]}
        assert environment == locked[role].environment
        arguments = [*map(expanded, given["args"]), *shlex.split(environment["EXTRA_ARGUMENTS"])]
        assert [*arguments, *locked[role].arguments[len(arguments) :]] == list(locked[role].arguments)
        assert [*map(expanded, given["command"])] == config["services"][role]["entrypoint"]
    assert set(pods(name)) == set(config["services"])


@pytest.mark.parametrize("name", FLEETS)
def test_the_router_differs_from_composes_only_in_how_it_finds_engines(name: str) -> None:
    _, config = compose(name)
    locked = locked_roles(config)["router"]
    given = container(pods(name)["router"])
    environment = {item["name"]: expanded(item["value"]) for item in given["env"]}
    arguments = [*map(expanded, given["args"]), *shlex.split(environment["EXTRA_ARGUMENTS"])]

    def rest(words: list[str]) -> list[str]:
        kept: list[str] = []
        dropping = False
        for word in words:
            if word.startswith("--"):
                option = word.partition("=")[0]
                dropping = option in FIXED_WORKERS or "selector" in option or option.startswith("--service-discovery")
            kept += [] if dropping else [word]
        return kept

    assert rest(arguments) == rest(list(locked.arguments))
    assert {**environment, "EXTRA_ARGUMENTS": ""} == {**locked.environment, "EXTRA_ARGUMENTS": ""}
    assert arguments.count("--service-discovery") == 1
    assert not set(FIXED_WORKERS) & set(arguments)


@pytest.mark.parametrize("name", FLEETS)
def test_probes_rights_and_limits_mean_what_composes_mean(name: str) -> None:
    _, config = compose(name)
    for role, pod in pods(name).items():
        service, given, spec = config["services"][role], container(pod), pod["spec"]
        check = service["healthcheck"]
        ready = given["readinessProbe"]
        assert ready["exec"]["command"] == check["test"][1:]
        assert ready["periodSeconds"] == seconds(check["interval"])
        assert ready["timeoutSeconds"] == seconds(check["timeout"])
        assert ready["failureThreshold"] == check["retries"]
        if role != "router":
            start = given["startupProbe"]
            assert start["exec"] == ready["exec"]
            assert start["periodSeconds"] * start["failureThreshold"] == seconds(check["start_period"])
        user, _, group = service["user"].partition(":")
        assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (int(user), int(group))
        assert spec["securityContext"]["runAsNonRoot"] is True
        security = given["securityContext"]
        assert security["readOnlyRootFilesystem"] is service["read_only"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == service["cap_drop"]
        assert security["capabilities"].get("add", []) == service.get("cap_add", [])
        assert spec["terminationGracePeriodSeconds"] == DRAIN_SECONDS + seconds(service["stop_grace_period"])
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        if shared := service.get("shm_size"):
            assert size(volumes["shm"]["emptyDir"]["sizeLimit"].removesuffix("i").lower()) == int(shared)
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in given["volumeMounts"]}
        for volume in service["volumes"]:
            assert mounts[volume["target"]] == volume.get("read_only", False)
        assert {mount["name"] for mount in given["volumeMounts"]} <= set(volumes)


@pytest.mark.parametrize("name", ["pd", "cpu"])
def test_a_router_takes_only_engines_that_can_exchange_a_cache_with_each_other(name: str) -> None:
    found = pods(name)
    arguments = container(found["router"])["args"]
    for role in ("prefill", "decode"):
        place = arguments.index(f"--{role}-selector") + 1
        end = next(index for index in range(place, len(arguments)) if arguments[index].startswith("--"))
        wanted = dict(item.split("=", 1) for item in arguments[place:end])
        labels = {one: pod["metadata"]["labels"] for one, pod in found.items()}
        assert [one for one in labels if wanted.items() <= labels[one].items()] == [role]
    assert found["prefill"]["metadata"]["annotations"]["sglang.ai/bootstrap-port"] == "8998"
    assert f"--service-discovery-namespace={cluster(name).namespace}" in arguments


def test_other_code_or_arguments_make_other_peers() -> None:
    engines = [roles("pd")["prefill"], roles("pd")["decode"]]
    other = [roles("tuned")["prefill"], roles("tuned")["decode"]]
    assert len({peers_key(IMAGE, engines), peers_key("another", engines), peers_key(IMAGE, other)}) == 3


def test_a_service_that_no_manifest_is_written_for_is_refused_by_name() -> None:
    spec_file, config = compose("pd")
    more: dict[str, Any] = {**config, "services": {**config["services"], "namespaces": {}}}
    with pytest.raises(DeployError, match="namespaces"):
        read_roles(more, spec_file.spec)


def test_a_container_with_more_rights_than_the_manifests_give_is_refused() -> None:
    spec_file, config = compose("pd")
    services: dict[str, Any] = {**config["services"], "decode": {**config["services"]["decode"], "cap_drop": []}}
    with pytest.raises(DeployError, match="decode more rights"):
        read_roles({"services": services}, spec_file.spec)


@given(st.text())
def test_kubernetes_reads_an_escaped_text_as_the_text(text: str) -> None:
    assert expanded(escaped(text)) == text


@given(st.integers(1, 2**50))
def test_a_quantity_is_the_number_of_bytes(count: int) -> None:
    factor = {"Gi": 1 << 30, "Mi": 1 << 20, "Ki": 1 << 10}
    text = quantity(count)
    assert int(text.rstrip("GMKi")) * factor.get(text[-2:], 1) == count


@pytest.mark.parametrize("text", ["", "5", "5x", "s", "1m 5s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        seconds(text)


def test_durations_and_sizes_as_compose_prints_them() -> None:
    assert [seconds(text) for text in ("30m0s", "1m0s", "2s", "1h0m0.5s", "500ms")] == [1800, 60, 2, 3600.5, 0.5]
    assert [size(text) for text in ("8g", "256m", "1024", "64mb")] == [8 << 30, 256 << 20, 1024, 64 << 20]


def test_a_model_is_named_by_its_files() -> None:
    other = MODEL.model_copy(update={"file": (MODEL.file[0].model_copy(update={"sha256": "3" * 64}),)})
    assert len({model_key(MODEL), model_key(other), model_key(None)}) == 3


def test_an_export_replaces_the_one_before_and_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    first = Lock(host=HostLock(driver="580", docker_engine="25.0", docker_compose="2.24.4"))
    assert first.host
    second = first.model_copy(update={"host": first.host.model_copy(update={"driver": "590"})})
    assert change_of(folder, first).startswith("lock ")
    assert write(folder, {"base/a.yaml": "1\n", "base/gone.yaml": "1\n"}, first) is None
    assert "host driver 580 -> 590" in change_of(folder, second)
    assert change_of(folder, first).endswith("as before")
    previous = write(folder, {"base/a.yaml": "2\n"}, second)
    assert previous
    assert {path.name for path in (folder / "base").iterdir()} == {"a.yaml"}
    assert (previous / "base/a.yaml").read_text() == "1\n"
    write(folder, {"base/a.yaml": "3\n"}, second)
    assert (previous / "base/a.yaml").read_text() == "2\n"
    assert {path.name for path in tmp_path.iterdir()} == {"fleet", "fleet.previous"}


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(DeployError, match="other files"):
        write(tmp_path, {"a": "b"}, Lock())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_write_that_fails_leaves_the_former_export_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    write(folder, {"a": "1"}, Lock())
    with pytest.raises(OSError):
        write(folder, {"a": "2", "a/b": "3"}, Lock())
    assert (folder / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["fleet"]


def test_there_are_as_many_routers_as_the_engines_decode_requests_at_once() -> None:
    def routers(name: str, replicas: int) -> int:
        text = files(name, replicas=replicas)["base/router.yaml"]
        return next(item["spec"]["replicas"] for item in yaml.safe_load_all(text) if item["kind"] == "Deployment")

    # 256 requests in flight a router; 64 a pair, 32 as `tuned` has it, 64 for each of two engines.
    assert [routers("pd", count) for count in (1, 8, 9, 100)] == [2, 2, 3, 25]
    assert routers("tuned", 100) == 13
    assert routers("replicas", 100) == 50


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    deploy = Path(sys.executable).parent / "deploy"
    return subprocess.run([str(deploy), "export", *arguments], capture_output=True, text=True, cwd=ROOT)


def test_the_verb_writes_manifests_and_says_how_to_apply_them(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    done = run("kubernetes", str(folder), "--image", IMAGE, "--namespace", "two", "-n", "3")
    assert done.returncode == 0, done.stderr
    assert f"{folder}/overlays/device-plugin" in done.stdout.split()
    assert f"kubectl apply -k {folder}/overlays/device-plugin" in done.stderr
    engines = yaml.safe_load((folder / "base/engines.yaml").read_text())
    assert (engines["metadata"]["namespace"], engines["spec"]["replicas"]) == ("two", 3)
    again = json.loads(run("kubernetes", str(folder), "--image", IMAGE, "--json").stdout)
    assert again["previous"] == f"{folder}.previous"
    assert again["change"].endswith("as before")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "in no registry"),
        (["--image", "registry.lan/image:tag"], 2, "not an image by digest"),
        (["--image", IMAGE, "--namespace", "Not_A_Name"], 2, "lower-case"),
        (["--image", IMAGE, "--replicas", "0"], 2, "replicas"),
        (["--image", IMAGE, "--model-folder", "model"], 2, "not an absolute path"),
        (["--image", IMAGE, "--profile", "replicas"], 2, "replica"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_writes_nothing(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    done = run("kubernetes", str(tmp_path / "fleet"), *arguments)
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", [[], ["image"]])
def test_a_file_as_first_word_is_still_the_archive(tmp_path: Path, form: list[str]) -> None:
    # Neither form gets as far as Docker here: the help of the verb that takes the word says which it is.
    done = run(*form, str(tmp_path / "no" / "image.tar"), "--help")
    assert done.returncode == 0
    assert "OCI archive" in done.stdout
    assert "kubernetes" in run("--help").stdout
