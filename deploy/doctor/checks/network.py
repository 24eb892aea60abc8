"""Checks of ports and firewalls."""

import ipaddress
from collections.abc import Iterator

from deploy.doctor.check import check
from deploy.doctor.finding import Needs, Problem, error, warning
from deploy.host.report import HostReport

GROUP = "Network"
_EVERY = {"0.0.0.0", "::"}


@check("port.in_use", GROUP)
def port_in_use(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Somebody else listens where the router is to be published. Docker's own proxy may be our running stack."""
    for listener in report.listeners or []:
        collides = listener.address == needs.bind or _EVERY & {listener.address, needs.bind}
        if listener.port != needs.port or not collides or listener.process == "docker-proxy":
            continue
        holder = f"{listener.process} (pid {listener.pid})" if listener.process else "a process of another user"
        yield error(
            f"port {needs.port} is in use by {holder}",
            "the router is published there",
            "stop that process, or set another port under [router] in deploy.toml",
            look=f"sudo ss -ltnp 'sport = :{needs.port}'",
        )
        return


@check("firewall.bypassed", GROUP)
def firewall_bypassed(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """A firewall gives a false sense of safety: Docker's rules come before it."""
    names = [name for name, on in (("ufw", report.firewall.ufw), ("firewalld", report.firewall.firewalld)) if on]
    docker_writes_rules = report.docker is not None and report.docker.iptables is not False
    if names and docker_writes_rules and not ipaddress.ip_address(needs.bind).is_loopback:
        yield warning(
            f"the router is published on {needs.bind} and {names[0]} is active",
            f"ports that Docker publishes go around {names[0]}: its rules do not protect this one",
            'bind to "127.0.0.1" and put a reverse proxy before it, or filter in the chain DOCKER-USER',
            look="sudo iptables -L DOCKER-USER -n",
            link="https://github.com/moby/moby/issues/22054",
        )
