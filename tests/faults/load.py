"""Locust's user for the fault tests: asks, reads the stream to its end, and compares every answer with what it must be.

EXPECTED_ANSWERS names a JSON file: prompt → answer. A request fails if its status is not 200, its stream breaks off, or
its answer is another one. ABORTS, SLOW and OVERLONG are shares of the requests: hung up in mid-stream, read with a
pause after each piece, longer than the context and so to be refused with 400. RETRIES is how often a refused request is
sent again after what Retry-After says, as OpenAI's client does on its own; the default is never.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from locust import HttpUser, constant, events, task

ANSWERS: dict[str, str] = json.loads(Path(os.environ["EXPECTED_ANSWERS"]).read_text())
TOKENS = int(os.environ.get("ANSWER_TOKENS", "20"))
RETRIES = int(os.environ.get("RETRIES", "0"))
ABORTS = float(os.environ.get("ABORTS", "0"))
SLOW = float(os.environ.get("SLOW", "0"))
OVERLONG = float(os.environ.get("OVERLONG", "0"))
PAUSE_S = 0.2
HEADERS = {"Authorization": f"Bearer {os.environ['API_KEY']}"} if "API_KEY" in os.environ else {}
# After so many requests the file `enough` appears beside the answers.
STOP_AFTER = int(os.environ.get("STOP_AFTER", "0"))
KINDS = ("abort", "slow", "overlong", "answer")
WEIGHTS = (ABORTS, SLOW, OVERLONG, 1 - ABORTS - SLOW - OVERLONG)
PATH = "/v1/chat/completions"
sent = 0


@events.request.add_listener  # pyright: ignore
def say_why(exception: Exception | None = None, **_: Any) -> None:
    if exception:
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {exception}\n")


class Asker(HttpUser):
    wait_time = constant(0)  # pyright: ignore

    @task
    def ask(self) -> None:
        global sent
        sent += 1
        if sent == STOP_AFTER:
            Path(os.environ["EXPECTED_ANSWERS"]).with_name("enough").touch()
        prompt = random.choice(list(ANSWERS))
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        (kind,) = random.choices(KINDS, WEIGHTS)
        if kind == "overlong":
            body["messages"] = [{"role": "user", "content": "x " * 6000}]
        for attempt in range(RETRIES + 1):
            with self.client.post(
                PATH,
                json=body,
                headers=HEADERS,
                stream=True,
                timeout=120,
                catch_response=True,
                name=kind if attempt == 0 else f"{kind}, asked again",
            ) as response:
                last = attempt == RETRIES
                refused = response.status_code in (0, 502, 503)
                if refused and not last:
                    response.success()
                elif kind == "overlong" and response.status_code == 400:
                    response.success()
                    return
                elif response.status_code != 200:
                    response.failure(f"HTTP {response.status_code}: {(response.text or '')[:200]}")
                    return
                else:
                    self._read(response, prompt, kind)
                    return
            time.sleep(float(response.headers.get("Retry-After", 1)) if response.headers else 1.0)

    def _read(self, response: Any, prompt: str, kind: str) -> None:
        text, ended = "", False
        try:
            for number, line in enumerate(response.iter_lines()):
                if kind == "abort" and number > random.randint(0, 6):
                    response.close()
                    response.success()
                    return
                if kind == "slow":
                    time.sleep(PAUSE_S)
                if line == b"data: [DONE]":
                    ended = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        response.failure(f"error in the stream: {event['error']}"[:200])
                        return
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
        except Exception as error:
            response.failure(f"the stream broke off: {type(error).__name__}")
            return
        if not ended:
            response.failure("the stream ended without [DONE]")
        elif text != ANSWERS[prompt]:
            response.failure(f"wrong answer: {text[:80]!r}")
