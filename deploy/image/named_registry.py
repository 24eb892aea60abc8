"""The registry that the command line or deploy.toml names."""

from pathlib import Path

from deploy.image.registry import Client, NoRegistry, parse_registry
from deploy.spec.load import load


def registry_client(named: str | None, spec: Path, certificates: Path | None = None) -> Client:
    """A client of the registry that the command line names, else deploy.toml.

    Args:
        spec: the deploy.toml; read only if the command line names none.

    Raises:
        NoRegistry: there is none, or it is no address.
        SpecError, NoSpec: deploy.toml cannot be used.
    """
    if address := named or load(spec).spec.image.registry:
        return Client(parse_registry(address), certificates)
    raise NoRegistry(
        "no registry is named",
        f"{spec} has none under [image]",
        "set registry there, or name one on the command line: HOST[:PORT][/PATH], see --help",
    )
