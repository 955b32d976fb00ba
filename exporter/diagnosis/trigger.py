"""Do failures follow prompt length or request rate? An exact test that works with a handful of failures.

Each failure is its own control (a case-crossover design): the window in which it happened is
ranked among windows of ordinary serving that were like it in the other covariate. Long prompts
come with traffic, so length is compared among windows of the same rate, and rate among windows of
the same length. Under the null hypothesis every rank is as likely as any other, and the sum of
the ranks has a distribution that can be counted out; nothing is approximated.

Two traps decide what may enter. A prompt that killed the engine is in no histogram, as vLLM
observes a request when it has finished: a failure known from histograms alone has no length. And
clients send the killing prompt again after the restart: such repeats count as one failure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import nsmallest
from itertools import accumulate, chain
from typing import TypeGuard

from .exposure import WINDOW_SECONDS, Failed, Window

SOURCES = ("dump", "iteration", "requests", "metrics")
"""Where the numbers of a failure come from, best first."""

CONTROLS = 30
"""Windows a failure is compared with, where there are as many."""

ENOUGH_CONTROLS = 15
"""Fewer comparable windows tell nothing: the failure enters no test."""

MOST_EVENTS = 100
"""The latest failures that are judged; bounds the time it takes."""

REPEAT_SECONDS = 600.0
"""A failure this soon after another repeats it: five minutes are Kubernetes' longest back-off between
restarts, and five are left for the model to load. A client that retries is there already."""

_MATCH = 0.25  # how far the other covariate of a control may be from that of the case
_KEPT_PROMPTS = 32
_LARGEST = 1e15  # more is no count of tokens, requests or seconds
_SIGNIFICANT = 0.05
_ORDINARY = 0.20  # above it the other covariate is taken to play no part


@dataclass(frozen=True, slots=True)
class Comparison:
    """One covariate of one event: the case against its controls."""

    case: float
    controls: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One failure with the windows it is compared with, frozen when it happened.

    ``time``: seconds since the epoch. ``source``: one of ``SOURCES``, of the case. ``length`` and
    ``rate`` are None where they are not known. ``prompts``: lengths of the prompts in the failing
    step, longest first. ``lost``: windows missing from the stretch its controls were chosen from,
    for gaps, resets and warm-up.
    """

    incident: str
    life: int
    time: float | None
    source: str
    length: Comparison | None
    rate: Comparison | None
    prompts: tuple[int, ...]
    lost: int


@dataclass(frozen=True, slots=True)
class Covariate:
    """``pvalue``: one-sided, exact. ``rank_ratio``: share of controls below the case, averaged over events."""

    pvalue: float
    rank_ratio: float


@dataclass(frozen=True, slots=True)
class Trigger:
    """The verdict on all failures.

    ``effective_events``: failures that are no repeats and have enough windows to compare with.
    ``control_windows``: what each of them was compared with, at least; where there are none, the
    most that any failure has. ``windows_lost``: the most that any failure lacks; their stretches
    overlap. ``exposure_source``: the worst among those that count. ``insufficient`` has no numbers.
    """

    verdict: str
    events: int
    effective_events: int
    control_windows: int
    windows_lost: int
    exposure_source: str | None
    prompt_length: Covariate | None
    request_rate: Covariate | None
    says: str


# --- one failure ----------------------------------------------------------------------------------


def event(
    failed: Failed,
    life: int,
    time: float | None,
    case_length: float | None,
    case_rate: float | None,
    source: str,
    pool: Sequence[Window],
    lost: int,
) -> Event:
    """Choose the windows that a failure is compared with.

    ``case_length`` and ``case_rate`` are those of the ``WINDOW_SECONDS`` that end with the failing
    step, taken as the windows in ``pool`` are: the largest in that time, the failing step included,
    and cut to the bounds of a histogram where they are. The step alone is no window: it would
    be compared with windows in which little happened. ``pool`` has windows of one kind, under the
    settings that failed.

    The controls of a covariate are the ``CONTROLS`` windows nearest in the other one, none further than
    25 %, and none below the case while there are others; among equally near ones those nearest in
    time; of the same life where that has as many.
    A window that touches the last ``WINDOW_SECONDS`` before the failure is the case's own. Without
    a time that can't be told, and nothing is compared; nor without a rate.

    A ``case_length`` from ``metrics`` is refused: it is that of requests that finished. Where the length is
    not known, the rate is compared with that of the windows with the longest prompts, as if the
    failure had been one of them; else the traffic that brings long prompts would be blamed for them.
    Raises ValueError for an unknown source.
    """
    if source not in SOURCES:
        raise ValueError(f"unknown source of exposure: {source!r}")
    when, rate = _known(time), _known(case_rate)
    length = None if source == "metrics" else _known(case_length)
    lengths = rates = None
    if when is not None and rate is not None:
        windows = [
            (w.length, w.rate, w.end, w.life)
            for w in pool
            if (w.length is not None and 0 <= w.length <= _LARGEST)
            and (w.rate is not None and 0 <= w.rate <= _LARGEST)
            and abs(w.end - when) > WINDOW_SECONDS
        ]
        if length is not None:
            lengths = Comparison(length, tuple(w[0] for w in _nearest(windows, 1, rate, when, life)))
            rates = Comparison(rate, tuple(w[1] for w in _nearest(windows, 0, length, when, life)))
        else:
            longest = nsmallest(CONTROLS, windows, key=lambda w: (-w[0], abs(w[2] - when), w))
            rates = Comparison(rate, tuple(w[1] for w in longest))
    prompts = failed.prompts or ((failed.longest_prompt,) if failed.longest_prompt else ())
    kept = tuple(sorted(prompts, reverse=True)[:_KEPT_PROMPTS])
    return Event(failed.incident, life, when, source, lengths, rates, kept, max(lost, 0))


_Candidate = tuple[float, float, float, int]  # length, rate, end and life of a window


def _nearest(
    windows: list[_Candidate], matched: int, case: float, time: float, life: int
) -> list[_Candidate]:
    """The controls: the windows whose value at ``matched`` is nearest to ``case``.

    Those below it come last. What is compared rises with what is matched, so controls from below
    would let the case look large; in the mean a length has more windows below than above.
    """
    reach = _MATCH * case
    near = [w for w in windows if abs(w[matched] - case) <= reach]
    own = [w for w in near if w[3] == life]
    chosen = own if len(own) >= CONTROLS else near
    return nsmallest(
        CONTROLS, chosen, key=lambda w: (w[matched] < case, abs(w[matched] - case), abs(w[2] - time), w)
    )


def _known(value: float | None) -> float | None:
    """``value``, where it can be a count or a time."""
    return float(value) if value is not None and 0 <= value <= _LARGEST else None


# --- the test -------------------------------------------------------------------------------------


def exact_pvalue(sets: Sequence[Comparison]) -> float:
    """One-sided p of the sum of the cases' ranks within their sets, ties by mid-rank.

    Counts the ways to name one member of every set the case, and among them those whose ranks sum
    to the observed sum or more. Whole numbers up to the last division. Raises ValueError without sets.
    """
    if not sets:
        raise ValueError("no sets to test")
    observed = 0
    ways: list[list[int]] = []  # of each set: how many members have the score that is the index
    for one in sets:
        counts = Counter(one.controls)
        counts[one.case] += 1
        scores = [0] * (2 * len(one.controls) + 1)
        below = 0
        for value, count in sorted(counts.items()):
            score = 2 * below + count - 1  # twice the mid-rank, from 0
            scores[score] = count
            below += count
            if value == one.case:
                observed += score
        ways.append(scores)
    half = len(ways) // 2
    left, right = _convolved(ways[:half]), _convolved(ways[half:])
    # the last product is not needed term by term
    at_least = [*accumulate(reversed(right))][::-1] + [0] * len(left)
    tail = sum(count * at_least[max(observed - score, 0)] for score, count in enumerate(left))
    return tail / (sum(left) * sum(right))


def _convolved(ways: list[list[int]]) -> list[int]:
    """How many ways there are to each sum of one score from every set."""
    if len(ways) < 2:
        return ways[0] if ways else [1]
    half = len(ways) // 2
    a, b = _convolved(ways[:half]), _convolved(ways[half:])
    # one product of two long numbers whose digits are the counts, wide enough for any count to come
    width = (sum(a) * sum(b)).bit_length() // 8 + 1
    size = (len(a) + len(b) - 1) * width
    product = (_packed(a, width) * _packed(b, width)).to_bytes(size, "little")
    return [int.from_bytes(product[at : at + width], "little") for at in range(0, size, width)]


def _packed(counts: list[int], width: int) -> int:
    return int.from_bytes(b"".join([count.to_bytes(width, "little") for count in counts]), "little")


def rank_ratio(one: Comparison) -> float:
    """Share of the controls below the case, equal ones by half: 0.5 is ordinary, 1 above all."""
    below = sum(value < one.case for value in one.controls)
    equal = sum(value == one.case for value in one.controls)
    return (below + equal / 2) / len(one.controls)


def _covariate(sets: Sequence[Comparison]) -> Covariate:
    return Covariate(exact_pvalue(sets), sum(map(rank_ratio, sets)) / len(sets))


# --- the verdict ----------------------------------------------------------------------------------


def judge(events: Sequence[Event]) -> Trigger:
    """What the failures tell together, and the sentence for people.

    A statement needs three failures in either test, or two whose lengths are from dumps; with
    less, the latest that has a dump is described. Failures that repeat one killing prompt form a
    group, and one of them speaks for it: the first whose length is known, else the first. Which
    one that is does not hang on its ranks, so the null stays exact, and however often a prompt
    comes back, nothing becomes more certain.
    """
    latest = sorted(events, key=_when)[-MOST_EVENTS:]
    heads = [next((one for one in group if one.length), group[0]) for group in _groups(latest)]
    used = [one for one in heads if _enough(one.length) or _enough(one.rate)]
    dumped = [one for one in used if _enough(one.length) and one.source == "dump"]
    told = used
    lengths, rates = _comparisons(told)
    both = min(len(lengths), len(rates))
    length = rate = None
    if both >= 3 or (both == 2 and len(dumped) == len(lengths)):
        length, rate = _covariate(lengths), _covariate(rates)
        verdict, says = _statement(length.pvalue, rate.pvalue)
    elif dumped:
        told = dumped[-1:]
        lengths, rates = _comparisons(told)
        length, rate = _covariate(lengths), _covariate(rates) if rates else None
        verdict, says = "descriptive", _description(lengths[0], rates[0] if rates else None)
    else:
        verdict, says = "insufficient", _shortage(len(events), heads)
    compared = [len(one.controls) for one in lengths + rates]
    if not compared:
        found = [len(c.controls) for one in heads for c in (one.length, one.rate) if c]
        compared = [max(found, default=0)]
    sources = [one.source for one in told if _enough(one.length)] or [one.source for one in used or heads]
    trigger = Trigger(
        verdict=verdict,
        events=len(events),
        effective_events=len(used),
        control_windows=min(compared),
        windows_lost=max((one.lost for one in heads), default=0),
        exposure_source=max(sources, key=SOURCES.index, default=None),
        prompt_length=length,
        request_rate=rate,
        says=says,
    )
    return replace(trigger, says=f"{says} {_basis(trigger)}")


def document(trigger: Trigger) -> dict[str, object]:
    """The ``trigger`` object of the document; what is not known is left out."""
    return {name: value for name, value in asdict(trigger).items() if value is not None}


def _when(one: Event) -> float:
    return -math.inf if one.time is None else one.time


def _enough(one: Comparison | None) -> TypeGuard[Comparison]:
    return one is not None and len(one.controls) >= ENOUGH_CONTROLS


def _comparisons(events: Sequence[Event]) -> tuple[list[Comparison], list[Comparison]]:
    """Of length and of rate, those with enough controls."""
    return (
        [one.length for one in events if _enough(one.length)],
        [one.rate for one in events if _enough(one.rate)],
    )


def _groups(events: Sequence[Event]) -> list[list[Event]]:
    """Failures that repeat each other, also by way of a third; oldest first."""
    groups: list[list[Event]] = []
    for one in events:
        related = [any(_repeats(one, other) for other in group) for group in groups]
        joined = [group for group, is_related in zip(groups, related, strict=True) if is_related]
        groups = [group for group, is_related in zip(groups, related, strict=True) if not is_related]
        groups.append(sorted([*chain.from_iterable(joined), one], key=_when))
    return sorted(groups, key=lambda group: _when(group[0]))


def _repeats(one: Event, other: Event) -> bool:
    """Whether the longest prompt of one step was in the other too, or one failure followed at once."""
    if one.time is not None and other.time is not None and abs(one.time - other.time) <= REPEAT_SECONDS:
        return True
    if not one.prompts or not other.prompts:
        return False
    # the step of a retry may hold another prompt that is longer still
    return one.prompts[0] in other.prompts or other.prompts[0] in one.prompts


# --- words: no stronger than the verdict ----------------------------------------------------------

_SOURCE_WORDS = {
    "dump": "step dumps",
    "iteration": "iteration lines",
    "requests": "request lines",
    "metrics": "metrics",
}


def _statement(length: float, rate: float) -> tuple[str, str]:
    """Verdict and sentence for two p-values."""
    if length < _SIGNIFICANT and rate > _ORDINARY:
        return "supports", (
            f"Failures follow prompt length (exact {_shown(length)}), not request rate ({_shown(rate)})."
        )
    if rate < _SIGNIFICANT and length > _ORDINARY:
        return "contradicts", (
            f"Failures follow request rate (exact {_shown(rate)}), not prompt length ({_shown(length)})."
        )
    if length < _SIGNIFICANT and rate < _SIGNIFICANT:
        why = "long prompts and traffic rose together"
    elif length < _SIGNIFICANT:
        why = "long prompts stand out, but request rate is not ordinary either"
    elif rate < _SIGNIFICANT:
        why = "request rate stands out, but prompt length is not ordinary either"
    else:
        why = "neither long prompts nor traffic stand out"
    numbers = f"prompt length exact {_shown(length)}, request rate {_shown(rate)}"
    return "mixed", f"Cannot separate; {why} ({numbers})."


def _shown(pvalue: float) -> str:
    return "p<0.0001" if pvalue < 1e-4 else f"p={pvalue:.2g}"


def _description(length: Comparison, rate: Comparison | None) -> str:
    step = _place(length, ("the largest", "large", "ordinary", "small"), " comparable windows")
    traffic = "could not be compared"
    if rate is not None:
        traffic = "was " + _place(rate, ("the highest", "high", "ordinary", "low"), "")
    return f"The failing step was {step}; request rate {traffic}."


def _place(one: Comparison, words: tuple[str, str, str, str], of: str) -> str:
    """Where the case is among its controls, counted from the top."""
    top, high, ordinary, low = words
    size = len(one.controls) + 1
    if one.case > max(one.controls):
        return f"{top} of {size}{of}"
    ratio = rank_ratio(one)
    word = low if ratio < _ORDINARY else ordinary if exact_pvalue([one]) > _ORDINARY else high
    return f"{word} (rank {size - ratio * (size - 1):g} of {size}{of})"


def _shortage(failures: int, heads: Sequence[Event]) -> str:
    """What is missing."""
    if not failures:
        return "Not enough evidence to say what triggers it (no failure was seen)."
    independent = "" if len(heads) == failures else "independent "
    reasons = [_count(len(heads), f"{independent}failure")]
    if all(one.source != "dump" for one in heads):
        reasons.append("no step dump")
    if all(one.length is None for one in heads):
        reasons.append("no length of a failing prompt")
    short = sum(not (_enough(one.rate) and (one.length is None or _enough(one.length))) for one in heads)
    if short:
        where = f" for {short} of them" if short < len(heads) else ""
        reasons.append(f"fewer than {ENOUGH_CONTROLS} comparable windows{where}")
    return f"Not enough evidence to say what triggers it ({', '.join(reasons)})."


def _basis(trigger: Trigger) -> str:
    source = trigger.exposure_source
    return (
        f"Basis: k={_count(trigger.events, 'failure')}, k_eff={trigger.effective_events}, "
        f"M={_count(trigger.control_windows, 'control window')}, "
        f"exposure from {_SOURCE_WORDS[source] if source else 'nowhere'}, "
        f"{_count(trigger.windows_lost, 'window')} lost."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- the state ------------------------------------------------------------------------------------


def to_plain(one: Event) -> dict[str, object]:
    """``one`` as JSON can hold it."""
    return asdict(one)


def from_plain(plain: object) -> Event:
    """What ``to_plain`` gave. Raises ValueError, TypeError or LookupError for anything else."""
    if not isinstance(plain, Mapping):
        raise TypeError("an event must be an object")
    source, time = plain["source"], plain["time"]
    if source not in SOURCES:
        raise ValueError("an event with an unknown source")
    incident, life, lost = plain["incident"], plain["life"], plain["lost"]
    if not isinstance(incident, str):
        raise TypeError("an incident must be a text")
    return Event(
        incident,
        _whole(life),
        None if time is None else _real(time),
        str(source),
        _comparison(plain["length"]),
        _comparison(plain["rate"]),
        tuple(_whole(one) for one in _list(plain["prompts"], _KEPT_PROMPTS)),
        _whole(lost),
    )


def _comparison(plain: object) -> Comparison | None:
    if plain is None:
        return None
    if not isinstance(plain, Mapping):
        raise TypeError("a comparison must be an object")
    return Comparison(_real(plain["case"]), tuple(_real(one) for one in _list(plain["controls"], CONTROLS)))


def _list(plain: object, most: int) -> Sequence[object]:
    if not isinstance(plain, (list, tuple)) or len(plain) > most:
        raise ValueError(f"not a list of at most {most}")
    return plain


def _real(plain: object) -> float:
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise TypeError("not a number")
    if not 0 <= plain <= _LARGEST:
        raise ValueError("not a count or a time")
    return float(plain)


def _whole(plain: object) -> int:
    if not isinstance(plain, int):
        raise TypeError("not a whole number")
    return int(_real(plain))
