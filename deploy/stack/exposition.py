"""The controller's own view in Prometheus's text format, for the page of metrics (engine_runtime/exporter.py)."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest

from deploy.stack.accept import Acceptance
from deploy.stack.compose import RoleState, Stack
from deploy.stack.state import State, write

ACCEPTED_FILE, ROLES_FILE = "accepted.prom", "roles.prom"


def accepted(acceptance: Acceptance, identity: Mapping[str, str], at: datetime) -> str:
    """What the last acceptance showed.

    Args:
        identity: labels that say what was accepted: profile, image.
        at: when it was.
    """
    registry = CollectorRegistry()
    labels = {**identity, "transport": acceptance.transport}
    info = Gauge("deploy_accepted_info", "What was accepted last, always 1.", [*labels], registry=registry)
    info.labels(**labels).set(1)
    for name, text, value in (
        ("deploy_accepted_timestamp_seconds", "When the stack was accepted last.", at.timestamp()),
        ("deploy_accepted_kv_bytes", "KV cache that crossed from prefill to decode then.", acceptance.transferred),
        ("deploy_accepted_first_token_seconds", "Time to the first token then.", acceptance.first_token_s),
    ):
        Gauge(name, text, registry=registry).set(value)
    return generate_latest(registry).decode()


def roles(states: Iterable[RoleState], at: datetime) -> str:
    """What Docker says of each container.

    Args:
        at: when it was asked.
    """
    registry = CollectorRegistry()

    def gauge(name: str, text: str) -> Gauge:
        return Gauge(name, text, ["role"], registry=registry)

    serving = gauge("deploy_role_serving", "Whether the container runs and its health check passes.")
    restarts = gauge("deploy_role_restarts", "How often Docker started the container again.")
    killed = gauge("deploy_role_out_of_memory", "Whether the kernel killed it for lack of memory.")
    started = gauge("deploy_role_started_timestamp_seconds", "When its process started.")
    for state in states:
        serving.labels(state.role).set(state.serving)
        restarts.labels(state.role).set(state.restarts)
        killed.labels(state.role).set(state.out_of_memory)
        if state.started_at:
            started.labels(state.role).set(state.started_at.timestamp())
    looked = "When the controller last looked at the containers."
    Gauge("deploy_observed_timestamp_seconds", looked, registry=registry).set(at.timestamp())
    return generate_latest(registry).decode()


def write_accepted(state: State, stack: Stack, acceptance: Acceptance, image: str) -> None:
    """Show an acceptance, and the containers at that moment, on the page of metrics, if there is one."""
    if not state.metrics.is_dir():
        return
    now = datetime.now(UTC)
    write(state.metrics / ACCEPTED_FILE, accepted(acceptance, {"profile": stack.profile, "image": image}, now))
    write_roles(state, stack.roles(), now)


def write_roles(state: State, states: Iterable[RoleState], at: datetime) -> None:
    """Show the containers on the page of metrics, if there is one."""
    if not state.metrics.is_dir():
        return
    write(state.metrics / ROLES_FILE, roles(states, at))
