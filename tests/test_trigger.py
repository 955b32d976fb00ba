"""The trigger test: exact against brute force, honest against synthetic truths, and careful with words.

``TRIGGER_RUNS=2000 pytest tests/test_trigger.py`` runs the simulated truths longer (by default 60).
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.diagnosis.exposure import WINDOW_SECONDS, Failed, Window
from exporter.diagnosis.trigger import (
    CONTROLS,
    ENOUGH_CONTROLS,
    MOST_EVENTS,
    REPEAT_SECONDS,
    Comparison,
    Event,
    document,
    event,
    exact_pvalue,
    from_plain,
    judge,
    rank_ratio,
    to_plain,
)

sys.path.append(str(Path(__file__).parent / "bench"))

import trigger as simulation

RUNS = int(os.environ.get("TRIGGER_RUNS", "60"))
HOUR = 3600.0
UNHURRIED = settings(deadline=None)  # other work on the machine is no failure
VALUES = st.integers(0, 6)  # few, so that ties are common
SETS = st.lists(
    st.builds(Comparison, VALUES.map(float), st.lists(VALUES.map(float), max_size=5).map(tuple)),
    min_size=1,
    max_size=4,
)


def brute_force(sets: Sequence[Comparison]) -> Fraction:
    """The p-value by trying every member of every set as the case; mid-ranks by their definition, doubled."""
    ranks, observed = [], 0
    for one in sets:
        members = [one.case, *one.controls]
        doubled = [
            2 * sum(other < member for other in members) + members.count(member) + 1 for member in members
        ]
        observed += doubled[0]
        ranks.append(doubled)
    sums = [sum(choice) for choice in product(*ranks)]
    return Fraction(sum(one >= observed for one in sums), len(sums))


def ranked(place: int, controls: int = CONTROLS) -> Comparison:
    """A case with ``place - 1`` of its controls above it."""
    return Comparison(controls - place + 1.5, tuple(float(one) for one in range(1, controls + 1)))


def failure(number: int, length: int | None, rate: int | None, source: str = "dump", **more: Any) -> Event:
    """An event of its own, with the places of its length and its rate among 31 windows."""
    whole = Event(
        incident=f"incident{number}",
        life=number,
        time=number * HOUR,
        source=source,
        length=None if length is None else ranked(length),
        rate=None if rate is None else ranked(rate),
        prompts=(20_000 + number,) if source == "dump" else (),
        lost=0,
    )
    return replace(whole, **more)


def failed(**more: Any) -> Failed:
    """An incident without a dump."""
    return replace(Failed("one", None, "prefill_budget", "serving", True), **more)


def windows(number: int, life: int = 0, length: float = 1000.0, rate: float = 12.0) -> list[Window]:
    """Windows from the beginning of time, each one token longer than the one before."""
    return [Window((n + 1) * WINDOW_SECONDS, life, length + n, rate) for n in range(number)]


# --- the test -------------------------------------------------------------------------------------


@UNHURRIED
@given(SETS)
def test_p_is_exact(sets: list[Comparison]) -> None:
    """The convolution gives what trying out all ways gives, for sets of any sizes and with ties."""
    assert exact_pvalue(sets) == pytest.approx(float(brute_force(sets)), abs=1e-12, rel=1e-12)


@UNHURRIED
@given(SETS)
def test_p_is_a_probability(sets: list[Comparison]) -> None:
    """P is above 0, as the observed order is one of those counted, and never above 1."""
    assert 0 < exact_pvalue(sets) <= 1


@UNHURRIED
@given(SETS, VALUES, st.data())
def test_a_higher_case_is_never_less_significant(
    sets: list[Comparison], more: int, data: st.DataObject
) -> None:
    """Raising one case among the same controls cannot raise p where the case was and stays untied."""
    at = data.draw(st.integers(0, len(sets) - 1))
    low = replace(sets[at], case=sets[at].case + 0.25)
    high = replace(low, case=low.case + more)
    before, after = [*sets], [*sets]
    before[at], after[at] = low, high
    assert exact_pvalue(after) <= exact_pvalue(before)


@UNHURRIED
@given(SETS, st.randoms(use_true_random=False))
def test_the_order_of_controls_and_sets_says_nothing(sets: list[Comparison], rng: random.Random) -> None:
    """Controls are exchangeable, and so are sets."""
    shuffled = [replace(one, controls=tuple(rng.sample(one.controls, len(one.controls)))) for one in sets]
    rng.shuffle(shuffled)
    assert exact_pvalue(shuffled) == exact_pvalue(sets)
    assert sum(map(len, (one.controls for one in shuffled))) == sum(len(one.controls) for one in sets)


@UNHURRIED
@given(SETS, st.sampled_from([math.exp, lambda x: 3 * x + 1]))
def test_only_ranks_count(sets: list[Comparison], rising: Any) -> None:
    """Any rising change of scale leaves p as it is."""
    changed = [Comparison(rising(one.case), tuple(map(rising, one.controls))) for one in sets]
    assert exact_pvalue(changed) == exact_pvalue(sets)


@pytest.mark.parametrize(("failures", "p"), [(1, 1 / 31), (2, 31**-2), (8, 31**-8), (100, 31**-100)])
def test_the_largest_each_time(failures: int, p: float) -> None:
    """Cases above all controls have the smallest p there is: one way of all."""
    assert exact_pvalue([ranked(1)] * failures) == pytest.approx(p, rel=1e-12, abs=0)


def test_all_equal() -> None:
    """Where every window is like the case there is nothing to be seen."""
    same = Comparison(5.0, (5.0,) * CONTROLS)
    assert exact_pvalue([same] * 3) == 1
    assert rank_ratio(same) == 0.5


def test_no_sets() -> None:
    """There is no p-value of nothing."""
    with pytest.raises(ValueError, match="no sets"):
        exact_pvalue([])


@pytest.mark.parametrize(("place", "ratio"), [(1, 1.0), (16, 0.5), (31, 0.0)])
def test_rank_ratio(place: int, ratio: float) -> None:
    """The share of controls that the case is above."""
    assert rank_ratio(ranked(place)) == ratio


# --- the choice of controls -----------------------------------------------------------------------


def test_controls_are_the_nearest_in_the_other_covariate() -> None:
    """Length is compared among windows of the same rate, rate among windows of the same length."""
    alike = windows(130)[100:]
    busy = [Window(n * WINDOW_SECONDS, 0, 5000.0 + n, 40.0 + n) for n in range(200, 230)]
    one = event(failed(), 0, 9000.0, 5115.0, 12.0, "dump", alike + busy, 3)
    assert one.length == Comparison(5115.0, tuple(1129.0 - n for n in range(30)))
    assert one.rate is not None
    assert set(one.rate.controls) == {w.rate for w in busy}
    assert one.lost == 3


def test_a_window_too_different_is_no_control() -> None:
    """25 % is as far as a control may be from the case; rather few controls than wrong ones."""
    pool = [Window(n * WINDOW_SECONDS, 0, 100.0, 75.0 + n) for n in range(100)]
    one = event(failed(), 0, 9000.0, 100.0, 100.0, "dump", pool, 0)
    assert one.rate is not None
    assert one.length is not None
    assert len(one.length.controls) == CONTROLS
    few = event(failed(), 0, 9000.0, 100.0, 55.0, "dump", pool, 0)
    assert few.length == Comparison(100.0, ())
    assert judge([few]).verdict == "insufficient"


def test_windows_above_the_case_come_first() -> None:
    """Shorter windows have less traffic, and would let that of the case look high: longer ones are preferred."""
    pool = [Window(n * WINDOW_SECONDS, 0, 1000.0 + 2 * n, float(n)) for n in range(60)]
    middle = event(failed(), 0, 9000.0, 1050.0, 12.0, "dump", pool, 0)
    assert middle.rate == Comparison(12.0, tuple(float(n) for n in range(25, 55)))
    high = event(failed(), 0, 9000.0, 1111.0, 12.0, "dump", pool, 0)
    assert high.rate == Comparison(12.0, tuple(float(n) for n in [*range(56, 60), *range(55, 29, -1)]))


def test_among_equals_the_nearest_in_time() -> None:
    """The server of an hour ago may have had other traffic; windows close to the failure are preferred."""
    one = event(failed(), 0, 200 * WINDOW_SECONDS, 9000.0, 12.0, "dump", windows(190), 0)
    assert one.length is not None
    assert one.length.controls == tuple(1000.0 + n for n in range(189, 159, -1))


def test_the_own_life_comes_first() -> None:
    """Windows of the same process are compared where they suffice, else all."""
    before, own = windows(200, 0), windows(250, 1, length=2000.0, rate=13.0)[210:]
    one = event(failed(), 1, 252 * WINDOW_SECONDS, 9000.0, 12.0, "dump", before + own, 0)
    assert one.length is not None
    assert min(one.length.controls) > 2000
    short = event(failed(), 1, 252 * WINDOW_SECONDS, 9000.0, 12.0, "dump", before + own[-20:], 0)
    assert short.length is not None
    assert max(short.length.controls) < 2000


@pytest.mark.parametrize("offset", [-WINDOW_SECONDS, -0.1, 0.0, 7.0, WINDOW_SECONDS])
def test_the_own_window_is_no_control(offset: float) -> None:
    """A window that touches the seconds before the failure holds what is to be compared."""
    time = 100 * WINDOW_SECONDS
    pool = [Window(time + offset, 0, 7777.0, 12.0), *windows(60)]
    one = event(failed(), 0, time, 7777.0, 12.0, "dump", pool, 0)
    assert one.length is not None
    assert 7777.0 not in one.length.controls


@UNHURRIED
@given(st.randoms(use_true_random=False))
def test_the_choice_does_not_hang_on_the_order(rng: random.Random) -> None:
    """The same windows in any order give the same event: no random numbers are drawn."""
    pool = [Window(n * 15.0, n % 2, float(n * 7919 % 50), float(n * 104729 % 9)) for n in range(80)]
    expected = event(failed(), 1, 5000.0, 45.0, 6.0, "dump", pool, 0)
    rng.shuffle(pool)
    assert event(failed(), 1, 5000.0, 45.0, 6.0, "dump", pool, 0) == expected


def test_a_histogram_of_finished_requests_gives_no_length() -> None:
    """The prompt that killed is not among the finished ones, so what is there is no length of the case."""
    one = event(failed(), 0, 9000.0, 1200.0, 12.0, "metrics", windows(100), 0)
    assert one.length is None
    assert one.rate is not None


def test_an_unknown_length_is_taken_to_be_long() -> None:
    """The rate of a failure of unknown length is compared with that of the windows with the longest prompts."""
    pool = [Window(n * WINDOW_SECONDS, 0, 100.0 - n, float(n)) for n in range(100)]
    one = event(failed(), 0, 9000.0, None, 50.0, "metrics", pool, 0)
    assert one.rate == Comparison(50.0, tuple(float(n) for n in range(30)))


@pytest.mark.parametrize(
    ("time", "length", "rate"),
    [(None, 1.0, 1.0), (9000.0, 1.0, None), (9000.0, 1.0, math.nan), (math.inf, 1.0, 1.0)],
    ids=["no time", "no rate", "rate is no number", "endless time"],
)
def test_nothing_to_match_with(time: float | None, length: float | None, rate: float | None) -> None:
    """Without a time the own window cannot be told, without a rate nothing can be matched."""
    one = event(failed(), 0, time, length, rate, "dump", windows(100), 0)
    assert (one.length, one.rate) == (None, None)


def test_windows_that_are_not_known_are_no_controls() -> None:
    """A window needs both numbers, and numbers that can be meant."""
    broken = [
        Window(n * WINDOW_SECONDS, 0, *pair)
        for n, pair in enumerate(
            [(None, 12.0), (1000.0, None), (math.nan, 12.0), (-1.0, 12.0), (1e300, 12.0)]
        )
    ]
    one = event(failed(), 0, 9000.0, 1000.0, 12.0, "dump", broken, 0)
    assert one.length == Comparison(1000.0, ())
    assert one.rate == Comparison(12.0, ())


def test_an_unknown_source() -> None:
    """A source nobody named is a mistake of the caller."""
    with pytest.raises(ValueError, match="unknown source"):
        event(failed(), 0, 1.0, 1.0, 1.0, "histogram", [], 0)


def test_prompts_are_kept_longest_first_and_bounded() -> None:
    """The state keeps enough of a step to know it again, not all of it."""
    one = event(failed(prompts=tuple(range(1000))), 0, 9.0, 1.0, 1.0, "dump", [], 0)
    assert one.prompts == tuple(range(999, 967, -1))
    assert event(failed(longest_prompt=7), 0, 9.0, 1.0, 1.0, "dump", [], 0).prompts == (7,)


# --- repeats --------------------------------------------------------------------------------------


def test_a_prompt_that_comes_back_counts_once() -> None:
    """Clients send the killing prompt again after the restart: the same length, or it follows at once."""
    first = failure(1, 1, 14)
    again = failure(2, 1, 14, prompts=(30_000, *first.prompts))
    soon = failure(3, 1, 14, "iteration", time=HOUR + REPEAT_SECONDS)
    later = failure(4, 1, 14)
    told = judge([first, again, soon, later])
    assert (told.events, told.effective_events) == (4, 2)
    assert judge([first, replace(soon, time=HOUR + REPEAT_SECONDS + 1)]).effective_events == 2


def test_repeats_join_groups() -> None:
    """A failure that repeats two others makes one of all three, in whatever order they are given."""
    left, right = failure(1, 1, 14), failure(2, 2, 14)
    bridge = failure(3, 3, 14, prompts=(30_000, *right.prompts, *left.prompts))
    for events in ([left, right, bridge], [bridge, right, left]):
        assert judge(events).effective_events == 1


@UNHURRIED
@given(st.integers(1, 31), st.integers(1, 31), st.integers(0, 1))
def test_repeats_make_nothing_more_certain(length: int, rate: int, of: int) -> None:
    """However a repeat ranks, it changes no p-value: the first of its group speaks for it."""
    firsts = [failure(1, 1, 20), failure(9, 3, 12)]
    again = failure(20, length, rate, prompts=firsts[of].prompts)
    before, after = judge(firsts), judge([*firsts, again])
    assert (after.prompt_length, after.request_rate) == (before.prompt_length, before.request_rate)
    assert (after.events, after.effective_events) == (3, 2)


def test_the_first_with_a_known_length_speaks() -> None:
    """A group is not left without a length because its first failure has none."""
    silent = failure(1, None, 1, "metrics")
    again = failure(2, 1, 14, time=HOUR + 60)
    told = judge([silent, again])
    assert told.verdict == "descriptive"
    assert told.request_rate is not None
    assert told.request_rate.rank_ratio == pytest.approx(17 / 30)


# --- the verdict ----------------------------------------------------------------------------------


BASIS = "M=30 control windows, exposure from step dumps, 0 windows lost."


@pytest.mark.parametrize(
    ("events", "verdict", "says"),
    [
        (
            [],
            "insufficient",
            "Not enough evidence to say what triggers it (no failure was seen). "
            "Basis: k=0 failures, k_eff=0, M=0 control windows, exposure from nowhere, 0 windows lost.",
        ),
        (
            [failure(1, 1, 14, "iteration")],
            "insufficient",
            "Not enough evidence to say what triggers it (1 failure, no step dump). "
            "Basis: k=1 failure, k_eff=1, M=30 control windows, exposure from iteration lines, 0 windows lost.",
        ),
        (
            [failure(n, None, 1, "metrics") for n in range(5)],
            "insufficient",
            "Not enough evidence to say what triggers it (5 failures, no step dump, no length of a failing prompt). "
            "Basis: k=5 failures, k_eff=5, M=30 control windows, exposure from metrics, 0 windows lost.",
        ),
        (
            [failure(n, 1, 14 if n else None, "requests") for n in range(3)],
            "insufficient",
            "Not enough evidence to say what triggers it "
            "(3 failures, no step dump, fewer than 15 comparable windows for 1 of them). "
            "Basis: k=3 failures, k_eff=3, M=30 control windows, exposure from request lines, 0 windows lost.",
        ),
        (
            [failure(1, 1, 14)],
            "descriptive",
            "The failing step was the largest of 31 comparable windows; request rate was ordinary (rank 14 of 31). "
            f"Basis: k=1 failure, k_eff=1, {BASIS}",
        ),
        (
            [failure(1, 4, 1)],
            "descriptive",
            "The failing step was large (rank 4 of 31 comparable windows); request rate was the highest of 31. "
            f"Basis: k=1 failure, k_eff=1, {BASIS}",
        ),
        (
            [failure(1, 30, None)],
            "descriptive",
            "The failing step was small (rank 30 of 31 comparable windows); request rate could not be compared. "
            f"Basis: k=1 failure, k_eff=1, {BASIS}",
        ),
        (
            [failure(1, 1, 14), failure(2, 1, 18)],
            "supports",
            "Failures follow prompt length (exact p=0.001), not request rate (p=0.52). "
            f"Basis: k=2 failures, k_eff=2, {BASIS}",
        ),
        (
            [failure(n, 1, 16) for n in range(4)],
            "supports",
            "Failures follow prompt length (exact p<0.0001), not request rate (p=0.51). "
            f"Basis: k=4 failures, k_eff=4, {BASIS}",
        ),
        (
            [failure(1, 14, 1), failure(2, 18, 1)],
            "contradicts",
            "Failures follow request rate (exact p=0.001), not prompt length (p=0.52). "
            f"Basis: k=2 failures, k_eff=2, {BASIS}",
        ),
        (
            [failure(1, 1, 1), failure(2, 2, 1)],
            "mixed",
            "Cannot separate; long prompts and traffic rose together "
            "(prompt length exact p=0.0031, request rate p=0.001). "
            f"Basis: k=2 failures, k_eff=2, {BASIS}",
        ),
        (
            [failure(1, 1, 5), failure(2, 2, 10)],
            "mixed",
            "Cannot separate; long prompts stand out, but request rate is not ordinary either "
            "(prompt length exact p=0.0031, request rate p=0.11). "
            f"Basis: k=2 failures, k_eff=2, {BASIS}",
        ),
        (
            [failure(1, 5, 1), failure(2, 10, 1)],
            "mixed",
            "Cannot separate; request rate stands out, but prompt length is not ordinary either "
            "(prompt length exact p=0.11, request rate p=0.001). "
            f"Basis: k=2 failures, k_eff=2, {BASIS}",
        ),
        (
            [failure(1, 16, 16), failure(2, 16, 16)],
            "mixed",
            "Cannot separate; neither long prompts nor traffic stand out "
            "(prompt length exact p=0.52, request rate p=0.52). "
            f"Basis: k=2 failures, k_eff=2, {BASIS}",
        ),
    ],
    ids=[
        "none", "one", "no lengths", "no windows", "dump", "rank", "no rate", "two dumps", "four", "rate", "both",
        "length and some rate", "rate and some length", "neither",
    ],
)  # fmt: skip
def test_verdicts(events: list[Event], verdict: str, says: str) -> None:
    """Every line of the table of verdicts, with its words."""
    told = judge(events)
    assert told.verdict == verdict
    assert told.says == says


def test_two_failures_without_dumps_state_nothing() -> None:
    """Two failures are enough where the lengths are from dumps, else three are."""
    lines = [failure(n, 1, 14, "requests") for n in range(3)]
    assert judge(lines[:2]).verdict == "insufficient"
    assert judge(lines).verdict == "supports"
    mixed = judge([*lines[:2], failure(9, 1, 14)])
    assert (mixed.verdict, mixed.exposure_source) == ("supports", "requests")  # the worst of them
    told = judge([lines[0], failure(9, 1, 14)])
    assert (told.verdict, told.exposure_source, told.effective_events) == ("descriptive", "dump", 2)


def test_the_latest_dump_is_described() -> None:
    """Where two dumps make no statement, as one has no windows for its rate, the newer one is told."""
    told = judge([failure(2, 1, 14), failure(1, 3, None)])
    assert told.verdict == "descriptive"
    assert told.says.startswith("The failing step was the largest of 31 comparable windows;")


def test_a_failure_of_unknown_length_takes_part_in_the_rate_test() -> None:
    """It adds to what is known of the rate, and does not stand in the way of the lengths."""
    dumps = [failure(1, 1, 14), failure(2, 1, 14)]
    told = judge([*dumps, failure(3, None, 1, "metrics")])
    assert told.prompt_length == judge(dumps).prompt_length
    assert told.request_rate is not None
    assert told.request_rate.rank_ratio == pytest.approx((17 + 17 + 30) / 90)
    assert (told.effective_events, told.exposure_source) == (3, "dump")


def test_too_few_windows() -> None:
    """A failure with fewer than 15 comparable windows enters no test, and the sentence says so."""
    enough = replace(failure(1, 1, 14), rate=ranked(7, ENOUGH_CONTROLS))
    assert judge([enough]).control_windows == ENOUGH_CONTROLS
    few = replace(enough, length=ranked(1, 14), rate=ranked(7, 14), lost=9)
    told = judge([few])
    assert told.says == (
        "Not enough evidence to say what triggers it (1 failure, fewer than 15 comparable windows). "
        "Basis: k=1 failure, k_eff=0, M=14 control windows, exposure from step dumps, 9 windows lost."
    )
    assert (told.effective_events, told.prompt_length, told.request_rate) == (0, None, None)


def test_only_the_latest_are_judged() -> None:
    """What a crash loop costs is bounded."""
    events = [failure(n, 1, 14) for n in range(MOST_EVENTS + 50)]
    told = judge(events)
    assert (told.events, told.effective_events) == (MOST_EVENTS + 50, MOST_EVENTS)


def test_document() -> None:
    """The object of the document, with what is not known left out."""
    assert document(judge([failure(1, 1, 14)])) == {
        "verdict": "descriptive",
        "events": 1,
        "effective_events": 1,
        "control_windows": 30,
        "windows_lost": 0,
        "exposure_source": "dump",
        "prompt_length": {"pvalue": 1 / 31, "rank_ratio": 1.0},
        "request_rate": {"pvalue": 14 / 31, "rank_ratio": 17 / 30},
        "says": judge([failure(1, 1, 14)]).says,
    }
    assert document(judge([])).keys() == {
        "verdict", "events", "effective_events", "control_windows", "windows_lost", "says",
    }  # fmt: skip


# --- the state ------------------------------------------------------------------------------------

EVENT = event(failed(prompts=(9000, 12)), 3, 9000.0, 1200.0, 12.0, "dump", windows(100), 2)


@pytest.mark.parametrize("one", [EVENT, event(failed(), 0, None, None, None, "metrics", [], 0)])
def test_events_survive_as_json(one: Event) -> None:
    """What is written to the state is what is read."""
    assert from_plain(json.loads(json.dumps(to_plain(one)))) == one


RUBBISH: list[tuple[str, Any]] = [
    ("incident", 7), ("life", "3"), ("life", True), ("life", -1), ("time", "now"), ("time", math.nan),
    ("time", 10**400), ("source", "histogram"), ("source", []), ("length", []), ("length", {"case": 1}),
    ("length", {"case": True, "controls": []}), ("rate", {"case": 1, "controls": [1] * 31}),
    ("rate", {"case": 1, "controls": ["1"]}), ("rate", {"case": 1, "controls": "111"}),
    ("prompts", None), ("prompts", [1.5]), ("prompts", [1] * 33), ("lost", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), RUBBISH, ids=lambda value: str(value)[:20])
def test_rubbish_in_the_state_is_refused(name: str, value: Any) -> None:
    """A damaged state is told by one of three errors."""
    plain = to_plain(EVENT) | {name: value}
    with pytest.raises((ValueError, TypeError, LookupError)):
        from_plain(plain)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@UNHURRIED
@given(JSON | st.sampled_from(sorted(to_plain(EVENT))).flatmap(
    lambda name: JSON.map(lambda value: to_plain(EVENT) | {name: value})
))  # fmt: skip
def test_anything_in_the_state_is_read_or_refused(plain: Any) -> None:
    """No other error gets out, and what is read can be judged."""
    try:
        one = from_plain(plain)
    except (ValueError, TypeError, LookupError):
        return
    assert judge([one]).events == 1


@pytest.mark.parametrize("name", sorted(to_plain(EVENT)))
def test_a_missing_part_of_the_state_is_refused(name: str) -> None:
    """An event without one of its parts is no event."""
    plain = to_plain(EVENT)
    del plain[name]
    with pytest.raises(LookupError):
        from_plain(plain)


# --- simulated truths -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cells() -> dict[simulation.Key, simulation.Cell]:
    """A small version of ``tests/bench/trigger.py``; rows that show mistakes have a quarter of the runs."""
    rows = [key for key in simulation.rows() if key[1] in ("dump", "censored", "metrics")]
    return simulation.simulate(20261130, RUNS, rows)


def share(part: int, cell: simulation.Cell) -> float:
    """Of its runs."""
    assert cell.runs >= RUNS / 4
    return part / cell.runs


def test_two_dumps_show_that_failures_follow_length(cells: dict[simulation.Key, simulation.Cell]) -> None:
    """The power of the length test where prompts kill; 0.95 over many runs."""
    cell = cells["length", "dump", 2]
    assert share(cell.length, cell) > 0.8


@pytest.mark.parametrize("size", simulation.SIZES)
def test_false_positives_are_rare(cells: dict[simulation.Key, simulation.Cell], size: int) -> None:
    """Neither test cries wolf where its truth is absent; at most 0.06 over many runs."""
    for truth, wrong in (("length", "rate"), ("rate", "length"), ("neither", "rate"), ("neither", "length")):
        cell = cells[truth, "dump", size]
        assert share(getattr(cell, wrong), cell) < 0.2, (truth, wrong)


def test_a_censored_window_shows_nothing(cells: dict[simulation.Key, simulation.Cell]) -> None:
    """With what a histogram holds of the failing window, eight failures show no more than chance does."""
    cell = cells["length", "censored", 8]
    assert share(cell.length, cell) < 0.35
    assert cells["length", "dump", 8].length == cells["length", "dump", 8].runs


def test_what_is_called_censored_states_nothing(cells: dict[simulation.Key, simulation.Cell]) -> None:
    """The same windows, named by their source, never make a statement: ``event`` refuses the length."""
    for size in simulation.SIZES:
        cell = cells["length", "metrics", size]
        assert cell.verdicts == {"insufficient": cell.runs}
