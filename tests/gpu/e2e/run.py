"""Drives SGLang servers with the tiny model and compares what they answer, count and launch. Standard library only.

Usage: run.py VERB …   (`run.py --help`)

Everything lies in one folder, E2E_HOME (default /tmp/gpu-e2e): site/ and plug/ as `stage.sh` leaves them, tiny/ from
model.py, and what the servers write. Results are JSON files there.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HOME = Path(os.environ.get("E2E_HOME", "/tmp/gpu-e2e"))
# Of compose.yaml: each compiler's folder is below it, as in a container, so that the caches' own tools work on it.
CACHE = "/var/cache/engine"
OPS = [
    "SPARSE_MLA_DECODE",
    "INDEXER_LOGITS",
    "TOPK_INDICES",
    "MHC_POST_PRE_NORM",
    "FP8_BLOCK_LINEAR",
    "INV_ROPE_WO_A",
    "MOE_FP4_SMALL_BATCH",
    "ROUTE_EXPERTS",
    "BF16_LINEAR_PARTIALS",
    "PREPARE_QUERIES",
    "STORE_ATTENTION_INPUTS",
]
# All but the first end a group of 128 tokens while they answer; the last has more compressed tokens than the indexer
# picks.
PROMPTS = tuple(map(int, os.environ.get("E2E_PROMPTS", "12 370 1525 4080").split()))
ANSWER = 24
OURS = HOME / "site/sm120_kernels/ops"


def environment(settings: list[str]) -> dict[str, str]:
    compose = (HOME / "compose.yaml").read_text()
    return (
        os.environ
        | dict(re.findall(rf"^  (\w+): ({CACHE}\S*)$", compose, re.M))
        | {
            "PYTHONPATH": f"{HOME}/site:{HOME}/plug",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
            "SGLANG_DSV4_FP4_EXPERTS": "0",
            # In a server with both the fallback of a routed call must run on this GPU.
            "SGLANG_SM120_FLASHMLA_BACKEND": "triton",
            # Ours come from where bake.sh puts them, and what is compiled is written down.
            "TRITON_CACHE_MANAGER": "sm120_kernels.baked:BakedCache",
            "TRITON_DISABLE_LINE_INFO": "1",
            "SM120_KERNELS_BAKED": str(HOME / "baked"),
            # As compose.yaml has them: which transport carries the KV cache is in the log.
            "UCX_PROTO_INFO": "*remote memory write*",
            "UCX_LOG_FILE": "stderr",
            "SGLANG_DISAGGREGATION_NIXL_BACKEND": "UCX",
        }
        | dict(setting.split("=", 1) for setting in settings)
    )


def start(name: str, port: int, settings: list[str], hooks: str, arguments: list[str]) -> None:
    """Start a server in the background."""
    chosen = OPS if hooks == "all" else [op for op in hooks.split(",") if op]
    switches = [f"SGLANG_SM120_{op}=1" for op in chosen]
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(HOME / "tiny"),
        "--load-format",
        "dummy",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--trust-remote-code", "--sampling-backend", "pytorch"]
    command += ["--max-running-requests", "16", "--max-total-tokens", "32768", "--context-length", "16384"]
    command += ["--chunked-prefill-size", "4096", "--skip-server-warmup", "--skip-tokenizer-init"]
    command += ["--disable-radix-cache", "--enable-metrics", *arguments]
    with (HOME / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment(switches + settings), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=HOME,
            start_new_session=True,
        )  # fmt: skip
    (HOME / f"{name}.pid").write_text(f"{process.pid} {port}")


def wait(names: list[str], seconds: float) -> int:
    """Until every server answers; 1 if one died or did not come up in time."""
    began, failed, waiting = time.time(), 0, list(names)
    while waiting:
        for name in list(waiting):
            pid, port = (HOME / f"{name}.pid").read_text().split()
            late = time.time() - began > seconds
            try:
                # Not /health: it generates a token, which compiles for a minute.
                urllib.request.urlopen(f"http://127.0.0.1:{port}/model_info", timeout=2).read()
                print(f"{name} up after {time.time() - began:.0f} s", flush=True)
            except (urllib.error.URLError, OSError):
                if Path(f"/proc/{pid}").exists() and not late:
                    continue
                print(f"{name} {'not up' if late else 'died'} after {time.time() - began:.0f} s", flush=True)
                print("\n".join((HOME / f"{name}.log").read_text().splitlines()[-25:]), flush=True)
                failed = 1
            waiting.remove(name)
        time.sleep(1)
    return failed


def ask(port: int, path: str, body: Any, timeout: float = 240) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text = urllib.request.urlopen(request, timeout=timeout).read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


def prompt(tokens: int) -> list[int]:
    return [(7 * i * i + 13 * i + 5) % 1000 + 10 for i in range(tokens)]


def request(tokens: int, answer: int = ANSWER, **others: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}
    return {"input_ids": prompt(tokens), "sampling_params": sampling, **others}


def generate(name: str, port: int) -> None:
    """Greedy answers with the 20 best log-probabilities of each step: one after the other, then together."""
    found: dict[str, Any] = {}

    def one(key: str, tokens: int) -> None:
        began = time.time()
        answer = ask(port, "/generate", request(tokens, return_logprob=True, top_logprobs_num=20))
        found[key] = {
            "tokens": [step[1] for step in answer["meta_info"]["output_token_logprobs"]],
            "best": [{str(t): p for p, t, *_ in step} for step in answer["meta_info"]["output_top_logprobs"]],
            "seconds": round(time.time() - began, 2),
        }

    for tokens in PROMPTS:
        one(f"{tokens} alone", tokens)
        print(
            name, tokens, found[f"{tokens} alone"]["seconds"], "s", found[f"{tokens} alone"]["tokens"][:8], flush=True
        )
    threads = [threading.Thread(target=one, args=(f"{tokens} together", tokens)) for tokens in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (HOME / f"generate-{name}.json").write_text(json.dumps(found))


def compare(left: str, right: str) -> None:
    """Equal tokens, and differences of log-probabilities up to and with the first step whose token differs."""
    sides = [json.loads((HOME / f"generate-{name}.json").read_text()) for name in (left, right)]
    rows, worst, squares, count = {}, 0.0, 0.0, 0
    for key in sides[0]:
        a, b = (side[key] for side in sides)
        same = next(
            (i for i, pair in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if pair[0] != pair[1]), ANSWER
        )
        steps = range(min(same + 1, ANSWER))
        differences = [
            abs(a["best"][step][token] - b["best"][step][token])
            for step in steps
            for token in a["best"][step].keys() & b["best"][step].keys()
        ]
        worst = max([worst, *differences])
        squares, count = squares + sum(d * d for d in differences), count + len(differences)
        margin = None
        if same < ANSWER:
            best = sorted(a["best"][same].values(), reverse=True)
            margin = round(best[0] - best[1], 4)
        rows[key] = {
            "equal": same,
            "of": ANSWER,
            "worst": round(max(differences), 4),
            "margin at the first other": margin,
        }
    result = {"worst": round(worst, 4), "rms": round((squares / max(count, 1)) ** 0.5, 5), "prompts": rows}
    print(f"compare {left} {right}", json.dumps(result), flush=True)
    (HOME / f"compare-{left}-{right}.json").write_text(json.dumps(result, indent=1))


def metrics(name: str, port: int) -> None:
    """Calls by op, function and path; the differences that a check reported."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    calls: dict[str, float] = collections.defaultdict(float)
    for labels, value in re.findall(r"^sm120_kernels_calls_total\{([^}]*)\} (\S+)", text, re.M):
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        calls[f"{label['op']} ({label['function']}) {label['path']}"] += float(value)
    errors: dict[str, list[float]] = collections.defaultdict(list)
    for what, value in re.findall(r"sm120_kernels: (\S+ \(\S+\)) differs from SGLang by (\S+)", log(name)):
        errors[what].append(float(value))
    fallbacks = sorted(set(re.findall(r"sm120_kernels: (.* falls back to SGLang: .*)", log(name))))
    checked = {
        what: {"checks": len(all_), "median": sorted(all_)[len(all_) // 2], "worst": max(all_)}
        for what, all_ in errors.items()
    }
    result = {"calls": dict(sorted(calls.items())), "checked": checked, "fallbacks": fallbacks}
    print(f"metrics {name}", json.dumps(result, indent=1), flush=True)
    (HOME / f"metrics-{name}.json").write_text(json.dumps(result, indent=1))


def mark() -> None:
    """Begin to count compilations: what is in the caches now does not count."""
    from engine_runtime import jit

    jit.TRITON_LOG.unlink(missing_ok=True)
    found = {name: sorted(files) for name, files in jit.entries(environment([])).items()}
    (HOME / "mark.json").write_text(json.dumps(found))


def compiled(name: str) -> None:
    """How much was compiled since `mark`, by compiler as the containers count it; names of the Triton kernels."""
    from engine_runtime import jit

    before = {key: set(map(tuple, files)) for key, files in json.loads((HOME / "mark.json").read_text()).items()}
    counts = jit.count(before, environment([]))
    lines = jit.TRITON_LOG.read_text().splitlines() if jit.TRITON_LOG.exists() else []
    kernels = collections.Counter(line.split()[1] for line in lines if line.startswith("kernel "))
    ours = set(re.findall(r"^def (_\w+)\(", "".join(map(Path.read_text, OURS.glob("*.py"))), re.M))
    result = {
        "compiled": counts,
        "in all": sum(counts.values()),
        "Triton kernels of ours": {kernel: number for kernel, number in kernels.items() if kernel in ours},
        "of SGLang": {kernel: number for kernel, number in kernels.items() if kernel not in ours},
    }
    print(f"compiled {name}", json.dumps(result), flush=True)
    (HOME / f"compiled-{name}.json").write_text(json.dumps(result, indent=1))


def log(name: str) -> str:
    return (HOME / f"{name}.log").read_text(errors="replace")


def profile(name: str, port: int, batch: int, answer: int) -> None:
    """The launches of some decode steps, in their order, from SGLang's own profiler."""
    folder = HOME / f"profile-{name}-{batch}"

    def together(tokens: int) -> list[threading.Thread]:
        body = request(PROMPTS[0], answer=tokens)
        threads = [threading.Thread(target=ask, args=(port, "/generate", body)) for _ in range(batch)]
        for thread in threads:
            thread.start()
        return threads

    # Compiles what this batch needs.
    for thread in together(4):
        thread.join()
    threads = together(answer)
    time.sleep(1.5)
    ask(port, "/start_profile", {"output_dir": str(folder), "activities": ["GPU"], "num_steps": 6})
    for thread in threads:
        thread.join()
    deadline = time.time() + 30
    while not (files := list(folder.rglob("*.gz"))) and time.time() < deadline:
        time.sleep(0.5)
    time.sleep(1)
    shutil.copyfile(files[0], HOME / f"trace-{name}-{batch}.json.gz")
    with gzip.open(files[0]) as trace:
        events = json.load(trace)["traceEvents"]
    events = [e for e in events if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    events.sort(key=lambda event: event["ts"])
    rows = [[event["name"][:160], round(event["dur"], 2)] for event in events]
    (HOME / f"launches-{name}-{batch}.json").write_text(json.dumps(rows))
    print(f"profile {name} batch {batch}: {len(rows)} launches in all", flush=True)


# The last launch between two blocks, SGLang's and ours.
BOUNDARY = re.compile("mhc_pre_big_fuse|^_finish_kernel$")


def layers(name: str, batch: int) -> None:
    """Launches of one decode step, and of each of its layers but the last: from boundary to boundary."""
    names = [row[0] for row in json.loads((HOME / f"launches-{name}-{batch}.json").read_text())]
    step = next(
        (n for n in range(50, len(names) // 2) if all(a == b for a, b in zip(names, names[n:], strict=False))), None
    )
    if step is None:
        print(f"layers {name} batch {batch}: no two steps are alike", flush=True)
        return
    # The first is no boundary: it begins the first layer.
    ends = [place for place, launch in enumerate(names[:step]) if BOUNDARY.search(launch)][::2]
    result = {"step": step, "layers": [last - first for first, last in itertools.pairwise(ends)]}
    print(f"layers {name} batch {batch}", json.dumps(result), flush=True)


def pd(prefill: int, decode: int, name: str, bootstrap: int) -> None:
    """Greedy answers of a prefill and a decode server without a router; compared with a server that does both."""
    alone = json.loads((HOME / f"generate-{name}.json").read_text())
    rows = {}
    for room, tokens in enumerate(PROMPTS):
        body = request(tokens, bootstrap_host="127.0.0.1", bootstrap_port=bootstrap, bootstrap_room=1000 + room)
        results: dict[int, Any] = {}

        def go(port: int, body: Any = body, results: dict[int, Any] = results) -> None:
            try:
                results[port] = ask(port, "/generate", body, 150)
            except OSError as error:
                results[port] = {"error": repr(error)}

        threads = [threading.Thread(target=go, args=(port,)) for port in (prefill, decode)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answer = results[decode].get("output_ids", results[decode])
        expected = alone[f"{tokens} alone"]["tokens"]
        same = next(
            (i for i, pair in enumerate(zip(answer, expected, strict=False)) if pair[0] != pair[1]), len(answer)
        )
        rows[tokens] = {"equal to one server": same, "of": ANSWER, "tokens": answer}
        print("pd", tokens, json.dumps(rows[tokens]), flush=True)
    (HOME / "pd.json").write_text(json.dumps(rows, indent=1))


def stop(names: list[str]) -> None:
    for name in names:
        if not (HOME / f"{name}.pid").exists():
            continue
        pid = int((HOME / f"{name}.pid").read_text().split()[0])
        subprocess.run(["kill", "-9", "--", f"-{pid}"], check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("start", help="start a server; what follows -- goes to SGLang")
    verb.add_argument("name")
    verb.add_argument("port", type=int)
    verb.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings")
    verb.add_argument("--hooks", default="", help="all, or names of ops in capitals, separated by commas")
    verb = verbs.add_parser("wait", help="until servers answer")
    verb.add_argument("seconds", type=float)
    verb.add_argument("names", nargs="+")
    for which in ("generate", "metrics"):
        verb = verbs.add_parser(which)
        verb.add_argument("name")
        verb.add_argument("port", type=int)
    verb = verbs.add_parser("profile")
    verb.add_argument("name")
    verb.add_argument("port", type=int)
    verb.add_argument("batch", type=int)
    verb.add_argument("answer", type=int, help="tokens, so many that they take some seconds")
    verb = verbs.add_parser("layers", help="after profile")
    verb.add_argument("name")
    verb.add_argument("batch", type=int)
    verb = verbs.add_parser("compare")
    verb.add_argument("left")
    verb.add_argument("right")
    verb = verbs.add_parser("pd")
    verb.add_argument("prefill", type=int)
    verb.add_argument("decode", type=int)
    verb.add_argument("name")
    verb.add_argument("bootstrap", type=int)
    verbs.add_parser("mark", help="before a start whose compilations are to be counted")
    verb = verbs.add_parser("compiled", help="since mark")
    verb.add_argument("name", help="of the file with the result")
    verb = verbs.add_parser("stop")
    verb.add_argument("names", nargs="+")
    # argparse loses what follows -- where options stand between the positions before it.
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given = vars(parser.parse_args(sys.argv[1:cut]))
    if given["verb"] == "start":
        given["arguments"] = sys.argv[cut + 1 :]
    return globals()[given.pop("verb")](**given) or 0


if __name__ == "__main__":
    sys.exit(main())
