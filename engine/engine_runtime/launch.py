"""Role entry point of the containers: `python -m engine_runtime.launch ROLE ARGUMENT...`.

ROLE is `prefill`, `decode`, `engine` (one server that does both) or `router`; the arguments are SGLang's or its
router's own. Further arguments come from the variable EXTRA_ARGUMENTS. The router's API key is read from the file
API_KEY_FILE, so that it appears in no argument list, environment or log.
"""

import importlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from engine_runtime import cpu

ENGINE_ROLES = ("prefill", "decode", "engine")
ROLES = (*ENGINE_ROLES, "router")
API_KEY_FILE = Path("/run/secrets/api_key")


class UsageError(Exception):
    """The container was started in a way that cannot work; the text says what to change."""


def arguments(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Split the command line into the role and the arguments of the role's own program.

    Args:
        command: Everything after the module's name.
        environment: EXTRA_ARGUMENTS in it is split like a shell would and put last, where it wins.

    Raises:
        UsageError: No role, an unknown one, a secret on the command line, or unbalanced quotes in EXTRA_ARGUMENTS.
    """
    if not command or command[0] not in ROLES:
        raise UsageError(f"expected one of {', '.join(ROLES)} as first argument, got {' '.join(command[:1]) or 'none'}")
    role, rest = command[0], list(command[1:])
    try:
        rest += shlex.split(environment.get("EXTRA_ARGUMENTS", ""))
    except ValueError as error:
        raise UsageError(f"EXTRA_ARGUMENTS cannot be split into arguments: {error}") from error
    for argument in rest:
        if argument.split("=")[0] in ("--api-key", "--admin-api-key"):
            raise UsageError("keys on the command line show in `docker inspect`; put the key into the secret file")
    if role in ("prefill", "decode"):
        rest.append(f"--disaggregation-mode={role}")
    return role, rest


def read_api_key(path: Path) -> str | None:
    """The key in the file, or None when the file is absent or empty.

    Raises:
        UsageError: The file cannot be read or holds more than one word.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the API key file cannot be read by user {os.getuid()}: {error}") from error
    words = text.split()
    if len(words) > 1:
        raise UsageError("the API key file must hold one word")
    return words[0] if words else None


def check_exposure(published_address: str, api_key: str | None) -> None:
    """Refuse to serve other machines without a key.

    Args:
        published_address: Host address the router's port is published on; empty means every address.
        api_key: The router's key.

    Raises:
        UsageError: The address is not a loopback one and there is no key.
    """
    address = published_address.strip("[]")
    try:
        loopback = ip_address(address).is_loopback
    except ValueError:
        loopback = address == "localhost"
    if not loopback and api_key is None:
        raise UsageError(
            f"the router is published on {published_address or 'every address'} without an API key: "
            "set API_KEY_FILE, or BIND_ADDRESS=127.0.0.1"
        )


def run_engine(rest: list[str]) -> None:
    """Run SGLang's server in this process until it ends."""
    if cpu.wanted():
        use_cpu_standins()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if cpu.wanted() and not cpu.applied():
        raise UsageError("SGLang did not load the CPU plug-in; is the package engine-runtime installed with its metadata?")
    try:
        run_server(prepare_server_args(rest))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def use_cpu_standins() -> None:
    """Put the stand-ins for CUDA-only packages first on the path of this process and of those it starts."""
    folder = str(Path(importlib.import_module("cpu_standins").__file__ or "").parent)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))


def run_router(rest: list[str], api_key: str | None) -> None:
    """Run the router in this process until it ends."""
    from sglang_router.launch_router import launch_router, parse_router_args

    router_arguments = parse_router_args(rest)
    router_arguments.api_key = api_key
    launch_router(router_arguments)


def main() -> None:
    """Run the role that the command line names."""
    try:
        role, rest = arguments(sys.argv[1:], os.environ)
        if role == "router":
            api_key = read_api_key(API_KEY_FILE)
            check_exposure(os.environ.get("PUBLISHED_ADDRESS", "127.0.0.1"), api_key)
            run_router(rest, api_key)
        else:
            run_engine(rest)
    except UsageError as error:
        sys.exit(f"engine_runtime.launch: {error}")


if __name__ == "__main__":
    main()
