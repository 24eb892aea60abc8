"""Where a stack answers, however it was started."""

from typing import Any, cast

import pytest

from deploy.stack.compose import RoleState, Stack
from deploy.stack.status import running_endpoint


class Configured:
    """A stack of which only the effective configuration is asked."""

    def config(self) -> dict[str, Any]:
        ports = [{"host_ip": "127.0.0.1", "published": "30000", "target": 30000}]
        return {"services": {"router": {"ports": ports}, "prefill": {"command": []}}, "secrets": {}}


def role(name: str, *ports: int) -> RoleState:
    return RoleState(name, "id", name, "i", "running", "healthy", 0, False, 0, None, 1, frozenset(ports), "", ())


@pytest.mark.parametrize(
    ("roles", "url"),
    [
        ((role("router", 30000),), "http://127.0.0.1:30000"),
        ((role("router", 31235),), "http://127.0.0.1:31235"),
        ((role("router"), role("front", 443)), "http://127.0.0.1:443"),
        ((role("router"),), "http://127.0.0.1:30000"),
        ((role("prefill"),), None),
    ],
)
def test_the_url_has_the_port_that_the_containers_publish(roles: tuple[RoleState, ...], url: str | None) -> None:
    target = running_endpoint(cast("Stack", Configured()), roles)
    assert (target.url if target else None) == url
