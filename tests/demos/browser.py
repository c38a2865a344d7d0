"""The page in a real browser: ``pytest tests/demos/browser.py``.

Needs the extra ``demo-test`` and Debian's chromium. Where one is missing these tests fail; the name
of this file keeps them out of an ordinary run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own, started as a user starts it."""
    log = tmp_path_factory.mktemp("demo") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vlmfast", "demo", "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        end = time.monotonic() + READY_S
        while not (found := re.search(r"http://\S+", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield found[0]
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        server.terminate()
        server.wait(timeout=20)


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


def upload(page: Page, path: Path, kind: str = "image") -> None:
    page.locator(f"#{kind}-media input[type=file]").set_input_files(path)


def ask(page: Page, question: str = QUESTION, kind: str = "image") -> None:
    page.locator(f"#{kind}-question textarea, #{kind}-question input").fill(question)
    page.locator(f"#{kind}-ask").click()


def answered(page: Page, kind: str = "image", words: str = "Answered with") -> None:
    expect(page.locator(f"#{kind}-note")).to_contain_text(words)


def counter(page: Page, name: str, side: str, kind: str = "image") -> str:
    row = page.locator(f"#{kind}-counters tr", has_text=name).first
    return row.locator("td").nth(0 if side == "full" else 1).inner_text()


def text_of(page: Page, side: str, kind: str = "image") -> str:
    """The last answer of a side."""
    return page.locator(f"#{kind}-{side} .message.bot").last.inner_text().strip()


def pixels(page: Page, selector: str) -> list[int]:
    """What an image of the page shows, small and grey."""
    return page.locator(selector).evaluate(
        """async e => { await e.decode(); const c = document.createElement('canvas');
        c.width = c.height = 28; const x = c.getContext('2d');
        x.drawImage(e, 0, 0, 28, 28); const d = x.getImageData(0, 0, 28, 28).data;
        return [...Array(784).keys()].map(i => (d[4*i] + d[4*i+1] + d[4*i+2]) / 3 | 0); }"""
    )


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
    expect(page.locator("#image-media img")).to_be_visible()
    ask(page)
    answered(page)
    return page


def test_ask_updates_counters_and_overlay(asked: Page) -> None:
    for side in ("full", "recipe"):
        expect(asked.locator(f"#image-{side}")).to_contain_text(SAID)
    assert counter(asked, "Visual tokens", "full") == "336"
    assert counter(asked, "Visual tokens", "recipe") == "336 → 74 (hired)"
    assert counter(asked, "Agreement", "recipe") == "100 %"
    first, _ = counter(asked, "Time to the first", "full").split(" ")
    assert float(first.replace(",", "")) > 0  # 1,084.8 on a busy machine
    expect(asked.locator("#image-depths img")).to_have_count(2)
    expect(asked.locator("#image-slider img")).to_have_count(2)
    before, after = (pixels(asked, f"#image-slider img >> nth={number}") for number in range(2))
    darker = sum(a < b - 10 for a, b in zip(after, before, strict=True)) / len(before)
    assert 0.5 < darker < 0.95  # 74 of 336 tokens were kept
    shot(asked, "asked-1280")


def test_slider_moves(asked: Page) -> None:
    slider = asked.locator("#image-slider")
    expect(slider.locator("img")).to_have_count(2)
    slider.scroll_into_view_if_needed()
    box = slider.locator("img").first.bounding_box()
    before = slider.screenshot()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    asked.mouse.move(*middle)
    asked.mouse.down()
    asked.mouse.move(middle[0] - box["width"] / 3, middle[1], steps=5)
    asked.mouse.up()
    assert slider.screenshot() != before


def test_text_is_streamed(page: Page) -> None:
    upload(page, IMAGE)
    expect(page.locator("#image-media img")).to_be_visible()
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


def test_second_question_and_full_detail(asked: Page) -> None:
    ask(asked, "What color is the circle?")
    expect(asked.locator("#image-recipe")).to_contain_text("purple")
    answered(asked)
    assert int(counter(asked, "Prompt tokens reused", "recipe").split(" ")[0]) > 80
    assert counter(asked, "Visual tokens", "recipe") == "336 → 74 (hired)"
    asked.locator("#image-again").click()
    answered(asked, words="Answered with none")
    expect(asked.locator("#image-recipe")).to_contain_text("Looked again at full detail: purple")
    assert counter(asked, "Visual tokens", "recipe") == "336"
    with asked.expect_download() as download:
        asked.locator("#image-trace").click()
    trace = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert trace["question"] == "What color is the circle?"
    assert set(trace["answers"]) == {"full", "recipe", "restored"}


def test_recipe_by_text_and_by_controls(page: Page) -> None:
    text = page.locator("#recipe textarea, #recipe input")
    page.locator("#builder > button").click()
    write(text, "grid:0.5")
    method = page.locator("#method-encode input")
    expect(method).to_have_value("grid")
    expect(page.locator("#preset input")).to_have_value("custom")
    write(text, "grdi:0.5")
    expect(page.locator("#recipe-note")).to_contain_text("grdi")
    expect(method).to_have_value("grid")
    write(text, "grid:0.5")
    expect(page.locator("#recipe-note")).not_to_be_visible()
    page.locator("#dial-encode input[type=number]").fill("0.25")
    expect(text).to_have_value("grid:budget=0.25")
    method.click()
    page.get_by_role("option", name="visionzip", exact=True).click()
    expect(text).to_have_value(re.compile("^visionzip:"))
    page.locator("#method-cache input").click()
    page.get_by_role("option", name="kivi", exact=True).click()
    expect(text).to_have_value(re.compile(r"^visionzip:.*\+kivi$"))
    page.locator("#preset input").click()
    page.get_by_role("option", name="fast", exact=True).click()
    expect(text).to_have_value("hired:positions=keep,budget=0.11")
    expect(page.locator("#method-cache input")).to_have_value("none")
    shot(page, "builder")
    upload(page, IMAGE)
    expect(page.locator("#image-media img")).to_be_visible()
    ask(page)
    answered(page)
    assert counter(page, "Visual tokens", "recipe") == "336 → 37 (hired)"


def test_empty_question_and_invalid_recipe(page: Page) -> None:
    ask(page)
    alert = page.locator("#image-note [role=alert]")
    expect(alert).to_contain_text("no image")
    upload(page, IMAGE)
    expect(page.locator("#image-media img")).to_be_visible()
    ask(page, " ")
    expect(alert).to_contain_text("question is empty")
    page.locator("#recipe textarea, #recipe input").fill("hirred:0.2")
    ask(page)
    expect(alert).to_contain_text("hirred")
    page.locator("#recipe textarea, #recipe input").fill("hired:0.2")
    ask(page)
    answered(page)


def bad_files(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Tab, file and what the page says of it."""
    sys.path.insert(0, str(Path(__file__).parent))
    import test_talk

    for number, (kind, data, words) in enumerate(test_talk.bad_files(folder).values()):
        path = folder / f"bad-{number}{'.png' if kind == 'image' else '.mp4'}"
        path.write_bytes(data)
        yield kind, path, words
    silent = folder / "sound.mp4"
    test_talk.write_sound(silent)
    yield "video", silent, "video stream|no video"


def test_unreadable_files_are_reported_and_the_next_question_works(
    browser: Browser, address: str, tmp_path: Path
) -> None:
    for kind, path, words in bad_files(tmp_path):
        users = opened(browser, address)
        page = next(users)
        page.get_by_role("tab", name="Image" if kind == "image" else "Video").click()
        with page.expect_response(re.compile("/upload")):
            upload(page, path, kind)
        expect(page.locator(f"#{kind}-media button[aria-label]").first).to_be_visible()
        ask(page, kind=kind)
        alert = page.locator(f"#{kind}-note [role=alert]")
        expect(alert).to_contain_text(re.compile(words))
        shot(page, f"bad-{path.stem}")
        page.get_by_role("tab", name="Image").click()
        page.get_by_text(EXAMPLE).first.click()
        question = page.locator("#image-question textarea, #image-question input")
        expect(question).to_have_value(EXAMPLE)
        expect(page.locator("#image-media img")).to_have_attribute("src", re.compile("image-"))
        page.locator("#image-ask").click()
        answered(page)
        assert text_of(page, "full") == EXAMPLE_SAID
        assert next(users, None) is None


def test_unreadable_file_after_an_example(page: Page, tmp_path: Path) -> None:
    """The page opens no file itself: not even once an example has been in its place."""
    page.get_by_text(EXAMPLE).first.click()
    expect(page.locator("#image-media img")).to_have_attribute("src", re.compile("image-"))
    page.get_by_role("button", name="Remove Image").click()
    *_, huge = (path for _, path, words in bad_files(tmp_path) if "too large" in words)
    with page.expect_response(re.compile("/upload")):
        upload(page, huge)
    expect(page.locator("#image-media img")).to_have_attribute("src", re.compile(huge.name))
    ask(page)
    expect(page.locator("#image-note [role=alert]")).to_contain_text(huge.name)


def test_animation_gives_its_first_image(page: Page, tmp_path: Path) -> None:
    from PIL import Image

    path, first = tmp_path / "animated.gif", Image.open(IMAGE).convert("RGB")
    other = Image.new("RGB", first.size)
    first.save(path, save_all=True, append_images=[other], duration=100)
    upload(page, path)
    expect(page.locator("#image-media img")).to_be_visible()
    ask(page)
    answered(page)
    assert text_of(page, "full") == SAID


def test_unavailable_models_are_reported(page: Page, tmp_path: Path) -> None:
    page.locator("#model-area > button").click()
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for name, words in (
        ("example/no-such-model", "example/no-such-model"),  # the hub cannot be reached
        (str(tmp_path), "'gpt2' model, which is not supported"),
        (" ", "the model is empty"),
    ):
        page.locator("#model textarea, #model input").fill(name)
        page.locator("#model-load").click()
        expect(page.locator("#model-note [role=alert]")).to_contain_text(words)
    page.locator("#model textarea, #model input").fill("tiny")
    page.locator("#model-load").click()
    expect(page.locator("#model-note [role=status]")).to_contain_text("Loaded tiny")
    expect(page.get_by_text("is a demo model")).to_be_visible()
    upload(page, IMAGE)
    expect(page.locator("#image-media img")).to_be_visible()
    ask(page)
    answered(page)


def test_two_users_at_once(browser: Browser, address: str, asked: Page) -> None:
    users = opened(browser, address)
    other = next(users)
    upload(other, IMAGE)
    expect(other.locator("#image-media img")).to_be_visible()
    ask(other, "What color is the circle?")
    ask(asked, "How many yellow objects are there?")
    expect(other.locator("#image-full")).to_contain_text("purple")
    answered(other)
    answered(asked)
    expect(asked.locator("#image-full")).to_contain_text("How many yellow")
    expect(asked.locator("#image-full")).not_to_contain_text("purple")
    expect(other.locator("#image-full")).not_to_contain_text("How many yellow")
    assert next(users, None) is None


def test_reload_during_an_answer(page: Page) -> None:
    upload(page, IMAGE)
    expect(page.locator("#image-media img")).to_be_visible()
    ask(page, "Describe the image.")
    expect(page.locator("#image-full")).to_contain_text("There")
    page.reload()
    upload(page, IMAGE)
    expect(page.locator("#image-media img")).to_be_visible()
    ask(page)
    answered(page)
    expect(page.locator("#image-full")).to_contain_text(SAID)


def test_closing_the_page_during_an_answer(browser: Browser, address: str, page: Page) -> None:
    """Both places in the queue are taken by pages that go away."""
    for _ in range(2):
        users = opened(browser, address)
        other = next(users)
        upload(other, IMAGE)
        expect(other.locator("#image-media img")).to_be_visible()
        ask(other, "Describe the image.")
        expect(other.locator("#image-full")).to_contain_text("There")
        assert next(users, None) is None
    upload(page, IMAGE)
    expect(page.locator("#image-media img")).to_be_visible()
    ask(page)
    answered(page)
    assert text_of(page, "full") == SAID


def test_other_controls(page: Page) -> None:
    recipe = page.locator("#recipe textarea, #recipe input")
    page.locator("#builder > button").click()
    write(recipe, "hired:0.2")
    keep = page.get_by_label("Preserve the positions of kept tokens")
    expect(keep).not_to_be_checked()
    keep.check()
    expect(recipe).to_have_value("hired:positions=keep")
    keep.uncheck()
    expect(recipe).to_have_value("hired")
    keep.check()
    for place, method in (("prefill", "pyramiddrop"), ("drafter", "draft-ngram")):
        page.locator(f"#method-{place} input").click()
        page.get_by_role("option", name=method, exact=True).click()
        expect(recipe).to_have_value(re.compile(rf"\+{method}"))
    page.get_by_role("button", name="Answers").click()
    longest = page.locator("#tokens input[type=number]")
    longest.fill("40")
    longest.press("Enter")
    page.get_by_label("Include earlier questions in the context").check()
    upload(page, IMAGE)
    expect(page.locator("#image-media img")).to_be_visible()
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
    expect(page.locator("#image-full .message.bot")).to_have_count(2)
    answered(page)
    assert 0 < len(text_of(page, "full")) < len(whole) / 2
    # Its prompt has the first question and its answer in it.
    prompts = [counter(page, "Prompt tokens reused", "full")]
    page.get_by_label("Include earlier questions in the context").uncheck()
    for count in (1, 2):  # the first begins another conversation
        ask(page, "Describe the image.")
        expect(page.locator("#image-full .message.bot")).to_have_count(count)
        answered(page)
    prompts.append(counter(page, "Prompt tokens reused", "full"))
    remembered, alone = (int(text.split(" of ")[1]) for text in prompts)
    assert remembered > alone + 30 > 336


def test_stop_ends_the_answer(page: Page) -> None:
    upload(page, IMAGE)
    expect(page.locator("#image-media img")).to_be_visible()
    ask(page, "Describe the image.")
    expect(page.locator("#image-full")).to_contain_text("There")
    page.locator("#image-stop").click()
    answered(page, words="Stopped")
    ask(page)
    answered(page)


def test_a_video_has_a_strip_of_frames(page: Page) -> None:
    page.get_by_role("tab", name="Video").click()
    upload(page, CLIP, "video")
    expect(page.locator("#video-media video")).to_be_visible()
    ask(page, "Which way does the cyan star move?", "video")
    answered(page, "video")
    expect(page.locator("#video-recipe")).to_contain_text("up")
    expect(page.locator("#video-strip img")).to_have_count(4)
    assert counter(page, "Visual tokens", "full", "video") == "544"
    page.locator("#video-frames input[type=number]").fill("2")
    page.locator("#video-frames input[type=number]").press("Enter")
    ask(page, "Which way does the cyan star move?", "video")
    expect(page.locator("#video-strip img")).to_have_count(2)
    assert counter(page, "Visual tokens", "full", "video") == "272"
    shot(page, "video")


def contrasts(page: Page) -> dict[str, float]:
    """Contrast of the project's own texts with their background, by the formula of WCAG 2."""
    return page.evaluate(
        """() => {
        const rgba = text => { const n = text.match(/[0-9.]+/g).map(Number);
            return [n[0], n[1], n[2], n.length > 3 ? n[3] : 1]; };
        const background = e => { for (; e; e = e.parentElement) {
            const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] == 1) return c; }
            return [255, 255, 255, 1]; };
        const light = c => { const [r, g, b] = c.slice(0, 3).map(v => v / 255).map(
            v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const found = {};
        for (const e of document.querySelectorAll(
                '.note, .counters caption, .counters th, .counters td, .prose p, .message, '
                + '.caption-label, [data-testid=block-info], [data-testid=block-info] + *, '
                + 'button.lg, [role=tab]'))
            if (e.offsetParent && e.innerText.trim()) {
                const [a, b] = [light(rgba(getComputedStyle(e).color)), light(background(e))];
                found[e.className + ' ' + e.innerText.slice(0, 30)] =
                    (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }
        return found; }"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screen(browser: Browser, address: str, scheme: str) -> None:
    narrow = {"viewport": {"width": 390, "height": 800}, "color_scheme": scheme}
    users = opened(browser, f"{address}/?__theme={scheme}", **narrow)
    page = next(users)
    page.get_by_text(QUESTION).first.click()  # an example
    expect(page.locator("#image-media img")).to_be_visible()
    page.locator("#image-ask").click()
    answered(page)
    expect(page.locator("#image-slider img")).to_have_count(2)
    expect(page.locator("#image-depths img")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    ratios = contrasts(page)
    assert len(ratios) > 10
    assert min(ratios.values()) >= 4.5, ratios  # what WCAG asks for
    shot(page, f"narrow-{scheme}")
    assert next(users, None) is None


def test_controls_have_accessible_names(page: Page) -> None:
    """What a screen reader would read out, and that the keyboard alone can ask."""
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('input, textarea, button, select')].filter(
        e => e.offsetParent && e.type !== 'file' && !(e.labels && e.labels.length)
        && !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
        || e.getAttribute('title') || e.innerText.trim())).map(e => e.outerHTML)"""
    )
    assert nameless == []
    page.get_by_text(QUESTION).first.click()
    expect(page.locator("#image-media img")).to_be_visible()
    page.locator("#image-question textarea, #image-question input").focus()
    page.keyboard.press("Enter")
    answered(page)


def test_measured_plots(page: Page) -> None:
    page.get_by_role("tab", name="Measured").click()
    plots = page.locator(".plot img")
    expect(plots).to_have_count(2)
    for number in range(2):
        expect(plots.nth(number)).to_have_js_property("complete", True)
        assert plots.nth(number).evaluate("e => e.naturalWidth") > 500
    shot(page, "measured")
