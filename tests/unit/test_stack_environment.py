import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deploy.spec.load import load, parse
from deploy.spec.profiles import ENGINES, ROUTER, compose_files
from deploy.stack.environment import Facts, Variable, quote, render, variables
from deploy.stack.origins import LAUNCHER, settings, variable_names

ROOT = Path(__file__).parents[2]
FACTS = Facts("image:tag", Path("/srv/model"), None, {})


def values(text: str, facts: Facts = FACTS) -> dict[str, str]:
    return {line.name: line.value for line in variables(parse(text, Path("deploy.toml")), facts)}


def test_an_empty_spec_gives_only_what_the_host_decides() -> None:
    assert values("") == {"IMAGE": "image:tag", "MODEL_PATH": "/srv/model"}


def test_the_defaults_of_the_spec_are_those_of_the_compose_files() -> None:
    text = (ROOT / "compose.yaml").read_text()
    defaults = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    given = {line.name: line.value for line in variables(load(ROOT / "deploy.toml"), FACTS)}
    assert {name: defaults[name] for name in given if name not in ("IMAGE", "MODEL_PATH")} == {
        name: value for name, value in given.items() if name not in ("IMAGE", "MODEL_PATH")
    }


def test_every_variable_that_a_spec_gives_is_asked_for_by_the_compose_files() -> None:
    known = variable_names([ROOT / name for name in compose_files("pd", p2p=True)])
    key = Facts("i", Path("/m"), Path("/key"), {"MEMLOCK": "1", "NOFILE": "2"})
    assert {line.name for line in variables(load(ROOT / "deploy.toml"), key)} <= known


REPLICAS = """
profile = "replicas"
[model]
name = "m"
[[replica]]
gpus = [0, 1]
numa_node = 0
cpus = "0-7"
[[replica]]
gpus = [2, "GPU-3f"]
numa_node = 1
extra_arguments = "--x 1"
[engine]
speculation = "eagle"
nccl = "ll_ring"
pcie_ipc_all_reduce = true
moe_backend = "marlin"
"""


def test_replicas_become_services_their_urls_and_one_way_to_speculate() -> None:
    assert values(REPLICAS) == {
        "IMAGE": "image:tag",
        "MODEL_PATH": "/srv/model",
        "SERVED_MODEL_NAME": "m",
        "MOE_RUNNER_BACKEND": "marlin",
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "Ring",
        "PCIE_IPC_ALLREDUCE": "1",
        "SPECULATION_ARGUMENTS": "--speculative-algorithm=EAGLE --speculative-num-steps=3 --speculative-eagle-topk=1 "
        "--speculative-num-draft-tokens=4",
        "ENGINE_GPU_0": "nvidia.com/gpu=0",
        "ENGINE_GPU_1": "nvidia.com/gpu=1",
        "ENGINE_NUMA_NODE": "0",
        "ENGINE_CPUS": "0-7",
        "ENGINE_2_GPU_0": "nvidia.com/gpu=2",
        "ENGINE_2_GPU_1": "nvidia.com/gpu=GPU-3f",
        "ENGINE_2_NUMA_NODE": "1",
        "ENGINE_2_EXTRA_ARGUMENTS": "--x 1",
        "COMPOSE_PROFILES": "2-engines",
        "WORKER_URLS": "http://engine:30000 http://engine-2:30000",
    }


def test_one_replica_needs_no_compose_profile() -> None:
    given = values('profile = "replicas"\n[[replica]]\ngpus = [0, 1]\nnuma_node = 0\n')
    assert not {"COMPOSE_PROFILES", "WORKER_URLS"} & set(given)


def test_a_draft_model_of_its_own_is_mounted_and_named() -> None:
    text = (
        'profile = "replicas"\n[[replica]]\ngpus = [0, 1]\nnuma_node = 0\n'
        '[engine]\nspeculation = "dspark"\ndraft_path = "d"\n'
    )
    given = values(text, Facts("i", Path("/m"), None, {}, Path("/srv/d")))
    assert given["DRAFT_PATH"] == "/srv/d"
    assert given["SPECULATION_ARGUMENTS"] == "--speculative-algorithm=DSPARK --speculative-draft-model-path=/draft"


def test_the_nvfp4_checkpoint_brings_its_own_moe_backend_and_a_person_may_still_choose() -> None:
    assert values('[model]\nvariant = "nvfp4"\n')["MOE_RUNNER_BACKEND"] == "flashinfer_cutlass"
    assert values('[model]\nvariant = "nvfp4"\n[engine]\nmoe_backend = "marlin"\n')["MOE_RUNNER_BACKEND"] == "marlin"


def test_auto_and_false_leave_the_compose_files_variables_to_the_person() -> None:
    given = values((ROOT / "deploy.toml").read_text() + 'NCCL_PROTO = "LL"\nPCIE_IPC_ALLREDUCE = 1\n')
    assert (given["NCCL_PROTO"], given["PCIE_IPC_ALLREDUCE"]) == ("LL", "1")
    assert not {"NCCL_ALGO", "MOE_RUNNER_BACKEND", "SPECULATION_ARGUMENTS"} & set(given)


@pytest.mark.parametrize("size", [2, 4])
def test_every_variable_of_the_replicas_is_asked_for_by_their_compose_files(size: int) -> None:
    engines = {2: 4, 4: 2}[size]
    tables = "".join(
        f'[[replica]]\ngpus = {list(range(k * size, k * size + size))}\nnuma_node = 0\ncpus = "1"\n'
        'extra_arguments = "-x"\n'
        for k in range(engines)
    )
    text = REPLICAS.replace(REPLICAS[REPLICAS.index("[[") : REPLICAS.index("[engine]")], tables).replace(
        '"eagle"', '"dspark"\ndraft_path = "d"'
    )
    facts = Facts("i", Path("/m"), Path("/key"), {"MEMLOCK": "1", "NOFILE": "2"}, Path("/d"))
    given = {line.name for line in variables(parse(text, Path("deploy.toml")), facts)}
    # Compose itself asks for this one.
    known = variable_names([ROOT / name for name in compose_files("replicas", gpus_per_engine=size)])
    assert given - {"COMPOSE_PROFILES"} <= known
    assert len([name for name in given if "_GPU_" in name]) == 8
    # What only the roles of profile pd know is not among them.
    assert "PREFILL_GPU_0" not in known


def test_gpus_become_cdi_names_in_their_order() -> None:
    given = values('[decode]\ngpus = [5, "GPU-1f", "example.com/gpu=7", 4]\n')
    assert [given[f"DECODE_GPU_{slot}"] for slot in range(4)] == [
        "nvidia.com/gpu=5",
        "nvidia.com/gpu=GPU-1f",
        "example.com/gpu=7",
        "nvidia.com/gpu=4",
    ]


def test_without_gpus_only_router_and_variables_count() -> None:
    text = 'profile = "cpu"\n[engine]\ncontext_length = 9\n[router]\nport = 8\n[variables]\nUCX_TLS = "tcp"\n'
    assert values(text) == {"IMAGE": "image:tag", "MODEL_PATH": "/srv/model", "PORT": "8", "UCX_TLS": "tcp"}


def test_a_persons_variable_wins_over_the_limit_of_the_host() -> None:
    facts = Facts("i", Path("/m"), None, {"MEMLOCK": "8388608", "NOFILE": "20000"})
    given = values("[variables]\nMEMLOCK = 4096\n", facts)
    assert (given["MEMLOCK"], given["NOFILE"]) == ("4096", "20000")


@pytest.mark.parametrize(("address", "written"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_an_ipv6_address_is_bracketed(address: str, written: str) -> None:
    assert values(f'[router]\nbind = "{address}"\n')["BIND_ADDRESS"] == written


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]) | st.just("\n")))
def test_a_quoted_value_stays_on_one_line_and_reads_back_as_itself(value: str) -> None:
    """Read back by the rules of Compose's env files; tests/docker sends such values through Compose itself."""
    quoted = quote(value)
    assert "\n" not in quoted
    if quoted.startswith('"'):
        undone = {"\\n": "\n", '\\"': '"', "\\$": "$", "\\\\": "\\"}
        body = re.sub(r'\\[n"$\\]', lambda match: undone[match.group()], quoted[1:-1])
        assert body == value
        assert not re.search(r'(?<!\\)(\\\\)*["$]', quoted[1:-1])
    else:
        assert quoted == value


def test_the_env_file_has_one_line_a_variable() -> None:
    text = render([Variable("A", "1", (), "x"), Variable("B", "two words", (), "x")])
    assert text.splitlines()[1:] == ["A=1", 'B="two words"']


COMPOSE = """\
x-environment: &environment
  SHARED: ${SHARED:-one}
services:
  prefill:
    environment:
      <<: *environment
      EXTRA_ARGUMENTS: ${PREFILL_EXTRA_ARGUMENTS:-}
    command:
      - prefill
      - --size=${SIZE:-4}
      # a comment with ${COMMENTED:-out}
      - --other=${OTHER:-5}
"""
OVERRIDE = """\
services:
  prefill:
    environment: {SHARED: two}
"""


def test_each_argument_and_variable_names_file_line_and_who_set_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(COMPOSE)
    (tmp_path / "b.yaml").write_text(OVERRIDE)
    effective: dict[str, Any] = {
        "services": {
            "prefill": {
                "command": ["prefill", "--size=8", "--other=5"],
                "environment": {"SHARED": "two", "EXTRA_ARGUMENTS": "--x $$y"},
            }
        }
    }
    lines = [
        Variable("SIZE", "8", ("prefill", "gpus"), "deploy.toml:3"),
        Variable("PREFILL_EXTRA_ARGUMENTS", "--x $y", ("prefill", "extra_arguments"), "deploy.toml:5"),
    ]
    found = settings(effective, [tmp_path / "a.yaml", tmp_path / "b.yaml"], lines)
    assert [(item.name, item.value, item.origin) for item in found] == [
        ("", "prefill", "a.yaml:9"),
        ("", "--size=8", "deploy.toml:3 via SIZE"),
        ("", "--other=5", "a.yaml:12 default"),
        ("", "--disaggregation-mode=prefill", LAUNCHER),
        ("", "--x", "deploy.toml:5 via PREFILL_EXTRA_ARGUMENTS"),
        ("", "$y", "deploy.toml:5 via PREFILL_EXTRA_ARGUMENTS"),
        ("EXTRA_ARGUMENTS", "--x $y", "deploy.toml:5 via PREFILL_EXTRA_ARGUMENTS"),
        ("SHARED", "two", "b.yaml:3"),
    ]


def test_variables_in_comments_are_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(COMPOSE)
    assert variable_names([tmp_path / "a.yaml"]) == {"SHARED", "PREFILL_EXTRA_ARGUMENTS", "SIZE", "OTHER"}


def test_the_launcher_adds_what_the_origins_say() -> None:
    from engine_runtime.launch import arguments

    from deploy.stack.origins import LAUNCHER_ADDS

    for role, added in LAUNCHER_ADDS.items():
        assert arguments([role], {}) == (role, list(added))


def test_each_role_of_the_compose_files_is_known() -> None:
    document = cast(dict[str, Any], yaml.safe_load((ROOT / "compose.yaml").read_text()))
    assert set(document["services"]) == {*ENGINES["pd"], ROUTER}
