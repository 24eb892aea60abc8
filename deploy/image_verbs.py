"""The verbs about the engine image as a thing to hand on: `push`, `pull`, `import`, `sbom`.

`cli.py` mounts them.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from deploy import render
from deploy.command_line import ROOT, SPEC, JsonOption, Panel, SpecOption, console, examples, print_json, verbs
from deploy.host import probe
from deploy.host.docker_facts import require_docker
from deploy.image.locked import locked_image
from deploy.image.named_registry import registry_client
from deploy.image.sbom import attach, make_sbom
from deploy.image.signature import sign
from deploy.image.transfer import Pulled, import_archive, pull, push
from deploy.lock.document import FILE_NAME
from deploy.lock.model import read_lock, write_lock

SIGNING_KEY = "cosign.key"

app = verbs()
out = console()
err = console(stderr=True)

RegistryCertificates = Annotated[
    Path | None, typer.Option("--certificates", help="CA file for the registry.", show_default="the machine's")
]


@app.command(
    "push",
    rich_help_panel=Panel.LOCK,
    epilog=examples(
        "deploy push                            to [image] registry of deploy.toml",
        "deploy push --to registry.lan:5000     to another one",
        "deploy push && git add deploy.lock     the lock now names the image as the registry holds it",
        "deploy push --key cosign.key           and sign it; [image] public_key makes `up` ask for that",
    ),
)
def push_verb(
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="REGISTRY", help="HOST[:PORT][/PATH].", show_default="[image] registry"),
    ] = None,
    spec: SpecOption = SPEC,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", metavar="FILE", help="Sign with this private key of cosign's.", show_default="cosign.key, if any"
        ),
    ] = None,
    certificates: RegistryCertificates = None,
    as_json: JsonOption = False,
) -> None:
    """Put the locked image into a registry, so that other hosts need not build it; layers that are there stay.

    Its bill of materials goes beside it, and a signature if there is a key. deploy.lock then has the digests by which
    the registry holds the image and each layer.
    """
    lock = read_lock(ROOT)
    image = locked_image(ROOT, lock)
    require_docker(probe.docker_facts(), cdi=False)
    with registry_client(to, spec, certificates) as client, render.transfer(err) as progress:
        pushed = push(image, client, progress=progress)
        attach(client, client.manifest(pushed.image.manifest), make_sbom(lock))
    key = key or (spec.parent / SIGNING_KEY if (spec.parent / SIGNING_KEY).exists() else None)
    if key:
        sign(client.registry, pushed.image.manifest, key)
    if pushed.image != image:
        write_lock(ROOT, lock.model_copy(update={"image": pushed.image}))
    if as_json:
        print_json({"reference": pushed.reference, "changed": pushed.changed, "signed": key is not None})
        return
    out.print(f"{pushed.reference}  {'pushed' if pushed.changed else 'was there'}", soft_wrap=True)
    if pushed.image != image:
        err.print(f"{FILE_NAME} has its digests now: commit it, the other hosts verify against it")


@app.command(
    "pull",
    rich_help_panel=Panel.LOCK,
    epilog=examples("deploy pull", "deploy pull --from registry.lan:5000 --json | jq .size"),
)
def pull_verb(
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="REGISTRY", help="HOST[:PORT][/PATH].", show_default="[image] registry"),
    ] = None,
    spec: SpecOption = SPEC,
    certificates: RegistryCertificates = None,
    as_json: JsonOption = False,
) -> None:
    """Bring the locked image from a registry to this host: only layers that are not here, each verified.

    What arrived before a cut or Ctrl-C is kept; the same command goes on from there.
    """
    image = locked_image(ROOT, read_lock(ROOT))
    require_docker(probe.docker_facts(), cdi=False)
    with registry_client(source, spec, certificates) as client, render.transfer(err) as progress:
        _show(pull(image, client, progress=progress), as_json)


@app.command("import", rich_help_panel=Panel.LOCK, epilog=examples("deploy import /mnt/usb/image.tar"))
def import_verb(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An OCI archive.", exists=True, dir_okay=False)],
    as_json: JsonOption = False,
) -> None:
    """Bring the locked image from a file to this host. An archive that is cut, damaged or another image is refused."""
    image = locked_image(ROOT, read_lock(ROOT))
    require_docker(probe.docker_facts(), cdi=False)
    with render.transfer(err) as progress:
        _show(import_archive(image, file, progress=progress), as_json)


@app.command(
    "sbom",
    rich_help_panel=Panel.LOCK,
    epilog=examples("deploy sbom > sbom.json", "deploy sbom | jq -r '.components[].purl'"),
)
def sbom_verb() -> None:
    """Print the image's bill of materials (CycloneDX, JSON), from deploy.lock: every package and wheel by hash."""
    sys.stdout.write(make_sbom(read_lock(ROOT)))


def _show(pulled: Pulled, as_json: bool) -> None:
    image = pulled.image
    if as_json:
        print_json({"image": asdict(image), "layers": pulled.layers, "size": pulled.size})
        return
    out.print(f"{image.tag}  {image.id}  {image.size_bytes / 1e9:.1f} GB", soft_wrap=True)
    err.print(f"{pulled.layers} layers, {pulled.size / 1e6:,.1f} MB came; the others were here")
