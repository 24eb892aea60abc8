"""The verb `scale`: ten, a hundred or a thousand hosts, simulated. `cli.py` mounts it."""

from typing import Annotated

import typer

from deploy import render
from deploy.command_line import (
    ROOT,
    SPEC,
    JsonOption,
    Panel,
    ProfileOption,
    SpecOption,
    console,
    examples,
    print_json,
    verbs,
)
from deploy.lock.model import read_lock
from deploy.scale.distribution import WAYS, Network
from deploy.scale.report import COMPILE_S, DISK_RATE, GIGABIT, UNPACK_RATE, Assumed, Fleet, fleets
from deploy.spec.load import load

MOST_RATE = 10_000
"""Gb/s or GB/s: beyond anything that can be bought."""

app = verbs()
out = console()
err = console(stderr=True)
MOST_HOSTS = 2000


@app.command(
    "scale",
    rich_help_panel=Panel.TUNE,
    epilog=examples(
        "deploy scale                                   10, 100 and 1000 hosts",
        "deploy scale --hosts 40 --registry 40 --network 100 --json",
        "deploy scale --compile 0                       the folder of compiled kernels is brought along",
    ),
)
def scale_verb(
    hosts: Annotated[str, typer.Option("--hosts", metavar="N,N,…", help="How many.")] = "10,100,1000",
    network: Annotated[
        float, typer.Option("--network", min=0.1, max=MOST_RATE, help="Gb/s of one host, each way.")
    ] = 25,
    registry: Annotated[
        float, typer.Option("--registry", min=0.1, max=MOST_RATE, help="Gb/s that registry or hub send.")
    ] = 10,
    cache: Annotated[
        float, typer.Option("--cache", min=0.1, max=MOST_RATE, help="Gb/s of a pull-through cache for 16 hosts.")
    ] = 25,
    disk: Annotated[
        float, typer.Option("--disk", min=0.01, max=MOST_RATE, help="GB/s at which a host reads the model.")
    ] = DISK_RATE / 1e9,
    unpack: Annotated[
        float, typer.Option("--unpack", min=0.01, max=MOST_RATE, help="GB/s of unpacked image.")
    ] = UNPACK_RATE / 1e9,
    compile: Annotated[
        float, typer.Option("--compile", min=0, max=1e6, help="Seconds of the first start's kernels.")
    ] = COMPILE_S,
    spec: SpecOption = SPEC,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate how long it takes until so many hosts serve, and what grows with them. Touches no host.

    Image and model come from the registry, from pull-through caches, or from the other hosts (peer to peer). What is
    measured and what is assumed is in docs/scale.md.
    """
    try:
        counts = [int(word) for word in hosts.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= MOST_HOSTS for count in counts):
        raise typer.BadParameter(f"numbers from 1 to {MOST_HOSTS}, with commas between", param_hint="--hosts")
    lines = Network(registry * GIGABIT, cache * GIGABIT, network * GIGABIT)
    assumed = Assumed(lines, disk * 1e9, unpack * 1e9, compile=compile)
    chosen = load(spec, profile.value if profile else None).spec
    with err.status("simulating; a thousand hosts take a minute"):
        found = fleets(chosen, read_lock(ROOT), counts, assumed)
    if as_json:
        print_json([fleet.as_dict() for fleet in found])
        return
    headers = ["hosts", "from", "image", "model", "serving", "again", "in flight", "routers", "probes", "between hosts"]
    out.print(render.table(headers, [row for fleet in found for row in _rows(fleet)]))


def _rows(fleet: Fleet) -> list[list[str]]:
    """A line for each way; what does not depend on it stands in the first."""
    rows: list[list[str]] = []
    for way in WAYS:
        once = [
            _time(fleet.later),
            str(fleet.requests),
            str(fleet.routers),
            f"{fleet.probes:.1f}/s",
            f"{fleet.traffic / 1e9:.2f} GB/s",
        ]
        head = [str(fleet.hosts) if not rows else "", way]
        times = [_time(found[way]) for found in (fleet.image, fleet.model, fleet.first)]
        rows.append([*head, *times, *(once if not rows else [""] * len(once))])
    return rows


def _time(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6 * 3600 else f"{seconds / 3600:.0f} h"
