"""Runs the benches and writes what they print into `bench/RESULTS.md`, with the machine, the versions and the date.

Backs the figures that README.md and docs quote. Takes about an hour, with `--million` another one; `--only` runs some
and leaves the others' sections as they are. What needs data that are not ours (`recall.py`) runs if `--data` names it.

    python bench/run_all.py [--only overhead,store] [--million FOLDER] [--data FILE]
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
RUNS: dict[str, list[str]] = {
    "store": ["--sizes", "5000,100000"],
    "overhead": [],
    "resident": [],
    "start": [],
    "encryption": [],
    "rights": [],
    "pool": [],
    "ingest": [],
    "kv": ["--plot", "docs/images/prompt-cost"],
    "cases": [],
    "times": [],
    "sources": [],
    "soak": ["--minutes", "10"],
    "recall": ["--store", "{stores}"],
}
MILLION: dict[str, list[str]] = {
    "store": ["--sizes", "5000,100000,1000000", "--keep", "{folder}"],
    "overhead": ["--stores", "{folder}", "--chunks", "5000,100000,1000000"],
}
"""In place of those: over a million chunks too."""
PLOTS = {"kv": "../docs/images/prompt-cost.svg"}
PACKAGES = ("aiohttp", "fastembed", "msgspec", "numpy", "onnxruntime", "uvloop", "xllamacpp")
WIDTH = "130"
_HIDDEN = {"--data": "FILE", "--keep": "FOLDER", "--store": "FOLDER", "--stores": "FOLDER"}


def machine() -> str:
    """What this was measured on."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    cpu = f"{len(names)} × {names[0]}" if names else f"{os.cpu_count()} cores"
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {cpu}, {int(memory) / 1e6:.0f} GB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {versions}"
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def run(name: str, arguments: list[str]) -> str:
    """One bench's section."""
    command = ["python", f"bench/{name}.py", *arguments]
    started = time.monotonic()
    environment = {**os.environ, "COLUMNS": WIDTH}
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False
    )
    minutes = (time.monotonic() - started) / 60
    output = (
        done.stdout if done.returncode == 0 else f"{done.stdout}\n{done.stderr[-3000:]}\nexit code {done.returncode}"
    )
    told = "\n".join(line.rstrip() for line in output.strip().splitlines())
    shown = " ".join(_HIDDEN.get(previous, one) for previous, one in pairwise(["", *command]))
    plot = f"\n![{name}]({PLOTS[name]})\n" if name in PLOTS and done.returncode == 0 else ""
    return f"## {name}\n\n`{shown}`, {minutes:.1f} minutes\n{plot}\n```\n{told}\n```\n"


def known_sections() -> dict[str, str]:
    """What is in the page already, by the bench's name."""
    parts = re.split(r"^## (\w+)$", RESULTS.read_text(), flags=re.MULTILINE)[1:] if RESULTS.exists() else []
    return {name: f"## {name}{text.rstrip()}\n" for name, text in zip(parts[::2], parts[1::2], strict=True)}


def main() -> None:
    """Run, and write the page anew after each bench."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(RUNS)}")
    parser.add_argument("--data", help="NAME=PATH of conversations for recall.py")
    parser.add_argument(
        "--million", type=Path, help="an existing folder for the stores, of which one is a million chunks"
    )
    asked = parser.parse_args()
    names = asked.only.split(",") if asked.only else [name for name in RUNS if name != "recall" or asked.data]
    head = (
        "# What the benches printed\n\nWritten by `bench/run_all.py`. On a shared machine only ratios within one run "
        f"count; what followed from them is in [NOTES.md](NOTES.md).\n\n{machine()}\n"
    )
    sections = known_sections() if asked.only else {}
    for name in names:
        print(f"{name} …", flush=True)
        arguments = MILLION.get(name, RUNS[name]) if asked.million else RUNS[name]
        with tempfile.TemporaryDirectory(prefix="memd-bench-") as stores:
            arguments = [one.format(folder=asked.million, stores=stores) for one in arguments]
            sections[name] = run(name, [*arguments, *(["--data", asked.data] if name == "recall" else [])])
        RESULTS.write_text("\n".join([head, *(sections[name] for name in RUNS if name in sections)]))
    print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()
