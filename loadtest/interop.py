"""Results of other tools: read into our schema, and ours written in theirs. Pure but for the two file functions.

docs/metrics.md lists how the definitions differ; nothing is converted silently into something it is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from deploy.validation import mistakes
from loadtest.errors import BenchError, NoResult
from loadtest.metrics import Metrics
from loadtest.plain import mapping, parse, sequence
from loadtest.result import Environment, LevelResult, Result, Window
from loadtest.stats import Distribution
from loadtest.validity import Finding

Tool = Literal["sglang", "aiperf", "genai-bench"]
TOOLS: tuple[Tool, ...] = ("sglang", "aiperf", "genai-bench")


def detect(data: dict[str, Any]) -> Tool | None:
    """Which tool wrote this, by its fields."""
    if "aggregated_metrics" in data:
        return "genai-bench"
    if "output_throughput" in data and "median_ttft_ms" in data:
        return "sglang"
    if "output_token_throughput" in data and "request_latency" in data:
        return "aiperf"
    return None


def read(path: Path) -> Result:
    """Reads a result file of another tool (JSON, or JSONL with one run a line). Raises NoResult."""
    fix = f"name a file that {', '.join(TOOLS[:-1])} or {TOOLS[-1]} wrote"
    try:
        text = path.read_text(encoding="utf-8")
        try:
            documents = [mapping(parse(text))]
        except ValueError:
            documents = [mapping(parse(line)) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise NoResult(f"cannot read {path}", error.strerror or str(error), fix) from None
    except ValueError as error:
        raise NoResult(f"{path} is not JSON", str(error), fix) from None
    tools = {detect(document) for document in documents}
    tool = detect(documents[0]) if len(tools) == 1 else None
    if tool is None:
        raise NoResult(f"{path} is no result of a tool we know", "its fields fit none", fix)
    try:
        result = Result(
            id=path.stem,
            created="1970-01-01T00:00:00+00:00",
            command=["import", path.name],
            label=path.stem,
            source=tool,
            workload={"source": tool},
            environment=Environment(url="-", model=_model(tool, documents[0])),
            levels=[_CONVERT[tool](document, path) for document in documents],
        )
        # What is not a number any more, JSON has no word for: it would not be read back.
        return Result.model_validate_json(result.model_dump_json(by_alias=True))
    except ValidationError as error:
        raise NoResult(f"{path} has a field that {tool} writes otherwise", mistakes(error), fix) from None
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise NoResult(f"{path} lacks a field that {tool} writes, or has it otherwise", repr(error), fix) from None


def _model(tool: str, document: dict[str, Any]) -> str:
    if tool == "sglang":
        return str(mapping(document.get("server_info")).get("served_model_name", "-"))
    if tool == "aiperf":
        given = mapping(document.get("input_config"))
        before = sequence(mapping(given.get("endpoint")).get("model_names"))
        since_0_13 = [mapping(item).get("name") for item in sequence(mapping(given.get("models")).get("items"))]
        return ", ".join(map(str, [*before, *since_0_13])) or "-"
    return "-"


_UNJUDGED = Finding(
    id="imported", severity="note", text="measured by another tool: none of our validity rules were applied"
)


def _level(path: Path, users: float | None, metrics: Metrics) -> LevelResult:
    whole = int(users) if users and users == int(users) else None
    return LevelResult(
        name=f"c{whole}" if whole else path.stem,
        users=whole,
        folder=path.name,
        verdict="valid",
        findings=[_UNJUDGED],
        window=Window(started=0.0, begin=0.0, end=metrics.duration),
        metrics=metrics,
    )


def _metrics(**given: Any) -> Metrics:
    empty: dict[str, Any] = dict.fromkeys(
        ("cached_tokens", "ttft", "ttfc", "tpot", "itl", "gap", "e2e", "delay", "input_length", "output_length")
    )
    return Metrics.model_validate({**empty, "errors": {}, "token_times": "spread", **given})


def _from_sglang(document: dict[str, Any], path: Path) -> LevelResult:
    def spread(name: str) -> Distribution:
        scale = 1e-3
        return Distribution(
            count=int(document["completed"]),
            mean=document[f"mean_{name}_ms"] * scale,
            deviation=document[f"std_{name}_ms"] * scale,
            minimum=0.0,
            p50=document[f"median_{name}_ms"] * scale,
            p90=document[f"p90_{name}_ms"] * scale,
            p95=document[f"p95_{name}_ms"] * scale,
            p99=document[f"p99_{name}_ms"] * scale,
            maximum=document.get(f"max_{name}_ms", document[f"p99_{name}_ms"]) * scale,
        )

    return _level(
        path,
        document.get("max_concurrency"),
        _metrics(
            duration=document["duration"],
            requests=document["completed"],
            request_rate=document["request_throughput"],
            output_tokens=document["total_output_tokens"],
            output_throughput=document["output_throughput"],
            prompt_tokens=document["total_input_tokens"],
            total_throughput=document["total_throughput"],
            in_flight=document["concurrency"],
            ttft=spread("ttft"),
            tpot=spread("tpot"),
            itl=spread("itl"),
            e2e=spread("e2e_latency"),
        ),
    )


def _from_aiperf(document: dict[str, Any], path: Path) -> LevelResult:
    def value(name: str) -> float:
        return float(mapping(document[name])["avg"])

    def spread(name: str) -> Distribution | None:
        found = mapping(document.get(name))
        if not found:
            return None
        scale = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9, "sec": 1.0, "s": 1.0}.get(str(found.get("unit")), 1.0)
        middle = float(found.get("p50", found["avg"]))
        numbers = {
            ours: float(found.get(theirs, middle)) * scale
            for ours, theirs in (("p50", "p50"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"))
        }
        return Distribution(
            count=int(value("request_count")),
            mean=float(found["avg"]) * scale,
            deviation=float(found.get("std", 0.0)) * scale,
            minimum=float(found.get("min", middle)) * scale,
            maximum=float(found.get("max", middle)) * scale,
            **numbers,
        )

    duration = value("benchmark_duration")
    output, prompt = value("total_osl"), value("total_isl")
    given = mapping(document.get("input_config"))
    since_0_13 = [mapping(phase) for phase in sequence(given.get("phases"))]
    profiling = next((phase for phase in since_0_13 if phase.get("kind") == "profiling"), None)
    loadgen = profiling or mapping(given.get("loadgen"))
    latency = spread("request_latency")
    return _level(
        path,
        loadgen.get("concurrency"),
        _metrics(
            duration=duration,
            requests=int(value("request_count")),
            request_rate=value("request_throughput"),
            output_tokens=int(output),
            output_throughput=value("output_token_throughput"),
            prompt_tokens=int(prompt),
            total_throughput=(output + prompt) / duration,
            in_flight=latency.mean * value("request_throughput") if latency else 0.0,
            ttft=spread("time_to_first_token"),
            tpot=spread("inter_token_latency"),
            e2e=latency,
        ),
    )


def _from_genai_bench(document: dict[str, Any], path: Path) -> LevelResult:
    found = mapping(document["aggregated_metrics"])
    stats = mapping(found["stats"])
    scale = {"s": 1.0, "ms": 1e-3}[str(document.get("_time_unit", "s"))]

    def spread(name: str) -> Distribution:
        values = {key: float(value or 0.0) * scale for key, value in mapping(stats[name]).items()}
        return Distribution(
            count=int(found["num_completed_requests"]),
            mean=values["mean"],
            deviation=values.get("stddev", 0.0),
            minimum=values["min"],
            p50=values["p50"],
            p90=values["p90"],
            p95=values["p95"],
            p99=values["p99"],
            maximum=values["max"],
        )

    duration = float(found["run_duration"])
    output = float(found["mean_output_throughput_tokens_per_s"])
    prompt = float(found["mean_input_throughput_tokens_per_s"])
    latency = spread("e2e_latency")
    return _level(
        path,
        found.get("num_concurrency"),
        _metrics(
            duration=duration,
            requests=int(found["num_completed_requests"]),
            request_rate=found["requests_per_second"],
            output_tokens=round(output * duration),
            output_throughput=output,
            prompt_tokens=round(prompt * duration),
            total_throughput=found["mean_total_tokens_throughput_tokens_per_s"],
            in_flight=latency.mean * float(found["requests_per_second"]),
            errors={f"http {code}": int(count) for code, count in mapping(found.get("error_codes_frequency")).items()},
            ttft=spread("ttft"),
            tpot=spread("tpot"),
            e2e=latency,
        ),
    )


_CONVERT: dict[Tool, Callable[[dict[str, Any], Path], LevelResult]] = {
    "sglang": _from_sglang,
    "aiperf": _from_aiperf,
    "genai-bench": _from_genai_bench,
}


def export(result: Result, tool: Tool) -> str:
    """Our valid levels as that tool's result, one JSON document a line. Raises BenchError when there is none."""
    write = {"sglang": _to_sglang, "aiperf": _to_aiperf, "genai-bench": _to_genai_bench}[tool]
    documents = [write(level, level.metrics) for level in result.levels if level.metrics is not None]
    if not documents:
        raise BenchError("nothing to export", "no level of this run is valid")
    return "".join(json.dumps(document) + "\n" for document in documents)


def _to_sglang(level: LevelResult, metrics: Metrics) -> dict[str, Any]:
    document: dict[str, Any] = {
        "backend": "sglang-oai-chat",
        "dataset_name": "random",
        "request_rate": level.rate if level.rate is not None else "inf",
        "max_concurrency": level.users,
        "duration": metrics.duration,
        "completed": metrics.requests,
        "total_input_tokens": metrics.prompt_tokens,
        "total_output_tokens": metrics.output_tokens,
        "request_throughput": metrics.request_rate,
        "input_throughput": metrics.prompt_tokens / metrics.duration,
        "output_throughput": metrics.output_throughput,
        "total_throughput": metrics.total_throughput,
        "concurrency": metrics.in_flight,
    }
    for name, found in (
        ("e2e_latency", metrics.e2e),
        ("ttft", metrics.ttft),
        ("tpot", metrics.tpot),
        ("itl", metrics.itl),
    ):
        if found is not None:
            values = {"mean": found.mean, "median": found.p50, "std": found.deviation, "max": found.maximum}
            values |= {"p90": found.p90, "p95": found.p95, "p99": found.p99}
            document |= {f"{field}_{name}_ms": value * 1000 for field, value in values.items()}
    return document


def _to_aiperf(level: LevelResult, metrics: Metrics) -> dict[str, Any]:
    def single(unit: str, value: float) -> dict[str, Any]:
        return {"unit": unit, "avg": value}

    document: dict[str, Any] = {
        "request_throughput": single("requests/sec", metrics.request_rate),
        "output_token_throughput": single("tokens/sec", metrics.output_throughput),
        "benchmark_duration": single("sec", metrics.duration),
        "request_count": single("requests", metrics.requests),
        "total_isl": single("tokens", metrics.prompt_tokens),
        "total_osl": single("tokens", metrics.output_tokens),
        "input_config": {"loadgen": {"concurrency": level.users, "request_rate": level.rate}},
    }
    latencies = {
        "request_latency": metrics.e2e,
        "time_to_first_token": metrics.ttft,
        "inter_token_latency": metrics.tpot,
    }
    for name, found in latencies.items():
        if found is not None:
            values = {"avg": found.mean, "std": found.deviation, "min": found.minimum, "max": found.maximum}
            values |= {"p50": found.p50, "p90": found.p90, "p95": found.p95, "p99": found.p99}
            document[name] = {"unit": "ms"} | {field: value * 1000 for field, value in values.items()}
    return document


def _to_genai_bench(level: LevelResult, metrics: Metrics) -> dict[str, Any]:
    stats: dict[str, Any] = {}
    for name, found in (("ttft", metrics.ttft), ("tpot", metrics.tpot), ("e2e_latency", metrics.e2e)):
        if found is not None:
            stats[name] = {"min": found.minimum, "max": found.maximum, "mean": found.mean, "stddev": found.deviation}
            stats[name] |= {"p50": found.p50, "p90": found.p90, "p95": found.p95, "p99": found.p99}
    failed = sum(metrics.errors.values())
    return {
        "aggregated_metrics": {
            "num_concurrency": level.users or level.rate,
            "iteration_type": "num_concurrency",
            "run_duration": metrics.duration,
            "mean_output_throughput_tokens_per_s": metrics.output_throughput,
            "mean_input_throughput_tokens_per_s": metrics.prompt_tokens / metrics.duration,
            "mean_total_tokens_throughput_tokens_per_s": metrics.total_throughput,
            "requests_per_second": metrics.request_rate,
            "error_codes_frequency": {},
            "error_rate": failed / max(1, failed + metrics.requests),
            "num_error_requests": failed,
            "num_completed_requests": metrics.requests,
            "num_requests": failed + metrics.requests,
            "stats": stats,
        },
        "individual_request_metrics": [],
    }
