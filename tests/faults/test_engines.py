"""What happens to real engines, and what a client sees of it: SGLang, NIXL, router and gate on the cpu profile."""

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import WAITING_S, real
from harness import PATIENCE_S, PROMPTS, SLOW, Controller, docker, load, note

pytestmark = pytest.mark.long
STACK = "SGLang on CPU"
TOKENS = 20
# What must hold.
SETTLED_S, SERVICE_S = 15.0, 60.0
OBSERVED_S = 600.0
CUT_S = 20.0


def ask(url: str, prompt: str, tokens: int = TOKENS) -> httpx.Response:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    yield from real(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def answers(served: Controller) -> dict[str, str]:
    """Greedy answers of the idle stack."""
    return {prompt: text_of(ask(served.url, prompt)) for prompt in PROMPTS}


@dataclass
class Seen:
    """What a client saw that asks twice a second and never waits for an answer before it asks again.

    Attributes:
        answers: seconds since the fault when it was asked, how long it took, status or the error's name.
    """

    answers: list[tuple[float, float, str]] = field(default_factory=list[tuple[float, float, str]])

    def slowest(self) -> float:
        return max(took for _, took, _ in self.answers)

    def service(self) -> float:
        """Seconds from the fault until every later question was answered."""
        bad = [asked + took for asked, took, what in self.answers if what != "200" and asked + took > 0]
        return max(bad, default=0.0)

    def words(self) -> str:
        counts: dict[str, int] = {}
        for _, _, what in self.answers:
            counts[what] = counts.get(what, 0) + 1
        shown = ", ".join(f"{count} of {what}" for what, count in sorted(counts.items()))
        return f"{shown}; the slowest {self.slowest():.1f} s"


def well(url: str) -> None:
    """Wait until the last fault is over."""
    deadline = time.monotonic() + OBSERVED_S
    while ask(url, "are you there?").status_code != 200:
        assert time.monotonic() < deadline, "nothing is served after the last fault"
        time.sleep(1)


def observe(url: str, expected: dict[str, str], fault: Callable[[], object]) -> Seen:
    """Ask before, during and after a fault, until twenty questions in a row have been answered rightly."""
    well(url)
    seen, stop = Seen(), threading.Event()
    begun = time.monotonic() + 2
    prompts = list(expected)

    def one(number: int) -> None:
        asked, prompt = time.monotonic(), prompts[number % len(prompts)]
        try:
            answer = ask(url, prompt)
            what = str(answer.status_code)
            if what == "200" and text_of(answer) != expected[prompt]:
                what = "wrong answer"
        except httpx.HTTPError as error:
            what = type(error).__name__
        seen.answers.append((asked - begun, time.monotonic() - asked, what))

    with ThreadPoolExecutor(300) as pool:
        number, done = 0, False
        while not stop.is_set():
            pool.submit(one, number)
            number += 1
            time.sleep(0.5)
            now = time.monotonic()
            if not done and now > begun:
                fault()
                done, begun = True, time.monotonic()
            last = sorted(seen.answers)[-20:]
            if done and now - begun > 20 and len(last) == 20 and all(what == "200" for _, _, what in last):
                stop.set()
            if done and now - begun > OBSERVED_S:
                stop.set()
    seen.answers.sort()
    return seen


def settled(seen: Seen) -> None:
    """No wrong answer, no question that hung, and service again."""
    assert not [item for item in seen.answers if item[2] == "wrong answer"], seen.words()
    assert seen.slowest() < SETTLED_S * SLOW, seen.words()
    assert seen.answers[-1][2] == "200", seen.words()


@contextmanager
def watched(controller: Controller) -> Iterator[list[dict[str, Any]]]:
    """`deploy watch` runs beside what happens within; the list holds its incidents afterwards."""
    incidents: list[dict[str, Any]] = []
    watcher = controller.start("watch", "--json")
    try:
        yield incidents
    finally:
        watcher.terminate()
        output, _ = watcher.communicate(timeout=30)
        incidents += map(json.loads, output.splitlines())


def kill(controller: Controller, service: str, number: signal.Signals) -> None:
    os.kill(controller.pid(service), number)


@pytest.mark.parametrize("service", ["decode", "prefill", "router"])
def test_sigkill(served: Controller, answers: dict[str, str], service: str) -> None:
    seen = observe(served.url, answers, lambda: kill(served, service, signal.SIGKILL))
    note(f"SIGKILL of {service}", seen.words(), seen.service(), "what was in flight", STACK)
    settled(seen)
    assert seen.service() < SERVICE_S * SLOW, seen.words()


@pytest.mark.parametrize("service", ["decode", "prefill"])
def test_sigkill_of_the_scheduler_process(served: Controller, answers: dict[str, str], service: str) -> None:
    seen = observe(served.url, answers, lambda: os.kill(served.child(service, "sglang::scheduler"), signal.SIGKILL))
    note(f"SIGKILL of {service}'s scheduler", seen.words(), seen.service(), "what was in flight", STACK)
    settled(seen)


def test_sigkill_of_the_router_process_behind_the_gate(served: Controller, answers: dict[str, str]) -> None:
    seen = observe(served.url, answers, lambda: os.kill(served.child("router", "router-alone"), signal.SIGKILL))
    note("SIGKILL of the router behind its gate", seen.words(), seen.service(), "what was in flight", STACK)
    settled(seen)


@pytest.mark.parametrize("service", ["decode", "prefill"])
def test_a_cut_network_between_the_roles(served: Controller, answers: dict[str, str], service: str) -> None:
    enter = ["nsenter", "-t", str(served.pid(service)), "-n", "ip", "link", "set", "eth0"]

    def cut() -> None:
        subprocess.run([*enter, "down"], check=True)
        # The address stays, the routes go with the link and come back with it.
        threading.Timer(CUT_S, lambda: subprocess.run([*enter, "up"], check=True)).start()

    seen = observe(served.url, answers, cut)
    note(f"network of {service} cut for {CUT_S:.0f} s", seen.words(), seen.service(), "what was in flight", STACK)
    settled(seen)


def tcp_patience(controller: Controller, service: str, retries: int) -> None:
    """How often the kernel sends again, ever more seldom, before it gives a connection up."""
    order = f"echo {retries} > /proc/sys/net/ipv4/tcp_retries2"
    subprocess.run(["nsenter", "-t", str(controller.pid(service)), "-n", "sh", "-c", order], check=True)


def barrier(controller: Controller) -> tuple[list[str], list[str]]:
    """Orders that block the KV cache on its way from prefill to decode, and that let it through again.

    Its port is decode's with the most connections: one of each of prefill's transfer workers.
    """
    enter = ["nsenter", "-t", str(controller.pid("decode")), "-n", "ss", "--no-header", "--tcp", "--numeric"]
    lines = subprocess.run(enter, capture_output=True, text=True, check=True).stdout.splitlines()
    ports = Counter(line.split()[3].rsplit(":", 1)[1] for line in lines)
    (port, _), *_ = (item for item in ports.most_common() if item[0] != "30000")
    rule = ["OUTPUT", "-p", "tcp", "--dport", port, "-j", "DROP"]
    enter = ["nsenter", "-t", str(controller.pid("prefill")), "-n", "iptables"]
    return [*enter, "-A", *rule], [*enter, "-D", *rule]


def test_ports_between_the_roles_that_stay_blocked(served: Controller, answers: dict[str, str]) -> None:
    """Nobody is dead, so the limit is WAITING_TIMEOUT, here shorter than its default."""
    well(served.url)
    closing, opening = barrier(served)
    subprocess.run(closing, check=True)
    try:
        with ThreadPoolExecutor(4) as pool:
            begun = time.monotonic()
            asked = [pool.submit(ask, served.url, prompt) for prompt in PROMPTS[:4]]
            statuses = {answer.result().status_code for answer in asked}
            seconds = time.monotonic() - begun
    finally:
        subprocess.run(opening, check=True)
    begun = time.monotonic()
    well(served.url)
    back = time.monotonic() - begun
    shown = ", ".join(map(str, sorted(statuses)))
    seen = f"{shown} after {seconds:.0f} s; once they are open, the next answer after {back:.0f} s"
    what = f"ports of the KV transfer blocked for good, WAITING_TIMEOUT={WAITING_S}"
    note(what, seen, seconds + back, "what waited", STACK)
    assert 200 not in statuses
    assert seconds < (WAITING_S + SETTLED_S) * SLOW, seen
    deadline = time.monotonic() + PATIENCE_S
    while left := used(served):
        assert time.monotonic() < deadline, f"{left} tokens of the KV pools are still in use"
        time.sleep(1)
    assert {prompt: text_of(ask(served.url, prompt)) for prompt in PROMPTS} == answers


def test_blocked_ports_between_the_roles(served: Controller, answers: dict[str, str]) -> None:
    closing, opening = barrier(served)

    def block() -> None:
        subprocess.run(closing, check=True)
        threading.Timer(20, lambda: subprocess.run(opening, check=True)).start()

    seen = observe(served.url, answers, block)
    note("ports of the KV transfer blocked for 20 s", seen.words(), seen.service(), "nothing", STACK)
    # Nobody is dead: TCP brings everything once it can. WAITING_TIMEOUT is the limit.
    assert {what for _, _, what in seen.answers} == {"200"}, seen.words()
    assert seen.slowest() < (20 + 2 * SETTLED_S) * SLOW, seen.words()


def test_what_outlasts_tcp_is_over_once_prefill_has_been_restarted(served: Controller, answers: dict[str, str]) -> None:
    """The kernel's own patience is a quarter of an hour; here it has 13 s."""
    closing, opening = barrier(served)

    def block() -> None:
        subprocess.run(closing, check=True)
        threading.Timer(CUT_S, lambda: subprocess.run(opening, check=True)).start()

    tcp_patience(served, "prefill", 5)
    try:
        with watched(served) as incidents:
            seen = observe(served.url, answers, block)
    finally:
        tcp_patience(served, "prefill", 15)
    what = f"ports of the KV transfer blocked for {CUT_S:.0f} s, of which TCP waits for 13, with deploy watch"
    note(what, seen.words(), seen.service(), "what was in flight", STACK)
    assert [(item["role"], item["remedy"]) for item in incidents] == [("prefill", "restart")], incidents
    assert not [item for item in seen.answers if item[2] == "wrong answer"], seen.words()
    assert seen.answers[-1][2] == "200", seen.words()


SCHEDULER, SERVER = "sglang::scheduler", "engine_runtime.launch"
STUCK = {
    "decode's scheduler": ("decode", SCHEDULER),
    "decode's HTTP server": ("decode", SERVER),
    "prefill's scheduler": ("prefill", SCHEDULER),
    "prefill's HTTP server": ("prefill", SERVER),
    "the router": ("router", "router-alone"),
}
# The gate finds it in 10 s, `deploy watch` waits for 10 s more and looks 5 s after its last look, which takes 10 s more
# where a stuck HTTP server is asked (33 s on one day, twice 42 s on another); then as after a SIGKILL.
RESTARTED_S = 50.0


@pytest.mark.parametrize("what", STUCK)
def test_a_process_that_is_stuck_is_killed_and_started_again(
    served: Controller, answers: dict[str, str], what: str
) -> None:
    service, title = STUCK[what]
    process = served.child(service, title)
    begun: list[float] = []

    def stop() -> None:
        os.kill(process, signal.SIGSTOP)
        begun.append(time.time())

    with watched(served) as incidents:
        seen = observe(served.url, answers, stop)
    if service == "router":
        # The gate does this alone.
        note(f"SIGSTOP of {what}", seen.words(), seen.service(), "what was in flight", STACK)
        settled(seen)
        assert not incidents
        return
    mine = [item for item in incidents if item["role"] == service]
    assert [item["remedy"] for item in mine][:1] == ["restart"], incidents
    after = datetime.fromisoformat(mine[0]["time"]).timestamp() - begun[0]
    words = f"{seen.words()}; restarted after {after:.0f} s"
    note(f"SIGSTOP of {what}, with deploy watch", words, seen.service(), "what was in flight", STACK)
    settled(seen)
    assert after < RESTARTED_S * SLOW, words
    assert (Path(mine[0]["record"]) / f"{service}.log").read_text()


COMPILED_S, COMPILED_ANSWERED_S = 45.0, 8.0
"""For how long the scheduler compiles, and until when a question is with it in any case: then the router's own probes,
here every 15 s, may have taken it out."""


@pytest.mark.parametrize("service", ["decode", "prefill"])
def test_a_scheduler_that_waits_for_a_compiler_is_waited_for(
    served: Controller, answers: dict[str, str], service: str
) -> None:
    """On a CPU nothing is compiled: the scheduler stands still, and beside it runs a program of a compiler's name."""
    process = served.child(service, SCHEDULER)
    compiler = f"cp $(which sleep) /tmp/ptxas && exec /tmp/ptxas {COMPILED_S + 2}"

    def compile_something() -> None:
        docker("exec", "--detach", served.container(service), "sh", "-c", compiler)
        os.kill(process, signal.SIGSTOP)
        threading.Timer(COMPILED_S, os.kill, (process, signal.SIGCONT)).start()

    with watched(served) as incidents:
        seen = observe(served.url, answers, compile_something)
    what = f"{service}'s scheduler waits {COMPILED_S:.0f} s for a compiler, with deploy watch"
    note(what, seen.words(), seen.service(), "nothing", STACK)
    assert not incidents
    assert {status for _, _, status in seen.answers} <= {"200", "503"}, seen.words()
    assert {status for asked, _, status in seen.answers if asked < COMPILED_ANSWERED_S} == {"200"}, seen.words()
    assert all(took < SETTLED_S * SLOW for _, took, status in seen.answers if status == "503"), seen.words()
    assert process == served.child(service, SCHEDULER), "it was restarted"


def resident(controller: Controller, service: str) -> int:
    """Resident memory of all processes of a container, in KiB."""
    lines = docker("top", controller.container(service), "-eo", "pid,rss").splitlines()[1:]
    return sum(int(line.split()[1]) for line in lines)


def used(controller: Controller) -> int:
    script = (
        "import json, urllib.request as r; "
        "print(sum(load['num_used_tokens'] for load in "
        "json.load(r.urlopen('http://127.0.0.1:30000/v1/loads', timeout=20))['loads']))"
    )
    return sum(
        int(docker("exec", controller.container(role), "python", "-c", script)) for role in ("prefill", "decode")
    )


def test_a_thousand_requests_with_aborts_give_no_wrong_answer_and_leave_nothing_behind(
    served: Controller, answers: dict[str, str], tmp_path: Path
) -> None:
    requests = int(os.environ.get("STRESS_REQUESTS", "1000"))
    well(served.url)

    def burst(count: int) -> dict[str, object]:
        shares = {"ABORTS": "0.1", "SLOW": "0.1", "OVERLONG": "0.02"}
        with load(served.url, answers, tmp_path, users=16, **shares, STOP_AFTER=str(count)) as found:
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline and not (tmp_path / "enough").exists():
                time.sleep(1)
        (tmp_path / "enough").unlink(missing_ok=True)
        return found

    # The first requests fill pools and caches that stay.
    burst(200)
    before = {role: resident(served, role) for role in ("prefill", "decode", "router")}
    found = burst(requests)
    assert found["failures"] == 0, found["errors"]
    assert int(str(found["requests"])) >= requests
    deadline = time.monotonic() + 60
    while left := used(served):
        assert time.monotonic() < deadline, f"{left} tokens of the KV pools are still in use"
        time.sleep(1)
    after = {role: resident(served, role) for role in before}
    grown = {role: (after[role] - before[role]) / 1024 for role in before}
    assert {prompt: text_of(ask(served.url, prompt)) for prompt in PROMPTS} == answers
    what = ", ".join(f"{role} {size:+.0f} MiB" for role, size in grown.items())
    note(
        f"{requests} requests at 16 in flight; a tenth hung up, a tenth read slowly, 2 % over-long prompts",
        f"{found['requests']} requests: no wrong answer; slowest {found['slowest_s']:.1f} s",
        None,
        f"nothing; KV pools empty; resident memory {what}",
        STACK,
    )
    assert max(grown.values()) < 100, grown
