"""The page of a large step: ``python -m benchmarks.page [groups] [microbatches]``.

A step of 64 groups and 512 microbatches should open in 2 seconds, and pan at 20 frames a second.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile
import time

from mpmd.schedules import Std1F1B
from tests.support.browser import FLAGS, HELP, chromium
from tests.support.drawn_profiles import drawn_profile
from tests.support.schedule_plans import plan_of_schedule

FRAMES = 100
OPENINGS = 5

PAN = """(frames) => new Promise((done) => {
  const canvas = document.querySelector("#panels canvas");
  const times = [performance.now()];
  const tick = () => {
    times.push(performance.now());
    if (times.length > frames) return done(times.slice(1).map((time, i) => time - times[i]));
    const deltaX = times.length % 40 < 20 ? 40 : -40;
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaX, bubbles: true, cancelable: true }));
    requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
})"""
"""Pans in each frame, and returns the milliseconds from frame to frame."""


def main(num_groups: int = 64, num_microbatches: int = 512) -> None:
    """Times the page of a step of 1F1B with drawn times."""
    executable = chromium()
    if executable is None:
        sys.exit(HELP)
    profile = drawn_profile(plan_of_schedule(Std1F1B(num_groups), num_microbatches))
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "page.html"
        began = time.process_time()
        profile.write_html(path)
        seconds = time.process_time() - began
        print(f"{num_groups} groups, {num_microbatches} microbatches: {path.stat().st_size / 1e6:.1f} MB")
        print(f"written in {seconds:.1f} s of processor time")
        browse(executable, path)


def browse(executable: str, path: pathlib.Path) -> None:
    """Opens a page several times, and pans it at several zooms."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        openings = []
        for _ in range(OPENINGS):
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            began = time.perf_counter()
            page.goto(path.as_uri())
            page.wait_for_selector("body[data-ready]")
            openings.append(time.perf_counter() - began)
        print(f"opened in {statistics.median(openings):.2f} s ({min(openings):.2f} to {max(openings):.2f})")
        for part, zooms in (("half", 1), ("an eighth", 2), ("a 64th", 3)):
            for _ in range(zooms):
                page.locator("#zoom-in").click()
            report(part, page.evaluate(PAN, FRAMES))
        browser.close()


def report(part: str, times: list[float]) -> None:
    """Prints the frames a second of frame times."""
    slow = statistics.quantiles(times, n=20)[-1]
    rate = 1000 / statistics.median(times)
    print(f"panned with {part} of the step in sight: {rate:.0f} frames a second; 95% within {slow:.0f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
