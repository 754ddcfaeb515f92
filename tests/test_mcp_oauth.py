"""OAuth as people and programs meet it: the official TypeScript client's whole flow, allowed in a real Chromium."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import Serving
from daemon_process import DaemonProcess, token_setting
from page_browser import DESK, PHONE, chromium, tab
from playwright.sync_api import Browser, Page, expect
from typescript_client import CLIENTS, NODE, TypeScriptClient

if chromium() is None:
    pytest.skip("there is no Chromium; on Debian and Ubuntu: apt install chromium", allow_module_level=True)

OWNER, ANN = "the-owner-has-this-token", "ann-has-a-token-of-her-own"
LIST = {"name": "list_topics", "arguments": {}}


@pytest.fixture
def daemon(serving: Serving) -> DaemonProcess:
    ann = token_setting("ann", ANN, "read", "write", "correct", topics=["team-*"])
    return serving({"auth": {"token": OWNER, "tokens": [ann]}})


def remember(topic: str, content: str) -> dict[str, Any]:
    return {"name": "remember", "arguments": {"content": content, "topic": topic}}


class Program:
    """A program on this computer: the official client, run by Node."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def says(self, what: str) -> Any:
        """The next thing that it says, which has to be this."""
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline()
        assert line, self._process.stderr.read()
        said = json.loads(line)
        assert list(said) == [what], said
        return said[what]


@contextmanager
def program(daemon: DaemonProcess, *calls: dict[str, Any]) -> Iterator[Program]:
    process = subprocess.Popen(
        [NODE, "mcp_oauth.ts", f"{daemon.own_url}/mcp"],
        cwd=CLIENTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NODE_NO_WARNINGS": "1"},
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"name": "An editor", "calls": calls}))
        process.stdin.close()
        yield Program(process)
    finally:
        process.kill()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        process.wait()


@contextmanager
def consent_page(browser: Browser, daemon: DaemonProcess, address: str, **more: Any) -> Iterator[Page]:
    with tab(browser, daemon.own_url, **more) as watched:
        watched.expected = ("asked elsewhere: http://localhost:", "status of 403", "status of 422")
        watched.page.goto(address)
        yield watched.page
        assert watched.unexpected() == []


@pytest.mark.parametrize(
    "view", [{"viewport": DESK, "color_scheme": "light"}, {"viewport": PHONE, "color_scheme": "dark"}]
)
def test_a_program_is_allowed_in_the_browser_and_has_what_the_person_left_it(
    typescript: TypeScriptClient, browser: Browser, daemon: DaemonProcess, view: dict[str, Any]
) -> None:
    calls = [remember("team-lamp", "The keeper is Ada."), remember("team-other", "x"), LIST]
    with program(daemon, LIST, *calls) as editor:
        with consent_page(browser, daemon, editor.says("open"), **view) as page:
            expect(page.get_by_role("heading", level=1)).to_have_text("May this program use your memory?")
            expect(page.locator("main")).to_contain_text("An editor asks for access")
            expect(page.locator("dl")).to_contain_text("a program on this computer, at http://localhost:")
            assert page.evaluate("document.documentElement.scrollWidth") <= view["viewport"]["width"]
            page.get_by_label("correct").uncheck()
            page.get_by_label("Only in these topics").fill("team-lamp secret")
            for token, problem in (("a wrong one", "no token of this memd"), (ANN, "no topic like secret")):
                page.get_by_label("Your memd token").fill(token)
                page.get_by_role("button", name="Allow").click()
                expect(page.get_by_role("alert")).to_contain_text(problem)
                expect(page.get_by_label("Your memd token")).to_have_value("")
            page.get_by_label("Only in these topics").fill("team-lamp")
            page.get_by_label("Your memd token").fill(ANN)
            page.get_by_role("button", name="Allow").click()
            expect(page.get_by_role("heading")).to_have_text("Back in the program")
        editor.says("open")  # after it was revoked it asks again
        told = editor.says("told")
    assert told["answer"]["iss"] == daemon.own_url and told["answer"]["state"] == "a state"
    assert told["scope"] == "read write" and told["refreshed"]
    nothing, noted, refused, *topics = told["replies"]
    assert nothing == "Nothing is remembered yet." and {one.partition(":")[0] for one in topics} == {"team-lamp"}
    assert "no right to write in the topic 'team-other'" in refused
    assert noted.startswith("Remembered in topic team-lamp: [mem:")
    assert told["after_revocation"] == "UnauthorizedError"
    assert ANN not in (daemon.data_dir / "memd.grants").read_text()


def test_a_person_can_refuse_without_a_token(
    typescript: TypeScriptClient, browser: Browser, daemon: DaemonProcess
) -> None:
    with program(daemon, LIST) as editor:
        with consent_page(browser, daemon, editor.says("open")) as page:
            page.get_by_role("button", name="Refuse").click()
            expect(page.get_by_role("heading")).to_have_text("Back in the program")
        answer = editor.says("told")["answer"]
    assert answer["error"] == "access_denied" and answer["iss"] == daemon.own_url
    assert json.loads((daemon.data_dir / "memd.grants").read_bytes())["grants"] == []
