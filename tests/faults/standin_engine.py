"""Stands in for an SGLang engine where only router, gate and controller are tested: it starts in a second.

It answers what the router asks of a worker, streams a made-up answer that depends on the prompt alone, and counts and
reports like SGLang. WORD_SECONDS is the time of one word.
"""

import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

from aiohttp import web

MODEL = "tiny"
WORD_S = float(os.environ.get("WORD_SECONDS", "0.02"))
START_S = float(os.environ.get("START_SECONDS", "0"))
served = {"requests": 0, "prompt": 0, "answer": 0}
flying = 0


def words(prompt: str, count: int) -> list[str]:
    """The answer to a prompt: the same from every engine, now and later."""
    return [hashlib.sha256(f"{prompt} {place}".encode()).hexdigest()[:6] + " " for place in range(count)]


async def chat(request: web.Request) -> web.StreamResponse:
    global flying
    body: dict[str, Any] = await request.json()
    prompt, count = (
        str(body["messages"][-1]["content"]),
        int(body.get("max_completion_tokens") or body.get("max_tokens") or 16),
    )
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": count}
    flying += 1
    try:
        if not body.get("stream"):
            await asyncio.sleep(WORD_S * count)
            message = {"role": "assistant", "content": "".join(words(prompt, count))}
            count_request(usage)
            return web.json_response(
                {"id": "1", "model": MODEL, "choices": [{"index": 0, "message": message}], "usage": usage}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in words(prompt, count):
            await asyncio.sleep(WORD_S)
            await event(response, {"choices": [{"index": 0, "delta": {"content": word}}]})
        await event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        count_request(usage)
        return response
    finally:
        flying -= 1


def count_request(usage: dict[str, int]) -> None:
    served["requests"] += 1
    served["prompt"] += usage["prompt_tokens"]
    served["answer"] += usage["completion_tokens"]


async def event(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(data)}\n\n".encode())


async def facts(request: web.Request) -> web.Response:
    return web.json_response(
        {"model_path": "/model", "served_model_name": MODEL, "tokenizer_path": "/model", "is_generation": True}
    )


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def loads(request: web.Request) -> web.Response:
    return web.json_response(
        {
            "loads": [
                {"timestamp": time.time(), "num_running_reqs": flying, "num_waiting_reqs": 0, "num_used_tokens": flying}
            ]
        }
    )


async def metrics(request: web.Request) -> web.Response:
    names = {"requests": "num_requests_total", "prompt": "prompt_tokens_total", "answer": "generation_tokens_total"}
    lines = [f"# TYPE sglang:{names[name]} counter\nsglang:{names[name]} {value}\n" for name, value in served.items()]
    return web.Response(text="".join(lines))


async def health(request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def main() -> None:
    if os.environ.get("FAIL_AT_START"):
        sys.exit("the stand-in was told to fail")
    time.sleep(START_S)
    application = web.Application()
    application.router.add_post("/v1/chat/completions", chat)
    for path, handler in (
        ("/health", health),
        ("/v1/models", models),
        ("/v1/loads", loads),
        ("/metrics", metrics),
        ("/model_info", facts),
        ("/get_model_info", facts),
        ("/server_info", facts),
        ("/get_server_info", facts),
    ):
        application.router.add_get(path, handler)
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 30000).start()
    sys.stderr.write("The server is fired up and ready to roll!\n")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    while flying:
        await asyncio.sleep(0.05)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
