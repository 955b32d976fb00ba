"""Writes logs of a busy vLLM server for the benchmarks, the same bytes for the same arguments.

Kinds:

``mixed``       access lines, request lines and statistics as 0.32 prints them with
                ``--enable-log-requests``; the server dies and starts again every 10 MB
``crashloop``   the same, but it dies in every MiB: 900 times in a gigabyte
``warnings``    mostly lines that are not INFO: warnings, refused requests with tracebacks, debug
``iterations``  one line an engine step (``--enable-logging-iteration-details``)

The deaths are those of a real capture, so what they cost to parse is real.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

CAPTURE = Path(__file__).parents[1] / "captures" / "mlp_eager_16384.log.gz"
_LETTERS = "etaoin shrdlu cmfwyp vbgkqjxz"


def death() -> bytes:
    """Start, serving and death of one real server."""
    return gzip.decompress(CAPTURE.read_bytes())


def _clock(second: int) -> bytes:
    return b"11-%02d %02d:%02d:%02d" % (
        1 + second // 86400 % 28,
        second // 3600 % 24,
        second // 60 % 60,
        second % 60,
    )


def _mixed(rng: random.Random, n: int) -> bytes:
    now = _clock(n // 8)
    kind = rng.random()
    if kind < 0.47:
        status = b"200 OK" if rng.random() < 0.99 else b"400 Bad Request"
        return b'INFO:     10.%d.%d.%d:%d - "POST /v1/chat/completions HTTP/1.1" %s\n' % (
            rng.randrange(256), rng.randrange(256), rng.randrange(256), 20000 + n % 40000, status,
        )  # fmt: skip
    if kind < 0.70:
        return (
            b"(APIServer pid=1) INFO %s [request_logger.py:65] Received request chatcmpl-%016x: params: "
            b"SamplingParams(n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, "
            b"temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=[], stop_token_ids=[], "
            b"bad_words=[], include_stop_str_in_output=False, ignore_eos=False, max_tokens=%d, min_tokens=0, "
            b"logprobs=None, prompt_logprobs=None, skip_special_tokens=True), lora_request: None.\n"
            % (now, rng.getrandbits(64), rng.randrange(16, 4096))
        )
    if kind < 0.93:
        return b"(APIServer pid=1) INFO %s [async_llm.py:578] Added request chatcmpl-%016x.\n" % (
            now,
            rng.getrandbits(64),
        )
    return (
        b"(APIServer pid=1) INFO %s [loggers.py:271] Engine 000: Avg prompt throughput: %d.%d tokens/s, "
        b"Avg generation throughput: %d.%d tokens/s, Running: %d reqs, Waiting: %d reqs, GPU KV cache usage: "
        b"%d.%d%%, Prefix cache hit rate: %d.%d%%\n"
        % (now, rng.randrange(9000), n % 10, rng.randrange(900), n % 10, rng.randrange(99), n % 7, n % 100, n % 10, n % 90, n % 10)
    )  # fmt: skip


def _warnings(rng: random.Random, n: int) -> bytes:
    now = _clock(n // 8)
    kind = rng.random()
    if kind < 0.4:
        return (
            b"(APIServer pid=1) WARNING %s [protocol.py:%d] The following fields were present in the request but ignored: {'field_%d'}\n"
            % (now, 70 + n % 9, n % 99)
        )
    if kind < 0.5:
        words = "".join(rng.choice(_LETTERS) for _ in range(60)).encode()
        head = b"(APIServer pid=1) ERROR %s [serving_chat.py:200] " % now
        frames = (
            b"Error in preprocessing prompt inputs", b"Traceback (most recent call last):",
            b'  File "/usr/local/lib/python3.12/dist-packages/vllm/entrypoints/openai/serving_chat.py", line 183, in create_chat_completion',
            b"    ) = await self._preprocess_chat(", b"        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
            b'  File "/usr/local/lib/python3.12/dist-packages/vllm/entrypoints/openai/serving_engine.py", line 593, in _tokenize_prompt',
            b"ValueError: this prompt can not be read: " + words,
        )  # fmt: skip
        return b"".join(head + frame + b"\n" for frame in frames)
    if kind < 0.75:
        return (
            b"(EngineCore pid=104) WARNING %s [scheduler.py:1439] request %016x waits for a grammar that is still compiled\n"
            % (now, rng.getrandbits(64))
        )
    return (
        b"(EngineCore pid=104) DEBUG %s [v1/core/sched/scheduler.py:440] num_new_tokens=%d num_computed_tokens=%d\n"
        % (now, rng.randrange(9000), n % 8192)
    )


def _iterations(rng: random.Random, n: int) -> bytes:
    if n % 60 == 0:
        return _mixed(rng, n)
    return (
        b"(APIServer pid=1) INFO %s [loggers.py:199] Engine 000: Iteration(%d): %d context requests, %d context tokens, "
        b"%d generation requests, %d generation tokens, iteration elapsed time: %d.%02d ms, GPU KV cache usage: %d.%d%%\n"
        % (
            _clock(n // 40),
            n,
            n % 3,
            rng.randrange(16384),
            n % 64,
            n % 64,
            rng.randrange(300),
            n % 100,
            n % 100,
            n % 10,
        )
    )


KINDS = {
    "mixed": (_mixed, 10_000_000),
    "crashloop": (_mixed, 900_000),
    "warnings": (_warnings, 0),
    "iterations": (_iterations, 64_000_000),
}
"""What writes one line of a kind, and the bytes between deaths (0: none)."""


def chunks(kind: str, size: int, seed: int = 1) -> Iterator[bytes]:
    """The log in pieces of about a megabyte; ``size`` in bytes is met to within one piece."""
    line, between_deaths = KINDS[kind]
    rng = random.Random(seed)  # noqa: S311 - reproducible bytes are wanted, not secrets
    dead = death() if between_deaths else b""
    written = n = 0
    while written < size:
        lines, length = [], 0
        while length < (1 << 20):
            lines.append(line(rng, n))
            length += len(lines[-1])
            n += 1
        piece = b"".join(lines)
        if between_deaths and written // between_deaths != (written + length) // between_deaths:
            # one start at a time: its dates follow the clock of the lines around it
            piece += re.sub(rb"\b11-30 ", _clock(n // 8)[:6], dead)
        written += len(piece)
        yield piece


def write(kind: str, size: int, file: BinaryIO) -> None:
    """Write one log of ``size`` bytes. Long ones repeat 64 MiB: making them must not take longer than reading them."""
    first = b"".join(chunks(kind, min(size, 64 << 20)))
    written = 0
    while written < size:
        file.write(first)
        written += len(first)


def main() -> None:
    """``generate.py KIND MEGABYTES > FILE``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("megabytes", type=int)
    args = parser.parse_args()
    write(args.kind, args.megabytes * 1_000_000, sys.stdout.buffer)


if __name__ == "__main__":
    main()
