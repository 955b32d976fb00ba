"""Does a smaller step cure it? Runs with a lower budget against those that failed, over restarts.

Lives with equal settings are one *epoch*, adjacent or not. An epoch that failed is compared with the
current one if they differ in the budget alone. Opportunities are counted, not hours: prompts long
enough to have triggered the failure. That long prompts stop failing is no cure if none came.

The test is exact. If the lower budget changed nothing, each of the k failures falls among the N old
exposures with probability N / (N + M), M being the new ones, so ``p = (N / (N + M)) ** k``. The M that
gives p <= .05 follows from N and k, which are known before the first new prompt, and one failure ends
the experiment. So to watch the count grow and stop there is one test of a fixed size: looking often does
not raise the error. A sequential probability ratio test of the old rate against a tenth of it would stop
at M = 3.2 N / k, but it takes k / N for the true rate. With the rate only estimated it would confirm a
share of (1 + 3.2 / k) ** -k of the changes that do nothing: 24 % after one failure, 15 % after two. It
is not used.

What counts as an old failure: one in serving of class ``prefill_budget``; and one of a workspace, of
fragmentation or unknown if its step was full. For those the name of the tensor is open, while the
experiment only asks whether the size of the step decides. ``prompt_logprobs`` does not count: what
triggers it is not a long prompt, and those are what is counted here. At the lower budget the same
classes refute whatever their step was, and so does ``static_overcommit``, which is what a failure of
too little headroom looks like at an ordinary step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ..vllm.startup import FLAGS, SETTINGS
from .engine import settings_changed, step_limit
from .exposure import PROMPT_SOURCES, Failed, LifeExposure
from .step_size import whole

LEVEL = 0.05
FULL = 0.9
"""Share of the step limit from which a step is full."""

_BUDGET = frozenset({"max_num_batched_tokens", "max_num_scheduled_tokens"})
# swap_space is memory of the host
_MATTERS = ({*SETTINGS.values(), *FLAGS.values()} | _BUDGET | {"device_name", "model", "vllm_version"}) - {
    "swap_space"
}
_IF_FULL = frozenset({"context_workspace", "moe_workspace", "fragmentation", "unknown"})
_REFUTES = _IF_FULL | {"prefill_budget", "static_overcommit"}
# Settings that need less memory when lower: a failure in spite of them refutes all the more.
_EASES = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_len", "max_num_seqs"})
_WEIGHTY = ("gpu_memory_utilization", "model", "vllm_version")
_ROUNDING = 16 << 20  # pools are logged in GiB with two decimals
_MOST = 10**12  # more prompts than any server sees; counts up to here are exact


@dataclass(frozen=True, slots=True)
class Confirmation:
    """How the experiment stands; budgets and thresholds in tokens, exposures in prompts.

    ``state``: none, accruing, confirmed, refuted, confounded. ``old_exposures`` include the failures.
    ``exposures_needed`` is the total, not the rest. ``also_changed`` names what differs between the
    failing epoch and the current one beside the budget. ``threshold_tokens``: from where a prompt
    counts, the same in both epochs. None: not known, or not to be told in this state.
    """

    state: str
    old_budget: int | None = None
    new_budget: int | None = None
    failures: int = 0
    old_exposures: int | None = None
    exposures: int | None = None
    exposures_needed: int | None = None
    pvalue: float | None = None
    also_changed: tuple[str, ...] = ()
    says: str = ""
    threshold_tokens: int | None = None


def document(confirmation: Confirmation) -> dict[str, object]:
    """The contract's ``confirmation``; what is not known is left out."""
    result = {name: value for name, value in asdict(confirmation).items() if value is not None}
    result["also_changed"] = list(confirmation.also_changed)
    if confirmation.pvalue is not None:
        result["pvalue"] = float(f"{confirmation.pvalue:.3g}")
    return result


# --- the test -------------------------------------------------------------------------------------


def exact_pvalue(failures: int, old_exposures: int, exposures: int) -> float:
    """The chance that all failures fall among the old exposures if the budget makes no difference.

    ``old_exposures`` >= ``failures`` >= 1; no failure among the ``exposures`` of the lower budget.
    """
    return float((old_exposures / (old_exposures + exposures)) ** failures)


def needed(failures: int, old_exposures: int) -> int:
    """The fewest exposures without a failure for ``exact_pvalue`` to be at most ``LEVEL``."""
    found = math.ceil(old_exposures * math.expm1(-math.log(LEVEL) / failures))
    # logarithms are off by a little: settle it with the p-value itself
    while exact_pvalue(failures, old_exposures, found) > LEVEL:
        found += 1
    while found > 0 and exact_pvalue(failures, old_exposures, found - 1) <= LEVEL:
        found -= 1
    return found


# --- epochs ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Epoch:
    """Lives with equal settings. ``limit``: tokens a step may hold, None where it is not known."""

    limit: int | None
    settings: dict[str, object]
    lives: list[LifeExposure] = field(default_factory=list)

    def counted(self) -> list[Failed]:
        """Failures that a smaller step might cure."""
        return [failed for life in self.lives for failed in self.counted_in(life)]

    def counted_in(self, life: LifeExposure) -> list[Failed]:
        """Those of one life."""
        limit = self.limit
        return [f for f in life.failures if limit is not None and _counts(f, limit)]

    def refuting(self) -> list[Failed]:
        """Failures that a smaller step was to cure, had it been the cure."""
        return [
            f for life in self.lives for f in life.failures if f.phase == "serving" and f.class_id in _REFUTES
        ]

    def pools(self) -> list[int]:
        """Sizes of the KV pool in bytes, as far as lives logged theirs."""
        return [size for life in self.lives if (size := whole(life.kv_cache_bytes))]


def epochs(lives: Iterable[LifeExposure]) -> list[Epoch]:
    """Lives put together by their settings, in the order of each one's first life.

    A setting that is unknown in one life is no difference. Lives of an unknown limit stay alone.
    """
    found: list[Epoch] = []
    for life in lives:
        limit = limit_of(life.settings)
        for epoch in found:
            if limit is not None and epoch.limit == limit and not _differ(epoch.settings, life.settings):
                epoch.lives.append(life)
                epoch.settings = {**life.settings, **epoch.settings}
                break
        else:
            found.append(Epoch(limit, dict(life.settings), [life]))
    return found


def limit_of(settings: Mapping[str, object]) -> int | None:
    """Tokens one step may hold under ``settings``: the budget that binds."""
    return whole(step_limit(settings)) or None


def _differ(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return [
        name
        for name in settings_changed(before, after)
        if name in _MATTERS
        # None is vLLM's default, and the default of what can be switched is off
        and (before[name] or after[name])
    ]


def also_changed(failing: Epoch, other: Epoch) -> tuple[str, ...]:
    """Settings that differ beside the budget and can matter for memory.

    Pinning the pool at its old size, as is advised with a smaller budget, is no change: it keeps the
    rest of the device as it was. A larger pool leaves less, so a cure in spite of it is one.
    """
    names = [name for name in _differ(failing.settings, other.settings) if name not in _BUDGET]
    if other.settings.get("kv_cache_memory_bytes"):
        before, after = failing.pools(), other.pools()
        if before and after and min(after) >= max(before) - _ROUNDING:
            # with a pinned pool vLLM does not use the utilisation
            names = [n for n in names if n not in ("kv_cache_memory_bytes", "gpu_memory_utilization")]
    return tuple(names)


def _only_eases(names: Collection[str], failing: Epoch, other: Epoch) -> bool:
    """Whether every change could only have helped."""
    for name in names:
        before, after = failing.settings[name], other.settings[name]
        if name == "enforce_eager" and after is True:
            continue
        if name not in _EASES or not (_is_number(before) and _is_number(after)) or not after < before:  # type: ignore[operator]
            return False
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _counts(failed: Failed, limit: int) -> bool:
    if failed.phase != "serving":
        return False
    step = whole(failed.step_tokens)
    full = step is not None and step >= FULL * limit
    return failed.class_id == "prefill_budget" or (failed.class_id in _IF_FULL and full)


def _length(failed: Failed, limit: int) -> int:
    """Tokens of what failed: the longest prompt, else the step, else what would have filled a step."""
    lengths = (failed.longest_prompt, max(failed.prompts, default=0), failed.step_tokens)
    return next((length for length in map(whole, lengths) if length), limit)


# --- counting -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tally:
    """Exposures of two epochs by one source.

    ``to_die``: of the failing life that took most, its failures included; ``longest``: of the life
    that took most at the lower budget.
    """

    threshold: int
    failures: int
    old: int
    new: int
    to_die: int
    longest: int

    @property
    def pvalue(self) -> float:
        return exact_pvalue(self.failures, self.old, self.new)


def _tally(failing: Epoch, lower: Epoch) -> _Tally | None:
    """Exposures by the source that covers most failures, of equals the best; None without a common one."""
    least = _least(failing, lower)
    found = [one for source in PROMPT_SOURCES if (one := _by_source(source, least, failing, lower))]
    return max(found, key=lambda one: one.failures, default=None)


def _least(failing: Epoch, lower: Epoch) -> int:
    """From how many tokens a prompt could have failed: as the smallest that did, or as fills the smaller step."""
    assert failing.limit is not None
    assert lower.limit is not None
    return min([_length(failed, failing.limit) for failed in failing.counted()] + [lower.limit])


def _incomparable(failing: Epoch, lower: Epoch) -> str:
    """Why there is no tally, for people."""
    sources = [{s for life in epoch.lives for s in life.prompts} for epoch in (failing, lower)]
    if "metrics" in set.intersection(*sources):
        least = _least(failing, lower)
        return f"the buckets of vllm:request_prompt_tokens do not tell prompts of {least} tokens or more on both sides"
    return "long prompts were not counted by one source on both sides"


def _by_source(source: str, least: int, failing: Epoch, lower: Epoch) -> _Tally | None:
    """A life that ``source`` said nothing of is left out with its failures: what it survived is not known."""
    assert failing.limit is not None
    before = [life for life in failing.lives if source in life.prompts]
    after = [life for life in lower.lives if source in life.prompts]
    threshold = _threshold(source, least, [*before, *after])
    if threshold is None or not after:
        return None
    failures = old = to_die = 0
    for life in before:
        died = [f for f in failing.counted_in(life) if _length(f, failing.limit) >= threshold]
        passed = math.ceil(_passed(life, source, threshold))
        # a killed prompt never finished, so it was not counted; but a line of the log said that it came
        passed += 0 if source == "requests" else len(died)
        failures += len(died)
        old += max(passed, len(died))
        if died:
            to_die = max(to_die, passed, len(died))
    if not failures:
        return None
    passes = [math.floor(_passed(life, source, threshold)) for life in after]
    return _Tally(threshold, failures, old, sum(passes), to_die, max(passes))


def _threshold(source: str, least: int, lives: Iterable[LifeExposure]) -> int | None:
    """``least``, or the first bucket from there on that all histograms have; None without one."""
    if source != "metrics":
        return least
    edges = [set(life.prompts[source]) for life in lives if life.prompts[source]]
    return min((edge for edge in set.intersection(*edges) if edge >= least), default=None) if edges else None


def _passed(life: LifeExposure, source: str, threshold: int) -> float:
    count = life.at_least(source, threshold)
    return min(max(count, 0.0), _MOST) if not math.isnan(count) else 0.0


# --- the verdict ----------------------------------------------------------------------------------


def confirm(lives: Sequence[LifeExposure]) -> Confirmation:
    """How far a smaller step has proven to cure the failures. ``lives``: oldest first, the last is current.

    A start that has not named its budget yet changes nothing. Where more than the budget changed since
    the failures, another pair of epochs that differ in it alone may carry the verdict, if it suffices.
    """
    known = list(lives)
    while known and not known[-1].served and limit_of(known[-1].settings) is None:
        known.pop()
    if not known:
        return Confirmation("none", says="The step limit of the server is not known yet.")
    every = epochs(known)
    current = next(epoch for epoch in every if any(life is known[-1] for life in epoch.lives))
    failing = [epoch for epoch in every if epoch.counted()]
    higher = [
        e for e in failing if current.limit is not None and e.limit is not None and e.limit > current.limit
    ]
    if not higher:
        return _none(failing, current)
    clean = [epoch for epoch in higher if not also_changed(epoch, current)]
    if current.refuting():
        despite = [e for e in higher if _only_eases(also_changed(e, current), e, current)]
        best = _best((epoch, current) for epoch in clean or despite)
        return _refuted(*best) if best else _confounded(higher, current, None)
    if best := _best((epoch, current) for epoch in clean):
        return _judge(*best)
    others = (
        (old, low)
        for old in higher
        for low in every
        if low.limit is not None and old.limit is not None and low.limit < old.limit
        and not low.refuting() and not also_changed(old, low)
    )  # fmt: skip
    lean = _best(others)
    if lean is not None and _judge(*lean).state == "confirmed":
        return _leaning(_judge(*lean), lean[0], current)
    return _confounded(higher, current, lean)


def _best(pairs: Iterable[tuple[Epoch, Epoch]]) -> tuple[Epoch, Epoch] | None:
    """The pair with most evidence: the smallest p, then the most failures, then the latest."""

    def evidence(pair: tuple[Epoch, Epoch]) -> tuple[float, int, int]:
        tally = _tally(*pair)
        return (-tally.pvalue if tally else -1.0, len(pair[0].counted()), pair[0].lives[-1].index)

    return max(pairs, key=evidence, default=None)


def _none(failing: Sequence[Epoch], current: Epoch) -> Confirmation:
    if not failing:
        return Confirmation(
            "none",
            new_budget=current.limit,
            says="There was no failure that a smaller step might cure.",
            threshold_tokens=current.limit,
        )
    last = failing[-1]
    assert last.limit is not None
    count = sum(len(epoch.counted()) for epoch in failing)
    lengths = [_length(f, e.limit) for e in failing if e.limit is not None for f in e.counted()]
    if current.limit is None:
        says = f"{_failures(count)} before, but the step limit of the running server is not in its log."
    else:
        says = (
            f"{_failures(count)}, the last at {last.limit} tokens a step, and the limit is {current.limit} now: "
            "no smaller one is being tried."
        )
    return Confirmation(
        "none",
        last.limit,
        current.limit,
        count,
        says=says,
        threshold_tokens=min([*lengths, current.limit]) if current.limit is not None else None,
    )


def _judge(failing: Epoch, lower: Epoch) -> Confirmation:
    """Two epochs that differ in the budget alone, the lower one without a failure that refutes."""
    tally = _tally(failing, lower)
    other = sorted(_new_deaths(failing, lower))
    if tally is None:
        says = (
            f"{_failures(len(failing.counted()))} at {failing.limit} tokens a step and none at {lower.limit}, but "
            f"{_incomparable(failing, lower)}, so they can't be compared."
        )
        return _with(failing, lower, "accruing", None, " ".join([says, *_named(other, lower)]))
    needs = needed(tally.failures, tally.old)
    more = []
    if tally.new < needs:
        state, end = (
            "accruing",
            f" so far; {needs - tally.new} more without a failure are needed ({needs} in all).",
        )
        if tally.failures == 1:
            more.append(
                "After one failure that takes 19 times as many prompts as before it: "
                "replaying long prompts at both limits is quicker than waiting."
            )
    elif tally.longest < tally.to_die:
        state, end = "accruing", f" (p={tally.pvalue:.2g}), which would be enough."
        more.append(
            f"But a process that failed had taken {tally.to_die}, and none has taken more than {tally.longest} "
            "since: leave it running, as a fresh process proves little."
        )
    elif other:
        state, end = "accruing", f" (p={tally.pvalue:.2g}), which would be enough."
    else:
        state, end = "confirmed", f" (p={tally.pvalue:.2g}): the smaller step cures it."
        more.append(f"At most 1 in {tally.new // 3} long prompts can still fail (95 %).")
        if _failed_again(failing, lower):
            more.append(f"It had failed again when {failing.limit} came back.")
    if tally.failures > 1 and _one_prompt(failing):
        more.append("All failures had the same prompts, so they may be one that was sent again.")
    says = f"{_compared(failing, lower, tally)}{end}"
    if unknown := [n for n in _WEIGHTY if (n in failing.settings) != (n in lower.settings)]:
        more.append(f"Whether {_list(unknown)} changed is not in the log.")
    return _with(failing, lower, state, tally, " ".join([says, *more, *_named(other, lower)]), needs)


def _refuted(failing: Epoch, current: Epoch) -> Confirmation:
    found = current.refuting()
    classes = ", ".join(sorted({failed.class_id for failed in found}))
    says = (
        f"{_failures(len(failing.counted()))} at {failing.limit} tokens a step, and {len(found)} at {current.limit} too "
        f"({classes}): a smaller step alone does not cure it."
    )
    changed = also_changed(failing, current)
    if changed:
        says += f" Nor did the change of {_list(changed)}."
    return _with(failing, current, "refuted", _tally(failing, current), says, changed=changed)


def _confounded(higher: Sequence[Epoch], current: Epoch, lean: tuple[Epoch, Epoch] | None) -> Confirmation:
    failing = min(reversed(higher), key=lambda epoch: len(also_changed(epoch, current)))
    changed = also_changed(failing, current)
    went = "but failures went on" if current.refuting() else "so nobody can tell which of them matters"
    says = (
        f"{_failures(len(failing.counted()))} at {failing.limit} tokens a step; since then the limit was lowered to "
        f"{current.limit} and {_list(changed)} changed too, {went}."
    )
    tally = _tally(*lean) if lean is not None else None
    if lean is not None and tally is not None and tally.new:
        says += (
            f" Runs at {lean[1].limit} differ in the limit alone, but their {tally.new} long prompts are too few "
            f"or too new ({needed(tally.failures, tally.old)} are needed)."
        )
    return _with(failing, current, "confounded", _tally(failing, current), says, changed=changed)


def _leaning(found: Confirmation, failing: Epoch, current: Epoch) -> Confirmation:
    changed = also_changed(failing, current)
    note = f"The current run, at {current.limit}, does not count for this: {_list(changed)} changed too."
    return replace(found, also_changed=changed, says=f"{found.says} {note}")


def _with(
    failing: Epoch,
    lower: Epoch,
    state: str,
    tally: _Tally | None,
    says: str,
    needs: int | None = None,
    changed: tuple[str, ...] = (),
) -> Confirmation:
    return Confirmation(
        state=state,
        old_budget=failing.limit,
        new_budget=lower.limit,
        failures=tally.failures if tally else len(failing.counted()),
        old_exposures=tally.old if tally else None,
        exposures=tally.new if tally else None,
        exposures_needed=needs,
        pvalue=tally.pvalue if tally and needs is not None else None,
        also_changed=changed,
        says=says,
        threshold_tokens=tally.threshold if tally else None,
    )


def _new_deaths(failing: Epoch, lower: Epoch) -> Iterator[str]:
    """Classes that killed a server at the lower budget, and never at the old one."""
    before = {failed.class_id for life in failing.lives for failed in life.failures}
    for life in lower.lives:
        for failed in life.failures:
            refutes = failed.phase == "serving" and failed.class_id in _REFUTES
            if failed.fatal and not refutes and failed.class_id not in before:
                yield failed.class_id


def _failed_again(failing: Epoch, lower: Epoch) -> bool:
    """Whether lives at the old budget failed on both sides of those at the lower one."""
    at = [life.index for life in failing.lives if failing.counted_in(life)]
    return any(min(at) < life.index < max(at) for life in lower.lives)


def _one_prompt(failing: Epoch) -> bool:
    prompts = {failed.prompts for failed in failing.counted()}
    return len(prompts) == 1 and prompts != {()}


# --- words ----------------------------------------------------------------------------------------


def _compared(failing: Epoch, lower: Epoch, tally: _Tally) -> str:
    return (
        f"At {failing.limit} tokens a step {tally.failures} of {tally.old} prompts of {tally.threshold} tokens or more "
        f"failed, at {lower.limit} none of {tally.new}"
    )


def _named(other: Collection[str], lower: Epoch) -> list[str]:
    if not other:
        return []
    return [
        f"But at {lower.limit} the server now dies of {_list(sorted(set(other)))}, so this is no cure yet."
    ]


def _failures(count: int) -> str:
    return "One failure" if count == 1 else f"{count} failures"


def _list(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
