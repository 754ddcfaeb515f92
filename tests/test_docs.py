"""The documentation says what exists and is so, and its links lead somewhere."""

import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import click
import pytest
from daemon_process import DaemonProcess, user
from recording_upstream import RecordingUpstream

from memd.cli.main import main
from memd.conversation import tokens
from memd.conversation.hot_buffer import CORRECTABLE_TURNS
from memd.entries import HELPFUL_STEPS_MAX, UNHELPFUL_STEPS_MAX, UTILITY_RATIO
from memd.settings.loading import KEYS
from memd.settings.model import Config
from memd.store.log import segment
from memd.wire.api import CACHE_BYTES_MAX
from memd.wire.registry import APIS
from memd.wire.sideband import INJECTED_HEADER_BYTES_MAX

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "memd").rglob("*.md")])
PAGES += sorted(
    [
        *(ROOT / "clients").glob("*/*.md"),
        *(ROOT / "examples").glob("*.md"),
        *(ROOT / "examples").glob("*/*.md"),
        *(ROOT / "packaging").glob("*.md"),
    ]
)
COMMANDS = {name: command for name in main.list_commands() if (command := main.get_command(None, name))}


def settings_table() -> dict[str, str]:
    """Setting → default, as the page has them."""
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.*?) \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    return {key: default.strip("`") for key, default in rows}


def shipped_values() -> dict[str, str]:
    """Setting → the words behind it in defaults.yaml."""
    values = {}
    group = ""
    for line in (ROOT / "memd/settings/defaults.yaml").read_text().splitlines():
        found = re.match(r"( *)([a-z_]+):\s*(.*)", line)
        if found is None:
            continue
        indent, name, value = found.groups()
        if not indent:
            group = "" if value else f"{name}."
        if indent or value:
            values[(group if indent else "") + name] = value
    return values


def test_the_settings_page_has_all_settings_in_their_order_with_their_defaults() -> None:
    assert list(settings_table()) == list(KEYS) and settings_table() == shipped_values()


def command_sections() -> dict[str, str]:
    """Command → its section of the page."""
    page = (ROOT / "docs" / "commands.md").read_text()
    return dict(re.findall(r"^## memd (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))


def test_every_command_is_on_the_commands_page_and_no_other() -> None:
    assert set(command_sections()) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_described_under_its_command(name: str) -> None:
    described = set(re.findall(r"--[a-z][a-z-]*", command_sections().get(name, "")))
    existing = {
        flag
        for command in (COMMANDS[name], *getattr(COMMANDS[name], "commands", {}).values())
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for flag in parameter.opts
        if flag.startswith("--")
    }
    assert described == existing


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_a_line_of_help(name: str) -> None:
    assert COMMANDS[name].help
    for parameter in COMMANDS[name].params:
        if isinstance(parameter, click.Argument):  # click shows no help for these; the command's own text names them
            assert str(parameter.metavar).strip("[]") in str(COMMANDS[name].help)
            continue
        assert isinstance(parameter, click.Option)
        assert parameter.help, f"memd {name} {parameter.opts[0]}"


def links(page: Path) -> Iterator[str]:
    """Where a page's links and pictures lead, code left out."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text))


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_documentation_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link} in {page.name}"
        assert target.is_relative_to(ROOT), f"{link} in {page.name} leaves the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link} in {page.name}"


def is_in_the_source_archive(path: str) -> bool:
    """Whether MANIFEST.in, or setuptools by itself, puts a file or folder of the repository into it."""
    by_itself = path in ("README.md", "LICENSE", "pyproject.toml", "MANIFEST.in") or path.startswith("memd/")
    rules = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    grafted = any(path == given or path.startswith(f"{given}/") for verb, given, *_ in rules if verb == "graft")
    pruned = any(fnmatch(path, f"{given}/*") for verb, given, *_ in rules if verb == "prune")
    included = any(fnmatch(path, given) for verb, *patterns in rules if verb == "include" for given in patterns)
    return by_itself or (grafted and not pruned) or included


def test_what_pages_lead_to_is_in_the_source_archive() -> None:
    pages = [page for page in PAGES if is_in_the_source_archive(str(page.relative_to(ROOT)))]
    assert {"docs", "examples", "packaging", "clients"} <= {page.relative_to(ROOT).parts[0] for page in pages}
    for page in pages:
        for link in links(page):
            if not re.match(r"[a-z]+:|#", link):
                target = (page.parent / link.partition("#")[0]).resolve().relative_to(ROOT.resolve())
                assert is_in_the_source_archive(str(target)), f"{page.name}: {link}"


def drawn_tree() -> list[Path]:
    """The folders and modules of the tree in docs/architecture.md, relative to the repository."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    [tree] = re.findall(r"^```\n(memd/\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    folders: list[str] = []
    drawn = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"(?:[\w.]+(?:/|\.py)(?: +|$))+", line.lstrip())
        assert names, f"no folder or module is named in {line!r}"
        for name in names[0].split():
            folders[depth:] = [name]
            drawn.append(Path(*folders))
    return drawn


def test_the_drawn_tree_is_that_of_the_source() -> None:
    """A folder's line covers its modules, which may be drawn as well; those right below memd/ have to be."""
    drawn = drawn_tree()
    assert not [str(path) for path in drawn if not (ROOT / path).exists()], "drawn, but not there"
    modules = [path.relative_to(ROOT) for path in (ROOT / "memd").rglob("*.py")]
    below_memd = {path for path in modules if len(path.parts) == 2 and path.name != "__init__.py"}
    wanted = {path.parent for path in modules} | below_memd
    assert not sorted(str(path) for path in wanted - set(drawn)), "there, but not drawn"


def test_files_that_pages_and_docstrings_name_exist() -> None:
    named = re.compile(
        r"(?<![\w/.-])(?:bench|clients|docs|examples|memd|packaging|tests)/(?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|json|ts|sh|html|js)\b"
    )
    for page in [*PAGES, *(ROOT / "memd").rglob("*.py")]:
        for name in named.findall(page.read_text()):
            assert "NAME" in name or (ROOT / name).exists(), f"{page.relative_to(ROOT)} names {name}"


def test_every_module_that_test_files_share_is_on_the_page_for_contributors() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([a-z_]+\*?)`", "".join(line for line in page.splitlines() if line.startswith("| `")))
    for module in (ROOT / "tests" / "support").glob("*.py"):
        covering = [
            name for name in named if module.stem == name or (name[-1] == "*" and module.stem.startswith(name[:-1]))
        ]
        assert covering, module.name


# Sentences that are quoted here as they are written, beside what shows them; other test files try what else is claimed


def claimed(page: str, *sentences: str) -> None:
    """These stand in the page."""
    text = " ".join((ROOT / page).read_text().split())
    for sentence in sentences:
        assert " ".join(sentence.split()) in text, f"{page} does not say {sentence!r} any more: what shows it, here?"


def test_ports_addresses_and_bounds_that_pages_name_are_those_of_the_product() -> None:
    config = Config()
    claimed("SECURITY.md", "It listens on `127.0.0.1`.")
    claimed("README.md", 'baseURL: "http://127.0.0.1:8765/v1"', "`http://127.0.0.1:8766/memd/` shows each turn")
    assert (config.listen.host, config.listen.port, config.admin.port) == ("127.0.0.1", 8765, "auto")
    claimed("docs/protocol.md", "multiply or divide the score by 1.5, from 1.5⁻⁴", "to 1.5¹⁰", "at most 4 KB")
    assert (UTILITY_RATIO, UNHELPFUL_STEPS_MAX, HELPFUL_STEPS_MAX, INJECTED_HEADER_BYTES_MAX) == (1.5, 4, 10, 4096)
    claimed("docs/protocol.md", "was shown in the last 64 turns of the topic")
    assert CORRECTABLE_TURNS == 64
    claimed("docs/operations.md", "caches, at most 38 MB together: parsed messages, token counts, chunks")
    counts = tokens._COUNTS_BYTES_MAX + 2 * tokens._TEXTS_BYTES_MAX
    assert CACHE_BYTES_MAX + counts + segment.ENTRIES_READ.bytes_max <= 38_000_000


def test_what_the_readme_says_of_installing_and_of_apis_is_so() -> None:
    claimed("README.md", "Python 3.11 or later", "with OpenAI's, Anthropic's or Ollama's API", "make demo", "make test")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert {"chat", "responses", "messages", "ollama"} == {api.name for api in APIS}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "quick", "faults", "cluster"} <= targets
    for named in re.findall(r"`python (bench/\w+\.py)|`(bench/\w+\.py)", (ROOT / "README.md").read_text()):
        assert (ROOT / next(filter(None, named))).exists()


@pytest.mark.process
def test_memd_asks_the_model_server_and_nobody_else(served: DaemonProcess, upstream: RecordingUpstream) -> None:
    claimed("SECURITY.md", "It sends no statistics")
    served.chat([user("The walrus keeps the foghorn's spare key under the third granite step.")])
    served.wait_stored("granite step")
    asked = {request.target.partition("?")[0] for request in upstream.requests}
    assert asked <= {"/v1/chat/completions", "/props", "/apply-template", "/v1/models", "/health"}
