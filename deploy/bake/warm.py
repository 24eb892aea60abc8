"""Makes a running stack compile what requests make it compile, so that no user waits for it."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException

from deploy.errors import DeployError
from deploy.lock.options import options
from deploy.stack.client import Endpoint, RequestFailed, stream
from deploy.stack.compose import Stack, words

ROUNDS = 3
"""Compiling on demand is over when a round compiles nothing; this many at most."""
ANSWER_TOKENS = 16
SILENCE_S = 1800.0
"""A first compilation was seen to take minutes."""
DEFAULT_REQUESTS = 64
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Round:
    """One pass over all shapes.

    Attributes:
        requests: answered.
        refused: refused by the server, for example as too long.
        compiled: by engine, what it compiled meanwhile.
    """

    requests: int
    refused: int
    compiled: dict[str, dict[str, int]]

    @property
    def total(self) -> int:
        return sum(sum(counts.values()) for counts in self.compiled.values())


def lengths(context: int) -> list[int]:
    """Prompts to try, in words of about a token: each power of two up to half of the context, which leaves room."""
    return [1 << power for power in range(3, max(4, (context // 2).bit_length()))]


def batches(most: int) -> list[int]:
    """Requests at once: each power of two up to the engine's limit, and the limit."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


def limits(config: dict[str, Any]) -> tuple[int, int]:
    """The context in tokens and the most requests at once, of the engines of an effective compose configuration."""
    context, most = [DEFAULT_CONTEXT], [0]
    for service in config["services"].values():
        found = options(tuple(map(str, service.get("command") or ())))
        for name, into in (("--context-length", context), ("--max-running-requests", most)):
            into += [int(value) for value in found.get(name, ()) if value.isdigit()]
    return max(context), max(most) or DEFAULT_REQUESTS


def compiled(stack: Stack) -> dict[str, dict[str, int]]:
    """By engine, what its compilers have written so far.

    Raises:
        DeployError: a container does not say.
    """
    found: dict[str, dict[str, int]] = {}
    for state in stack.roles():
        if state.role not in stack.engines:
            continue
        try:
            said = DockerClient().container.execute(state.container, ["python", "-m", "engine_runtime.jit"])
            found[state.role] = json.loads(str(said))
        except (DockerException, ValueError) as error:
            why = words(error) if isinstance(error, DockerException) else str(error)
            raise DeployError(f"{state.role} does not say what it compiled", why, "deploy status") from error
    return found


def warm(
    stack: Stack, target: Endpoint, context: int, most: int, report: Callable[[str, int, int], None]
) -> Iterator[Round]:
    """Send requests of every length alone and short ones in every batch size, until nothing is compiled any more.

    Args:
        context, most: as `limits` has them.
        report: called with words, steps done and steps in all.

    Raises:
        RequestFailed: the stack does not answer.
    """
    for number in range(1, ROUNDS + 1):
        before = compiled(stack)
        done = refused = 0
        plan = [(length, 1) for length in lengths(context)] + [(8, size) for size in batches(most)]
        for place, (length, size) in enumerate(plan):
            report(f"round {number}: {size} x {length} words", place, len(plan))
            with ThreadPoolExecutor(size) as pool:
                for answered in pool.map(partial(_ask, target, length), range(size)):
                    done, refused = done + answered, refused + (not answered)
        if not done:
            raise RequestFailed("no request was answered", f"all {refused} were refused", "deploy logs")
        now = compiled(stack)
        made = {
            role: {name: number - before.get(role, {}).get(name, 0) for name, number in counts.items()}
            for role, counts in now.items()
        }
        found = Round(done, refused, made)
        yield found
        if found.total == 0:
            return


def _ask(target: Endpoint, length: int, number: int) -> bool:
    """One request; False if the server refused it."""
    # Another first word each: a prompt that is in the prefix cache compiles nothing.
    question = f"{number} " + "a " * length
    answer = stream(target, question, max_tokens=ANSWER_TOKENS, ignore_end=True, silence_s=SILENCE_S)
    try:
        with suppress(StopIteration):
            while True:
                next(answer)
    except RequestFailed as error:
        if "HTTP 400" in error.message or "HTTP 413" in error.message:
            return False
        raise
    return True
