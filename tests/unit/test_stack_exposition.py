from datetime import UTC, datetime
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from deploy.stack.accept import Acceptance
from deploy.stack.compose import RoleState
from deploy.stack.exposition import accepted, roles, write_roles
from deploy.stack.state import State

AT = datetime(2026, 11, 30, 1, 0, tzinfo=UTC)


def container(role: str, health: str, restarts: int = 0, started: datetime | None = AT) -> RoleState:
    return RoleState(role, "id", role, "i", "running", health, 0, False, restarts, started, 1, frozenset(), "", ())


def values(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("role", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_each_containers_state_is_a_sample_of_its_role() -> None:
    found = values(roles([container("prefill", "healthy", 2), container("decode", "unhealthy", started=None)], AT))
    assert found[("deploy_role_serving", "prefill")] == 1
    assert found[("deploy_role_serving", "decode")] == 0
    assert found[("deploy_role_restarts", "prefill")] == 2
    assert found[("deploy_role_started_timestamp_seconds", "prefill")] == AT.timestamp()
    assert ("deploy_role_started_timestamp_seconds", "decode") not in found
    assert found[("deploy_observed_timestamp_seconds", "")] == AT.timestamp()


def test_an_acceptance_says_what_was_accepted_and_how_the_cache_travelled() -> None:
    shown = Acceptance("u", "m", 300, 48, ("prefill", "decode"), 4096, "cuda_ipc", 0.25, 1.0, 9, False)
    text = accepted(shown, {"profile": "pd", "image": 'a"b'}, AT)
    (info,) = [family for family in text_string_to_metric_families(text) if family.name == "deploy_accepted_info"]
    assert info.samples[0].labels == {"profile": "pd", "image": 'a"b', "transport": "cuda_ipc"}
    assert values(text)[("deploy_accepted_kv_bytes", "")] == 4096
    assert values(text)[("deploy_accepted_first_token_seconds", "")] == 0.25


def test_nothing_is_written_for_a_stack_without_a_page_of_metrics(tmp_path: Path) -> None:
    state = State(tmp_path)
    write_roles(state, [], AT)
    assert not state.metrics.exists()
    state.metrics.mkdir()
    write_roles(state, [container("router", "healthy")], AT)
    assert [file.name for file in state.metrics.iterdir()] == ["roles.prom"]
