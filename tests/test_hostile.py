"""What clients send: it never counts, and it never comes out."""

from __future__ import annotations

import json

import pytest
from conftest import LATEST, Document, analyzed, capture

from exporter.analyze import Analysis, Reader
from exporter.diagnosis.history import History
from exporter.report.text import report

PREFIX = "(EngineCore pid=104) ERROR 11-02 10:00:05 [core.py:1138] "
FRAME = '  File "/usr/local/lib/python3.12/dist-packages/vllm/{}", line {}, in {}'
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 672.00 MiB. GPU 0 has a total capacity "
    "of 79.15 GiB of which 424.00 MiB is free."
)
TRACEBACK = (
    "Traceback (most recent call last):\n"
    + FRAME.format("v1/worker/gpu_model_runner.py", 4051, "execute_model")
    + "\n"
    + FRAME.format("model_executor/layers/activation.py", 146, "forward_cuda")
    + f"\n{OOM}"
)
DEATH = "\n".join(PREFIX + line for line in ["EngineCore encountered a fatal error.", *TRACEBACK.split("\n")])
HIDDEN = "the-prompt-of-somebody"


def logged(file: str, text: str, level: str = "INFO", process: str = "APIServer pid=1") -> str:
    """``text`` as vLLM logs it: its prefix on every line, CRLF within the record."""
    prefix = f"({process}) {level} 11-02 10:00:03 [{file}] "
    return "\r\n".join(prefix + line for line in text.split("\n")) + "\n"


FAKES = {"exception": OOM, "traceback": TRACEBACK, "death with prefixes": DEATH}
PLACES = {
    "prompt": ("logger.py:61", "Received request chatcmpl-1: prompt: {}, params: SamplingParams(n=1)", "INFO"),
    "request id": ("async_llm.py:401", "Added request chatcmpl-{}-8f3a.", "INFO"),
    "debug body": ("request_logger.py:74", 'Request 1 JSON body: {{"prompt": "{}"}}', "DEBUG"),
    "unknown model": ("serving.py:274", 'Error with model error=ErrorInfo(message="The model `{}` does not exist.")', "ERROR"),
    "validation": ("validation.py:151", "RequestValidationError caught.\nTraceback (most recent call last):\n"
                   "fastapi.exceptions.RequestValidationError: 1 validation error:\n  input: {}", "ERROR"),
    "chat template": ("hf.py:648", "Detected the chat template content format to be {}", "INFO"),
    "warning": ("protocol.py:71", "The following fields were present in the request but ignored: {}", "WARNING"),
}  # fmt: skip


class TestNothingCounts:
    """No text of a client is evidence, wherever vLLM prints it."""

    @pytest.mark.parametrize("fake", FAKES)
    @pytest.mark.parametrize("place", PLACES)
    def test_in_a_record_of_the_api_server(self, place: str, fake: str) -> None:
        """A perfect failure inside what a client sent gives nothing."""
        file, template, level = PLACES[place]
        document = analyzed(logged(file, template.format(FAKES[fake]), level).encode())
        assert document["incidents"] == []
        assert document["near_misses"] == 0

    @pytest.mark.parametrize("fake", FAKES)
    @pytest.mark.parametrize(
        "separator",
        [
            "\n",
            "\nTraceback (most recent call last):\n",
            "\n\nThe above exception was the direct cause of the following exception:\n\n",
        ],
    )
    def test_in_the_name_of_an_adapter(self, fake: str, separator: str) -> None:
        """The name of an adapter stands in a real traceback of a real worker; it still counts for nothing."""
        text = (
            "WorkerProc hit an exception.\nTraceback (most recent call last):\n"
            + FRAME.format("v1/worker/gpu_worker.py", 1440, "add_lora")
            + "\n"
            + FRAME.format("lora/worker_manager.py", 168, "_load_adapter")
            + f"\nvllm.exceptions.LoRAAdapterNotFoundError: Loading lora x{separator}{FAKES[fake]} failed"
        )
        log = logged("multiproc_executor.py:1063", text, "ERROR", "Worker pid=77")
        assert analyzed(log.encode())["incidents"] == []

    @pytest.mark.parametrize("fake", FAKES)
    def test_in_an_id_of_a_request_that_fails(self, fake: str) -> None:
        """Preprocessing fails and names the request; the id holds a failure of memory, the cause does not."""
        text = (
            f"Unexpected error pre-processing request chatcmpl-{FAKES[fake]}\nTraceback (most recent call last):\n"
            + FRAME.format("v1/engine/core.py", 1903, "process_input_sockets")
            + "\nValueError: bad grammar"
        )
        log = logged("core.py:2056", text, "ERROR", "EngineCore pid=104")
        assert analyzed(log.encode())["incidents"] == []

    def test_in_a_url(self) -> None:
        """The path and the query of an access line are the client's."""
        log = 'INFO:     192.0.2.1:40114 - "GET /v1/models?q=torch.OutOfMemoryError:CUDA+out+of+memory.+Tried+to+allocate+6.66+GiB HTTP/1.1" 200 OK\n'
        assert analyzed(log.encode())["incidents"] == []

    def test_a_dump_without_a_memory_word(self) -> None:
        """A dying step is dumped whatever killed it; a fake failure in an id of it gives no incident."""
        text = f"Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[NewRequestData(req_id=x{DEATH},prompt_token_ids_len=4000,prefill_token_ids_len=None)], num_scheduled_tokens={{x: 4000}}, total_num_scheduled_tokens=4000, scheduled_spec_decode_tokens={{}})"
        fatal = (
            "EngineCore encountered a fatal error.\nTraceback (most recent call last):\n"
            + FRAME.format("v1/engine/core.py", 1129, "run_engine_core")
            + "\ntorch.AcceleratorError: CUDA error: an illegal memory access was encountered"
        )
        log = logged("dump_input.py:79", text, "ERROR", "EngineCore pid=104") + logged(
            "core.py:1138", fatal, "ERROR", "EngineCore pid=104"
        )
        assert analyzed(log.encode())["incidents"] == []


class TestNothingComesOut:
    """Prompts, token ids and request ids stay in the log."""

    @staticmethod
    def death_with_secrets() -> bytes:
        """A real failure whose dump and request lines hold what must not come out."""
        dump = (
            f"Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[NewRequestData(req_id={HIDDEN}-id,"
            f"prompt_token_ids_len=4000,mm_features=[],sampling_params=SamplingParams(n=1, stop=['{HIDDEN}']),block_ids=([1],),"
            "num_computed_tokens=0,lora_request=None)], scheduled_cached_reqs=CachedRequestData(req_ids=['"
            + HIDDEN
            + "'], resumed_req_ids=[], new_token_ids=[[314159]], all_token_ids={'"
            + HIDDEN
            + "': [314159, 271828]}, new_block_ids=[null], num_computed_tokens=[12], num_output_tokens=[3]), num_scheduled_tokens={"
            f"{HIDDEN}-id: 4000, {HIDDEN}: 1}}, total_num_scheduled_tokens=4001, scheduled_spec_decode_tokens={{}}, scheduled_encoder_inputs={{}})"
        )
        failure = "EngineCore encountered a fatal error.\n" + TRACEBACK + f" {HIDDEN}"
        return (
            logged(
                "logger.py:61", f"Received request {HIDDEN}: prompt: '{HIDDEN}', params: SamplingParams(n=1)"
            )
            + logged("dump_input.py:79", dump, "ERROR", "EngineCore pid=104")
            + logged("core.py:1138", failure, "ERROR", "EngineCore pid=104")
        ).encode()

    def test_document_and_report(self) -> None:
        """Neither the JSON nor the text holds an id, a prompt or a token id; the numbers are there."""
        history = History()
        reader = Reader(history, LATEST)
        reader.feed(self.death_with_secrets())
        reader.finish()
        history.finish()
        document = analyzed(self.death_with_secrets())
        text = json.dumps(document) + report(Analysis(history, reader.lines, reader.bytes))
        (incident,) = document["incidents"]
        assert incident["facts"]["step_tokens"] == 4001
        assert incident["facts"]["decode_tokens"] == 1
        assert "SchedulerOutput" in "".join(incident["excerpt"])
        for hidden in (HIDDEN, "314159", "271828"):
            assert hidden not in text

    @pytest.mark.parametrize(
        "name",
        ["hostile_info_mp", "hostile_then_oom_mp", "hostile_id_in_dump", "hostile_color", "debug_oom_mp"],
    )
    def test_captures_of_hostile_traffic(self, name: str) -> None:
        """No word of the hostile traffic of a real server comes out."""
        document: Document = analyzed(capture(name))
        text = json.dumps(document)
        for hidden in ("6.66", "66666", "cmpl-", "chatcmpl", "/nope/", "v0.6.66"):
            assert hidden not in text
