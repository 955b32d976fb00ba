"""The pages in a real Chromium: what it draws, complains of, fetches, and reads out.

Debian's ``chromium`` is driven as it is installed; no other browser is downloaded.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from axe_playwright_python.sync_playwright import Axe
from conftest import HERE
from playwright.sync_api import Browser, Page, sync_playwright
from replay import EXPORTER, Replay
from servers import CASES, HOSTILE, application, cured, hostile, newest, one

from exporter.status import Status

SCREENSHOTS = HERE / "screenshots"
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 800}
WIDTH = "document.documentElement.scrollWidth"
SCREEN = {"width": 1000, "height": 1260}


class Host:
    """Serves applications from a thread, since Playwright keeps the event loop of the test to itself."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._runners: list[web.AppRunner] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, job: Any) -> Any:
        """What a coroutine returns."""
        return asyncio.run_coroutine_threadsafe(job, self.loop).result(60)

    def serve(self, status: Status, **options: Any) -> str:
        """The address under which a status is shown."""

        async def start() -> str:
            runner = web.AppRunner(application(status, **options))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._runners.append(runner)
            return f"http://127.0.0.1:{runner.addresses[0][1]}"

        return str(self.run(start()))

    def close(self) -> None:
        """Stop everything that is served."""
        for runner in self._runners:
            self.run(runner.cleanup())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A place to serve from."""
    found = Host()
    yield found
    found.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    path = shutil.which("chromium")
    assert path, "Chromium is not installed; apt-get install chromium, or run 'make test'"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


Open = Callable[..., Any]


@pytest.fixture
def tab(browser: Browser) -> Iterator[Open]:
    """Opens addresses as a reader would, and in the end asserts that nobody complained or left the host."""
    complaints: list[str] = []

    @contextmanager
    def opened(url: str, viewport: dict[str, int] = DESKTOP, **options: Any) -> Iterator[Page]:
        base = "/".join(url.split("/")[:3]) + "/"
        context = browser.new_context(viewport=viewport, **options)  # type: ignore[arg-type]
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith((base, "data:,")) else complaints.append(request.url)
            ),
        )
        answer = page.goto(url)
        assert answer is not None
        assert answer.status == 200
        yield page
        context.close()

    yield opened
    assert complaints == []


def paths(status: Status) -> list[str]:
    """The overview, and the last incidents where there are any."""
    return ["/", *(newest(status, at) for at, target in enumerate(status.targets) if target.incidents)]


@pytest.mark.parametrize("case", CASES)
def test_pages_fit_and_can_be_read_out(tab: Open, host: Host, case: str) -> None:
    """No console message, nothing fetched elsewhere, no scrolling sideways, nothing that axe objects to."""
    status = CASES[case]()
    base = host.serve(status)
    with tab(base, PHONE, color_scheme="light") as page:
        for path in paths(status):
            page.set_viewport_size(PHONE)
            page.emulate_media(color_scheme="light")
            page.goto(base + path)
            assert page.title() != "owned"
            assert page.evaluate("document.scripts.length") == 0
            assert page.evaluate(WIDTH) <= PHONE["width"], path
            assert objections(page) == [], path
            page.set_viewport_size(DESKTOP)
            page.emulate_media(color_scheme="dark")
            assert page.evaluate(WIDTH) <= DESKTOP["width"], path
            assert objections(page, runOnly=["color-contrast"]) == [], path


def objections(page: Page, **options: object) -> list[tuple[str, list[str]]]:
    """What axe finds: rule, and the elements that break it."""
    found = Axe().run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]


def test_hostile_texts_are_inert(tab: Open, host: Host) -> None:
    """Markup of a log makes no element; a script that got in all the same would not run."""
    status = hostile()
    with tab(host.serve(status) + newest(status)) as page:
        assert page.locator("img, script, h1:text-is('owned')").count() == 0
        lines = page.locator(".excerpt li").all_inner_texts()
        assert len(lines) == len(HOSTILE)
        assert lines[0] == HOSTILE[0]
        assert lines[3] == "user⟨U+202E⟩exe.gpj⟨U+2066⟩⟨U+200F⟩⟨U+2028⟩"
        assert len(lines[4]) < 2100


def test_the_policy_stops_a_script(browser: Browser, host: Host) -> None:
    """Were there a hole in a template, the policy would close it: scripts, handlers, pictures, styles."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(host.serve(one()))
    page.evaluate(
        """() => {
            window.blocked = [];
            document.addEventListener("securitypolicyviolation", e => window.blocked.push(e.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.owned = true";
            document.body.append(script);
            document.body.insertAdjacentHTML("beforeend",
                '<img src="/metrics" onerror="window.owned = true"><p style="color: red"><iframe src="/"></iframe>');
        }"""
    )
    page.wait_for_function("window.blocked.length >= 4")
    assert page.evaluate("window.owned") is None
    assert set(page.evaluate("window.blocked")) >= {
        "script-src-elem", "img-src", "style-src-attr", "frame-src",
    }  # fmt: skip
    context.close()


def test_without_javascript_nothing_is_missing(tab: Open, host: Host) -> None:
    """The page is the same where scripts are switched off."""
    status = one()
    url = host.serve(status) + newest(status)
    with tab(url) as page:
        text = page.locator("main").inner_text()
    with tab(url, java_script_enabled=False) as page:
        assert page.locator("main").inner_text() == text


def test_by_keyboard(tab: Open, host: Host) -> None:
    """The first stop is a visible link past the header; every further stop shows where it is."""
    status = one()
    with tab(host.serve(status) + newest(status)) as page:
        page.keyboard.press("Tab")
        skip = page.locator(":focus")
        assert skip.inner_text() == "Skip to the content"
        box = skip.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        page.keyboard.press("Enter")
        assert page.locator("main:focus").count() == 1
        stops = []
        for _ in range(4):
            page.keyboard.press("Tab")
            stops.append(
                page.locator(":focus").evaluate("e => [e.tagName, getComputedStyle(e).outlineWidth]")
            )
        assert stops[0] == ["SUMMARY", "3px"]
        assert {width for _, width in stops} == {"3px"}
        page.keyboard.press("Shift+Tab")
        page.locator("summary").focus()
        page.keyboard.press("Enter")
        assert page.locator("details table").is_visible()


def test_flags_are_selected_with_one_click(tab: Open, host: Host) -> None:
    """A click on flags selects all of them, and nothing else."""
    status = one()
    with tab(host.serve(status) + newest(status)) as page:
        page.locator(".flags").first.click()
        assert page.evaluate("getSelection().toString()") == "--max-num-batched-tokens 4096"


def test_printed(tab: Open, host: Host) -> None:
    """On paper there is no navigation, all of the verdict, and black on white also for who likes it dark."""
    status = one()
    with tab(host.serve(status) + newest(status), color_scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.locator("header nav").is_hidden()
        assert page.locator(".excerpt").is_visible()
        assert (
            page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            == "rgb(255, 255, 255)"
        )
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 30, 33)"
        assert page.pdf().startswith(b"%PDF")


# --- a real death ---------------------------------------------------------------------------------


@contextmanager
def replayed(host: Host, folder: Path) -> Iterator[str]:
    """The address of the command ``run`` beside a real server that has just died."""
    replay, log = Replay("mlp_eager_16384", 6), folder / "vllm.log"
    server = replay.server()
    url = host.run(server.__aenter__())
    sidecar = subprocess.Popen(
        [EXPORTER, "run", "--log", log, "--vllm-url", url, "--listen", "127.0.0.1:0",
         "--scrape-interval", "300ms", "--log-format", "json"],
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        base = ""
        assert sidecar.stderr is not None
        while not base:
            said = json.loads(sidecar.stderr.readline())
            base = f"http://{said['address']}" if said["event"] == "listening" else ""
        host.run(replay.write(log))
        end = time.monotonic() + 30
        while '"fatal": true' not in read(f"{base}/api/v1/incidents"):
            assert time.monotonic() < end
            time.sleep(0.05)
        yield base
    finally:
        sidecar.terminate()
        sidecar.communicate()
        host.run(server.__aexit__(None, None, None))


def read(url: str) -> str:
    """What is answered at an address."""
    with urllib.request.urlopen(url) as answer:  # noqa: S310 - of this test
        return str(answer.read().decode())


def test_from_the_overview_to_what_to_do(tab: Open, host: Host, tmp_path: Path) -> None:
    """The sidecar beside a real death: one click from the overview, and all that matters is on one screen."""
    with replayed(host, tmp_path) as base, tab(f"{base}/", SCREEN) as page:
        (incident,) = json.loads(read(f"{base}/api/v1/incidents"))["incidents"]
        page.locator(".verdict a").click()
        assert page.url == f"{base}/incidents/{incident['id']}"
        assert (
            page.locator("h1").inner_text()
            == "One prefill step needs more memory than is left beside the KV cache"
        )
        assert page.locator(".first .flags").inner_text() == "--max-num-batched-tokens 4096"
        for what in ("h1", ".numbers", ".first .flags", ".failure >> nth=2"):
            box = page.locator(what).bounding_box()
            assert box is not None
            assert box["y"] + box["height"] < SCREEN["height"], what


# --- screenshots ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "status"), [("overview", cured()), ("incident", one())])
def test_screenshots(
    tab: Open, host: Host, tmp_path: Path, request: pytest.FixtureRequest, name: str, status: Status
) -> None:
    """Those of the README have the size of what is drawn now. ``--renew-screenshots`` writes them anew."""
    path = "/" if name == "overview" else newest(status)
    folder = SCREENSHOTS if request.config.getoption("--renew-screenshots") else tmp_path
    with tab(host.serve(status) + path, SCREEN, color_scheme="light") as page:
        page.screenshot(path=folder / f"{name}.png")
    sizes = [
        struct.unpack(">II", (where / f"{name}.png").read_bytes()[16:24]) for where in (folder, SCREENSHOTS)
    ]
    assert sizes[0] == sizes[1] == (SCREEN["width"], SCREEN["height"])
