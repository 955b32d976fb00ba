"""One record -> what it tells. The place that decides which text may be evidence.

What a client sent appears in logs at every level, with newlines: prompts, request ids, model
and adapter names, URLs. Three rules keep it from counting:

1. below ERROR only texts that begin a record and come from the file that writes them count;
2. records of modules that repeat client text (``log.USER_TEXT_FILES``) are never evidence;
3. at ERROR an exception counts where the interpreter puts one: as the head of a record or at
   the end of a traceback, not inside the message of another exception.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..records import Dump, Failure, Frame, NearMiss, Record, Signal, Terminal, Traffic, TrafficSeen
from . import requests, scheduler_dump, startup, traceback
from .iteration import iterations
from .log import USER_TEXT_FILES
from .memory_error import Recognised, match

# [rank0]:[W1020 01:01:34.032955245 CUDACachingAllocator.cpp:3933] memory allocation failed with
# OOM on device 0 while trying to allocate 230686720 bytes (free: 92274688, total: 85094825984).
_RETRY = re.compile(
    r"(?:expandable_segments: )?memory (?:allocation|mapping) failed with OOM on device (\d{1,15}(?!\d)) "
    r"while trying to allocate (\d{1,15}(?!\d))(?: bytes)?(?: \(free: (\d{1,15}(?!\d)), total: (\d{1,15}(?!\d))\))?"
)
# [Sat Oct 25 09:04:11 2026] Memory cgroup out of memory: Killed process 30412 (VLLM::EngineCor) …
_KILLER = re.compile(
    r"(?:\[[^\]]{1,40}\] |<\d>|.{0,60}\bkernel: (?:\[[^\]]{1,30}\] )?)?"
    r"(?:Memory cgroup out of memory: |Out of memory: )Kill(?:ed)? process \d+ \(([^)]{1,32})\)"
)
_NVRM = re.compile(r"(?:\[[^\]]{1,40}\] |.{0,60}\bkernel: )?NVRM: .*NV_ERR_NO_MEMORY")
# NvMapMemAllocInternalTagged: 1075072515 error 12      (Jetson)
_NVMAP = re.compile(r"NvMapMemAlloc\w*: \d+ error 12")
# host:217:301 [1] include/alloc.h:103 NCCL WARN Cuda failure 2 'out of memory'
_NCCL_WARN = re.compile(
    r"[\w.-]+:\d+:\d+ \[\d+\] .{0,120}NCCL WARN (?:Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:host )?(?:malloc|calloc))"
)
# Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:368 'out of memory'
_ALL_REDUCE = re.compile(r"Failed: Cuda error \S{0,80}custom_all_reduce\.cuh:\d+ 'out of memory'")
# the shell: "Killed", "run.sh: line 3:  4242 Killed   vllm serve …"; kubectl describe: "Reason: OOMKilled"
_SHELL_KILLED = re.compile(r"Killed$|\S{1,80}: line \d+: +\d+ Killed\b")
_OOM_KILLED = re.compile(r"\s*(?:Last State: .{0,40})?Reason:\s+OOMKilled\s*$")
# another engine's lines in a mixed paste
_OTHER_ENGINE = re.compile(
    r"sglang|\[TensorRT-LLM\]|text_generation_launcher|lmdeploy|(?:Prefill|Decode) batch\. #|\bggml_|llama_model_load"
)
_RAY_PRESSURE = re.compile(
    r"(?:\S{0,40}\(raylet\)\S{0,20} .{0,80}|.{0,200}?)\d+ Workers? \(tasks / actors\) killed due to memory pressure \(OOM\)"
)
_RAY_MAYBE = re.compile(r".{0,400}process is killed by SIGKILL by OOM killer due to high memory usage")
# An answer of vLLM in the log of another program: responseBody={\"error\":{\"message\":\"Call to
# wake_up method failed: CUDA Error: out of memory at <path>:161\"
_UTILITY_ANSWER = re.compile(r"Call to (\w+) method failed: ((?:[^\"\\]|\\(?!\"))*)")
_INVOCATION = re.compile(r"Invocation of (\w+) method failed")
_REQUEST_FAILED = re.compile(r"Unexpected error pre-?processing request ")

# head of an ERROR record -> how the engine stands after it
_TERMINALS = (
    (re.compile(r"EngineCore encountered a fatal error|EngineCore hit an exception"), "fatal"),
    (re.compile(r"Engine background task failed|Background loop has errored"), "fatal"),
    (re.compile(r"EngineCore failed to start|WorkerProc failed to start|Engine process failed to start"), "start_failed"),
    (re.compile(r"AsyncLLM output_handler failed|(?:AsyncLLM|MQLLM)Engine is already dead|Engine core proc(?:ess)? \S{1,40} died unexpectedly"), "dead"),
    (re.compile(r"Exception occurred while running API servers"), "dead"),
)  # fmt: skip
_DEAD_EXCEPTIONS = ("EngineDeadError", "AsyncEngineDeadError", "MQEngineDeadError", "EngineGenerateError")
_FAILED_PROCS = re.compile(r"Failed core proc\(s\): \{([^}]*)\}")
_DIED = re.compile(
    r"Worker proc \S{1,60} died unexpectedly(?: \(exit code: (-?\d{1,15}(?!\d)|None)\))?|Worker \S{1,60} pid \d+ died, exit code: (-?\d{1,15}(?!\d))"
)
_API_PROCESSES = re.compile(r"(?:APIServer|ApiServer_\d+|MainProcess|DPSupervisor)$")
_ENGINE_FILES = frozenset(
    [
        "core.py",
        "engine.py",
        "multiproc_executor.py",
        "gpu_worker.py",
        "worker.py",
        "gpu_model_runner.py",
        "model_runner.py",
        "worker_base.py",
        "ray_utils.py",
        "cpu_worker.py",
        "multiproc_worker_utils.py",
        "llm_engine.py",
        "core_client.py",
        "utils.py",
        "base_loader.py",
        "cumem.py",
        "uniproc_executor.py",
        "async_llm_engine.py",
        "mp_distributed_executor.py",
    ]
)
FRONT_END_FILES = (USER_TEXT_FILES | {"api_server.py", "uvicorn"}) - {"async_llm_engine.py", "async_llm.py"}
"""Files whose ERROR records are about requests; ``async_llm*`` report the death of the engine."""


def signals(record: Record) -> Iterator[Signal]:
    """Everything ``record`` tells, in the order of its lines."""
    if record.level in ("ERROR", "CRITICAL") or record.level == "":
        yield from _failures(record)
        return
    if record.file == "CUDACachingAllocator.cpp":
        if (found := _RETRY.match(record.head)) is not None:
            yield _near_miss(record, found)
        return
    if record.traffic is not None:
        yield TrafficSeen(record.traffic, record)
        return
    if record.file in USER_TEXT_FILES and record.file != "launcher.py":
        if (received := requests.received(record)) is not None:
            yield TrafficSeen(received, record)
        return
    if record.level == "INFO" and (steps := iterations(record)):
        yield TrafficSeen(Traffic(steps=steps), record)
        return
    yield from startup.signals(record)


def _near_miss(record: Record, found: re.Match[str]) -> NearMiss:
    device, tried, free, total = (None if n is None else int(n) for n in found.groups())
    return NearMiss(device, tried, free, total, record)


def _failures(record: Record) -> Iterator[Signal]:
    head = record.head.strip()
    if (part := scheduler_dump.part_of(head)) is not None and record.level:
        yield _dump(record, part)
        return
    if record.file in FRONT_END_FILES:
        yield from _quoted_death(record)
        return
    if record.level == "":
        yield from _runtime_lines(record)
    survived = _survival(record)
    lines: Sequence[str] = record.lines
    offset = 0
    if survived is not None and survived.kind == "survived_request":
        # the id of the request stands in the head, with whatever newlines it has
        offset = max((i for i, text in enumerate(lines) if text.strip().startswith("Traceback (")), default=0)
        lines = lines[offset:]
    yield from _head_failure(record)
    yield from _exceptions(record, lines, offset)
    if survived is not None:
        yield survived  # of the failure before it
    yield from _terminals(record)


def _quoted_death(record: Record) -> Iterator[Signal]:
    """A request handler of V0 that quotes what killed the engine, in a class only vLLM raises.

    ``vllm.engine.multiprocessing.MQEngineDeadError: Engine loop is not running. Inspect the
    stacktrace to find the original error: OutOfMemoryError('CUDA out of memory. …``
    """
    for raised in traceback.exceptions(record.lines):
        if raised.cls != "vllm.engine.multiprocessing.MQEngineDeadError":
            continue
        if (found := match(raised.message)) is not None:
            yield _failure(found, (), record, raised.index)
        yield Terminal("dead", record)
        return


def _dump(record: Record, part: str) -> Dump:
    text = "\n".join(record.lines)
    if part == "config":
        version = scheduler_dump.config_version(text)
        return Dump(part, {"vllm_version": version} if version else {}, record)
    facts = scheduler_dump.output_facts(text) if part == "output" else scheduler_dump.stats_facts(text)
    return Dump(part, facts, record)


def _survival(record: Record) -> Terminal | None:
    """Lines that say the engine goes on: one utility call or one request failed."""
    if (found := _INVOCATION.match(record.head)) is not None:
        return Terminal("survived", record, found[1])
    if _REQUEST_FAILED.match(record.head) is not None:
        return Terminal("survived_request", record)
    return None


def _head_failure(record: Record) -> Iterator[Failure]:
    """Texts that vLLM logs as the head of an ERROR record, not as an exception."""
    head = record.head
    if record.level == "" or traceback.exception_of(head) is not None:
        return
    found = match(head) if head.startswith("Failed to load model") else None
    if found is not None:
        yield _failure(found, (), record, 0)


# Their messages are of the interpreter's making, or escape what they quote.
_PLAIN = frozenset(
    [
        "KeyError",
        "AttributeError",
        "ImportError",
        "ModuleNotFoundError",
        "IndexError",
        "TimeoutError",
        "StopIteration",
        "Empty",
    ]
)


_DEVICE_KINDS = frozenset(
    ["allocator", "driver", "cublas", "nccl", "cumem", "masked", "fraction", "host_allocator"]
)
_NEVER_RAISED_FOR_MEMORY = frozenset(
    ["ValueError", "KeyError", "TypeError", "ValidationError", "HTTPException"]
)


def _exceptions(record: Record, lines: Sequence[str], offset: int) -> Iterator[Signal]:
    """Memory failures and deaths among the exceptions of a record.

    Once an exception has spoken whose message may quote a client (an adapter's name, a grammar),
    all that follows in the record may be part of that message, down to a perfect traceback.
    """
    front_end = _API_PROCESSES.match(record.process) is not None
    for raised in traceback.exceptions(lines):
        name = raised.cls.rpartition(".")[2]
        if name in _DEAD_EXCEPTIONS and "original error" not in raised.message:
            yield Terminal("dead", record)
            continue
        if name == "RuntimeError" and (procs := _FAILED_PROCS.search(raised.message)) is not None:
            # RuntimeError: Engine core initialization failed. … Failed core proc(s): {'EngineCore_DP0': -9}
            if re.search(r": -9\b", procs[1]):
                yield _killed(record, raised.index + offset, -9)
            yield Terminal("start_failed", record)
            continue
        found = match(raised.message)
        if found is None and name == "MemoryError":
            # FlashInfer raises the interpreter's class for memory of the device
            on_device = any(f.path.startswith("flashinfer/") for f in raised.frames)
            found = Recognised("driver" if on_device else "host_allocator", {}, "MemoryError")
        if found is None and not _quotes_nobody(raised, name):
            return
        if (
            found is None
            or not _ours(raised, record)
            or (found.kind in _DEVICE_KINDS and name in _NEVER_RAISED_FOR_MEMORY)
        ):
            continue
        if front_end and not any(
            f.path.startswith(("torch/", "vllm/model_executor/")) for f in raised.frames
        ):
            continue  # the API server allocates on no device but for multimodal inputs
        yield _failure(found, raised.frames, record, raised.index + offset)


def _quotes_nobody(raised: traceback.Raised, name: str) -> bool:
    if name in _PLAIN or raised.cls.startswith("ray.exceptions"):
        return True
    through_lora = any("lora" in f.path or "lora" in f.function for f in raised.frames)
    return name == "RuntimeError" and not through_lora and "\n" not in raised.message


def _ours(raised: traceback.Raised, record: Record) -> bool:
    """Whether the exception can be vLLM's: other engines run out of memory too, in the same words.

    ``tvm.error.InternalError: CUDA out of memory.`` without a prefix or a frame of vLLM is not.
    """
    ours = any(frame.path.startswith("vllm/") for frame in raised.frames)
    if not ours and any(frame.path.startswith(traceback.OTHER_ENGINES) for frame in raised.frames):
        return False
    if record.level or record.process:
        return True
    if not ours and any(_OTHER_ENGINE.search(text) for text in record.lines):
        return False
    package = raised.cls.partition(".")[0] if "." in raised.cls else ""
    if package in ("", "torch", "vllm", "ray", "builtins", "pydantic_core", "concurrent"):
        return True
    return ours


def _failure(found: Recognised, frames: tuple[Frame, ...], record: Record, index: int) -> Failure:
    index = min(index, len(record.numbers) - 1)
    return Failure(found.kind, found.facts, frames, found.shown, record.numbers[index], record)


def _killed(record: Record, index: int, code: int) -> Failure:
    index = min(index, len(record.numbers) - 1)
    return Failure(
        "killed_by_signal", {"exit_code": code}, (), f"process ended by signal {-code} (exit code {code})",
        record.numbers[index], record,
    )  # fmt: skip


def _runtime_lines(record: Record) -> Iterator[Signal]:
    """Lines no logger writes: kernel, driver, Ray, C++ and answers quoted by other programs."""
    claimed = any("Traceback (" in text for text in record.lines)
    raised = next(iter(traceback.exceptions(record.lines)), None)
    quoting = (
        raised is not None
        and match(raised.message) is None
        and not _quotes_nobody(raised, raised.cls.rpartition(".")[2])
    )
    own = record.lines[: raised.index] if quoting and raised is not None else record.lines
    for index, line in enumerate(own):
        number, text = record.numbers[index], line.strip()  # a pasted log is often shifted
        if (found := _RETRY.match(text)) is not None:
            yield _near_miss(record, found)
        elif (found := _KILLER.match(text)) is not None:
            named = {"cgroup_named": True} if "Memory cgroup" in found[0] else {}
            yield Failure(
                "oom_killer", named, (), "the kernel killed a process for lack of memory", number, record
            )
        elif _OOM_KILLED.match(text) is not None:
            yield Failure("oom_killer", {"cgroup_named": True}, (), "Kubernetes: OOMKilled", number, record)
        elif _SHELL_KILLED.match(text) is not None:
            yield Failure("killed_by_signal", {"exit_code": -9}, (), "the shell says: Killed", number, record)
        elif "NCCL WARN" in text and _NCCL_WARN.match(text) is not None:
            yield Failure("nccl", {}, (), "NCCL WARN Cuda failure 'out of memory'", number, record)
        elif _ALL_REDUCE.match(text) is not None:
            yield Failure("nccl", {}, (), "custom all-reduce: Cuda error 'out of memory'", number, record)
        elif _NVMAP.match(text) is not None:
            yield Failure("driver_no_memory", {}, (), "NvMapMemAlloc: error 12", number, record)
        elif _NVRM.match(text) is not None:
            yield Failure("driver_no_memory", {}, (), "NVRM: NV_ERR_NO_MEMORY", number, record)
        elif "memory pressure (OOM)" in text and _RAY_PRESSURE.match(text) is not None:
            yield Failure(
                "ray_memory_pressure", {}, (), "Ray killed workers due to memory pressure", number, record
            )
        elif "OOM killer" in text and _RAY_MAYBE.match(text) is not None:
            yield Failure(
                "ray_maybe_oom", {}, (), "Ray names the OOM killer as a possible cause", number, record
            )
        elif text.startswith("CUDA Error: out of memory at ") and (found2 := match(text)) is not None:
            # csrc/cumem_allocator.cpp writes it to stderr before it raises
            yield _failure(found2, (), record, index)
        elif "method failed: " in text and (found := _UTILITY_ANSWER.search(text)) is not None:
            if (found2 := match(found[2])) is not None:
                frames = (
                    (Frame("vllm/device_allocator/cumem.py", 0, found[1]),) if found[1] == "wake_up" else ()
                )
                yield _failure(found2, frames, record, index)
                yield Terminal("survived", record, found[1])
        elif not claimed and traceback.exception_of(text) is None and _bare_message(text):
            found2 = match(text)
            if found2 is not None:
                yield _failure(found2, (), record, index)


def _bare_message(text: str) -> bool:
    """Messages that stand alone in a cut log, without their exception class."""
    return text.startswith(
        ("No available memory for the cache blocks", "To serve at least one request with",
         "The model's max seq len (", "Free memory on device", "free memory on device",
         "CUDA out of memory. Tried", "HIP out of memory. Tried", "NPU out of memory. Tried")
    )  # fmt: skip


def _terminals(record: Record) -> Iterator[Signal]:
    head = record.head.strip().removeprefix("-> ")
    for pattern, kind in _TERMINALS:
        if pattern.match(head) is not None:
            yield Terminal(kind, record)
            break
    if head.startswith("WorkerProc ") and not any(True for _ in traceback.exceptions(record.lines)):
        yield Terminal("cut", record)
    if (found := _DIED.match(head)) is not None:
        # "(exit code: None)" also follows ordinary start-up failures and proves nothing
        code = found[1] or found[2]
        if code == "-9":
            yield _killed(record, 0, -9)
        yield Terminal("dead", record)
    if record.level == "":
        for line in record.lines[1:]:
            text = line.strip().removeprefix("-> ")
            if text.startswith(("EngineCore encountered a fatal error", "EngineCore failed to start")):
                yield Terminal("fatal" if "fatal" in text else "start_failed", record)
            elif text.startswith("vllm.v1.engine.exceptions.EngineDeadError: "):
                yield Terminal("dead", record)
