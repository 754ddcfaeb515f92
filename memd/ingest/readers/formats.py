"""The table of formats: which module reads a file of which name, with which library, up to which size.

Rule: pure; a format is known by the end of the file's name. What is in no table is passed over where a folder is added.
"""

from __future__ import annotations

import msgspec

EXTRA = "pip install 'memd-proxy[documents]'"
MB = 1_000_000


class FileFormat(msgspec.Struct, frozen=True):
    """How the files of a format are read."""

    reader: str
    """The module of this folder whose `sections` reads them."""
    bytes_max: int
    needs: str = ""
    """The package to import, of the extra `documents`; empty: none."""


TEXT_FORMAT = FileFormat("text", 2 * MB)
_WORD = FileFormat("word", 100 * MB, "docx")
_SLIDES = FileFormat("slides", 200 * MB, "pptx")
_SHEETS = FileFormat("sheets", 100 * MB, "python_calamine")
_HTML = FileFormat("html", 10 * MB, "lxml")
_ROWS = FileFormat("delimited", 20 * MB)
FOREIGN = {
    ".pdf": FileFormat("pdf", 500 * MB, "pypdfium2"),
    ".docx": _WORD,
    ".docm": _WORD,
    ".pptx": _SLIDES,
    ".pptm": _SLIDES,
    **dict.fromkeys((".xlsx", ".xlsm", ".xlsb", ".xls", ".ods"), _SHEETS),
    **dict.fromkeys((".csv", ".tsv"), _ROWS),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _HTML),
    ".epub": FileFormat("epub", 200 * MB, "lxml"),
}
"""These are read in a process of its own."""
UNREADABLE = {
    **dict.fromkeys((".pages", ".key", ".odt", ".odp", ".doc", ".ppt", ".rtf"), "export it as PDF"),
    ".numbers": "export it as XLSX or PDF",
}
"""Documents that no reader here reads, and what to do instead."""
MARKDOWN = frozenset({".md", ".markdown", ".mdown", ".mkd"})
TEXT = frozenset(
    {
        *(".txt", ".text", ".log", ".rst", ".adoc", ".org", ".tex", ".json", ".jsonl", ".yaml", ".yml", ".toml"),
        *(".ini", ".cfg", ".conf", ".xml", ".css", ".scss", ".py", ".pyi", ".js", ".mjs"),
        *(".cjs", ".ts", ".tsx", ".jsx", ".vue", ".svelte", ".java", ".kt", ".kts", ".scala", ".groovy", ".go", ".rs"),
        *(".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".swift", ".m", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs"),
        *(".ml", ".ex", ".exs", ".erl", ".clj", ".sh", ".bash", ".zsh", ".fish", ".ps1", ".bat", ".sql", ".graphql"),
        *(".proto", ".tf", ".gradle", ".cmake", ".mk"),
    }
)
NAMES = frozenset({"readme", "license", "changelog", "makefile", "dockerfile", "notes", "todo", "contributing"})
"""Files without a suffix that are text."""


def is_readable(name: str) -> bool:
    """Whether a file of this name is read, or named with the reason, where a whole folder is added."""
    suffix = suffix_of(name)
    return suffix in MARKDOWN | TEXT | FOREIGN.keys() | UNREADABLE.keys() or name.lower() in NAMES


def format_of(name: str) -> FileFormat:
    """Return how a file of this name is read; what is not known is read as text."""
    return FOREIGN.get(suffix_of(name), TEXT_FORMAT)


def suffix_of(name: str) -> str:
    """Return the end of a file's name in lower case, with its dot; empty if it has none."""
    stem, dot, suffix = name.lower().rpartition(".")
    return f".{suffix}" if stem and dot else ""
