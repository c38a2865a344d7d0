"""The page in a real browser: ``pytest tests/demos/browser.py``.

Needs the extra ``demo-test`` and Debian's chromium. Where one is missing these tests fail; the name
of this file keeps them out of an ordinary run.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from gradio_client import Client
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from support.paths import ROOT

IMAGE, CLIP = ROOT / "examples" / "picture.png", ROOT / "examples" / "clip.mp4"
QUESTION, SAID = "What is in the bottom left?", "yellow triangle"
EXAMPLE, EXAMPLE_SAID = "What shape is the green object?", "cross"
# Generous: the machine may do other work as well, and nothing waits longer than it must.
WAIT_MS = 60_000
READY_S = 180
# Chromium makes no requests of its own.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync")

expect.set_options(timeout=WAIT_MS)


@contextmanager
def demo(log: Path, **environment: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server of its own, started as a user starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vlmfast", "demo", "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    with log.open("w") as out:
        server = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=environment,
            # Shells without job control start background jobs, such as this test, without SIGINT.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    try:
        end = time.monotonic() + READY_S
        while not (found := re.search(r"http://\S+", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield found[0], server
        text = log.read_text()
        refused = text.count("exceptions.InvalidPathError: ")  # a test names a file of the server
        assert text.count("Traceback") == refused, text
    finally:
        server.terminate()
        server.wait(timeout=20)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with demo(tmp_path_factory.mktemp("demo") / "log") as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path, "there is no chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    yield from opened(browser, address)


def opened(browser: Browser, address: str, **options) -> Iterator[Page]:
    """A user of their own; whatever the page itself complains about is an error."""
    options = {"viewport": {"width": 1280, "height": 900}, **options}
    context = browser.new_context(**options)
    context.set_default_timeout(WAIT_MS)
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_visible()
    yield page
    context.close()
    assert not complaints


def upload(page: Page, path: Path, kind: str = "image", words: str = "Ready") -> None:
    """Upload a file; the page then shows it, or says why it cannot."""
    page.locator(f"#{kind}-media input[type=file]").set_input_files(path)
    expect(page.locator(f"#{kind}-status")).to_contain_text(re.compile(words))


def ask(page: Page, question: str = QUESTION, kind: str = "image") -> None:
    page.locator(f"#{kind}-question textarea, #{kind}-question input").fill(question)
    page.locator(f"#{kind}-ask").click()


def answered(page: Page, kind: str = "image", words: str = "Answered with") -> None:
    expect(page.locator(f"#{kind}-status")).to_contain_text(words)


def counters(page: Page, kind: str = "image") -> dict[str, tuple[str, str]]:
    """Both cells of each row of the table."""
    rows = page.locator(f"#{kind}-counters tbody tr")
    texts = (row.locator("th, td").all_inner_texts() for row in rows.all())
    return {what: (full, shown) for what, full, shown in texts}


def counter(page: Page, name: str, side: str, kind: str = "image") -> str:
    return counters(page, kind)[name][0 if side == "full" else 1]


def text_of(page: Page, side: str, kind: str = "image") -> str:
    """The last answer of a side."""
    return page.locator(f"#{kind}-{side} .answer").last.inner_text().strip()


def write(box: Locator, text: str) -> None:
    """Key by key, as people do."""
    box.press("Control+a")
    box.press_sequentially(text)


def shot(page: Page, name: str) -> None:
    """Kept where ``VLMFAST_SHOTS`` names a folder, to be looked at."""
    if folder := os.environ.get("VLMFAST_SHOTS"):
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)


@pytest.fixture
def asked(page: Page) -> Page:
    upload(page, IMAGE)
    ask(page)
    answered(page)
    return page


FIRST_SCREENS = {"wide": (1280, 900), "narrow": (390, 844)}


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", FIRST_SCREENS)
def test_first_screen_shows_a_finished_comparison(
    browser: Browser, address: str, screen: str, scheme: str, kind: str
) -> None:
    width, height = FIRST_SCREENS[screen]
    options = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    users = opened(browser, f"{address}/?__theme={scheme}", **options)
    page = next(users)
    page.get_by_role("tab", name=kind.capitalize()).click()
    answered(page, kind)
    shown = [page.locator(f"#{kind}-status .headline"), page.locator(f"#{kind}-ask")]
    shown += [page.locator(f"#{kind}-{side} .answer") for side in ("full", "recipe")]
    shown += page.locator(f"#{kind}-view .layers").all()
    assert len(shown) == 4 + (2 if kind == "image" else 4)
    page.evaluate("window.scrollTo(0, 0)")  # choosing the tab may have scrolled
    for part in shown:
        expect(part).to_be_visible()
        box = part.bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= height
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    if screen == "wide":  # the answers are beside the image
        image, answer = shown[-1].bounding_box(), shown[2].bounding_box()
        assert answer["x"] >= image["x"] + image["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shot(page, f"first-{kind}-{screen}-{scheme}")
    assert next(users, None) is None


def test_ask_updates_counters_and_kept_tokens(asked: Page) -> None:
    for side in ("full", "recipe"):
        assert text_of(asked, side) == SAID
    assert counter(asked, "Visual tokens", "full") == "336"
    assert counter(asked, "Visual tokens", "recipe") == "336 → 175 (downsample) → 77 (scope)"
    assert counter(asked, "Agreement with the full model", "recipe") == "100 %"
    first, _ = counter(asked, "Time to the first token", "full").split(" ")
    assert float(first.replace(",", "")) > 0  # 1,084.8 on a busy machine
    expect(asked.locator("#image-view .mask")).to_have_count(2)
    shot(asked, "asked-1280")


def test_toggle_and_dimmer(page: Page) -> None:
    answered(page)
    mask = page.locator("#image-view .mask").first
    view, dim = page.locator("#image-view .layers").first, page.locator("#image-dim")
    expect(mask).to_have_css("opacity", "0.8")
    shown = {"80": view.screenshot()}
    for value in ("100", "20"):
        dim.fill(value)
        expect(mask).to_have_css("opacity", f"{int(value) / 100:g}")
        shown[value] = view.screenshot()
    page.get_by_label("Input", exact=True).first.check()
    expect(mask).to_be_hidden()
    shown["input"] = view.screenshot()
    assert len(set(shown.values())) == 4
    page.get_by_label("Kept tokens").first.check()
    expect(mask).to_be_visible()
    assert view.screenshot() == shown["20"]


def test_progress_appears_before_the_server_answers(page: Page) -> None:
    answered(page)
    for start in (
        page.locator("#image-ask").click,
        page.locator("#image-again").click,
        page.locator("#image-examples button").nth(1).click,
    ):
        page.route("**/queue/join*", lambda route: None)
        start()
        expect(page.locator("#image-status .bar")).to_be_visible()
        expect(page.locator("#image-status")).to_contain_text("Asking")
        page.unroute("**/queue/join*")  # what was held goes on
        answered(page)


def test_examples_answer_on_click(page: Page) -> None:
    for kind, words in (("image", EXAMPLE_SAID), ("video", "")):
        page.get_by_role("tab", name=kind.capitalize()).click()
        answered(page, kind)
        buttons = page.locator(f"#{kind}-examples button")
        expect(buttons).to_have_count(4 if kind == "image" else 3)
        for thumbnail in buttons.locator("img").all():
            expect(thumbnail).to_have_js_property("naturalWidth", 96)
        buttons.nth(2).click()
        question = buttons.nth(2).inner_text().strip()
        answered(page, kind, f"“{question}” Answered")
        expect(page.locator(f"#{kind}-question textarea, #{kind}-question input")).to_have_value(
            question
        )
        assert words in text_of(page, "full", kind)
        assert text_of(page, "full", kind)


def test_text_is_streamed(page: Page) -> None:
    upload(page, IMAGE)
    page.evaluate(
        """() => { window.seen = new Set();
        new MutationObserver(() => window.seen.add(
            document.querySelector('#image-full').innerText)).observe(
            document.querySelector('#image-full'), {subtree: true, childList: true,
            characterData: true}); }"""
    )
    ask(page, "Describe the image.")
    answered(page)
    texts = page.evaluate("[...window.seen]")
    assert len([text for text in texts if "There are" in text]) > 3


def test_recipe_by_text_and_by_controls(page: Page) -> None:
    text = page.locator("#recipe textarea, #recipe input")
    budget = page.locator("#budget input[type=number]")
    write(text, "snapkv:0.5")
    expect(page.locator("#budget")).not_to_be_visible()
    write(text, "grid:budget=0.5+kivi")
    expect(budget).to_have_value("0.5")
    expect(page.locator("#preset input")).to_have_value("custom")
    write(text, "grdi:0.5")
    expect(page.locator("#recipe-note")).to_contain_text("grdi")
    expect(budget).to_have_value("0.5")
    write(text, "grid:0.5+kivi")
    expect(page.locator("#recipe-note")).not_to_be_visible()
    expect(page.locator("#budget")).to_contain_text("the default of grid")
    budget.fill("0.25")
    expect(text).to_have_value("grid:budget=0.25+kivi")
    page.locator("#preset input").click()
    page.get_by_role("option", name=re.compile("^fast: ")).click()
    expect(text).to_have_value("downsample:budget=0.33+scope:budget=0.33")
    expect(budget).to_have_value("0.33")
    shot(page, "recipe")
    upload(page, IMAGE)
    ask(page)
    answered(page)
    assert counter(page, "Visual tokens", "recipe") == "336 → 120 (downsample) → 40 (scope)"


def test_empty_question_and_invalid_recipe(page: Page) -> None:
    answered(page)
    alert = page.locator("#image-status [role=alert]")
    ask(page, " ")
    expect(alert).to_contain_text("question is empty")
    page.locator("#recipe textarea, #recipe input").fill("hirred:0.2")
    ask(page)
    expect(alert).to_contain_text("hirred")
    write(page.locator("#recipe textarea, #recipe input"), "elastic:weights=/etc")
    expect(page.locator("#recipe-note")).to_contain_text("weights cannot be set on this page")
    ask(page)
    expect(alert).to_contain_text("weights cannot be set on this page")
    write(page.locator("#recipe textarea, #recipe input"), "hired:0.2")
    ask(page)
    answered(page)


def test_other_controls(page: Page) -> None:
    recipe = page.locator("#recipe textarea, #recipe input")
    write(recipe, "hired:0.2+pyramiddrop+draft-ngram")
    page.locator("#generation > button").click()
    longest = page.locator("#tokens input[type=number]")
    longest.fill("40")
    longest.press("Enter")
    page.get_by_label("Include earlier questions in the context").check()
    upload(page, IMAGE)
    ask(page, "Describe the image.")
    answered(page)
    kept = counter(page, "Visual tokens", "recipe")
    assert re.fullmatch(r"336 → \d+ \(hired\) → \d+ \(pyramiddrop\)", kept)
    assert "tokens per forward pass" in counter(page, "Accepted drafts", "recipe")
    assert counter(page, "KV cache", "recipe").startswith(("0.", "1.", "2.", "3."))
    whole = text_of(page, "full")
    longest.fill("3")
    longest.press("Enter")
    ask(page, "Describe the image.")
    expect(page.locator("#image-full details")).to_contain_text("Earlier (1)")
    answered(page)
    assert 0 < len(text_of(page, "full")) < len(whole) / 2
    # Its prompt has the first question and its answer in it.
    prompts = [counter(page, "Prompt tokens reused from the cache", "full")]
    page.get_by_label("Include earlier questions in the context").uncheck()
    for count in (0, 1):  # the first begins another conversation
        ask(page, "Describe the image.")
        expect(page.locator("#image-full details")).to_have_count(count)
        answered(page)
    prompts.append(counter(page, "Prompt tokens reused from the cache", "full"))
    remembered, alone = (int(text.split(" of ")[1]) for text in prompts)
    assert remembered > alone + 30 > 336


def test_stop_ends_the_answer(page: Page) -> None:
    upload(page, IMAGE)
    ask(page, "Describe the image.")
    expect(page.locator("#image-full")).to_contain_text("There")
    page.locator("#image-stop").click()
    answered(page, words="Stopped")
    ask(page)
    answered(page)


def test_video_is_shown_as_frames(page: Page) -> None:
    page.get_by_role("tab", name="Video").click()
    upload(page, CLIP, "video")
    expect(page.locator("#video-view img")).to_have_count(4)
    ask(page, "Which way does the cyan star move?", "video")
    answered(page, "video")
    expect(page.locator("#video-recipe")).to_contain_text("up")
    expect(page.locator("#video-view .mask")).to_have_count(4)
    assert counter(page, "Visual tokens", "full", "video") == "544"
    page.locator("#video-frames input[type=number]").fill("2")
    page.locator("#video-frames input[type=number]").press("Enter")
    ask(page, "Which way does the cyan star move?", "video")
    expect(page.locator("#video-view .mask")).to_have_count(2)
    assert counter(page, "Visual tokens", "full", "video") == "272"
    shot(page, "video")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(browser: Browser, address: str, scheme: str) -> None:
    """No serious finding of axe-core, in every tab with everything unfolded."""
    users = opened(browser, f"{address}/?__theme={scheme}", color_scheme=scheme)
    page, found = next(users), []
    for tab in ("Image", "Video"):
        page.get_by_role("tab", name=tab).click()
        answered(page, tab.lower())
        unfold(page)
        results = Axe().run(page).response["violations"]
        for rule in results:
            if rule["impact"] in ("serious", "critical"):
                found += [f"{tab}: {rule['id']}: {node['html']}" for node in rule["nodes"]]
    assert found == []
    assert next(users, None) is None


def unfold(page: Page) -> None:
    folded = page.locator("button.label-wrap:not(.open):visible")
    while count := folded.count():
        folded.first.click()
        expect(folded).not_to_have_count(count)


def test_keyboard_alone_can_ask(page: Page) -> None:
    answered(page)
    example = page.get_by_role("button", name=EXAMPLE)
    example.focus()
    page.keyboard.press("Enter")
    answered(page, words=f"“{EXAMPLE}” Answered")
    page.locator("#image-question textarea, #image-question input").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#image-full details")).to_contain_text("Earlier (1)")
    answered(page)


# --- without a browser ---------------------------------------------------------------------------


def test_no_endpoint_is_public(address: str) -> None:
    client = Client(address, verbose=False)
    found = client.view_api(return_format="dict", print_info=False)
    client.close()
    assert found == {"named_endpoints": {}, "unnamed_endpoints": {}}


def test_page_reads_no_file_of_the_server(address: str) -> None:
    """As an upload; Gradio stores those in a folder of the demo."""
    config = httpx.get(f"{address}/config").json()
    names = {part["props"].get("elem_id"): part["id"] for part in config["components"]}
    target = [names["image-media"], "upload"]
    (event,) = (e["id"] for e in config["dependencies"] if target in e["targets"])
    file = {"path": str(IMAGE), "meta": {"_type": "gradio.FileData"}}
    asked = {"data": [file, 1], "fn_index": event, "session_hash": "a"}
    found = httpx.post(f"{address}/gradio_api/run/predict", json=asked)
    assert found.status_code == 500 and "data:image" not in found.text
    with IMAGE.open("rb") as data:  # control
        uploaded = httpx.post(f"{address}/gradio_api/upload", files={"files": data}).json()
    asked["data"][0] |= {"path": uploaded[0]}
    found = httpx.post(f"{address}/gradio_api/run/predict", json=asked)
    assert found.status_code == 200 and "data:image" in found.text


def test_host_header_is_checked(address: str) -> None:
    port = address.rpartition(":")[2]
    for host, status in (
        ("127.0.0.1", 200),
        (f"localhost:{port}", 200),
        (f"[::1]:{port}", 200),
        ("attacker.example", 400),
        (f"attacker.example:{port}", 400),
        ("localhost.attacker.example", 400),
    ):
        for path in ("/", "/config", "/gradio_api/info"):
            assert httpx.get(address + path, headers={"Host": host}).status_code == status, host


def test_allowed_hosts() -> None:
    from vlmfast.demos.app import host_check

    assert host_check("0.0.0.0", ()) == []
    (check,) = host_check("0.0.0.0", ("demo.example",))
    assert {"demo.example", "localhost", "127.0.0.1", "::1"} <= set(check.kwargs["allowed_hosts"])
