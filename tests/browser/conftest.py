"""A headless Chromium for tests of the pages, and pages to test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenhand.cli import main
from evenhand.pages.run_page import write_run_report
from evenhand.trajectory import Kind, Trajectory, write_trajectories
from evenhand.trajectory.protocol import Document
from run_builder import group, write_alarms, write_results, write_run
from viewer_server import make_index, served

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--hide-scrollbars")  # fmt: skip
EVIL = "<script>window.owned = 1</script><img src=x onerror='window.owned = 2'>"


DOWN, LEFT, ESCAPE = "\ue015", "\ue012", "\ue00c"
"""Keys as WebDriver writes them."""


class Browser:
    """One tab, with the size and colours of choice."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str, *, width: int = 1280, dark: bool = False) -> None:
        """Load a page anew; what the console said before is forgotten."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(address)

    def js(self, script: str, *arguments: Any) -> Any:
        """Run a script and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: str, seconds: float = 60) -> Any:
        """Wait until a JavaScript expression is true; return its value."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, poll_frequency=0.1).until(
            lambda driver: driver.execute_script(f"return {condition}")
        )

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        from selenium.webdriver import ActionChains

        actions = ActionChains(self.driver)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def errors(self) -> list[str]:
        """Return what the console complained of since the page was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests; skipped where Chromium, its driver or selenium is missing."""
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs the Debian packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


def evil(trajectory: Trajectory) -> Trajectory:
    """The same rollout with markup in its question, its documents and its id."""
    segments = []
    for segment in trajectory.segments:
        if segment.kind is Kind.INFORMATION:
            documents = tuple(
                Document(d.id, f"{EVIL} {d.title}", f"{d.text} {EVIL}")
                for d in segment.documents or ()
            )
            segment = replace(segment, documents=documents)
        segments.append(segment)
    return replace(
        trajectory,
        id=f"{trajectory.id}{EVIL}",
        question=f"Who is it? {EVIL}",
        golden_answers=("x", EVIL),
        segments=tuple(segments),
    )


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an alarm whose last step holds markup wherever a rollout can."""
    path = write_run(tmp_path_factory.mktemp("browser") / "run", groups=6)
    rows = [evil(t) for q in range(6) for t in group(6, q)]
    write_trajectories(path / "trajectories/step-000006.jsonl.gz", rows)
    write_alarms(path, [3])
    return path


@pytest.fixture(scope="session")
def pages(run: Path) -> Iterator[dict[str, str]]:
    """The address of each kind of page, over the same run."""
    base = run.parent
    other = write_run(base / "other", after=0.8, settings={"loss": {"clip_high": 0.3}})
    write_run_report(base / "report.html", [run, other], [write_results(base / "evaluation")])
    last = str(run / "trajectories/step-000006.jsonl.gz")
    assert main(["audit", last, "--html", str(base / "audit.html")]) == 0
    with served(make_index(base / "cache", run)) as address:
        yield {
            "report": (base / "report.html").as_uri(),
            "audit": (base / "audit.html").as_uri(),
            "viewer": f"http://{address}/",
        }
