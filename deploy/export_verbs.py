"""The verb `export`: the locked image as one file, or the locked system as manifests. `cli.py` mounts it."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deploy import render
from deploy.command_line import (
    ROOT,
    SPEC,
    JsonOption,
    ProfileOption,
    SpecOption,
    console,
    examples,
    print_json,
    verbs,
)
from deploy.host import probe
from deploy.host.docker_facts import require_docker
from deploy.image.locked import locked_image
from deploy.image.transfer import export, tag_of
from deploy.kubernetes.export import OVERLAYS, manifests, write
from deploy.kubernetes.source import Wishes, prepare, served_model
from deploy.lock.model import read_lock
from deploy.spec.load import load

IMAGE = "image"
# RFC 1123: what Kubernetes takes as a name.
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class ImageByDefault(TyperGroup):
    """`deploy export FILE` is `deploy export image FILE`: a first word that is no kind of export is the file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        asks_help = bool(args) and args[0] in ctx.help_option_names
        if args and args[0] not in self.commands and not asks_help:
            args = [IMAGE, *args]
        return super().parse_args(ctx, args)


app = verbs(
    cls=ImageByDefault,
    help="Write the locked image into one file, or the locked system as Kubernetes manifests.",
    epilog=examples(
        "deploy export image.tar              the image; the same as deploy export image image.tar",
        "deploy export kubernetes fleet       manifests; a file of that name would be ./kubernetes",
    ),
    no_args_is_help=True,
)
out = console()
err = console(stderr=True)


@app.command(IMAGE, epilog=examples("deploy export image.tar", "deploy export /mnt/usb/image.tar"))
def image_verb(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write.")],
    as_json: JsonOption = False,
) -> None:
    """Write the locked image into one file (an OCI archive) for hosts without network."""
    image = locked_image(ROOT, read_lock(ROOT))
    require_docker(probe.docker_facts(), cdi=False)
    with render.transfer(err) as progress:
        manifest = export(image, file, progress=progress)
    size = file.stat().st_size
    if as_json:
        print_json({"file": str(file), "size": size, "manifest": manifest.digest, "image": image.id})
    else:
        out.print(f"{file}  {tag_of(image)}  {size / 1e9:.1f} GB", soft_wrap=True)


@app.command(
    "kubernetes",
    epilog=examples(
        "deploy export kubernetes fleet                    what deploy.toml describes, on one host",
        "deploy export kubernetes fleet --replicas 10      on ten",
        "kubectl diff -k fleet/overlays/device-plugin      what would change ...",
        "kubectl apply -k fleet/overlays/device-plugin     ... and do it",
        "kubectl apply -k fleet.previous/overlays/device-plugin   back to the export before",
    )
    + "\n\n\b\ndocs/kubernetes.md says what a cluster must have; deploy doctor --kubernetes looks.",
)
def kubernetes_verb(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write, replaced as a whole.")],
    spec: SpecOption = SPEC,
    profile: ProfileOption = None,
    replicas: Annotated[
        int,
        typer.Option("--replicas", "-n", min=1, max=10000, help="Copies of what deploy.toml describes, one a host."),
    ] = 1,
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="Where everything goes.")] = "dsv4",
    image: Annotated[
        str | None,
        typer.Option("--image", metavar="NAME@DIGEST", help="The image.", show_default="[image] registry, deploy.lock"),
    ] = None,
    model_folder: Annotated[
        str | None,
        typer.Option("--model-folder", metavar="PATH", help="The model on every node.", show_default="[model] path"),
    ] = None,
    draft_folder: Annotated[
        str | None,
        typer.Option(
            "--draft-folder", metavar="PATH", help="DSpark's draft there.", show_default="[engine] draft_path"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write Kubernetes manifests (Kustomize: a base, components, overlays) from deploy.toml and deploy.lock.

    Arguments and environment of each role are those of the compose files, which deploy.lock has. The export before
    moves to DIR.previous, and what has changed since becomes the change-cause annotation.
    """
    if not NAME.fullmatch(namespace):
        raise typer.BadParameter("lower-case letters, digits and -, at most 63", param_hint="--namespace")
    spec_file = load(spec, profile.value if profile else None)
    wishes = Wishes(folder, namespace, replicas, image, model_folder, draft_folder)
    roles, cluster, lock = prepare(ROOT, spec_file, wishes)
    model = served_model(spec_file, lock)
    files = manifests(roles, cluster, model)
    previous = write(folder, files, lock)
    overlays = sorted(name.rsplit("/", 1)[0] for name in files if name.startswith(f"{OVERLAYS}/"))
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "previous": str(previous) if previous else None,
                "files": sorted(files),
                "overlays": overlays,
                "image": cluster.image,
                "change": cluster.change,
            }
        )
        return
    for overlay in overlays:
        out.print(f"{folder}/{overlay}", markup=False, soft_wrap=True)
    usual = next(name for name in overlays if name.endswith(("/device-plugin", "/plain")))
    err.print(f"{len(files)} files; apply one: kubectl apply -k {folder}/{usual}", markup=False, soft_wrap=True)
    if previous:
        err.print(f"the export before is in {previous}", markup=False, soft_wrap=True)
    if model is None:
        err.print(
            "deploy.lock has no model: pods check only that its files are all there\n"
            "  fix: deploy lock --update model, then export again",
            markup=False,
            soft_wrap=True,
        )
