from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from aiohttp import web
from conftest import HERE, analyzed, capture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter import logs
from exporter.cli import main
from exporter.config import TargetConfig, load, parse_duration
from exporter.diagnosis.knowledge import CLASS_IDS, builtin_classes
from exporter.follow import Follower
from exporter.notify import alertmanager as api_module
from exporter.notify.alertmanager import Alertmanager, PushError, as_json
from exporter.notify.alerts import (
    MAX_DESCRIPTION,
    MAX_SUMMARY,
    RISKS,
    Links,
    fix_alert,
    incident_alert,
    risk_alert,
    runbook,
    target_labels,
    test_alert,
)
from exporter.notify.open_alerts import ENTER, FRESH, LEAVE, LONGEST, MAX_OPEN, SERVING, SHORTEST, OpenAlerts
from exporter.notify.outlets import Outlets, whose
from exporter.notify.pod_event import MAX_MESSAGE, PodEvents
from exporter.notify.receiver import EXPIRY, GIVE_UP, QUEUE, RESEND, SHOWN, Clock, Receiver
from exporter.records import Life
from exporter.scrape import open_session
from exporter.sources.kube_client import KubeClient, LoopClock
from exporter.state import Store
from exporter.status import OpenAlert, Status, TargetStatus

test_alert.__test__ = False  # type: ignore[attr-defined] # not a test, whatever its name says

NOW = datetime(2026, 11, 30, 16, 30, tzinfo=UTC).timestamp()
POD = {"namespace": "models", "pod": "llama-0", "container": "vllm"}

Document = dict[str, Any]


def incident(identity: str = "a1", **changes: Any) -> Document:
    """A fatal serving incident, just now, that is known to the second."""
    return {
        "id": identity, "time": "2026-11-30T16:29:50Z", "engine": 0, "class": "prefill_budget",
        "phase": "serving", "fatal": True, "confidence": "probable", "facts": {}, "evidence": [],
        "advice": {"do": [], "dead_ends": [], "confirm": ""}, **changes,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def lines() -> StringIO:
    """What the exporter logs, as JSON lines."""
    out = StringIO()
    logs.configure("info", "json", out)
    logs._standing.clear()
    return out


def said(out: StringIO) -> list[tuple[str, str]]:
    """Event and problem of each line that was logged."""
    every = [json.loads(line) for line in out.getvalue().splitlines()]
    return [(one["event"], one.get("problem", "")) for one in every]


# --- what an alert says -----------------------------------------------------------------------


class TestAlert:
    """Labels and texts made from documents."""

    def test_of_a_real_death(self, golden: Callable[[str, str], None]) -> None:
        """The page of a real death holds numbers, evidence, what to type, what not to do, and how to confirm."""
        (document,) = analyzed(capture("mlp_eager_16384"))["incidents"]
        alert = Links("https://oom.example.org", "https://runbooks.example.org").added(
            incident_alert(document, target_labels(POD, "tiny"), NOW)
        )
        shown = {**alert.labels, "generatorURL": alert.url, **alert.annotations}
        golden("page_mlp_eager_16384.txt", "".join(f"{name}: {text}\n" for name, text in shown.items()))

    @pytest.mark.parametrize(
        ("changes", "severity", "says", "book"),
        [
            ({}, "page", "ran out of memory and died", "VLLMPrefillBudgetOOM"),
            ({"class": "sampler"}, "page", "ran out of memory and died", "VLLMFatalOOM"),
            ({"class": "unknown"}, "page", "ran out of memory and died", "VLLMOOMUnclassified"),
            ({"class": "lora", "fatal": False}, "ticket", "ran out of memory and lives on", "VLLMOOMSurvived"),
            (
                {"phase": "startup", "class": "weights_load"}, "ticket", "did not start for lack of memory",
                "VLLMStartupOOM",
            ),
        ],
    )  # fmt: skip
    def test_severity(self, changes: dict[str, Any], severity: str, says: str, book: str) -> None:
        """Only an engine that died while serving wakes somebody; the runbook is that of the rule."""
        document = incident(**changes)
        alert = incident_alert(document, POD, NOW)
        assert alert.labels == {
            **POD, "alertname": "VLLMOutOfMemory", "severity": severity, "class": document["class"],
            "phase": document["phase"], "incident": "a1", "source": "vllm-oom-exporter",
        }  # fmt: skip
        assert alert.annotations["summary"] == f"vLLM (models/llama-0) {says}: {document['class']}"
        assert runbook(alert.labels) == book

    @pytest.mark.parametrize("class_id", CLASS_IDS)
    def test_every_class(self, class_id: str) -> None:
        """Whatever class it is of, an alert begins with what that is."""
        alert = incident_alert(incident(**{"class": class_id}), {}, NOW)
        first = alert.annotations["description"].splitlines()[0]
        assert first == f"{builtin_classes()[class_id].name}. Confidence that it is {class_id}: probable."

    def test_evidence_against(self) -> None:
        """What speaks against the class, or for another one, is told as such."""
        evidence = [
            {"favours": "prefill_budget", "weight": 1.0, "says": "one"},
            {"favours": "prefill_budget", "weight": -2.0, "says": "two"},
            {"favours": "sampler", "weight": 0.5, "says": "three"},
            {"favours": "sampler", "weight": -0.5, "says": "four"},
        ]
        text = incident_alert(incident(evidence=evidence), {}, NOW).annotations["description"]
        assert text.splitlines()[1:] == ["For: one", "Against: two", "Against: three"]

    def test_trigger(self) -> None:
        """What failures follow is told once it is decided."""
        for verdict, told in (("supports", True), ("insufficient", False)):
            trigger = {"verdict": verdict, "says": "failures follow long prompts"}
            text = incident_alert(incident(), {}, NOW, trigger).annotations["description"]
            assert ("failures follow long prompts" in text) == told

    @given(
        st.dictionaries(
            st.sampled_from(["class", "phase", "evidence", "advice", "confidence", "fatal", "id"]),
            st.recursive(
                st.none() | st.integers() | st.text(max_size=9) | st.just("<!channel> " * 500),
                lambda inner: (
                    st.lists(inner, max_size=2)
                    | st.dictionaries(st.sampled_from(["says", "weight", "text", "do", "dead_ends"]), inner)
                ),
                max_leaves=6,
            ),
        )
    )
    @settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def test_whatever_it_holds(self, document: Document) -> None:
        """Whatever a document holds, texts are bounded, printable and mention nobody in a chat."""
        alert = incident_alert({**incident(), **document, "facts": {}}, POD, NOW)
        texts = [*alert.labels.values(), *alert.annotations.values()]
        assert all(one.isprintable() or one == "\n" for text in texts for one in text)
        assert not any("<" in text for text in texts)
        assert len(alert.annotations["summary"]) <= MAX_SUMMARY
        assert len(alert.annotations["description"]) <= MAX_DESCRIPTION

    def test_model(self) -> None:
        """A name that is no model's does not become a label; folders of a path stay out of it."""
        assert target_labels(POD, "acme/a") == {**POD, "model_name": "acme/a"}
        assert target_labels(POD, "/srv/secret/a") == {**POD, "model_name": "a"}
        assert target_labels(POD, 'a"\n<!here>') == POD
        assert target_labels(POD, None) == POD

    def test_conditions(self) -> None:
        """Risks are tickets with their reasons; a fix that holds is information, one that does not a ticket."""
        for state in RISKS:
            found = risk_alert({"state": state, "reasons": ["one", "two"]}, POD, NOW)
            assert found is not None
            assert (found.labels["severity"], found.labels["state"]) == ("ticket", state)
            assert found.annotations["description"] == "one\ntwo"
        fix = {
            "says": "no failure",
            "old_budget": 16384,
            "new_budget": 2048,
            "exposures": 35,
            "exposures_needed": 35,
        }
        for state, name, severity in (
            ("confirmed", "VLLMFixConfirmed", "info"),
            ("refuted", "VLLMFixRefuted", "ticket"),
        ):
            found = fix_alert({**fix, "state": state}, POD, NOW)
            assert found is not None
            assert (found.labels["alertname"], found.labels["severity"]) == (name, severity)
            assert found.annotations["description"] == (
                "no failure\nmax_num_batched_tokens went from 16384 to 2048, after 35 of 35 exposures"
            )
        assert risk_alert({"state": "comfortable", "reasons": []}, POD, NOW) is None
        assert risk_alert(None, POD, NOW) is None
        assert fix_alert({"state": "accruing"}, POD, NOW) is None
        assert fix_alert(None, POD, NOW) is None

    def test_runbooks_are_there(self) -> None:
        """Every runbook that an alert links to is that of an alert of the rules."""
        rules = yaml.safe_load((HERE.parent / "rules" / "vllm-oom-alerts.yaml").read_text(encoding="utf-8"))
        known = {rule.get("alert") for group in rules["groups"] for rule in group["rules"]}
        alerts = [
            incident_alert(incident(fatal=f, **{"class": one}), {}, NOW)
            for one in CLASS_IDS
            for f in (True, False)
        ]
        alerts += [one for state in RISKS if (one := risk_alert({"state": state}, {}, NOW))]
        alerts += [one for state in ("confirmed", "refuted") if (one := fix_alert({"state": state}, {}, NOW))]
        assert {runbook(one.labels) for one in alerts} - known == set()


# --- one receiver -----------------------------------------------------------------------------


class Hands:
    """An Alertmanager in memory, and the time: what was pushed when, and what to answer."""

    name = "am:9093"

    def __init__(self) -> None:
        self.time = 0.0
        self.pushed: list[tuple[float, list[tuple[str, str]]]] = []
        """Time, and (incident, firing or resolved) of every alert that was taken."""
        self.tried = 0
        self.error: PushError | None = None
        self.poison = ""
        self.counts: Counter[str] = Counter()
        clock = Clock(lambda: NOW + self.time, lambda: self.time, lambda: 1.0)
        self.receiver = Receiver(self, lambda _, result: self.counts.update([result]), clock)

    async def push(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Take them, or not."""
        self.tried += 1
        if self.error is not None:
            raise self.error
        if any(one["labels"]["incident"] == self.poison for one in alerts):
            raise PushError("the alert is refused (HTTP 400)", rejected=True)
        now = datetime.fromtimestamp(NOW + self.time, UTC)
        self.pushed.append(
            (
                self.time,
                [
                    (
                        one["labels"]["incident"],
                        "firing" if datetime.fromisoformat(one["endsAt"]) > now else "resolved",
                    )
                    for one in alerts
                ],
            )
        )

    async def until(self, end: float) -> None:
        """Let the time go by, attempting whenever something is due."""
        while self.receiver.due <= end:
            self.time = max(self.time, self.receiver.due)
            await self.receiver.attempt()
        self.time = end

    @property
    def told(self) -> list[tuple[float, str, str]]:
        """Every alert that was taken: when, which, and how."""
        return [(when, *one) for when, batch in self.pushed for one in batch]


@pytest.fixture
def hands() -> Hands:
    """A receiver, its Alertmanager and its clock."""
    return Hands()


def alert(identity: str = "a1", starts: float = NOW, **changes: Any) -> OpenAlert:
    """An alert of an incident on a pod."""
    return incident_alert(incident(identity, **changes), POD, starts)


class TestReceiver:
    """One queue, driven by hand."""

    async def test_resends_while_it_fires(self, hands: Hands) -> None:
        """It is pushed at once, again every minute, and once more when it is over."""
        one = alert()
        hands.receiver.put(one)
        await hands.until(2.5 * RESEND)
        hands.receiver.end(one)
        await hands.until(10 * RESEND)
        assert hands.told == [
            (0.0, "a1", "firing"), (60.0, "a1", "firing"), (120.0, "a1", "firing"), (150.0, "a1", "resolved"),
        ]  # fmt: skip
        assert hands.counts == {"delivered": 2}
        assert one.sent == {"am:9093": NOW + 150}

    async def test_backs_off(self, hands: Hands, lines: StringIO) -> None:
        """A failing one is tried ever more rarely, said once, and gets everything when it is back."""
        hands.error = PushError("cannot connect: Connection refused")
        hands.receiver.put(alert())
        await hands.until(100)
        # after 0.5, 1, 2, 4, 8, 16 and then every 30 seconds
        assert (hands.tried, hands.counts) == (9, {"failed": 9})
        hands.receiver.put(alert("b2"))
        hands.error = None
        await hands.until(101)
        assert hands.told == [(100.0, "a1", "firing"), (100.0, "b2", "firing")]
        assert hands.counts == {"failed": 9, "delivered": 2}
        assert said(lines) == [
            ("Alertmanager does not take alerts: trying again", "cannot connect: Connection refused"),
            ("Alertmanager takes alerts again", ""),
        ]

    async def test_something_new_does_not_wait(self, hands: Hands) -> None:
        """A new alert is tried a second after the last attempt, however long the wait was."""
        hands.error = PushError("it answers HTTP 500")
        hands.receiver.put(alert())
        await hands.until(70)
        tried = hands.tried
        hands.receiver.put(alert("b2"))
        hands.receiver.put(alert("c3"))
        await hands.until(70.5)
        assert hands.tried == tried + 1

    async def test_over_before_it_was_delivered(self, hands: Hands) -> None:
        """What ended while nobody listened is still told, and shown for a while."""
        hands.error = PushError("it hung up")
        one = alert()
        hands.receiver.put(one)
        await hands.until(10)
        hands.receiver.end(one)
        await hands.until(20)
        hands.error = None
        await hands.until(2000)
        first, last = hands.told[0], hands.told[-1]
        assert first[2] == "firing"
        assert last == (first[0] + SHOWN, "a1", "resolved")

    async def test_replaced(self, hands: Hands) -> None:
        """A ticket that became a page before it was delivered is never seen."""
        hands.error = PushError("it hung up")
        ticket, page = alert(fatal=False), alert()
        hands.receiver.put(ticket)
        await hands.until(1)
        hands.receiver.end(ticket, replaced=True)
        hands.receiver.put(page)
        hands.error = None
        await hands.until(50)
        assert hands.told == [(2.0, "a1", "firing")] or len(hands.told) == 1
        hands.receiver.end(page, replaced=True)
        await hands.until(51)
        assert hands.told[-1][2] == "resolved"

    async def test_one_refused_among_others(self, hands: Hands, lines: StringIO) -> None:
        """One alert that is refused does not hold up the others, and is given up after a day."""
        hands.poison = "bad"
        for one in ("a1", "bad", "c3"):
            hands.receiver.put(alert(one))
        await hands.until(1)
        assert sorted(hands.told) == [(0.0, "a1", "firing"), (0.0, "c3", "firing")]
        await hands.until(GIVE_UP + 100)
        assert hands.counts["dropped"] == 1
        assert {one[1] for one in hands.told} == {"a1", "c3"}
        assert said(lines) == [
            ("Alertmanager does not take alerts: trying again", "the alert is refused (HTTP 400)")
        ]

    async def test_bounded(self, hands: Hands) -> None:
        """It holds so many alerts and no more; the oldest make room, and are counted."""
        hands.error = PushError("it hung up")
        for number in range(QUEUE + 7):
            hands.receiver.put(alert(f"i{number}"))
        hands.error = None
        await hands.until(5)
        assert hands.counts == {"dropped": 7, "delivered": QUEUE}
        assert {one[1] for one in hands.told} == {f"i{number}" for number in range(7, QUEUE + 7)}

    async def test_known_better(self, hands: Hands) -> None:
        """New words for the same alert are sent at once; the same words are not."""
        one = alert()
        hands.receiver.put(one)
        await hands.until(1)
        hands.receiver.put(one)
        await hands.until(2)
        assert len(hands.told) == 1
        one.annotations = {**one.annotations, "description": "better"}
        again = OpenAlert(one.labels, {**one.annotations, "summary": "s"}, one.starts)
        hands.receiver.put(again)
        await hands.until(3)
        assert [one[0] for one in hands.told] == [0.0, 2.0]

    @pytest.mark.parametrize(("ago", "sends"), [(EXPIRY - 1, True), (EXPIRY, False)])
    async def test_after_a_restart(self, hands: Hands, ago: float, sends: bool) -> None:
        """What Alertmanager still holds goes on as the same alert; what ended there is not fired again."""
        one = alert(starts=NOW - 500)
        one.sent["am:9093"] = NOW - ago
        hands.receiver.put(one)
        await hands.until(1)
        assert bool(hands.told) == sends
        assert hands.counts == {}

    async def test_forgotten(self, hands: Hands) -> None:
        """An alert of a target that is gone is not resent, but delivered if it never was."""
        old, new = alert("a1"), alert("b2")
        hands.receiver.put(old)
        await hands.until(1)
        hands.error = PushError("it hung up")
        hands.receiver.put(new)
        await hands.until(2)
        hands.receiver.forget(old)
        hands.receiver.forget(new)
        hands.error = None
        await hands.until(200)
        assert [one[1] for one in hands.told] == ["a1", "b2", "b2", "b2", "b2"][: len(hands.told)]
        assert ("b2", "firing") in [one[1:] for one in hands.told]

    async def test_flush(self, hands: Hands) -> None:
        """Before the process ends there is one more attempt, whatever the wait was."""
        hands.error = PushError("it hung up")
        hands.receiver.put(alert())
        await hands.until(60)
        hands.error = None
        await hands.receiver.flush()
        assert hands.told == [(60.0, "a1", "firing")]
        await hands.receiver.flush()
        assert len(hands.told) == 1

    async def test_runs(self) -> None:
        """The task sleeps until something is there, and delivers it."""
        hands = Hands()
        task = asyncio.create_task(hands.receiver.run())
        await asyncio.sleep(0)
        hands.receiver.put(alert())
        async with asyncio.timeout(5):
            while not hands.told:
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert hands.told == [(0.0, "a1", "firing")]


# --- the alerts of one target -------------------------------------------------------------------


class Told:
    """An outlet that keeps a list."""

    name = "am:9093"

    def __init__(self) -> None:
        self.said: list[tuple[str, str, str]] = []

    def put(self, alert: OpenAlert) -> None:
        """It fires."""
        self._add("fires", alert)

    def end(self, alert: OpenAlert, *, replaced: bool = False) -> None:
        """It is over."""
        self._add("replaced" if replaced else "ends", alert)

    def forget(self, alert: OpenAlert) -> None:
        """It is gone."""
        self._add("forgotten", alert)

    async def run(self) -> None:
        """Nothing to do."""

    async def flush(self) -> None:
        """Nothing to do."""

    def _add(self, what: str, alert: OpenAlert) -> None:
        labels = alert.labels
        self.said.append(
            (what, labels.get("incident") or labels.get("state") or labels["alertname"], labels["severity"])
        )


class Desk:
    """The alerts of one target with a clock to turn."""

    def __init__(self, status: TargetStatus | None = None) -> None:
        self.time = NOW
        self.status = status or TargetStatus("vllm")
        self.outlet = Told()
        self.alerts = OpenAlerts(self.status, POD, lambda: self.time, {"url": self.outlet}, Links())

    def after(self, seconds: float, step: float = 5.0) -> None:
        """Tick while time goes by."""
        end = self.time + seconds
        while self.time < end:
            self.time = min(self.time + step, end)
            self.alerts.tick()

    @property
    def said(self) -> list[tuple[str, str, str]]:
        """What was told, once."""
        said, self.outlet.said = self.outlet.said, []
        return said


@pytest.fixture
def desk() -> Desk:
    """The alerts of a target."""
    return Desk()


class TestOpenAlerts:
    """When alerts begin and end."""

    @pytest.mark.parametrize(
        ("time", "live", "resumed", "starts"),
        [
            ("2026-11-30T16:29:50Z", None, False, NOW - 10),
            ("2026-11-30T16:20:01Z", None, False, NOW - 599),
            ("2026-11-30T16:20:00Z", None, False, None),
            ("2026-11-30T16:20:00Z", NOW - 1, True, None),
            ("2026-11-30T16:31:00Z", None, False, NOW),  # their clock is ahead
            ("0001-01-01T00:00:00", None, True, None),
            ("2026-12-30T16:31:00Z", None, False, None),
            ("2026-11-30T16:29:50", None, False, None),  # a backlog, for all we know
            ("2020-01-01T00:00:00", NOW - 1, False, NOW - 1),
            (None, NOW - 1, False, NOW - 1),
            (None, None, True, None),
        ],
    )
    def test_fresh(
        self, desk: Desk, time: str | None, live: float | None, resumed: bool, starts: float | None
    ) -> None:
        """An incident is pushed if it is younger than ten minutes, by its own time or because it was read live."""
        desk.alerts.resumed = resumed
        document = incident(time=time)
        desk.alerts.incident({k: v for k, v in document.items() if v is not None}, live)
        assert [one.starts for one in desk.status.alerts.values()] == ([] if starts is None else [starts])
        assert desk.said == ([] if starts is None else [("fires", "a1", "page")])

    @pytest.mark.parametrize(("ago", "pushed"), [(5, True), (FRESH + 5, False), (-FRESH - 5, False)])
    def test_local_time_after_a_restart(self, desk: Desk, ago: float, pushed: bool) -> None:
        """A log that was read before is believed its local time, because what is new in it is new."""
        desk.alerts.resumed = True
        text = datetime.fromtimestamp(NOW - ago).isoformat(timespec="seconds")
        desk.alerts.incident(incident(time=text), None)
        assert bool(desk.said) == pushed

    def test_pages_once(self, desk: Desk) -> None:
        """The same incident, known better, is the same alert from the same start."""
        desk.alerts.incident(incident(), None)
        desk.time += 50
        desk.alerts.incident(incident(confidence="confirmed"), None)
        (one,) = desk.status.alerts.values()
        assert one.starts == NOW - 10
        assert "confirmed" in one.annotations["description"]
        assert desk.said == [("fires", "a1", "page")] * 2  # the second has new words only

    def test_becomes_fatal(self, desk: Desk) -> None:
        """A survived failure that kills the engine after all is a page in place of the ticket, named alike."""
        desk.alerts.incident(incident(fatal=False), None)
        desk.status.engines = [{"index": 0, "model": "acme/a"}]
        desk.time += 300
        desk.alerts.incident(incident(), None)
        assert desk.said == [("fires", "a1", "ticket"), ("replaced", "a1", "ticket"), ("fires", "a1", "page")]
        (one,) = desk.status.alerts.values()
        assert "model_name" not in one.labels  # as on the ticket
        assert one.starts == NOW - 10

    def test_model_of_its_life(self, desk: Desk) -> None:
        """An alert names the model of the life that failed."""
        desk.status.engines = [{"index": 0, "model": "acme/a"}, {"index": 1, "model": "acme/b"}]
        desk.alerts.incident(incident(engine=1), None)
        assert next(iter(desk.status.alerts.values())).labels["model_name"] == "acme/b"

    def test_ends_when_it_serves_again(self, desk: Desk) -> None:
        """It ends once the engine has served for five minutes, and never before half an hour is over."""
        desk.alerts.incident(incident(), None)
        desk.status.engine_state = "serving"
        desk.after(SHORTEST - 11)
        assert desk.said == [("fires", "a1", "page")]
        desk.after(5)
        assert desk.said == [("ends", "a1", "page")]
        assert desk.status.alerts == {}

    def test_outlasts_the_rule(self) -> None:
        """As long as the rule's alert of the same incident fires, so does the one that inhibits it."""
        rules = yaml.safe_load((HERE.parent / "rules" / "vllm-oom-alerts.yaml").read_text(encoding="utf-8"))
        kept = [
            parse_duration(rule["keep_firing_for"])
            for group in rules["groups"]
            for rule in group["rules"]
            if rule.get("alert") in ("VLLMPrefillBudgetOOM", "VLLMFatalOOM")
        ]
        assert len(kept) == 2
        window, waits = 300, 2 * 60  # increase5m, scraped and evaluated every minute
        assert max(kept) + window + waits < min(SHORTEST, EXPIRY)

    def test_a_crash_loop_does_not_end_it(self, desk: Desk) -> None:
        """An engine that dies again and again has not served; after an hour it was told long enough."""
        desk.alerts.incident(incident(), None)
        while desk.time < NOW + LONGEST - 900:
            desk.status.engine_state = "serving"
            desk.after(SERVING - 10)
            desk.status.engine_state = "dead"
            desk.after(60)
        assert desk.said == [("fires", "a1", "page")]
        desk.after(900)
        assert desk.said == [("ends", "a1", "page")]

    def test_bounded(self, desk: Desk) -> None:
        """No more than so many alerts fire for one target; the oldest ends for a newer one."""
        desk.status.risk = {"state": "tight", "reasons": []}
        desk.after(ENTER + 5)
        for number in range(MAX_OPEN + 1):
            desk.alerts.incident(incident(f"i{number}"), None)
        assert len(desk.status.alerts) == MAX_OPEN + 1
        assert [one for one in desk.said if one[0] == "ends"] == [("ends", "i0", "page")]

    def test_nobody_to_tell(self) -> None:
        """Without receivers nothing is kept."""
        status = TargetStatus("vllm")
        alerts = OpenAlerts(status, POD, lambda: NOW, {}, Links())
        alerts.incident(incident(), None)
        alerts.tick()
        assert status.alerts == {}

    def test_risk(self, desk: Desk) -> None:
        """A risk is told when it has lasted, follows its state, and ends when it was gone for a while."""
        desk.status.risk = {"state": "unexercised", "reasons": []}
        desk.after(ENTER - 1, 1)
        assert desk.said == []
        desk.after(3, 1)
        assert desk.said == [("fires", "unexercised", "ticket")]
        desk.status.risk = {"state": "exceeded", "reasons": ["it failed"]}
        desk.after(ENTER + 2, 1)
        assert desk.said == [("replaced", "unexercised", "ticket"), ("fires", "exceeded", "ticket")]
        desk.status.risk = None  # as after a restart
        desk.after(LEAVE - 5)
        desk.status.risk = {"state": "exceeded", "reasons": ["it failed"]}
        desk.after(100)
        assert desk.said == []
        desk.status.risk = {"state": "comfortable", "reasons": []}
        desk.after(LEAVE + 5)
        assert desk.said == [("ends", "exceeded", "ticket")]

    def test_flapping_risk(self, desk: Desk) -> None:
        """A state that comes and goes within seconds is told to nobody."""
        for _ in range(50):
            desk.status.risk = {"state": "tight", "reasons": []}
            desk.after(ENTER / 2)
            desk.status.risk = {"state": "comfortable", "reasons": []}
            desk.after(ENTER / 2)
        assert desk.said == []

    def test_fix(self, desk: Desk) -> None:
        """A confirmed fix is told for an hour, and not again while it stays confirmed, over restarts either."""
        desk.status.confirmation = {"state": "confirmed", "says": "no failure"}
        desk.after(ENTER + 5)
        assert desk.said == [("fires", "VLLMFixConfirmed", "info")]
        desk.after(3 * LONGEST, 60)
        assert desk.said == [("ends", "VLLMFixConfirmed", "info")]
        again = Desk(desk.status)
        again.time = desk.time
        again.alerts.adopt()
        again.after(LONGEST, 60)
        assert again.said == []
        again.status.confirmation = {"state": "refuted", "says": "it failed again"}
        again.after(ENTER + 61, 10)
        assert again.said == [("fires", "VLLMFixRefuted", "ticket")]

    def test_labels_of_the_life(self, desk: Desk) -> None:
        """Risks name the model that is served now."""
        desk.status.life = Life(0, model="acme/a")
        desk.status.risk = {"state": "tight", "reasons": []}
        desk.after(ENTER + 5)
        assert desk.status.alerts["risk"].labels["model_name"] == "acme/a"

    def test_restart(self, desk: Desk, tmp_path: Path) -> None:
        """A restart takes up the same alerts, with the same labels and start, from what was saved."""
        desk.alerts.incident(incident(), None)
        desk.alerts.incident(incident("late", time="2026-11-30T16:20:30Z"), None)
        desk.status.alerts["incident:a1"].sent["am:9093"] = NOW
        store = Store(tmp_path)
        store.open()
        follower = Follower(desk.status, {})
        store.save(follower)
        restored = TargetStatus("vllm")
        store.load(Follower(restored, {}))
        store.close()
        assert restored.alerts == desk.status.alerts
        again = Desk(restored)
        again.time = NOW + 40  # the second one is too old by now, and nobody was told
        again.alerts.adopt()
        assert again.said == [("fires", "a1", "page")]
        again.alerts.incident(incident(), None)
        assert len(restored.alerts) == 2

    def test_tells_when_to_save(self, desk: Desk) -> None:
        """What was delivered, and what ended, is to be saved; nothing else is."""
        desk.alerts.incident(incident(), None)
        desk.time += 2
        assert not desk.alerts.tick()
        desk.status.alerts["incident:a1"].sent["am:9093"] = desk.time
        desk.time += 2
        assert desk.alerts.tick()
        desk.time += 2
        assert not desk.alerts.tick()

    def test_released(self, desk: Desk) -> None:
        """Alerts of a target that is no longer watched are forgotten, not ended."""
        desk.alerts.incident(incident(), None)
        desk.alerts.release()
        assert desk.said == [("fires", "a1", "page"), ("forgotten", "a1", "page")]


# --- over HTTP ----------------------------------------------------------------------------------

Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def served(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server that answers every request so; gives host and port."""
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def problem_of(url: str) -> str:
    """What is said of a push there; empty if it was taken."""
    async with open_session() as session:
        try:
            await Alertmanager(url, session).push([as_json(alert(), NOW, NOW + EXPIRY)])
        except PushError as error:
            return str(error)
    return ""


class TestAlertmanager:
    """One push."""

    async def test_request(self) -> None:
        """Alerts arrive as JSON under the path prefix, with the credentials of the URL."""
        seen: list[tuple[str, str | None, Any]] = []

        async def handler(request: web.Request) -> web.Response:
            seen.append((request.path, request.headers.get("Authorization"), await request.json()))
            return web.Response()

        async with served(handler) as address:
            assert await problem_of(f"http://user:p%40ss@{address}/alerts") == ""
        ((path, authorization, (item,)),) = seen
        assert path == "/alerts/api/v2/alerts"
        assert authorization == f"Basic {base64.b64encode(b'user:p@ss').decode()}"
        assert (item["startsAt"], item["endsAt"]) == ("2026-11-30T16:30:00.000Z", "2026-11-30T17:00:00.000Z")
        assert item["labels"]["incident"] == "a1"
        assert "generatorURL" not in item

    @pytest.mark.parametrize(
        ("answer", "problem"),
        [
            (web.HTTPInternalServerError, "it answers HTTP 500"),
            (web.HTTPServiceUnavailable, "it answers HTTP 503"),
            (web.HTTPBadRequest, "the alert is refused (HTTP 400)"),
            (web.HTTPUnauthorized, "it wants other credentials (HTTP 401)"),
            (web.HTTPNotFound, "there is no /api/v2/alerts (HTTP 404); is the URL right?"),
        ],
    )
    async def test_status(self, answer: type[web.HTTPException], problem: str) -> None:
        """Anything but success is told by its status, without a word of the answer."""

        async def handler(_: web.Request) -> web.Response:
            raise answer(text="hunter2\x1b[31m")

        async with served(handler) as address:
            assert await problem_of(f"http://{address}") == problem

    async def test_redirect(self) -> None:
        """A redirect is not followed: credentials are for the server that was named."""
        paths = []

        async def handler(request: web.Request) -> web.Response:
            paths.append(request.path)
            raise web.HTTPFound("/elsewhere")

        async with served(handler) as address:
            assert await problem_of(f"http://a:hunter2@{address}") == (
                "it redirects (HTTP 302); give the URL it leads to"
            )
        assert paths == ["/api/v2/alerts"]

    @pytest.mark.parametrize(
        ("body", "problem"),
        [
            ("", ""),
            ("{}", ""),
            ("<html>Log in</html>", "the answer is no Alertmanager's (not JSON); is the URL right?"),
            ("[" * 60_000, "the answer is no Alertmanager's (not JSON); is the URL right?"),
            ("x" * (1 << 20), "the answer is no Alertmanager's (too long)"),
        ],
    )
    async def test_body(self, body: str, problem: str) -> None:
        """Success is believed of a server that says nothing, or JSON, as Alertmanager does."""

        async def handler(_: web.Request) -> web.Response:
            return web.Response(text=body)

        async with served(handler) as address:
            assert await problem_of(f"http://{address}") == problem

    @pytest.mark.parametrize("begun", [False, True])
    async def test_hangs(self, monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
        """Who never answers, or never ends, is given up after a fixed time."""
        monkeypatch.setattr(api_module, "TIMEOUT", 0.2)

        async def handler(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            if begun:
                await response.prepare(request)
            await asyncio.Event().wait()
            return response

        async with served(handler) as address:
            assert await problem_of(f"http://{address}") == "no complete answer within 0.2 s"

    async def test_garbage(self) -> None:
        """Who does not speak HTTP, or hangs up, is told as such."""
        answers = {b"SSH-2.0-x\r\n\r\n": "the answer is not HTTP", b"": "it hung up"}
        for data, problem in answers.items():

            async def answer(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes = data
            ) -> None:
                await reader.readuntil(b"}]")  # else what is left unread resets the connection
                writer.write(data)
                writer.close()

            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                assert await problem_of(f"http://127.0.0.1:{port}") == problem

    async def test_refused(self) -> None:
        """Nobody there, and no such name."""
        assert await problem_of("http://a:hunter2@127.0.0.1:1") == "cannot connect: Connection refused"
        assert await problem_of("http://a:hunter2@no-such-host.invalid") == "its name is not known"

    async def test_tls(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A certificate counts if the system knows who signed it; https is not spoken to who does not."""
        authority = trustme.CA()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(tls)

        async def handler(_: web.Request) -> web.Response:
            return web.Response()

        async with served(handler, tls) as address:
            assert (await problem_of(f"https://{address}")).startswith("its certificate is not accepted: ")
            authority.cert_pem.write_to_path(tmp_path / "ca.pem")
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
            context = ssl.create_default_context()
            async with open_session() as session:
                taken = await session.post(f"https://{address}/api/v2/alerts", ssl=context)
                assert taken.status == 200
        async with served(handler) as address:
            assert await problem_of(f"https://{address}") == "TLS failed; does it speak https there?"

    @pytest.mark.parametrize(
        ("url", "name"),
        [
            ("http://am:9093", "am:9093"),
            ("http://user:hunter2@am/prefix", "am:80"),
            ("https://am", "am:443"),
            ("http://[::1]:9093", "[::1]:9093"),
        ],
    )
    async def test_name(self, url: str, name: str) -> None:
        """A receiver is called by host and port, never by credentials."""
        async with open_session() as session:
            assert Alertmanager(url, session).name == name


class TestOutlets:
    """All receivers together."""

    async def test_use(self) -> None:
        """Counters are there before they count; a reload keeps receivers that stay, and what they hold."""
        status = Status()
        async with open_session() as session:
            outlets = Outlets(status, session, asyncio.create_task)
            outlets.use(("http://a:1", "http://b:2"))
            kept = outlets.open["http://b:2"]
            outlets.use(("http://b:2", "http://c:3"))
            assert list(outlets.open) == ["http://b:2", "http://c:3"]
            assert outlets.open["http://b:2"] is kept
            await outlets.flush()
        assert status.notifications == {
            (name, result): 0
            for name in ("a:1", "b:2", "c:3")
            for result in ("delivered", "failed", "dropped")
        }

    def test_whose(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An alert names the target of the configuration, else the pod, else the host."""
        monkeypatch.setattr("os.uname", lambda: type("Host", (), {"nodename": "gpu-1"}))
        config = TargetConfig("vllm", ("vllm.log",), "http://v")
        cluster = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        named = {**cluster, "POD_NAMESPACE": "models", "POD_NAME": "llama-0"}
        assert whose(TargetConfig("a", ("a.log",), "http://v", {"target": "a"}), named, 1) == {"target": "a"}
        assert whose(TargetConfig("vllm", ("kubernetes:models/llama-0/vllm",), "http://v"), {}, 1) == POD
        assert whose(config, named, 1) == {"namespace": "models", "pod": "llama-0"}
        assert whose(config, cluster, 10977) == {"instance": "gpu-1:10977"}
        assert whose(config, {}, 10977) == {"instance": "gpu-1:10977"}


# --- Kubernetes ---------------------------------------------------------------------------------


class ApiServer:
    """A stand-in for the API server: it keeps Events by name, and refuses as told."""

    def __init__(self) -> None:
        self.events: dict[str, Document] = {}
        self.answers: list[int] = []
        self.pod_status = 200
        self.asked = 0

    async def handle(self, request: web.Request) -> web.Response:
        """Two resources of it."""
        assert request.headers["Authorization"] == "Bearer secret"
        if request.method == "GET":
            assert request.path == "/api/v1/namespaces/models/pods/llama-0"
            return web.json_response({"metadata": {"uid": "u-1"}}, status=self.pod_status)
        assert (request.method, request.path) == ("POST", "/api/v1/namespaces/models/events")
        self.asked += 1
        if self.answers:
            return web.Response(status=self.answers.pop(0))
        event = await request.json()
        name = event["metadata"]["name"]
        if name in self.events:
            return web.Response(status=409)
        self.events[name] = event
        return web.json_response(event, status=201)


class TestPodEvents:
    """Events on the pod that failed."""

    @asynccontextmanager
    async def started(
        self, tmp_path: Path, server: ApiServer
    ) -> AsyncIterator[tuple[PodEvents, Counter[str]]]:
        """A writer of Events that needs no time to wait."""
        (tmp_path / "token").write_text("secret")
        counts: Counter[str] = Counter()
        async with served(server.handle) as address:
            client = KubeClient(f"http://{address}", tmp_path / "token", None, LoopClock())
            events = PodEvents(client, lambda _, result: counts.update([result]), lambda _: asyncio.sleep(0))
            try:
                yield events, counts
            finally:
                await client.close()

    async def settle(self, events: PodEvents) -> None:
        """Run until everything is written or given up."""
        task = asyncio.create_task(events.run())
        async with asyncio.timeout(10):
            while events._queue:
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def test_written(self, tmp_path: Path) -> None:
        """One Event an incident, on this very pod, within the size that is taken."""
        server = ApiServer()
        async with self.started(tmp_path, server) as (events, counts):
            long = [{"favours": "prefill_budget", "weight": 1.0, "says": "é" * 300}] * 4
            one = alert(evidence=long)
            events.put(one)
            events.put(one)
            await self.settle(events)
        (event,) = server.events.values()
        assert event["involvedObject"] == {
            "apiVersion": "v1", "kind": "Pod", "namespace": "models", "name": "llama-0", "uid": "u-1",
            "fieldPath": "spec.containers{vllm}",
        }  # fmt: skip
        assert (event["type"], event["reason"], event["metadata"]["name"]) == (
            "Warning", "VLLMOutOfMemory", "llama-0.a1-page",
        )  # fmt: skip
        assert event["message"].startswith(
            "vLLM (models/llama-0) ran out of memory and died: prefill_budget\n"
        )
        assert len(event["message"].encode()) <= MAX_MESSAGE
        assert event["firstTimestamp"] == "2026-11-30T16:30:00Z"
        assert counts == {"delivered": 1}

    async def test_in_a_cluster(self, tmp_path: Path) -> None:
        """Inside a pod Events are written with its service account; outside of one there are none."""
        server, status = ApiServer(), Status()
        authority = trustme.CA()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(tls)
        authority.cert_pem.write_to_path(tmp_path / "ca.crt")
        (tmp_path / "token").write_text("secret")
        async with served(server.handle, tls) as address, open_session() as session:
            host, _, port = address.partition(":")
            outlets = Outlets(status, session, asyncio.create_task)
            outlets.use_events({}, tmp_path)
            assert outlets.open == {}
            outlets.use_events({"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}, tmp_path)
            (events,) = outlets.open.values()
            assert status.notifications["kubernetes", "failed"] == 0
            events.put(alert())
            async with asyncio.timeout(10):
                while not server.events:
                    await asyncio.sleep(0.005)
            outlets.use(("http://127.0.0.1:1",))
            outlets.use(())
            assert list(outlets.open.values()) == [events]  # no reload takes them away
            await outlets.flush()

    async def test_twice(self, tmp_path: Path) -> None:
        """After a restart that knows of nothing the API server has it already, and that is fine."""
        server = ApiServer()
        for _ in range(2):
            async with self.started(tmp_path, server) as (events, counts):
                events.put(alert())
                await self.settle(events)
                assert counts == {"delivered": 1}
        assert len(server.events) == 1

    async def test_forbidden(self, tmp_path: Path, lines: StringIO) -> None:
        """Who may not write Events is told so once, with what to grant; then nothing is tried."""
        server = ApiServer()
        server.answers = [403, 403]
        async with self.started(tmp_path, server) as (events, counts):
            for one in ("a1", "b2", "c3"):
                events.put(alert(one))
            await self.settle(events)
            events.put(alert("d4"))
            await events.flush()
        assert (server.asked, counts) == (1, {"failed": 1})
        assert said(lines) == [
            (
                "no Kubernetes Events are written",
                "may not create events in namespace models (403); grant the service account the verb create on events",
            )
        ]

    async def test_retried(self, tmp_path: Path) -> None:
        """A server in trouble is asked again, and in the end given up; the next Event is written."""
        server = ApiServer()
        server.answers = [500, 503]
        async with self.started(tmp_path, server) as (events, counts):
            events.put(alert())
            await self.settle(events)
            assert counts == {"failed": 2, "delivered": 1}
            server.answers = [500] * 10
            events.put(alert("b2"))
            events.put(alert("c3"))
            await self.settle(events)
            assert counts == {"failed": 12, "delivered": 2, "dropped": 1}
        assert list(server.events) == ["llama-0.a1-page", "llama-0.c3-page"]

    async def test_without_the_pod(self, tmp_path: Path) -> None:
        """Who may not read the pod can still write its Event."""
        server = ApiServer()
        server.pod_status = 403
        async with self.started(tmp_path, server) as (events, _):
            events.put(alert())
            await self.settle(events)
        assert "uid" not in server.events["llama-0.a1-page"]["involvedObject"]

    async def test_no_pod(self, tmp_path: Path) -> None:
        """An alert that names no pod, or is of no incident, is no Event."""
        server = ApiServer()
        async with self.started(tmp_path, server) as (events, _):
            events.put(incident_alert(incident(), {"instance": "gpu-1"}, NOW))
            risk = risk_alert({"state": "tight"}, POD, NOW)
            assert risk is not None
            events.put(risk)
            await events.flush()
        assert server.asked == 0


# --- test-page ----------------------------------------------------------------------------------


class TestTestPage:
    """The command."""

    async def test_all(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A marked alert goes to every receiver; one line each says what came back."""
        seen: list[Any] = []

        async def handler(request: web.Request) -> web.Response:
            seen.extend(await request.json())
            return web.Response()

        async with served(handler) as address:
            urls = [f"http://{address}", f"http://a:hunter2@{address}/x"]
            good = ["test-page", *(part for url in urls for part in ("--alertmanager-url", url))]
            assert await asyncio.to_thread(main, good) == 0
            assert await asyncio.to_thread(main, [*good, "--alertmanager-url", "http://127.0.0.1:1"]) == 1
        assert len(seen) == 4
        assert {one["labels"]["alertname"] for one in seen} == {"VLLMOutOfMemoryTest"}
        assert {(one["labels"]["test"], one["labels"]["severity"]) for one in seen} == {("true", "page")}
        assert len({one["labels"]["incident"] for one in seen}) == 2  # each call is an alert of its own
        said = capsys.readouterr().out
        assert said.count(f"{address}: delivered in ") == 4
        assert "127.0.0.1:1: not delivered: cannot connect: Connection refused\n" in said
        assert "hunter2" not in said

    def test_usage(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Without a receiver, or with one that can't be, it is an error of usage."""
        assert main(["test-page"]) == 2
        assert main(["test-page", "--alertmanager-url", "http://am:9093/api/v2/alerts"]) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert first == (
            "vllm-oom-exporter: test-page: no Alertmanager is configured; give --alertmanager-url URL"
        )
        assert second.startswith(
            "vllm-oom-exporter: --alertmanager-url: /api/v2/alerts is added to it; must be"
        )


def test_urls_that_are_shown_hold_no_credentials() -> None:
    """Links of an alert are read by many."""
    with pytest.raises(Exception, match="can't hold credentials"):
        load(None, {}, {"log": ["x"], "web_external_url": "http://a:b@c"})
