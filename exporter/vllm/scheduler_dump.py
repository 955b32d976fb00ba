"""The scheduler dump of a failing step -> numbers.

vLLM prints it at ERROR when a step raises (``logging_utils/dump_input.py``, 0.9.0..0.33.0), in
three generations:

* 0.9.0: headers and objects in records of their own, a list of ``CachedRequestData``;
* 0.9.1..0.11.0: one record an object, from 0.9.2 ``CachedRequestData`` is a struct of arrays;
* 0.11.1..0.33.0: ``num_output_tokens`` says which cached requests still prefill. 0.11.1..0.13
  print raw token ids here.

Request ids stand in it unquoted and unescaped and may hold anything, also a whole fake dump.
The engine writes its own totals last, so everything is read from the end backwards. Ids are
compared, never kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# …}, total_num_scheduled_tokens=16384, scheduled_spec_decode_tokens={}, scheduled_encoder_inputs={}, …
_TOTAL = re.compile(r"\}, total_num_scheduled_tokens=(\d{1,15}(?!\d)), scheduled_spec_decode_tokens=\{")
_TOTAL_CUT = re.compile(r"total_num_scheduled_tokens=(\d{1,15}(?!\d))")
_ENCODER = "scheduled_encoder_inputs={"
_SCHEDULED = "num_scheduled_tokens={"
_ITEM = re.compile(r": (\d{1,15}(?!\d))(?:, |$)")
# followed by prefill_token_ids_len (0.12+) or mm_… in every version; an id may fake the rest
_NEW = re.compile(r",\s?prompt_token_ids_len=(\d{1,15}(?!\d)),\s?(?:prefill_token_ids_len=|mm_)")
_NEW_COMPUTED = re.compile(r"num_computed_tokens=(\d{1,15}(?!\d)),\s?lora_request=(None|null|\w+)")
_LOGPROBS = re.compile(r"\bprompt_logprobs=(None|null|-?\d{1,15}(?!\d))")
_REQ_IDS = re.compile(r"CachedRequestData\(req_ids=\[")
_ARRAY = r"{}=\[([\d, ]*)\]"
_STATS = re.compile(r"SchedulerStats\(num_running_reqs=(\d{1,15}(?!\d)), num_waiting_reqs=(\d{1,15}(?!\d))")
_KV_USAGE = re.compile(r"\b(?:kv|gpu)_cache_usage=(\d{1,15}(?:\.\d{1,30})?(?:e-?\d{1,2})?(?![\d.]))")
_KEPT_LENGTHS = 32
_VERSION = re.compile(r"V1 LLM engine \(v([\w.+!-]{1,64})\) with config")


def output_facts(text: str) -> dict[str, object]:
    """Numbers of ``SchedulerOutput(…)``; what can't be read is left out.

    ``step_tokens``, ``prefill_tokens`` and ``decode_tokens`` add up; ``max_prompt_tokens`` is
    the longest prompt among the requests that begin in this step (``prompt_lengths`` has the
    longest 32), ``max_computed_tokens`` the deepest context of a request that prefills. Booleans: ``prompt_logprobs_requested``,
    ``encoder_inputs``, ``spec_tokens``, ``lora_requested``.
    """
    facts: dict[str, object] = {}
    totals = list(_TOTAL.finditer(text))
    if not totals:
        cut = list(_TOTAL_CUT.finditer(text))
        if cut:
            facts["step_tokens"] = int(cut[-1][1])
        return facts
    total = totals[-1]
    facts["step_tokens"] = int(total[1])
    spec_end = text.find("}", total.end())
    spec = text[total.end() : spec_end] if spec_end >= 0 else ""
    facts["spec_tokens"] = bool(spec.strip())
    encoder = text.find(_ENCODER, total.end() - 1)
    if encoder >= 0:
        facts["encoder_inputs"] = not text.startswith("}", encoder + len(_ENCODER))

    # num_scheduled_tokens={id: n, …} ends where total_num_scheduled_tokens begins
    start = text.rfind(_SCHEDULED, 0, total.start())
    scheduled = text[start + len(_SCHEDULED) : total.start()] if start >= 0 else ""
    requests = text[:start] if start >= 0 else text[: total.start()]
    cached_at = requests.rfind("scheduled_cached_reqs=")
    new, cached = requests[:cached_at], requests[cached_at:]
    _read_new(new, facts)
    _split_tokens(new, cached, scheduled, facts)
    return facts


def _read_new(new: str, facts: dict[str, object]) -> None:
    """Requests that begin in this step. Their prompts are printed as lengths only."""
    lengths = [
        length for one in new.split("NewRequestData(")[1:] if (length := _prompt_length(one)) is not None
    ]
    if lengths:
        facts["max_prompt_tokens"] = max(lengths)
        facts["prompt_lengths"] = tuple(sorted(lengths, reverse=True)[:_KEPT_LENGTHS])
    loras = [m[2] for m in _NEW_COMPUTED.finditer(new)]
    if loras:
        facts["lora_requested"] = any(one not in ("None", "null") for one in loras)
    logprobs = [m[1] for m in _LOGPROBS.finditer(new)]
    if logprobs:
        facts["prompt_logprobs_requested"] = any(one not in ("None", "null") for one in logprobs)


def _prompt_length(request: str) -> int | None:
    """The prompt of one new request. Its id, which a client may choose, stands before; stop texts behind."""
    found = [m[1] for m in _NEW.finditer(request.partition("sampling_params=SamplingParams(")[0])]
    return int(found[-1]) if found else None


def _split_tokens(new: str, cached: str, scheduled: str, facts: dict[str, object]) -> None:
    """Prefill and decode tokens of the step, and the deepest context of a prefill."""
    step = facts["step_tokens"]
    assert isinstance(step, int)
    counts = [int(m[1]) for m in _ITEM.finditer(scheduled)]
    computed_new = [int(m[1]) for m in _NEW_COMPUTED.finditer(new)]
    new_count = len(computed_new) or new.count("NewRequestData(")
    spec = bool(facts.get("spec_tokens"))
    by_id = _tokens_by_cached_id(cached, scheduled)
    if by_id is None:
        # ids with quotes or cuts: sizes alone tell a chunk from a decode
        if sum(counts) != step:
            return
        prefill = sum(n for n in counts if n > (8 if spec else 1))
        contexts = list(computed_new)
    else:
        tokens, computed, outputs = by_id
        still = [
            (out == 0) if out is not None else (n > 1 and not spec)
            for n, out in zip(tokens, outputs, strict=True)
        ]
        decode = sum(n for n, prefills in zip(tokens, still, strict=True) if not prefills)
        prefill = max(0, step - decode) if new_count or any(still) else 0
        contexts = [c for c, prefills in zip(computed, still, strict=True) if prefills] + computed_new
    facts["prefill_tokens"] = prefill
    facts["decode_tokens"] = step - prefill
    if contexts:
        facts["max_computed_tokens"] = max(contexts)


def _tokens_by_cached_id(cached: str, scheduled: str) -> tuple[list[int], list[int], list[int | None]] | None:
    """Tokens, computed tokens and output tokens of each cached request; None if unreadable."""
    if "CachedRequestData(req_id=" in cached:  # 0.9.0, 0.9.1
        ids = re.findall(r"CachedRequestData\(req_id='?((?:[^',]|'(?!,))*)'?,", cached)
        computed = [int(n) for n in re.findall(r"num_computed_tokens=(\d{1,15}(?!\d))\)", cached)]
        outputs: list[int | None] = [None] * len(ids)
    else:
        match = _REQ_IDS.search(cached)
        if match is None:
            return ([], [], []) if "CachedRequestData" not in cached else None
        end = _end_of_ids(cached, match.end())
        if end is None:
            return None
        raw = cached[match.end() : end]
        ids = _quoted(raw)
        rest = cached[end:]
        computed = _numbers(rest, "num_computed_tokens")
        found = _numbers(rest, "num_output_tokens")
        outputs = list(found) if "num_output_tokens=[" in rest else [None] * len(ids)
    if len(ids) != len(computed) or len(ids) != len(outputs):
        return None
    tokens = []
    for one in ids:
        # from its beginning: the tokens of 0_cmpl-a are not those of 10_cmpl-a
        at = 0 if scheduled.startswith(f"{one}: ") else scheduled.find(f", {one}: ") + 2
        count = re.match(r": (\d{1,15})(?!\d)", scheduled[at + len(one) :]) if at != 1 else None
        if count is None:
            return None
        tokens.append(int(count[1]))
    return tokens, computed, outputs


def _end_of_ids(text: str, start: int) -> int | None:
    """Where the list of ids ends: before ``resumed…``, the field after it in every version."""
    end = text.find("resumed_", start)
    bracket = text.rfind("]", start, end) if end >= 0 else -1
    return bracket if bracket >= 0 else None


def _quoted(raw: str) -> list[str]:
    if not raw.strip():
        return []
    return [part.strip().strip("'\"") for part in re.split(r"(?<=['\"]), ?(?=['\"])", raw)]


def _numbers(text: str, name: str) -> list[int]:
    match = re.search(_ARRAY.format(name), text)
    return [int(n) for n in match[1].split(",") if n.strip()] if match else []


def stats_facts(text: str) -> dict[str, object]:
    """Numbers of ``SchedulerStats(…)``. Under async scheduling it can be one step ahead."""
    facts: dict[str, object] = {}
    if (match := _STATS.search(text)) is not None:
        facts["running_requests"] = int(match[1])
        facts["waiting_requests"] = int(match[2])
    if (match := _KV_USAGE.search(text)) is not None:
        facts["kv_cache_usage"] = round(float(match[1]), 4)
    return facts


def config_version(text: str) -> str | None:
    """Version of vLLM named by the dump's config line."""
    match = _VERSION.search(text)
    return match[1] if match else None


def part_of(head: str) -> str | None:
    """Which part of a dump a record with this first line is: config, output or stats."""
    if head.startswith("Dumping input data") or head.startswith("V1 LLM engine (v"):
        return "config"
    if head.startswith(("Dumping scheduler output", "SchedulerOutput(")):
        return "output"
    if head.startswith(("Dumping scheduler stats", "SchedulerStats(")):
        return "stats"
    return None


def merge(parts: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The facts of all parts of one dump together."""
    return {name: value for part in parts.values() for name, value in part.items()}
