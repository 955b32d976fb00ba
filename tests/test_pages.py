from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from conftest import capture
from markup import Page
from servers import (
    BIDI,
    CASES,
    HOSTILE,
    SCRIPT,
    application,
    empty,
    hostile,
    many,
    minutes_before,
    newest,
    one,
    server,
    several,
)  # fmt: skip
from yarl import URL

from exporter.diagnosis.knowledge import builtin_classes
from exporter.follow import Follower, Known
from exporter.state import Store
from exporter.status import Status
from exporter.web.timeline import timeline
from exporter.web.visible import text, time

Client = TestClient[web.Request, web.Application]
Get = Callable[..., Awaitable[Page]]

BUDGET = "One prefill step needs more memory than is left beside the KV cache"


@pytest.fixture
def get(aiohttp_client: Any) -> Get:
    """One page of the exporter that shows a status, read strictly."""

    async def call(status: Status, path: str = "/", expect: int = 200, **options: Any) -> Page:
        client: Client = await aiohttp_client(application(status, **options))
        answer = await client.get(path)
        assert answer.status == expect
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        page = Page(await answer.text())
        assert page.mistakes == []
        return page

    return call


# --- what every page has --------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
async def test_every_page_is_whole_in_itself(aiohttp_client: Any, case: str) -> None:
    """Well-formed, no script, nothing fetched, nothing inline but the style; every link leads somewhere."""
    status = CASES[case]()
    status.ready = True
    client: Client = await aiohttp_client(application(status))
    todo, seen = ["/"], set[str]()
    while todo:
        path = todo.pop()
        seen.add(path)
        answer = await client.get(path)
        assert answer.status == 200, path
        if answer.content_type != "text/html":
            continue
        source = await answer.text()
        page = Page(source)
        assert page.mistakes == [], path
        tags = {found.tag for found in page.elements}
        assert not tags & {"script", "img", "iframe", "object", "form", "base", "embed", "input", "button"}
        assert [found.attributes for found in page.all("link")] == [{"rel": "icon", "href": "data:,"}]
        names = {name for found in page.elements for name in found.attributes}
        assert not {name for name in names if name.startswith("on")} | names & {"style", "src", "srcset"}
        assert len(page.all("main")) == len(page.all("header")) == len(page.all("footer")) == 1
        assert page.elements[0].attributes == {"lang": "en"}
        for link in page.links:
            assert not re.match(r"[a-z]+:|/", link), link
            to = str(URL(path, encoded=True).join(URL(link, encoded=True)))
            if to not in seen and to != "/-/healthy" and len(seen) < 30:
                todo.append(to)


@pytest.mark.parametrize("path", ["/", "/incidents/nope"])
async def test_the_policy_allows_the_style_and_nothing_else(aiohttp_client: Any, path: str) -> None:
    """The policy is exact: the hash is that of the style in the page."""
    client: Client = await aiohttp_client(application(one()))
    answer = await client.get(path)
    style = re.findall(r"<style>(.*?)</style>", await answer.text(), re.DOTALL)
    assert len(style) == 1
    digest = base64.b64encode(hashlib.sha256(style[0].encode()).digest()).decode()
    assert answer.headers["Content-Security-Policy"] == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-store"
    assert "url(" not in style[0]
    assert "@import" not in style[0]


async def test_head_and_wrong_methods(aiohttp_client: Any) -> None:
    """HEAD has the headers alone; other methods are 405 in short text."""
    status = one()
    client: Client = await aiohttp_client(application(status))
    for path in ("/", newest(status)):
        answer = await client.head(path)
        assert (answer.status, await answer.read()) == (200, b"")
        assert int(answer.headers["Content-Length"]) == len(await (await client.get(path)).read())
        refused = await client.post(path)
        assert (refused.status, refused.content_type) == (405, "text/plain")


async def test_an_unknown_incident_is_a_page(get: Get) -> None:
    """Whoever follows an old link learns what is kept, and gets back."""
    page = await get(one(), "/incidents/%3Cb%3E", 404)
    assert page.all("h1")[0].text == "Not found"
    assert "no incident has this id" in page.text
    assert set(page.links) == {"../"}
    page = await get(one(), "/?target=nope", 404)
    assert "no target has this name" in page.text
    assert set(page.links) == {"./"}


# --- the overview ---------------------------------------------------------------------------------


async def test_empty_says_what_is_watched(get: Get) -> None:
    """Before anything was read: which logs, which of them is missing, and what will be here."""
    page = await get(empty())
    assert "unknown: neither its log nor /metrics tells" in page.text
    assert "Can't read /var/log/vllm/*.log: nothing matches; is the folder mounted?" in page.text
    assert "standard input: open" in page.text
    assert "vLLM's /metrics is not scraped" in page.text
    assert "Nothing has been seen yet" in page.text
    assert "when it runs out of memory, the verdict" in page.text
    assert page.all("table") == []
    assert {"metrics", "api/v1/incidents", "api/v1/targets", "api/v1/classes", "-/healthy", "-/ready"} == set(
        page.links
    )


async def test_healthy_shows_budget_and_risk(get: Get) -> None:
    """A server that never failed: its state, its budget, what may come of it; no verdict."""
    page = await get(CASES["healthy"]())
    assert "serving: answers requests" in page.text
    assert "max_num_batched_tokens 16,384" in page.text
    assert (
        "Risk unknown: not known yet 0 full steps of 16384 tokens survived so far; 50 would tell."
        in page.text
    )
    assert "No memory failure so far." in page.text
    assert [found.text for found in page.all("h3")] == [
        "Prefill budget",
        "What is being watched",
        "Lives of the engine",
    ]


async def test_one_incident_leads_the_overview(get: Get) -> None:
    """The verdict of the last failure is a link; confidence, numbers and the flags stand below it."""
    status = one()
    page = await get(status)
    assert "dead: ended by a failure" in page.text
    heading = page.all("h3", id="last-1")[0].text
    assert heading == f"Last failure, 2026-11-30 16:26:46 local, the engine died: {BUDGET}"
    assert page.links[0] == newest(status)[1:]
    assert "probable: the evidence clearly favours it; confirm it before you rely on it" in page.text
    numbers = page.all("p", class_="numbers")[0].text
    assert (
        numbers
        == "asked for 3.83 GiB, 2.11 GiB was free · step of 16,384 of at most 16,384 tokens · KV cache 0.8% full"
    )
    assert [found.text for found in page.all("code", class_="flags")] == ["--max-num-batched-tokens 4096"]
    assert "exceeded: a step at this budget has failed, or nearly" in page.text
    assert "insufficient: not enough evidence yet" in page.text
    assert "none: no smaller budget is being tried" in page.text


async def test_a_cure_shows_how_far_it_is_and_what_changed(get: Get) -> None:
    """After the budget was lowered: both budgets, exposures of those needed, lives with their changes."""
    status = CASES["cured"]()
    page = await get(status)
    assert "max_num_batched_tokens 2,048, 16,384 in the life before" in page.text
    assert "confirmed: the smaller budget cured it" in page.text
    assert (
        page.all("progress")[0].attributes | {"value": "26", "max": "26"}
        == page.all("progress")[0].attributes
    )
    assert "64 long prompts survived, 26 needed" in page.text
    assert page.all("code", class_="flags") == []  # what was to be done is done
    changes = [" ".join(found.text.split()) for found in page.all("li") if "→" in found.text]
    assert changes == ["max_num_batched_tokens 16,384 → 2,048", "max_num_batched_tokens 8,192 → 16,384"]
    status.targets[0].confirmation = {**status.targets[0].confirmation, "state": "accruing", "exposures": 12}  # type: ignore[dict-item]
    page = await get(status)
    assert "accruing: a smaller budget is being tried" in page.text
    assert "12 long prompts survived, 26 needed" in page.text
    assert [found.text for found in page.all("code", class_="flags")] == ["--max-num-batched-tokens 8192"]


async def test_many_incidents_are_turned_page_by_page(get: Get) -> None:
    """The newest fifty, links to older and newer ones; a number too high is the last page."""
    status = many()
    page = await get(status)
    rows = [link for link in page.links if link.startswith("incidents/")]
    assert rows[1:] == [f"incidents/{number:012x}" for number in range(200, 150, -1)]
    assert "Page 1 of 4, 200 incidents" in page.text
    assert page.all("a", rel="next")[0].attributes["href"] == "./?target=vllm&page=2"
    assert page.all("a", rel="prev") == []
    for asked in ("4", "999999"):
        page = await get(status, f"/?target=vllm&page={asked}")
        rows = [link for link in page.links if link.startswith("incidents/")]
        assert rows[1:] == [f"incidents/{number:012x}" for number in range(50, 0, -1)]
        assert page.all("a", rel="prev")[0].attributes["href"] == "./?target=vllm&page=3"
        assert page.all("a", rel="next") == []
    for wrong in ("0", "-1", "x", "²", "9" * 99, ""):
        assert "Page 1 of 4" in (await get(status, f"/?page={wrong}")).text


async def test_older_incidents_come_from_the_state_file(get: Get) -> None:
    """Behind what is in memory, and only there, the state file is asked; its count is the total."""
    status, asked = many(), list[tuple[int, int]]()
    first = status.targets[0].incidents[0]

    def listed(name: str, skip: int, most: int) -> tuple[list[dict[str, object]], int]:
        assert name == "vllm"
        asked.append((skip, most))
        return [{**first, "id": f"old{number}"} for number in range(skip, min(skip + most, 260))], 260

    page = await get(status, listed=listed)
    assert "Page 1 of 6, 260 incidents" in page.text
    assert f"incidents/{200:012x}" in page.links
    page = await get(status, "/?page=6", listed=listed)
    assert [link for link in page.links if "old" in link] == [f"incidents/old{at}" for at in range(250, 260)]
    assert asked == [(0, 0), (250, 50)]


async def test_all_that_is_stored_can_be_reached(get: Get, tmp_path: Path) -> None:
    """With a real state file every incident of it is on one page of the list, once and in order."""
    status, store = many(), Store(tmp_path)
    follower = Follower(status.targets[0], builtin_classes())
    first = status.targets[0].incidents[0]
    for number in range(230):
        follower.known[f"{number:012x}"] = Known("prefill_budget", "serving", True)
        follower.dirty[f"{number:012x}"] = {**first, "id": f"{number:012x}"}
    store.open()
    store.save(follower)
    store.load(follower)
    found: list[str] = []
    for number in range(1, 6):
        page = await get(status, f"/?page={number}", stored=store.incident, listed=store.incidents)
        assert f"Page {number} of 5, 230 incidents" in page.text
        found += [link for link in page.links if link.startswith("incidents/")][1:]
    assert found == [f"incidents/{number:012x}" for number in range(229, -1, -1)]
    page = await get(status, f"/{found[-1]}", stored=store.incident, listed=store.incidents)
    assert page.all("h1")[0].text == BUDGET
    store.close()
    assert "Page 1 of 4, 200 incidents" in (await get(status, "/?page=1", listed=store.incidents)).text


async def test_several_targets_are_told_apart(get: Get) -> None:
    """Each server has its part under its name in the cluster, or its own; one can be looked at alone."""
    status = several()
    page = await get(status)
    names = ["models/llama-0/vllm", "models/llama-1/vllm", "spare"]
    assert [found.text for found in page.all("h2")] == names
    assert [found.text for found in page.all("nav", aria_label="Servers")] == []
    top = page.all("nav")[0]
    assert top.text == "models/llama-0/vllm dead models/llama-1/vllm dead spare unknown"
    page = await get(status, "/?target=node/llama-1")
    assert page.all("h1")[0].text == "vLLM memory failures: models/llama-1/vllm"
    assert [found.text for found in page.all("h2")] == names[1:2]
    page = await get(status, newest(status, 1))
    assert page.all("p", class_="eyebrow")[0].text.endswith("· tiny · models/llama-1/vllm")
    assert "Ranks that failed 0, 1" in page.text


async def test_of_several_targets_the_newest_ten_are_shown(get: Get) -> None:
    """A list does not bury the next server; the rest is a link away."""
    status = several()
    status.targets[1].incidents = many().targets[0].incidents
    page = await get(status)
    assert len([link for link in page.links if link.startswith("incidents/0")]) == 11
    assert "./?target=node%2Fllama-1" in page.links
    assert "All 200 incidents of models/llama-1/vllm" in page.text


# --- one incident ---------------------------------------------------------------------------------


async def test_an_incident_begins_with_what_to_know(get: Get) -> None:
    """Verdict, numbers and command come before everything else, in that order."""
    status = one()
    page = await get(status, newest(status))
    assert page.text.startswith(
        f"the engine died · 2026-11-30 16:26:46 local · tiny {BUDGET} asked for 3.83 GiB, 2.11 GiB was free · "
        "step of 16,384 of at most 16,384 tokens · KV cache 0.8% full prefill_budget, probable: the evidence "
        "clearly favours it; confirm it before you rely on it Do first --max-num-batched-tokens 4096 Cap a step"
    )
    assert page.all("h1")[0].text == BUDGET
    assert [found.text for found in page.all("h2")] == [
        "Do first", "The numbers", "The minutes before", "Evidence", "Other things to do", "Do not bother",
        "How to be sure", "The engine", "The lines it stands on",
    ]  # fmt: skip
    assert page.all("time")[0].attributes == {"datetime": "2026-11-30T16:26:46"}


async def test_an_incident_shows_all_that_is_in_its_document(get: Get) -> None:
    """Numbers, evidence with weights and lines, every remedy, dead end, line; the way to its JSON."""
    status = one()
    document: Any = status.targets[0].incidents[0]
    page = await get(status, newest(status))
    figures = [found.text for found in page.all("div")]
    assert {"Missing 1.72 GiB", "Of them prefill 16,383", "Of them decode 1", "KV cache used 0.8%"} <= set(
        figures
    )
    rows = [found.text for found in page.all("tr")]
    for reason in document["evidence"]:
        assert f"{reason['weight']:+.1f} {reason['says']} {reason['line']}" in rows
    assert "Against it: nothing." in page.text
    flags = [found.text for found in page.all("code", class_="flags")]
    assert flags == [remedy["flags"] for remedy in document["advice"]["do"] if "flags" in remedy]
    ends = [found.text for found in page.all("dt")]
    assert {end["text"] for end in document["advice"]["dead_ends"]} <= set(ends)
    assert document["advice"]["confirm"] in page.text
    lines = [" ".join(line.split()) for line in document["excerpt"]]
    assert [found.text for found in page.all("ol", class_="excerpt")] == [
        "".join(f" {one}" for one in lines)[1:]
    ]
    assert f"../api/v1/incidents/{document['id']}" in page.links


async def test_evidence_against_names_what_it_speaks_for(get: Get) -> None:
    """A reason for another class, and one that weakens this one, stand against it."""
    status = one()
    document: Any = status.targets[0].incidents[0]
    document["evidence"] = [
        {"id": "a", "favours": "prefill_budget", "weight": -0.5, "says": "the step was small", "line": 7},
        {"id": "b", "favours": "fragmentation", "weight": 1.25, "says": "much was unallocated"},
        {"id": "c", "favours": "fragmentation", "weight": -1.0, "says": "steps of that size had passed"},
    ]
    page = await get(status, newest(status))
    first, second = page.all("tbody")[1:3]
    assert first.text == "-1.0 steps of that size had passed (about fragmentation)"
    assert second.text == "-0.5 the step was small 7 +1.2 much was unallocated (about fragmentation)"


async def test_excerpts_can_be_hidden(get: Get) -> None:
    """With --web.hide-excerpts no line of a log is on any page, and the page says why."""
    status = one()
    status.targets[0].incidents[0]["excerpt"] = ["not to be seen"]
    page = await get(status, newest(status), hide_excerpts=True)
    assert "not to be seen" not in page.text
    assert "This exporter shows no excerpts (--web.hide-excerpts)." in page.text
    assert "not to be seen" in (await get(status, newest(status))).text


async def test_an_incident_that_only_the_state_file_has(get: Get) -> None:
    """A link to an old incident works, though neither it nor its life is in memory any more."""
    status = one()
    old: Any = {**status.targets[0].incidents[0], "id": "old", "engine": 99}
    page = await get(
        status,
        "/incidents/old",
        stored=lambda name, wanted: old if (name, wanted) == ("vllm", "old") else None,
    )
    assert page.all("h1")[0].text == BUDGET
    assert "The engine" not in [found.text for found in page.all("h2")]


@pytest.mark.parametrize(
    ("log", "ended", "verdict", "numbers"),
    [
        ("kv_toobig", "the server did not start", "Less free memory at start than the requested share",
         "15.88 GiB of 19.59 GiB was free"),
        ("lora_survive", "the engine survived", "LoRA adapters at run time",
         "asked for 3.83 GiB, 2.11 GiB was free · at most 16,384 tokens a step"),
        ("kv_small_mp", "the server did not start", "The KV cache cannot hold one request of full length",
         "1.24 GiB of KV cache is needed, 1.00 GiB is there"),
    ],
)  # fmt: skip
async def test_other_failures(get: Get, log: str, ended: str, verdict: str, numbers: str) -> None:
    """How it ended and the line of numbers fit the kind of failure."""
    status = Status([server("vllm", log)])
    page = await get(status, newest(status))
    assert page.all("p", class_="eyebrow")[0].text.startswith(ended)
    assert page.all("h1")[0].text == verdict
    assert [found.text for found in page.all("p", class_="numbers")] == [numbers]


async def test_times_say_how_to_read_them(get: Get) -> None:
    """UTC is marked, local time is too, and a log without times is no error."""
    status = one()
    document: Any = status.targets[0].incidents[0]
    for given, shown in (("2026-11-30T16:26:46Z", "2026-11-30 16:26:46 UTC"), (None, "time not in the log")):
        document["time"] = given
        page = await get(status, newest(status))
        assert shown in page.all("p", class_="eyebrow")[0].text
        assert shown in (await get(status)).all("tbody")[0].text


# --- hostile texts --------------------------------------------------------------------------------


async def test_nothing_hostile_is_more_than_text(get: Get) -> None:
    """Markup is shown as text; what would hide or reorder is shown as what it is; long lines are cut."""
    status = hostile()
    pages = [
        await get(status),
        *[
            await get(status, f"/incidents/{one['id']}")
            for one in (status.targets[0].incidents[0], {"id": "bare"})
        ],
    ]
    pages.append(await get(status, "/incidents/%3Cscript%3Edocument.title%20%3D%20'owned'%3C%2Fscript%3E"))
    for page in pages:
        assert all(found.text != "owned" for found in page.all("h1"))
        everything = page.elements[0].text
        assert [found for found in everything if not (found.isprintable())] == []
        assert len(everything) < 60_000
    lines = pages[1].all("ol", class_="excerpt")[0].text
    assert SCRIPT in lines
    assert "␛[31mred␛[0m ␛]8;;http://example.org␇link␛\\" in lines
    assert "user⟨U+202E⟩exe.gpj⟨U+2066⟩⟨U+200F⟩⟨U+2028⟩" in lines
    assert "x" * 2000 + "… (98,000 more characters)" in lines
    assert "{{ 7 * 7 }}" in lines
    assert "⟨U+D800⟩ ␀ ⟨U+009B⟩" in lines


@pytest.mark.parametrize("name", ["hostile_then_oom_mp", "hostile_id_in_dump"])
async def test_a_real_attack_stays_in_the_log(get: Get, name: str) -> None:
    """Clients sent perfect failures to a real server that then failed: none of theirs is on its pages."""
    status = Status([server("vllm", name)])
    shown = (await get(status)).text + (await get(status, newest(status))).text
    assert BUDGET in shown
    sent = [one for one in ("6.66 GiB", "9.99 GiB", "cmpl-", "66666") if one.encode() in capture(name)]
    assert len(sent) >= 2
    assert [one for one in sent if one in shown] == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain", "plain"), (None, ""), (7, "7"), ("a\tb\n", "a␉b␊"), ("\x7f\x85", "␡⟨U+0085⟩"),
        ("\u00a0\ufeff\U000e0041", "⟨U+00A0⟩⟨U+FEFF⟩⟨U+E0041⟩"), ("Größe 模型 ✓", "Größe 模型 ✓"), (BIDI[:5], "user⟨U+202E⟩"),
        ("x" * 2001, "x" * 2000 + "… (1 more characters)"),
    ],
)  # fmt: skip
def test_what_does_not_print_is_made_visible(given: object, shown: str) -> None:
    """A reader sees that something is there, and what."""
    assert text(given) == shown


@pytest.mark.parametrize("given", [*HOSTILE, 7, [], {}, float("nan")])
def test_a_time_that_is_none_is_shown_as_text(given: object) -> None:
    """No attribute of the markup is made of it."""
    found = time(given)
    assert found is None or (found.machine is None and found.zone == "")


# --- the minutes before ---------------------------------------------------------------------------


async def test_the_minutes_before_are_drawn_and_tabled(get: Get) -> None:
    """Three lines with what they show in words, the moment of failure, and the same as a table."""
    status = one()
    page = await get(status, newest(status))
    labels = [found.attributes["aria-label"] for found in page.all("svg", role="img")]
    assert labels == [
        "Requests running, from 5 min before to the failure: 4 when last seen, at most 4",
        "Requests waiting, from 5 min before to the failure: 1 when last seen, at most 1",
        "KV cache used, from 5 min before to the failure: 0.8% when last seen, at most 0.8%",
    ]
    assert [found.attributes["d"] for found in page.all("path", class_="failure")] == ["M1000.0 0V100"] * 3
    rows = page.all("tr")
    assert rows[0].text == "Seconds before Requests running Requests waiting KV cache used"
    assert rows[1].text == "300.0 0 0 0.0%"
    assert rows[len(minutes_before())].text == "0.0 4 1 0.8%"
    del status.targets[0].incidents[0]["metrics_before"]
    page = await get(status, newest(status))
    assert "Not known: vLLM's /metrics was not scraped before this failure." in page.text
    assert page.all("svg") == []


def test_a_line_goes_through_what_was_scraped_and_not_over_gaps() -> None:
    """Time runs to the right and values upwards; three missing scrapes break the line; one alone is a dot."""
    samples = [
        {"seconds_before": float(s), "running_requests": float(v)}
        for s, v in [(10, 0), (9, 4), (8, 2), (1, 4)]
    ]
    found = timeline(samples)
    assert found is not None
    (line,) = found.series
    assert line.path == "M0.0 96.0h0L100.0 4.0L200.0 50.0M900.0 4.0h0"
    assert (line.last, line.most, line.top, found.begin, found.failure) == (
        "4",
        "4",
        "4",
        "10 s before",
        "1000.0",
    )


def test_a_scrape_after_the_failure_is_behind_its_line() -> None:
    """The last value is that of before, though a later one is drawn too."""
    found = timeline(
        [{"seconds_before": -1.0, "waiting_requests": 9}, {"seconds_before": 3.0, "waiting_requests": 2}]
    )
    assert found is not None
    assert (found.failure, found.series[0].last, found.series[0].most) == ("750.0", "2", "9")


@pytest.mark.parametrize("given", [None, [], "x", [{}], [{"seconds_before": 1.0}], [{"seconds_before": "1", "running_requests": 1}],
                                   [{"seconds_before": 1e9, "running_requests": 1}]])  # fmt: skip
def test_nothing_is_drawn_of_nothing(given: object) -> None:
    """Without a value at a time there is no drawing."""
    assert timeline(given) is None
