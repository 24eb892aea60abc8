import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deploy.spec.load import load, parse
from deploy.stack.compose import compose_files
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
    known = variable_names(compose_files(ROOT, "pd", "p2p"))
    key = Facts("i", Path("/m"), Path("/key"), {"MEMLOCK": "1", "NOFILE": "2"})
    assert {line.name for line in variables(load(ROOT / "deploy.toml"), key)} <= known


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
    from deploy.stack.compose import ROLES

    document = cast(dict[str, Any], yaml.safe_load((ROOT / "compose.yaml").read_text()))
    assert set(document["services"]) == set(ROLES)
