"""The verb that counts hosts on paper: `plan`. `cli.py` mounts it."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from deploy.command_line import SPEC, JsonOption, Panel, ProfileOption, SpecOption, console, examples, print_json, verbs
from deploy.errors import WrongInput
from deploy.gap.model import assumptions, prefill
from deploy.gap_verbs import GpuName, gpu_of, measured_levels, setting_of
from deploy.plan.capacity import Limits, Option, Plan, plan
from deploy.plan.service import EFFICIENCY, Service

if TYPE_CHECKING:
    from deploy.spec.model import Spec

IMPOSSIBLE = 1
MOST_TOKENS = 1 << 20

app = verbs()
out = console()
err = console(stderr=True)


def parse_limits(text: str, share: float) -> Limits:
    """`ttft=2,tpot=0.05`, seconds. Raises typer.BadParameter."""
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
            if name.strip() not in ("ttft", "tpot") or not 0 < float(value) < math.inf:
                raise ValueError
        except ValueError:
            raise typer.BadParameter(f"{part!r}: expected ttft=SECONDS,tpot=SECONDS", param_hint="--slo") from None
    return Limits(values.get("ttft"), values.get("tpot"), share)


@app.command(
    "plan",
    rich_help_panel=Panel.TUNE,
    epilog=examples(
        "deploy plan --rps 2 --isl 4096 --osl 512                          hosts, queues, headroom",
        "deploy plan --rps 500 --isl 2048 --osl 256 --slo ttft=2,tpot=0.05",
        "deploy plan --rps 2 --isl 4096 --osl 512 --measured runs/a        steps and prompts as a load test saw them",
        "deploy plan --rps 2 --isl 4096 --osl 512 --profile replicas --json | jq '.plans[0].hosts'",
    )
    + "\n\n\b\nExit code 1 if no number of hosts meets the limits.",
)
def plan_verb(
    rps: Annotated[float, typer.Option(min=1e-3, max=1e5, help="Requests a second.")],
    isl: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Tokens of a prompt.")],
    osl: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Tokens of an answer.")],
    slo: Annotated[str, typer.Option(metavar="ttft=S,tpot=S", help="Limits in seconds, of one or both.")] = "",
    share: Annotated[float, typer.Option(min=1, max=99.9, help="Percent of requests that must meet them.")] = 95.0,
    spec: SpecOption = SPEC,
    profile: ProfileOption = None,
    measured: Annotated[
        list[str] | None, typer.Option(metavar="FOLDER", help="A load test of this profile; its times count then.")
    ] = None,
    efficiency: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="Share of a predicted throughput to expect.")
    ] = EFFICIENCY,
    gpu: Annotated[GpuName | None, typer.Option(help="Instead of the report's, or rtx-pro-6000.")] = None,
    host_report: Annotated[Path | None, typer.Option(metavar="FILE", help="Of deploy doctor --save.")] = None,
    accepted: Annotated[
        float | None, typer.Option(min=1.0, max=8.0, help="Tokens a request keeps of a step, with speculation.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how many hosts of 8 GPUs a load needs, which profile, and how much room is left. Nothing is started.

    Both profiles are planned unless one is named. Times are a load test's where one is given, else predicted; queues
    are simulated. The answer says which, and on what it rests.
    """
    from deploy.spec.load import load

    limits = parse_limits(slo, share)
    if measured and profile is None:
        raise WrongInput("--measured without --profile", "times of one profile say nothing of another", "--profile pd")
    parsed = load(spec, "cpu" if profile == "cpu" else None).spec
    names = [profile.value] if profile else ["pd", "replicas"]
    specs = [parsed if parsed.profile == name else _default(name) for name in names]
    if isl + osl > (longest := specs[0].engine.context_length):
        raise WrongInput(
            f"{isl} + {osl} tokens are more than the context of {longest}",
            "the engines refuse such a request",
            "[engine] context_length in deploy.toml",
        )
    gpu_found = gpu_of(gpu, host_report)
    found: list[Plan] = []
    for one in specs:
        setting = setting_of(one, gpu_found, accepted=accepted if one.engine.speculation != "none" else None)
        service = _service(one, setting, isl, osl, measured or [], efficiency)
        option = Option("pd" if one.profile == "pd" else "replicas", service, setting.engines)
        found.append(plan(option, rps, limits, lambda text: err.print(text, soft_wrap=True)))
    found.sort(key=lambda one: (not one.hosts, one.hosts, -one.headroom))
    if as_json:
        print_json({"rps": rps, "isl": isl, "osl": osl, "limits": asdict(limits), "plans": list(map(_as_dict, found))})
    else:
        _show(found, rps, isl, osl, limits)
    if not found[0].hosts:
        raise typer.Exit(IMPOSSIBLE)


def _default(profile: str) -> "Spec":
    """The profile as `deploy init` would lay it out on 8 GPUs; replicas as four engines of two."""
    from deploy.spec.model import Engine, Role, Spec

    if profile == "pd":
        return Spec()
    replicas = tuple(Role(gpus=(2 * i, 2 * i + 1), numa_node=i // 2) for i in range(4))
    return Spec(profile="replicas", replica=replicas, engine=Engine(memory_fraction=0.9))


def _service(spec: "Spec", setting: Any, isl: int, osl: int, measured: list[str], efficiency: float) -> Service:
    from deploy.spec.memory import ASSUMED_MIB, limits, plan_memory

    requests, chunk = limits(spec)
    fit = plan_memory(ASSUMED_MIB, spec).tokens // (isl + osl)
    if fit < 1:
        raise WrongInput(
            f"the KV cache does not hold one request of {isl + osl} tokens",
            str(plan_memory(ASSUMED_MIB, spec)),
            "a larger [engine] memory_fraction in deploy.toml, or shorter requests",
        )
    service = Service(setting, isl, osl, chunk, min(requests, fit), efficiency=efficiency)
    if not measured:
        return service
    levels = measured_levels(measured, setting.accepted)
    # A load test counts the requests of all engines, a service those of one.
    each = tuple(replace(one, users=max(1, round(one.users / setting.engines))) for one in levels)
    return replace(service, measured=each, prompt_factor=_prompt_factor(measured, service))


def _prompt_factor(measured: list[str], service: Service) -> float | None:
    """Measured over predicted time of a prompt, from the smallest level: there nothing waits. None without one."""
    from loadtest.bench import load
    from loadtest.errors import BenchError

    seen: list[tuple[int, float, float]] = []
    for value in measured:
        if not Path(value).exists():
            continue
        try:
            result = load(Path(value))
        except BenchError:
            continue
        for level in result.levels:
            metrics = level.metrics
            if level.verdict == "valid" and metrics and metrics.ttft and metrics.input_length and level.users == 1:
                seen.append((1, metrics.ttft.p50, metrics.input_length.mean))
    if not seen:
        return None
    _, seconds, tokens = min(seen)
    predicted = sum(one.seconds for one in prefill(max(1, round(tokens)), service.chunk, service.setting))
    return seconds / predicted


def _as_dict(one: Plan) -> dict[str, Any]:
    seen = one.seen
    return {
        "prediction": True,
        "profile": one.option.profile,
        "hosts": one.hosts,
        "headroom": one.headroom,
        "requests_per_second_of_a_host": one.host_rate,
        "sources": one.option.service.sources(),
        "assumptions": _assumed(one),
        "simulation": None
        if seen is None
        else {
            "seconds": one.simulated,
            "requests": seen.arrived,
            "finished": seen.finished,
            "reading": seen.reading,
            "decoding": seen.decoding,
            "batch": seen.batch,
            **{
                name: {f"p{share:g}": seen.percentile(name, share) for share in (50, 95, 99)}
                for name in ("ttft", "tpot")
            },
        },
    }


def _assumed(one: Plan) -> list[str]:
    service = one.option.service
    return [
        *assumptions(service.setting),
        f"all prompts and answers of one length, no shared prefixes; at most {service.slots} requests decoded together "
        "on an engine (the spec's limit, or what the KV cache of a 96 GB GPU holds)",
        "Poisson arrivals, spread over the hosts at random, over a host's engines in turn; an engine of replicas reads "
        "prompts before it goes on decoding",
        "the transfer of the KV cache and the router take no time",
    ]


def _show(found: list[Plan], rps: float, isl: int, osl: int, limits: Limits) -> None:
    wanted = [f"{n} <= {v:g} s" for n, v in (("ttft", limits.ttft), ("tpot", limits.tpot)) if v is not None]
    promise = f", {limits.share:g} % of them with {' and '.join(wanted)}" if wanted else ""
    out.print(f"Prediction: {rps:g} requests/s of {isl} + {osl} tokens{promise}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for one in found:
        table.add_column(one.option.profile, justify="right")
    rows: dict[str, list[str]] = {"hosts of 8 GPUs": [str(one.hosts) if one.hosts else "none does" for one in found]}
    rows["headroom"] = [f"{one.headroom:.0%}" if one.hosts else "" for one in found]
    rows["requests/s of a host"] = [f"{one.host_rate:.2f}" for one in found]
    for name in ("ttft", "tpot"):
        for share in (50, 95, 99):
            rows[f"{name} p{share}, ms"] = [
                f"{one.seen.percentile(name, share) * 1e3:.1f}" if one.seen else "" for one in found
            ]
    rows["reads prompts"] = [f"{one.seen.reading:.0%}" if one.seen else "" for one in found]
    rows["decodes"] = [f"{one.seen.decoding:.0%}" if one.seen else "" for one in found]
    rows["batch"] = [f"{one.seen.batch:.1f}" if one.seen else "" for one in found]
    for name, values in rows.items():
        table.add_row(name, *values)
    out.print(table)
    best = found[0]
    if best.hosts:
        out.print(f"\n{best.option.profile}: {best.hosts} hosts", soft_wrap=True)
    else:
        out.print("\nno number of hosts meets the limits: one request alone takes longer", soft_wrap=True)
    for one in found:
        out.print(f"{one.option.profile}: {'; '.join(one.option.service.sources())}", soft_wrap=True)
    out.print("Assumed:")
    for line in _assumed(best):
        out.print(f"  - {line}", soft_wrap=True)
