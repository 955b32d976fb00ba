"""Loads the knowledge base (``classes/*.yaml``) and is the only thing that validates it.

A class of memory failure is one file: what it is, the evidence that speaks for and against
it, remedies with their cost, dead ends with their reason, how to confirm, sources, and
examples that are tests. ``CONTRIBUTING.md`` shows how to write one. Every problem in a file
is reported with its place, all of them at once.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

import yaml

CLASS_IDS = (
    "prefill_budget",
    "context_workspace",
    "moe_workspace",
    "prompt_logprobs",
    "sampler",
    "multimodal_encoder",
    "lora",
    "spec_decode",
    "fragmentation",
    "static_overcommit",
    "foreign_process",
    "memory_growth",
    "workspace_locked",
    "weights_load",
    "profile_run",
    "kv_cache_no_room",
    "kv_cache_below_max_len",
    "startup_free_memory",
    "cudagraph_capture",
    "communication",
    "sleep_wake",
    "host_memory",
    "unified_memory",
    "unknown",
)
"""The closed set, in the order of the contract; label ``class`` of the metrics."""

# What a condition may ask about. Filled by diagnosis/features.py; the text is documentation.
FEATURES: Mapping[str, str] = {
    "phase": "startup or serving",
    "message": "wording of the failure: a kind of vllm/memory_error.py",
    "stage": "what the server was doing, from the frames: weights, profile, kv_allocation, "
    "warmup, capture, step, sampling, utility, device_init",
    "operation": "the innermost operation the frames name, see vllm/traceback.py",
    "frames": "set of every operation and stage the frames name",
    "step_fill": "scheduled tokens of the failing step / the limit of a step, 0 to 1",
    "prefill_share": "prefill tokens / all tokens of the failing step, 0 to 1",
    "step_tokens": "scheduled tokens of the failing step",
    "budget_tokens": "max_num_batched_tokens in force",
    "running_requests": "running requests at the failing step",
    "context_ratio": "largest num_computed_tokens of a prefilling request / the budget",
    "kv_cache_usage": "fraction of KV blocks in use, 0 to 1",
    "encoder_inputs": "the failing step scheduled encoder inputs",
    "prompt_logprobs_requested": "a request of the failing step asks for prompt_logprobs",
    "spec_tokens": "the failing step scheduled speculative tokens",
    "lora_requested": "a request of the failing step uses an adapter",
    "reserved_over_shortage": "reserved but unallocated bytes / (tried - free)",
    "private_over_shortage": "bytes in private pools / (tried - free)",
    "foreign_bytes": "device bytes that neither this process nor free memory explains",
    "tried_over_total": "tried bytes / capacity of the device",
    "size_fits_step": "tried bytes are step tokens x a plausible row, rounded to 2 MiB",
    "size_fits_vocabulary": "tried bytes are rows x a common vocabulary, rounded to 2 MiB",
    "gpu_memory_utilization": "setting of this life, 0 to 1",
    "kv_pinned": "the KV pool was sized by hand (kv_cache_memory_bytes, num_gpu_blocks_override)",
    "budget_raised": "the budget is above that of the previous life in this history",
    "larger_step_survived": "a step at least as large succeeded earlier in this life",
    "free_memory_falling": "near misses of about the same size found less free memory each time",
    "near_misses": "near misses of this life before the failure",
    "asleep": "sleep mode was entered and not left in this life",
    "unified_device": "the device shares its memory with the host (GB10, Jetson)",
    "kv_connector": "a KV transfer connector is configured",
    "chunked_prefill": "enable_chunked_prefill of this life",
    "vllm_at_least": "version of vLLM as major.minor, a number",
    "cgroup_named": "the kernel or the runtime named the memory limit that killed a process",
}

FACTS = [
    "tried_bytes",
    "free_bytes",
    "total_bytes",
    "allocated_bytes",
    "reserved_unallocated_bytes",
    "private_pool_bytes",
    "process_bytes",
    "gpu_index",
    "vllm_version",
    "budget_tokens",
    "step_limit_tokens",
    "step_tokens",
    "prefill_tokens",
    "decode_tokens",
    "max_prompt_tokens",
    "max_computed_tokens",
    "running_requests",
    "waiting_requests",
    "kv_cache_usage",
    "frame",
    "ranks",
    "required_bytes",
    "available_bytes",
    "workspace_bytes",
    "max_model_len",
    "estimated_max_model_len",
    "exit_code",
    "dummy_requests",
    "row_width",
    "vocabulary_rows",
    "vocabulary",
]
"""Facts an incident may carry; templates may name them, and features, and ADVICE_NUMBERS."""

ADVICE_NUMBERS = (
    "recommended_max_num_batched_tokens",
    "pin_kv_cache_bytes",
    "shortage_bytes",
    "lower_utilization",
    "previous_budget_tokens",
    "lower_max_num_seqs",
    "raised_budget_tokens",
)
"""Numbers that diagnosis/advice.py computes for the templates of remedies."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
EFFECTS = ("fixes", "helps", "depends")
STATUSES = ("stable", "experimental")
BASES = ("src", "doc", "maint", "rep", "arith", "inf", "measured")


class KnowledgeError(ValueError):
    """The knowledge base has mistakes. ``problems`` lists each as ``file: place: what``."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class EvidenceRule:
    """``weight`` (natural log of a likelihood ratio) counts where all of ``when`` holds."""

    id: str
    group: str
    when: Mapping[str, object]
    weight: float
    says: str


@dataclass(frozen=True, slots=True)
class RemedyRule:
    """A remedy, offered where ``when`` holds and every number its text names is known."""

    do: str
    effect: str
    flags: str | None
    cost: str | None
    when: Mapping[str, object]
    basis: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeadEndRule:
    """Common advice that does not help, offered where ``when`` holds."""

    do: str
    why: str
    when: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Example:
    """A log and what must be said of it. ``expect`` is a class id, or ``none``."""

    name: str
    log: str
    expect: str
    phase: str | None


@dataclass(frozen=True, slots=True)
class FailureClass:
    """One class of memory failure."""

    id: str
    name: str
    phases: tuple[str, ...]
    status: str
    first_vllm: str
    last_vllm: str | None
    summary: str
    mechanism: str
    scales_with: str
    evidence: tuple[EvidenceRule, ...]
    remedies: tuple[RemedyRule, ...]
    dead_ends: tuple[DeadEndRule, ...]
    confirm: str
    confused_with: tuple[tuple[str, str], ...]
    sources: tuple[str, ...]
    examples: tuple[Example, ...]


def holds(when: Mapping[str, object], features: Mapping[str, object]) -> bool:
    """Whether every condition of ``when`` is true of ``features``.

    A test is ``">= 0.9"`` (also ``<= < >``) for numbers, ``null`` for "not known", a list for
    "any of these", anything else for equality. A feature that is not known fails every test
    but ``null``. Set-valued features pass when one member does.
    """
    return all(_passes(test, features.get(name)) for name, test in when.items())


def _passes(test: object, value: object) -> bool:
    if test is None:
        return value is None
    if value is None:
        return False
    if isinstance(value, frozenset):
        return any(_passes(test, member) for member in value)
    if isinstance(test, list):
        return any(_passes(one, value) for one in test)
    if isinstance(test, str) and test[:1] in "<>":
        return isinstance(value, int | float) and _compare(test, float(value))
    return value == test


def _compare(test: str, value: float) -> bool:
    operator, _, bound = test.partition(" ")
    limit = float(bound)
    match operator:
        case ">=":
            return value >= limit
        case "<=":
            return value <= limit
        case ">":
            return value > limit
        case "<":
            return value < limit
    raise ValueError(f"unknown comparison {test!r}")


def fields_of(template: str) -> list[str]:
    """Names in braces in ``template``."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


@cache
def builtin_classes() -> Mapping[str, FailureClass]:
    """The shipped knowledge base, in the order of ``CLASS_IDS``."""
    loaded = load_classes(files("exporter.diagnosis") / "classes")
    return {class_id: loaded[class_id] for class_id in CLASS_IDS}


def load_classes(folder: Traversable) -> dict[str, FailureClass]:
    """Read every ``*.yaml`` of ``folder``; raises ``KnowledgeError`` with every problem found."""
    problems: list[str] = []
    classes: dict[str, FailureClass] = {}
    names = sorted(item.name for item in folder.iterdir() if item.name.endswith(".yaml"))
    for name in names:
        text = (folder / name).read_text(encoding="utf-8")
        one = _Reader(name, problems).read(text)
        if one is not None:
            classes[one.id] = one
    problems += [f"{one}.yaml: missing file" for one in CLASS_IDS if f"{one}.yaml" not in names]
    if problems:
        raise KnowledgeError(problems)
    return classes


class _Reader:
    """Turns one file into a ``FailureClass``, collecting problems instead of stopping at one."""

    def __init__(self, name: str, problems: list[str]) -> None:
        self.name = name
        self.problems = problems

    def problem(self, place: str, what: str) -> None:
        self.problems.append(f"{self.name}: {place}: {what}")

    def read(self, text: str) -> FailureClass | None:
        before = len(self.problems)
        try:
            raw = yaml.load(text, Loader=_LOADER)  # noqa: S506 - one of the two safe loaders
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f"line {mark.line + 1}" if mark else "file"
            self.problem(place, getattr(error, "problem", None) or "not YAML")
            return None
        if not isinstance(raw, dict):
            self.problem("file", "must be a mapping")
            return None
        self.keys(
            "file",
            raw,
            required=[
                "id",
                "name",
                "phases",
                "status",
                "vllm",
                "summary",
                "mechanism",
                "scales_with",
                "evidence",
                "remedies",
                "dead_ends",
                "confirm",
                "confused_with",
                "sources",
                "examples",
            ],
        )
        if len(self.problems) > before:
            return None
        class_id = self.text("id", raw["id"])
        if f"{class_id}.yaml" != self.name or class_id not in CLASS_IDS:
            self.problem("id", f"{class_id!r} is not a known class, or not the file's name")
        vllm = raw["vllm"] if isinstance(raw["vllm"], dict) else {}
        self.keys("vllm", vllm, required=["first", "last"])
        result = FailureClass(
            id=class_id,
            name=self.text("name", raw["name"]),
            phases=tuple(
                self.choice("phases", one, ("startup", "serving"))
                for one in self.list("phases", raw["phases"])
            ),
            status=self.choice("status", raw["status"], STATUSES),
            first_vllm=str(vllm.get("first")),
            last_vllm=None if vllm.get("last") is None else str(vllm["last"]),
            summary=self.text("summary", raw["summary"]),
            mechanism=self.text("mechanism", raw["mechanism"]),
            scales_with=self.text("scales_with", raw["scales_with"]),
            evidence=tuple(self.evidence(i, one) for i, one in self.items("evidence", raw)),
            remedies=tuple(self.remedy(i, one) for i, one in self.items("remedies", raw)),
            dead_ends=tuple(self.dead_end(i, one) for i, one in self.items("dead_ends", raw)),
            confirm=self.text("confirm", raw["confirm"]),
            confused_with=tuple(self.confused(i, one) for i, one in self.items("confused_with", raw)),
            sources=tuple(
                self.text(f"sources[{i}]", s) for i, s in enumerate(self.list("sources", raw["sources"]))
            ),
            examples=tuple(self.example(i, one, class_id) for i, one in self.items("examples", raw)),
        )
        ids = [rule.id for rule in result.evidence]
        for twice in {one for one in ids if ids.count(one) > 1}:
            self.problem("evidence", f"id {twice!r} is used twice")
        if class_id != "unknown":
            expects = {example.expect for example in result.examples}
            if class_id not in expects or expects == {class_id}:
                self.problem("examples", "needs one of this class and one of something else")
            if raw["sources"] == []:
                self.problem("sources", "must not be empty")
        return result if len(self.problems) == before else None

    def evidence(self, i: int, raw: Mapping[str, object]) -> EvidenceRule:
        place = f"evidence[{i}]"
        self.keys(place, raw, required=["id", "group", "when", "weight", "says"], optional=["basis"])
        self.when(place, raw.get("when"))
        self.bases(place, raw.get("basis"))
        weight = raw.get("weight")
        if not isinstance(weight, int | float) or isinstance(weight, bool) or weight == 0:
            self.problem(f"{place}.weight", "must be a number other than 0")
            weight = 0.0
        says = self.template(f"{place}.says", raw.get("says"), (*FEATURES, *FACTS))
        return EvidenceRule(
            id=self.text(f"{place}.id", raw.get("id")),
            group=self.text(f"{place}.group", raw.get("group")),
            when=_mapping(raw.get("when")),
            weight=float(weight),
            says=says,
        )

    def remedy(self, i: int, raw: Mapping[str, object]) -> RemedyRule:
        place = f"remedies[{i}]"
        self.keys(place, raw, required=["do", "effect", "basis"], optional=["flags", "cost", "when"])
        self.when(place, raw.get("when"), (*FEATURES, *ADVICE_NUMBERS))
        allowed = (*FEATURES, *FACTS, *ADVICE_NUMBERS)
        flags, cost = raw.get("flags"), raw.get("cost")
        return RemedyRule(
            do=self.template(f"{place}.do", raw.get("do"), allowed),
            effect=self.choice(f"{place}.effect", raw.get("effect"), EFFECTS),
            flags=None if flags is None else self.template(f"{place}.flags", flags, allowed),
            cost=None if cost is None else self.text(f"{place}.cost", cost),
            when=_mapping(raw.get("when")),
            basis=self.bases(place, raw.get("basis")),
        )

    def dead_end(self, i: int, raw: Mapping[str, object]) -> DeadEndRule:
        place = f"dead_ends[{i}]"
        self.keys(place, raw, required=["do", "why"], optional=["when"])
        self.when(place, raw.get("when"), (*FEATURES, *ADVICE_NUMBERS))
        return DeadEndRule(
            do=self.text(f"{place}.do", raw.get("do")),
            why=self.text(f"{place}.why", raw.get("why")),
            when=_mapping(raw.get("when")),
        )

    def confused(self, i: int, raw: Mapping[str, object]) -> tuple[str, str]:
        place = f"confused_with[{i}]"
        self.keys(place, raw, required=["class", "tell"])
        return (
            self.choice(f"{place}.class", raw.get("class"), CLASS_IDS),
            self.text(f"{place}.tell", raw.get("tell")),
        )

    def example(self, i: int, raw: Mapping[str, object], class_id: str) -> Example:
        place = f"examples[{i}]"
        self.keys(place, raw, required=["name", "log"], optional=["expect", "phase"])
        phase = raw.get("phase")
        return Example(
            name=self.text(f"{place}.name", raw.get("name")),
            log=self.text(f"{place}.log", raw.get("log")),
            expect=self.choice(f"{place}.expect", raw.get("expect", class_id), (*CLASS_IDS, "none")),
            phase=None if phase is None else self.choice(f"{place}.phase", phase, ("startup", "serving")),
        )

    # --- small checks -----------------------------------------------------------------------

    def items(self, place: str, raw: Mapping[str, object]) -> Iterable[tuple[int, Mapping[str, object]]]:
        value = raw[place]
        if not isinstance(value, list):
            self.problem(place, "must be a list")
            return
        for i, one in enumerate(value):
            if isinstance(one, dict):
                yield i, one
            else:
                self.problem(f"{place}[{i}]", "must be a mapping")

    def keys(
        self,
        place: str,
        raw: Mapping[str, object],
        required: Iterable[str],
        optional: Iterable[str] = (),
    ) -> None:
        required = list(required)
        for missing in [key for key in required if key not in raw]:
            self.problem(place, f"{missing!r} is missing")
        for extra in [key for key in raw if key not in (*required, *optional)]:
            self.problem(place, f"{extra!r} is not a known key")

    def text(self, place: str, value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            self.problem(place, "must be a text that is not empty")
            return ""
        return value.strip()

    def choice(self, place: str, value: object, allowed: Iterable[str]) -> str:
        allowed = list(allowed)
        if value not in allowed:
            self.problem(place, f"{value!r} is none of {', '.join(allowed)}")
            return allowed[0]
        return str(value)

    def bases(self, place: str, value: object) -> tuple[str, ...]:
        values = value if isinstance(value, list) else []
        if value is not None and not isinstance(value, list):
            self.problem(f"{place}.basis", "must be a list")
        return tuple(self.choice(f"{place}.basis", str(one).split(" ")[0], BASES) for one in values)

    def list(self, place: str, value: object) -> Sequence[object]:
        if isinstance(value, list):
            return value
        self.problem(place, "must be a list")
        return ()

    def when(self, place: str, value: object, allowed: Iterable[str] = FEATURES) -> None:
        if value is None:
            return
        if not isinstance(value, dict):
            self.problem(f"{place}.when", "must be a mapping of features to tests")
            return
        for name, test in value.items():
            if name not in allowed:
                self.problem(f"{place}.when", f"{name!r} is not a known feature")
            for one in test if isinstance(test, list) else [test]:
                if isinstance(one, str) and one[:1] in "<>":
                    try:
                        _compare(one, 0.0)
                    except ValueError:
                        self.problem(f"{place}.when.{name}", f"{one!r} is not a comparison")

    def template(self, place: str, value: object, allowed: Iterable[str]) -> str:
        text = self.text(place, value)
        try:
            names = fields_of(text)
        except ValueError as error:
            self.problem(place, f"not a template: {error}")
            return ""
        for name in names:
            if name not in allowed:
                self.problem(place, f"{{{name}}} is not a known fact or feature")
        return text


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
