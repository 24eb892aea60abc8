"""A whole run: preparation, every level and repetition, verdicts, the result on disk."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from deploy.validation import mistakes
from loadtest import containers, prepare, validity
from loadtest import report as report_files
from loadtest.api import Api
from loadtest.errors import BenchError, NoResult
from loadtest.locked import Locks, differences, is_locked, read_locks
from loadtest.metrics import Metrics, Slo, measure, timeline
from loadtest.plain import mapping, parse
from loadtest.result import (
    AccountResult,
    EngineStatistics,
    Environment,
    GpuStatistics,
    LevelResult,
    Result,
    Target,
    Verdict,
    Window,
)
from loadtest.run import Level, Observed, Progress, check_disk, observe
from loadtest.scrape import GAUGES, Watcher, engine_identity, identity, parse_metrics
from loadtest.sse import Endpoint
from loadtest.validity import Evidence
from loadtest.workload import Plan, Prompts, Trace, Vocabulary, Workload, read_prompts, read_trace

BATCHES = 10
NEEDED_DISK = 64 * 2**20


@dataclass(frozen=True)
class Settings:
    """What the person asked for. Either `users` (closed loop) or `rates` (open loop) or a trace decides the levels."""

    url: str
    workload: Workload
    users: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    duration: float = 60.0
    repetitions: int = 1
    endpoint: Endpoint = "chat"
    model: str | None = None
    api_key_file: Path | None = None
    ca_file: Path | None = None
    seed: int = 1
    temperature: float = 0.0
    tokenizer: Path | None = None
    engines: Mapping[str, str] = field(default_factory=dict[str, str])
    out: Path = Path("runs")
    label: str | None = None
    processes: int = 1
    ramp: float = 0.0
    warmup_limit: float = 300.0
    drain_limit: float = 120.0
    silence_timeout: float = 300.0
    request_timeout: float = 1800.0
    slo: Slo | None = None
    target: tuple[float, int] | None = None
    lock: Path | None = None
    host_report: Path | None = None


@dataclass(frozen=True)
class State:
    """For the live table: the level that runs, what came before it, and how far it is."""

    level: str
    number: int
    levels: int
    progress: Progress
    done: Sequence[LevelResult]


def run(
    settings: Settings,
    report: Callable[[State], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[Result, Path]:
    """Does it all; returns the result and its folder. Raises BenchError when nothing could be measured."""
    created = datetime.now(UTC)
    _check(settings)
    key = prepare.read_key(settings.api_key_file)
    locks = read_locks(settings.lock, Path())
    api = Api(settings.url, api_key=key, ca_file=settings.ca_file)
    try:
        plan, environment, engines, inside, pages = _prepare(settings, locks, api, say)
    finally:
        api.close()
    identifier, folder = _folder(settings, created)
    plans = _levels(settings, plan)
    results: list[LevelResult] = []
    watcher = Watcher(pages, {"Authorization": f"Bearer {key}"} if key else {})
    watcher.start()

    def result() -> Result:
        return Result(
            id=identifier,
            created=created.isoformat(timespec="seconds"),
            command=[Path(sys.argv[0]).name, *sys.argv[1:]],
            label=settings.label,
            workload=_describe(plan),
            environment=environment,
            levels=results,
            target=judge_target(settings.target, results),
        )

    try:
        for number, (level, level_plan, repetition) in enumerate(plans, 1):
            name = f"{level.name}-r{repetition}"

            def show(progress: Progress, name: str = name, number: int = number) -> None:
                report(State(name, number, len(plans), progress, results))

            identities = _identities(engines, inside)
            seen = observe(level_plan, level, folder / name, watcher, show, interrupted)
            after = _identities(engines, inside)
            results.append(
                _level_result(
                    settings, locks, environment.image, level, level_plan, repetition, name, seen, identities, after
                )
            )
            _write_engines(folder / name / "server.jsonl", seen)
            save(result(), folder)
            if not seen.complete:
                break
    finally:
        watcher.stop()
    report_files.write(result(), folder)
    return result(), folder


def write_plan(settings: Settings, path: Path) -> None:
    """Writes the plan that a plain Locust run takes (the first of `rates` if there are any). Raises BenchError."""
    _check(settings)
    api = Api(settings.url, api_key=prepare.read_key(settings.api_key_file), ca_file=settings.ca_file)
    try:
        plan = _prepare(settings, read_locks(settings.lock, Path()), api, lambda _: None)[0]
    finally:
        api.close()
    plan = plan.model_copy(update={"rate": settings.rates[0]}) if settings.rates else plan
    try:
        path.write_text(plan.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}", error.strerror or str(error)) from None


def save(result: Result, folder: Path) -> None:
    """Writes `result.json`, whole or not at all. Raises BenchError."""
    path = folder / "result.json"
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(result.model_dump_json(indent=1, by_alias=True) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BenchError(f"cannot write {path}", error.strerror or str(error), "choose another folder: --out") from None


def load(path: Path) -> Result:
    """Reads a result: a run's folder or its `result.json`. Raises NoResult."""
    file = path / "result.json" if path.is_dir() else path
    fix = "name the folder of a run: deploy bench -c 1,16 makes one"
    if file.exists() and not file.is_file():
        # A pipe would be waited for.
        raise NoResult(f"cannot read {file}", "it is no regular file", fix)
    try:
        data = parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoResult(f"cannot read {file}", error.strerror or str(error), fix) from None
    except ValueError as error:
        raise NoResult(f"{file} is not a result", str(error), fix) from None
    schema = mapping(data).get("schema")
    if not isinstance(schema, str) or not schema.startswith("dsv4-loadtest/"):
        raise NoResult(f"{file} is not a result of deploy bench", "", "import another tool's: deploy bench import FILE")
    try:
        return Result.model_validate(data)
    except ValidationError as error:
        raise NoResult(f"{file} has schema {schema}, which this version cannot read", mistakes(error), fix) from None


def load_all(folder: Path) -> tuple[list[Result], list[Path]]:
    """Results of all runs in a folder by date, and the files that are none. Raises NoResult without a folder."""
    if not folder.is_dir():
        raise NoResult(f"there is no folder {folder}", "runs are kept in one", "deploy bench -c 1,16 makes one")
    results: list[Result] = []
    broken: list[Path] = []
    for file in sorted(folder.glob("*/result.json")):
        try:
            results.append(load(file))
        except NoResult:
            broken.append(file)
    return sorted(results, key=lambda result: result.created), broken


def _check(settings: Settings) -> None:
    try:
        (settings.label or "").encode()
    except UnicodeEncodeError:
        raise BenchError("the label is no text in UTF-8") from None
    if settings.duration <= 0 or settings.repetitions < 1 or settings.processes < 1:
        raise BenchError("duration, repetitions and processes must be positive")
    if any(users < 1 for users in settings.users) or any(rate <= 0 for rate in settings.rates):
        raise BenchError("concurrency and rate must be positive")
    if settings.target and settings.target[1] not in settings.users:
        raise BenchError(
            f"the target is at C={settings.target[1]}, which is not measured", "", f"add it: -c {settings.target[1]}"
        )
    try:
        if isinstance(settings.workload, Prompts):
            read_prompts(Path(settings.workload.path).read_text(encoding="utf-8"), settings.workload.path)
        elif isinstance(settings.workload, Trace):
            read_trace(Path(settings.workload.path).read_text(encoding="utf-8"), settings.workload.path, 1.0)
    except OSError as error:
        raise BenchError(f"cannot read {error.filename}", error.strerror or "") from None
    except UnicodeDecodeError as error:
        raise BenchError("the file of prompts is not UTF-8", str(error)) from None
    except ValueError as error:
        raise BenchError(str(error)) from None


def _prepare(
    settings: Settings, locks: Locks, api: Api, say: Callable[[str], None]
) -> tuple[Plan, Environment, dict[str, str], dict[str, str], dict[str, str]]:
    """The plan, what is measured, the engines' base URLs, their containers, and the pages their counters are on."""
    model = prepare.choose_model(api, settings.model)
    stack = containers.find_stack(settings.url)
    engines = dict(settings.engines) or stack.engines
    inside = {} if settings.engines else stack.containers
    if settings.engines or not has_metrics(api, "/engine_metrics"):
        if not engines and has_metrics(api, "/metrics"):
            engines = {"server": settings.url}
        pages = {name: f"{url.rstrip('/')}/metrics" for name, url in engines.items()}
    else:
        pages = {"": f"{settings.url}/engine_metrics"}
    if isinstance(settings.workload, Prompts):
        vocabulary = Vocabulary(words=["unused"], overhead=0, source="own prompts")
    else:
        say("measuring the prompt template …")
        count = prepare.count_prompt(api, settings.endpoint, model)
        vocabulary = prepare.build_vocabulary(count, settings.tokenizer)
        say(f"{len(vocabulary.words)} words of one token ({vocabulary.source}); the template has {vocabulary.overhead}")
    plan = Plan(
        url=settings.url,
        endpoint=settings.endpoint,
        model=model,
        api_key_file=str(settings.api_key_file.resolve()) if settings.api_key_file else None,
        ca_file=str(settings.ca_file.resolve()) if settings.ca_file else None,
        seed=settings.seed,
        workload=settings.workload,
        vocabulary=vocabulary,
        temperature=settings.temperature,
        ramp=settings.ramp,
        generators=settings.processes,
        silence_timeout=settings.silence_timeout,
        request_timeout=settings.request_timeout,
    )
    environment = Environment(
        url=settings.url,
        model=model,
        engines=_identities(engines, inside),
        lock=lock_facts(locks),
        image=stack.image,
        host=_host(settings.host_report),
        generator={name: version(name) for name in ("locust", "gevent", "geventhttpclient")},
    )
    return plan, environment, engines, inside, pages


def _identities(engines: Mapping[str, str], inside: Mapping[str, str]) -> dict[str, dict[str, Any] | None]:
    """What each engine says it is, asked for inside its container where it has one."""
    found: dict[str, dict[str, Any] | None] = {}
    for name, url in engines.items():
        if container := inside.get(name):
            report = containers.server_info(container)
            found[name] = identity(report) if report else None
        else:
            found[name] = engine_identity(url)
    return found


def has_metrics(api: Api, path: str) -> bool:
    """Does this page show an engine's counters?"""
    try:
        return bool(parse_metrics(api.get(path).text))
    except (BenchError, ValueError):
        return False


def lock_facts(locks: Locks) -> dict[str, Any]:
    """Hash of the lock files and the engine version they name."""
    facts: dict[str, Any] = {
        name: "sha256:" + hashlib.sha256(text.encode()).hexdigest() for name, text in locks.files.items()
    }
    return facts | ({"sglang": locks.version} if locks.version else {})


def _host(report: Path | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
    }
    if report is not None:
        try:
            facts["report"] = json.loads(report.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BenchError(f"cannot read the host report {report}", str(error)) from None
    return facts


def _folder(settings: Settings, created: datetime) -> tuple[str, Path]:
    stamp = created.strftime("%Y%m%dT%H%M%SZ")
    for attempt in range(100):
        identifier = stamp if attempt == 0 else f"{stamp}-{attempt}"
        folder = settings.out / identifier
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BenchError(f"cannot make the folder {folder}", error.strerror or str(error), "--out FOLDER") from None
        check_disk(folder, NEEDED_DISK)
        return identifier, folder
    raise BenchError(f"too many runs at once in {settings.out}")


def _levels(settings: Settings, plan: Plan) -> list[tuple[Level, Plan, int]]:
    """Repetitions go round by round, so that a drift of the machine does not look like an effect of C."""
    common: dict[str, Any] = {
        "duration": settings.duration,
        "ramp": settings.ramp,
        "warmup_limit": settings.warmup_limit,
        "drain_limit": settings.drain_limit,
    }
    levels: list[tuple[Level, Plan, int]] = []
    for repetition in range(1, settings.repetitions + 1):
        seed = settings.seed + 1000 * (repetition - 1)
        if isinstance(plan.workload, Trace):
            levels.append(
                (Level("trace", settings.processes, **common), plan.model_copy(update={"seed": seed}), repetition)
            )
            continue
        for k, users in enumerate(settings.users):
            # A generator without a user would only be in the way.
            changed = plan.model_copy(update={"seed": seed + k, "generators": min(plan.generators, users)})
            levels.append((Level(f"c{users}", users, **common), changed, repetition))
        for k, rate in enumerate(settings.rates):
            changed = plan.model_copy(update={"seed": seed + 500 + k, "rate": rate})
            levels.append((Level(f"rate{rate:g}", settings.processes, **common), changed, repetition))
    return levels


def _describe(plan: Plan) -> dict[str, Any]:
    described = plan.model_dump(mode="json", exclude={"vocabulary", "api_key_file", "ca_file", "url"})
    described["vocabulary"] = {
        "words": len(plan.vocabulary.words),
        "overhead": plan.vocabulary.overhead,
        "source": plan.vocabulary.source,
    }
    return described


def _level_result(
    settings: Settings,
    locks: Locks,
    image: str | None,
    level: Level,
    plan: Plan,
    repetition: int,
    name: str,
    seen: Observed,
    identities: Mapping[str, Mapping[str, Any] | None],
    after: Mapping[str, Mapping[str, Any] | None],
) -> LevelResult:
    closed = plan.rate is None and not isinstance(plan.workload, Trace)
    evidence = Evidence(
        begin=seen.begin,
        end=seen.end,
        samples=seen.samples,
        ticks=seen.ticks,
        snapshots=seen.snapshots,
        gpus=seen.gpus,
        users=level.users if closed else None,
        steady=seen.steady,
        contradictions=differences(locks, identities, image),
        locked=is_locked(locks, identities),
        found_identity=identities,
        identity_after=after,
    )
    findings = validity.judge(evidence) if seen.end > seen.begin else []
    verdict: Verdict = "valid" if validity.valid(findings) else "rejected"
    if not seen.complete:
        verdict = "partial"
        why = seen.failure or "it was interrupted"
        findings = [
            validity.Finding(id="partial", severity="reject", text=f"the window is not complete: {why}"),
            *findings,
        ]
    metrics: Metrics | None = None
    batches: list[float] = []
    if verdict == "valid":
        metrics = measure(seen.samples, seen.begin, seen.end, settings.slo)
        batches = timeline(seen.samples, seen.begin, seen.end, (seen.end - seen.begin) / BATCHES)["output"][:BATCHES]
    ticks = [tick for tick in seen.ticks if seen.begin <= tick.at < seen.end]
    return LevelResult(
        name=level.name,
        users=level.users if closed else None,
        rate=plan.rate,
        repetition=repetition,
        folder=name,
        verdict=verdict,
        findings=findings,
        window=Window(started=seen.started, begin=seen.begin, end=seen.end),
        metrics=metrics,
        batches=batches,
        accounts={
            book.role: AccountResult(counted=book.served, ours=book.ours) for book in validity.accounts(evidence)
        },
        engines=_engine_statistics(evidence),
        gpus=_gpu_statistics(evidence),
        generator={
            "late_max": max((tick.late for tick in ticks), default=0.0),
            "lag_max": max((tick.lag for tick in ticks), default=0.0),
            "cpu_mean": sum(tick.cpu for tick in ticks) / len(ticks) if ticks else 0.0,
        },
    )


def _engine_statistics(evidence: Evidence) -> dict[str, EngineStatistics]:
    statistics: dict[str, EngineStatistics] = {}
    for engine in dict.fromkeys(snapshot.engine for snapshot in evidence.snapshots):
        inside = [
            s.values
            for s in evidence.snapshots
            if s.engine == engine and s.values is not None and evidence.begin <= s.at < evidence.end
        ]
        series = {name: [values[name] for values in inside if name in values] for name in GAUGES}
        statistics[engine] = EngineStatistics(
            mean={name: sum(values) / len(values) for name, values in series.items() if values},
            maximum={name: max(values) for name, values in series.items() if values},
        )
    return statistics


def _gpu_statistics(evidence: Evidence) -> list[GpuStatistics]:
    inside = [g for g in evidence.gpus if evidence.begin <= g.at < evidence.end]
    found: list[GpuStatistics] = []
    for gpu in sorted({g.gpu for g in inside}):
        powers = [g.power for g in inside if g.gpu == gpu and g.power is not None]
        shares = [g.utilisation for g in inside if g.gpu == gpu and g.utilisation is not None]
        found.append(
            GpuStatistics(
                gpu=gpu,
                power=sum(powers) / len(powers) if powers else None,
                utilisation=sum(shares) / len(shares) if shares else None,
            )
        )
    return found


def _write_engines(path: Path, seen: Observed) -> None:
    """Snapshots and GPU samples as JSON lines, for the report and for later questions."""
    lines = [
        json.dumps({"kind": "engine", "at": round(s.at, 3), "engine": s.engine, "values": s.values and dict(s.values)})
        for s in seen.snapshots
    ]
    lines += [
        json.dumps({"kind": "gpu", "at": round(g.at, 3), "gpu": g.gpu, "power": g.power, "utilisation": g.utilisation})
        for g in seen.gpus
    ]
    try:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}", error.strerror or str(error), "choose another folder: --out") from None


def judge_target(target: tuple[float, int] | None, levels: Sequence[LevelResult]) -> Target | None:
    """Pass or fail, and the gap as a factor of the step time: a step gives each of C sequences one token.

    The step budget is C / throughput; the measured step is the mean TPOT. The factor that is still missing is of the
    throughput, because prefill and queueing take their share beside the steps.
    """
    if target is None:
        return None
    wanted, users = target
    valid = [level.metrics for level in levels if level.users == users and level.metrics is not None]
    measured = sum(m.output_throughput for m in valid) / len(valid) if valid else None
    steps = [m.tpot.mean for m in valid if m.tpot is not None]
    return Target(
        throughput=wanted,
        users=users,
        measured=measured,
        reached=measured is not None and measured >= wanted,
        step_budget=users / wanted,
        step=sum(steps) / len(steps) if steps else None,
        factor=wanted / measured if measured else None,
    )
