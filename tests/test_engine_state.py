from __future__ import annotations

from dataclasses import replace

import pytest

from exporter.engine_state import GONE_SECONDS, HUNG_SECONDS, Signs, engine_state
from exporter.status import ENGINE_STATES

# One rank of several failed: the process lives and answers, and nothing happens any more.
HUNG = Signs("serving", up=True, healthy=True, unresolved=True, line=HUNG_SECONDS, token=HUNG_SECONDS)
GONE = GONE_SECONDS


class TestLog:
    """What the log alone says."""

    @pytest.mark.parametrize(
        ("signs", "state"),
        [
            (Signs(None), "unknown"),
            (Signs(None, up=False), "unknown"),
            (Signs("starting"), "starting"),
            (Signs("starting", up=False), "starting"),
            (Signs("serving"), "serving"),
            (Signs("serving", up=False, line=5000.0), "serving"),
            (Signs("dead"), "dead"),
            (Signs("dead", up=False, line=1.0), "dead"),
            (Signs("stopped"), "stopped"),
            (Signs("stopped", up=False, line=1.0), "stopped"),
        ],
    )
    def test_state(self, signs: Signs, state: str) -> None:
        """Where nothing is scraped, or nobody answers from the start, the state is that of the log."""
        assert engine_state(signs) == state


class TestMetrics:
    """What ``/metrics`` adds."""

    @pytest.mark.parametrize(
        ("signs", "state"),
        [
            (Signs(None, up=True), "serving"),
            (Signs("starting", up=True), "serving"),
            (Signs("serving", up=True), "serving"),
        ],
    )
    def test_who_answers_serves(self, signs: Signs, state: str) -> None:
        """A server that answers has started, whether its log was read that far or not."""
        assert engine_state(signs) == state

    @pytest.mark.parametrize("logged", ["starting", "serving", None])
    @pytest.mark.parametrize(
        ("gone", "dead"), [(0.0, False), (GONE - 0.1, False), (GONE, True), (5000.0, True)]
    )
    def test_killed_without_a_word(self, logged: str | None, gone: float, dead: bool) -> None:
        """A server that refuses connections for ten seconds, after it had answered, was killed."""
        before = engine_state(Signs(logged, up=False))
        assert engine_state(Signs(logged, up=False, gone=gone)) == ("dead" if dead else before)

    @pytest.mark.parametrize("logged", ["dead", "stopped"])
    @pytest.mark.parametrize(
        ("line", "serves"), [(0.0, False), (30.0, False), (30.1, True), (5000.0, True), (None, False)]
    )
    def test_answers_after_its_death(self, logged: str, line: float | None, serves: bool) -> None:
        """The API server outlives its engine by a moment; who answers half a minute later is another one."""
        assert engine_state(Signs(logged, up=True, line=line)) == ("serving" if serves else logged)

    @pytest.mark.parametrize("logged", ["dead", "stopped"])
    def test_a_logged_end_is_not_overruled_by_silence(self, logged: str) -> None:
        """A server that said how it ended keeps that end when its port closes."""
        assert engine_state(Signs(logged, up=False, gone=5000.0, line=5000.0)) == logged


class TestHung:
    """An out-of-memory failure, an answer to ``/health``, and silence."""

    def test_entered(self) -> None:
        """All signs together make it hung, after thirty seconds and not before."""
        assert engine_state(HUNG) == "hung"
        assert engine_state(replace(HUNG, line=29.9)) == "serving"
        assert engine_state(replace(HUNG, token=29.9)) == "serving"

    @pytest.mark.parametrize("missing", ["line", "token"])
    def test_what_never_came_is_silent(self, missing: str) -> None:
        """A line or a token that never came since the exporter started does not speak against it."""
        signs = replace(HUNG, line=None) if missing == "line" else replace(HUNG, token=None)
        assert engine_state(signs) == "hung"

    @pytest.mark.parametrize(
        ("signs", "state"),
        [
            (replace(HUNG, unresolved=False), "serving"),  # it said that it goes on
            (replace(HUNG, line=0.1), "serving"),  # progress
            (replace(HUNG, token=0.1), "serving"),
            (replace(HUNG, logged="dead", line=31.0), "serving"),  # another one answers
            (replace(HUNG, logged="dead", line=1.0), "dead"),  # noticed after 300 s
            (replace(HUNG, logged="stopped", line=1.0), "stopped"),
            (replace(HUNG, up=False, healthy=False), "serving"),
            (replace(HUNG, up=False, healthy=False, gone=GONE), "dead"),  # killed by an operator
            (replace(HUNG, healthy=False), "serving"),  # vLLM itself says that it is not well
            (replace(HUNG, up=None), "serving"),
        ],
    )
    def test_left(self, signs: Signs, state: str) -> None:
        """It is left on death, stop or progress, and where one of its signs is missing."""
        assert engine_state(signs) == state

    @pytest.mark.parametrize("logged", ["starting", None])
    def test_whatever_the_log_missed(self, logged: str | None) -> None:
        """A log that was not read from its beginning does not keep it from being seen."""
        assert engine_state(replace(HUNG, logged=logged)) == "hung"


def test_only_states_of_the_contract() -> None:
    """Every combination of signs gives one of the states that have a series."""
    seen = {
        engine_state(Signs(logged, up, healthy, gone, unresolved, line, token))
        for logged in (None, "starting", "serving", "dead", "stopped")
        for up in (None, False, True)
        for healthy in (False, True)
        for gone in (None, 0.0, GONE)
        for unresolved in (False, True)
        for line in (None, 0.0, 100.0)
        for token in (None, 0.0, 100.0)
    }
    assert seen == set(ENGINE_STATES)
