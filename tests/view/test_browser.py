"""Every view in a real browser, with the text of an attacker in each of them."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

pytestmark = pytest.mark.browser
CHROMIUM = ("chromium", "google-chrome")


@contextmanager
def shown(*words: str) -> Iterator[str]:
    """What `outloop view` prints, while it serves."""
    command = [sys.executable, "-m", "outloop.cli", "view", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


@pytest.fixture(scope="module")
def link(run_folder: Path) -> Iterator[str]:
    """Of a page that shows one run."""
    with shown(str(run_folder)) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The distribution's Chromium (make chromium)."""
    path = next(filter(None, map(shutil.which, CHROMIUM)))
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser, link: str) -> Iterator[Page]:
    """A tab that has followed the link; ends with no error on its console."""
    context = browser.new_context()
    opened = context.new_page()
    problems: list[str] = []
    opened.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(link)
    expect(opened.locator("h1")).to_have_count(1)
    yield opened
    context.close()
    # The server's refusals, and the browser's of markup, are on the console.
    assert [text for text in problems if not re.search("404|TrustedHTML", text)] == []


def go(page: Page, where: str) -> None:
    """Open an address of the run and wait until it is shown."""
    page.goto(f"{page.url.partition('#')[0]}#/shown/{where}")
    expect(page.locator("#main")).to_have_attribute("data-shown", f"#/shown/{where}")


def test_the_overview_draws_its_curves(page: Page) -> None:
    """With what a step's time went to, fates and events; a chart tells its numbers to a key."""
    assert "key=" not in page.url
    titles = page.locator(".chart h3").all_text_contents()
    assert {"Reward", "Where a step's time went", "Entropy", "Groups dropped"} <= set(titles)
    chart = page.get_by_role("img", name=re.compile("Reward. reward: from 0.1 to 0.8"))
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".tip.shown")).to_contain_text("step 7")
    expect(page.locator(".tip.shown")).to_contain_text("0.7 ± 0.2")
    expect(page.locator(".events")).to_contain_text("router-0")
    lanes = page.get_by_role("img", name=re.compile("Who waited for whom. the trainer waited"))
    expect(lanes).to_be_visible()
    page.get_by_role("button", name="last minute").click()
    expect(page.get_by_role("button", name="last minute")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("link", name="lost: environment").click()
    expect(page.locator("#rows tbody tr")).to_have_count(1)


def test_the_longest_failed_episode_is_found_and_says_why(page: Page) -> None:
    """By keys alone: the list, the search, the row, the reason; its address shows it again."""
    page.keyboard.press("e")
    expect(page.locator("#rows tbody tr")).to_have_count(4)
    page.keyboard.press("/")
    page.keyboard.type("question")
    page.keyboard.press("Enter")
    expect(page.locator(".count")).to_contain_text("3 episodes")
    page.get_by_role("link", name="tokens", exact=True).click()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("tokens")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator(".card.error")).to_contain_text("the sandbox did not start")
    again = page.context.new_page()
    again.goto(page.url)
    expect(again.locator(".card.error")).to_contain_text("the sandbox did not start")
    again.close()


def test_an_episode_is_a_tree_of_turns(page: Page) -> None:
    """Tool calls and results apart from text; a branch says where it parts, with both texts."""
    go(page, "episode/good")
    expect(page.locator(".turn")).to_have_count(3)
    expect(page.locator(".call")).to_contain_text('"name": "add"')
    expect(page.locator(".result")).to_contain_text("4")
    page.locator(".why summary").click()
    expect(page.locator(".why .two")).to_contain_text("wrong")
    assert page.locator("#turn-2").evaluate("e => e.style.getPropertyValue('--depth')") == "1"
    page.get_by_label("text as the server saw it").check()
    expect(page.locator("#turn-0 .raw.output")).to_contain_text("<tool_call>")


def test_attempts_stand_side_by_side(page: Page) -> None:
    """Each with its reward and its distance to the group's mean."""
    go(page, "group/g0-1")
    expect(page.locator(".side thead th")).to_have_count(3)
    expect(page.locator(".side thead")).to_contain_text("+0.5")
    expect(page.locator(".side thead")).to_contain_text("\u22120.5")
    expect(page.locator(".side tbody tr")).to_have_count(3)


def test_a_task_is_shown_version_by_version(page: Page) -> None:
    """Reached from an episode: a column for each version, rewards, and where the texts part."""
    go(page, "episode/good")
    page.get_by_role("link", name="its task by version").click()
    expect(page.locator("h1")).to_have_text("Task sum")
    heads = ["version 302 attempts", "version 411 attempt"]
    expect(page.locator(".versions thead th")).to_have_text(heads)
    expect(page.locator(".versions .attempts").nth(1)).to_contain_text('"name": "add"')
    expect(page.get_by_role("img", name=re.compile("Reward of this task"))).to_be_visible()
    page.get_by_role("link", name="as a list").click()
    expect(page.locator("#rows tbody tr")).to_have_count(3)


def test_a_token_tells_all_that_is_known_of_it(page: Page) -> None:
    """Id, text, logprob, version and mask; keys choose the color and move."""
    go(page, "tokens/good")
    detail = page.locator(".detail")
    page.locator(".area").focus()
    page.keyboard.press("3")
    expect(page.locator("#by-version")).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".keys")).to_contain_text("version 4")
    page.locator("#turn-1 .tok:not(.given)").nth(1).click()
    expect(detail).to_contain_text("policy version4")
    expect(detail).to_contain_text("no: after_stop")
    page.keyboard.press("ArrowLeft")
    expect(detail).to_contain_text("behavior logprob-0.1")
    assert "by=version" in page.url


def test_hostile_text_is_only_text(page: Page) -> None:
    """In every view: nothing of it runs, makes an element, or turns the line around."""
    for where, shows in (
        ("overview", "with"),
        ("episodes", ""),
        ("episode/attack", "<script>window.hacked=1</script>"),
        ("episode/attack?raw=1", "<img src=x onerror=window.hacked=2>"),
        ("tokens/attack", "<script>window.hacked=1</script>"),
        ("group/g0-1", ""),
        (
            "task/%3Cimg%20src%3Dx%20onerror%3Dwindow.hacked%3D2%3E",
            "<script>window.hacked=1</script>",
        ),
        ("episodes?text=%3Cscript%3Ewindow.hacked%3D6%3C%2Fscript%3E", ""),
        ("episode/%3Cimg%20src=x%20onerror=window.hacked=7%3E", "is not in the archive"),
    ):
        go(page, where)
        if shows and where != "overview":
            expect(page.locator("main")).to_contain_text(shows)
        page.wait_for_timeout(50)
        assert page.evaluate("window.hacked") is None, where
        assert (
            page.locator(
                "main script, main img, main svg[onload], main a[href^=javascript]"
            ).count()
            == 0
        )
        assert "\u202e" not in page.locator("main").inner_text()
    assign = "document.body.innerHTML = '<p>x</p>'"
    refused = page.evaluate(f"() => {{ try {{ {assign} }} catch (error) {{ return error.name }} }}")
    assert refused == "TypeError"


def test_light_and_dark(browser: Browser, link: str) -> None:
    """As the system has it, until a key chooses; the choice stays."""
    context = browser.new_context(color_scheme="dark")
    tab = context.new_page()
    tab.goto(link)

    def background() -> str:
        return str(tab.evaluate("getComputedStyle(document.body.parentElement).backgroundColor"))

    expect(tab.locator(".tiles")).to_be_visible()
    dark = background()
    tab.keyboard.press("t")
    assert background() != dark
    tab.reload()
    assert background() != dark
    context.close()


def test_runs_are_listed_and_compared(browser: Browser, run_folder: Path) -> None:
    """The demo beside another run: both in one chart, and the address keeps the choice."""
    with shown(str(run_folder), "--demo") as url:
        tab = browser.new_page()
        tab.goto(url)
        expect(tab.locator("tbody tr")).to_have_count(2)
        tab.get_by_role("link", name="demo").click()
        expect(tab.locator(".tiles")).to_contain_text("episodes kept")
        tab.locator(".compare").get_by_text("shown").click()
        reward = tab.locator(".chart", has_text="Reward").first
        expect(reward.locator(".legend")).to_have_text("demoshown")
        tab.reload()
        expect(reward.locator(".legend")).to_have_text("demoshown")
        tab.close()
