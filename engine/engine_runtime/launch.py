"""Role entry point of the containers: `python -m engine_runtime.launch ROLE ARGUMENT...`.

ROLE is `prefill`, `decode`, `engine` (one server that does both), `router` (it runs behind its gate), `front` (HAProxy
before the router) or `exporter` (the metrics of all roles); the arguments are SGLang's or its router's own. Further
arguments come from the variable EXTRA_ARGUMENTS.

Router and front read their keys from the secret files, so that they appear in no argument list, environment or log. The
engines have none: only the router can reach them, and SGLang would print the key in its log and in `/server_info`.
"""

import argparse
import importlib
import math
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from engine_runtime import cpu, exporter, front, health, jit
from engine_runtime.secret_files import ADMIN_KEY_FILE, KEYS_FILE, UsageError, read_keys, read_text

ENGINE_ROLES = ("prefill", "decode", "engine")
# The router behind its gate; only the gate starts it.
ROUTER_ALONE = "router-alone"
ROLES = (*ENGINE_ROLES, "router", ROUTER_ALONE, "front", "exporter")
PORT = 30000
# SGLang's own default.
BOOTSTRAP_PORT = 8998
NUMA_NODES_FROM = "NUMA_NODES_FROM"
SECRET_ARGUMENTS = ("--api-key", "--admin-api-key", "--control-plane-api-keys")


def arguments(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Split the command line into the role and the arguments of the role's own program.

    Args:
        command: Everything after the module's name.
        environment: EXTRA_ARGUMENTS in it is split like a shell would and put last, where it wins. With
            NUMA_NODES_FROM=driver `--numa-node` is left out, and SGLang asks the driver where each GPU hangs: for
            whoever chooses the GPUs of a container without knowing its arguments (Kubernetes' device plugin).

    Raises:
        UsageError: No role, an unknown one, a secret on the command line, unbalanced quotes in EXTRA_ARGUMENTS, or
            another source of NUMA nodes.
    """
    if not command or command[0] not in ROLES:
        raise UsageError(f"expected one of {', '.join(ROLES)} as first argument, got {' '.join(command[:1]) or 'none'}")
    role, rest = command[0], list(command[1:])
    try:
        rest += shlex.split(environment.get("EXTRA_ARGUMENTS", ""))
    except ValueError as error:
        raise UsageError(f"EXTRA_ARGUMENTS cannot be split into arguments: {error}") from error
    for argument in rest:
        if argument.split("=")[0] in SECRET_ARGUMENTS:
            raise UsageError("keys on the command line show in `docker inspect`; put the key into the secret file")
    source = environment.get(NUMA_NODES_FROM, "arguments")
    if source not in ("arguments", "driver"):
        raise UsageError(f"{NUMA_NODES_FROM} is arguments or driver, not {source}")
    if source == "driver":
        rest = without_option(rest, "--numa-node")
    if role in ("prefill", "decode"):
        rest.append(f"--disaggregation-mode={role}")
    return role, rest


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """Arguments without an option and its values, however often it is there."""
    kept: list[str] = []
    inside = False
    for argument in arguments:
        if argument.startswith("--"):
            inside = argument.partition("=")[0] == option
        if not inside:
            kept.append(argument)
    return kept


def router_key(path: Path) -> str | None:
    """The one key in the file, None if there is none.

    Raises:
        UsageError: as `read_keys`, or there are more: the router knows one.
    """
    keys = list(read_keys(path))
    if len(keys) > 1:
        raise UsageError("the router takes one API key; with compose.front.yaml there can be more")
    return keys[0] if keys else None


def check_exposure(published_address: str) -> None:
    """Refuse to serve other machines with the router itself: some of its routes ask for no key.

    Args:
        published_address: Host address the router's port is published on; empty means every address.

    Raises:
        UsageError: The address is not a loopback one.
    """
    address = published_address.strip("[]")
    try:
        loopback = ip_address(address).is_loopback
    except ValueError:
        loopback = address == "localhost"
    if not loopback:
        raise UsageError(
            f"the router is published on {published_address or 'every address'}, and some of its routes ask for no "
            "key: add compose.front.yaml and set API_KEY_FILE, or BIND_ADDRESS=127.0.0.1"
        )


def check_bootstrap_port(arguments: Sequence[str]) -> None:
    """Refuse to start a prefill that decode could not find: SGLang only logs that the port is taken, and serves on.

    Raises:
        UsageError: another process has the port.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=BOOTSTRAP_PORT)
    port = parser.parse_known_args(arguments)[0].disaggregation_bootstrap_port
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UsageError(
            f"port {port}, where decode asks for the way to prefill, cannot be had: {error.strerror}; "
            "--disaggregation-bootstrap-port names another, and the router's --prefill the same"
        ) from error


def run_engine(rest: list[str]) -> None:
    """Run SGLang's server in this process until it ends."""
    server, plugins = _import("sglang.launch_server"), _import("sglang.srt.plugins")
    plugins.load_plugins()
    if cpu.wanted() and not cpu.applied():
        raise UsageError("SGLang did not load the CPU plug-in: is engine-runtime installed, is SGLANG_PLUGINS set?")
    jit.begin(_ready, os.environ)
    _import("sglang.srt.entrypoints.http_server").app.add_api_route(jit.ROUTE, jit.state)
    try:
        server.run_server(server.prepare_server_args(rest))
    finally:
        server.kill_process_tree(os.getpid(), include_parent=False)


def _ready() -> bool:
    try:
        return health.fetch_local(health.PATHS["engine"]) == 200
    except OSError:
        return False


def run_gate(rest: list[str], environment: Mapping[str, str]) -> int:
    """Run the router behind its gate, on the address that the router was given; returns the exit code."""
    gate = _import("engine_runtime.gate")
    silence_s = engine_silence(environment, gate.ASK_S, gate.SILENCE_S)
    # Of two equal options the last counts, and `rest` holds EXTRA_ARGUMENTS already.
    os.environ.pop("EXTRA_ARGUMENTS", None)
    own = ["--host=127.0.0.1", f"--port={gate.ROUTER_PORT}"]
    command = [sys.executable, "-m", "engine_runtime.launch", ROUTER_ALONE, *rest, *own]
    return gate.run(rest, command, listen_address(rest), PORT, silence_s)


def engine_silence(environment: Mapping[str, str], least: float, default: float) -> float:
    """Seconds for which an engine may show no sign of life, from ENGINE_SILENCE.

    Raises:
        UsageError: not a number, or not above `least`.
    """
    text = environment.get("ENGINE_SILENCE") or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not least < seconds < math.inf:
        raise UsageError(f"ENGINE_SILENCE is a number of seconds above {least:.0f}, not {text}")
    return seconds


def listen_address(arguments: Sequence[str]) -> str:
    """What `--host` says, the last of several; every address without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="0.0.0.0")
    return parser.parse_known_args(arguments)[0].host


def run_router(rest: list[str], api_key: str | None, admin_key: str | None, gate_key: str) -> None:
    """Run the router in this process until it ends.

    Args:
        rest: The router's arguments.
        api_key: Key that clients must send; None leaves the API open.
        admin_key: Key for adding workers, flushing caches and loading modules; None locks these for everyone ...
        gate_key: ... but the gate, which takes workers out and brings them back.
    """
    # Not sglang_router.launch_router: it imports torch, which costs seconds and half a gigabyte.
    router_args, router = _import("sglang_router.router_args").RouterArgs, _import("sglang_router.router").Router
    parser = argparse.ArgumentParser(prog="router", allow_abbrev=False)
    router_args.add_cli_args(parser)
    router_arguments = router_args.from_cli_args(parser.parse_args(rest))
    router_arguments.api_key = api_key
    router_arguments.control_plane_api_keys = [
        ("admin", "admin", admin_key or secrets.token_urlsafe(32), "admin"),
        ("gate", "gate", gate_key or secrets.token_urlsafe(32), "admin"),
    ]
    router.from_args(router_arguments).start()


def _import(name: str) -> Any:
    """A module that only the image has, and only the role that uses it should load."""
    return importlib.import_module(name)


def main() -> None:
    """Run the role that the command line names."""
    try:
        role, rest = arguments(sys.argv[1:], os.environ)
        if role == "router":
            check_exposure(os.environ.get("PUBLISHED_ADDRESS", "127.0.0.1"))
            sys.exit(run_gate(rest, os.environ))
        elif role == ROUTER_ALONE:
            admin_key = read_text(ADMIN_KEY_FILE).strip() or None
            run_router(rest, router_key(KEYS_FILE), admin_key, sys.stdin.readline().strip())
        elif role == "front":
            front.run(os.environ)
        elif role == "exporter":
            exporter.run(os.environ)
        else:
            if role == "prefill":
                check_bootstrap_port(rest)
            run_engine(rest)
    except UsageError as error:
        sys.exit(f"engine_runtime.launch: {error}")


if __name__ == "__main__":
    main()
