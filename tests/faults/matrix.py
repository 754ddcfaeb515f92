"""Every call of a daemon's life on its files fails once, with each error, and for good: `make faults`.

    python tests/faults/matrix.py [--kind write] [--first N] [--every N] [--old] [--json FILE]

First a life without a fault counts the calls of each kind; then each n-th of them fails in a life of its own, some
seconds each. With `--old` each begins on a log of which all indexes and words are missing, as an earlier version left
it, and lasts until the background has made them. Prints one line a fault; exit code 1 if anything acknowledged was
lost, or something else is wrong.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from daemon_process import DaemonProcess  # noqa: E402  # needs the path
from faulty_daemon import ENDS, ERRORS, KINDS, SETTINGS, Fault, Life, OldLog, compiled, live  # noqa: E402
from recording_upstream import recording_upstream  # noqa: E402

LASTING = ("write", "sync", "open", "read")


def one_life(library: Path, fault: Fault, old: OldLog | None = None, keep: Path | None = None) -> Life:
    """A life in a folder of its own; `keep`: where its data directory is copied to."""
    with tempfile.TemporaryDirectory(prefix="memd-fault-") as folder, recording_upstream(window=2048) as upstream:
        daemon = DaemonProcess(Path(folder), upstream.url, SETTINGS)
        try:
            life = live(daemon, library, fault, old)
            if keep is not None:
                shutil.copytree(daemon.data_dir, keep)
            return life
        finally:
            daemon.discard()


def faults(counts: dict[str, int], kinds: list[str], first: int, every: int) -> Iterator[Fault]:
    """The plan: each `every`-th call of each kind with each error, and lasting ones."""
    for kind in kinds:
        for nth in range(first, counts[kind] + 1, every):
            yield from (Fault(kind, nth, error) for error in ERRORS if error != ENDS or kind != "read")
            if kind in LASTING:
                yield Fault(kind, nth, lasts=True)


def main() -> None:
    """Count, then fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--first", type=int, default=1, help="begin with this call")
    parser.add_argument("--every", type=int, default=1, help="leave out all but each n-th call")
    parser.add_argument("--old", action="store_true", help="begin on a log whose indexes and words are missing")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    DaemonProcess.forks = True
    with tempfile.TemporaryDirectory(prefix="memd-inject-") as folder:
        library = compiled(Path(folder))
        old = None
        if asked.old:
            first = one_life(library, Fault(), keep=Path(folder) / "old")
            old = OldLog(Path(folder) / "old", tuple(first.acknowledged))
        healthy = one_life(library, Fault(), old)
        assert not healthy.refused_start, "the daemon does not start on a disk without faults"
        print(f"no fault: {healthy.counts}", *healthy.complaints, sep="\n  ", flush=True)
        told, bad = [], len(healthy.complaints)
        for fault in faults(healthy.counts, asked.kind or list(KINDS), asked.first, asked.every):
            life = one_life(library, fault, old)
            bad += len(life.complaints)
            start = ", did not start" if life.refused_start else ""
            print(f"{fault}: {len(life.acknowledged)} acknowledged{start}", *life.complaints, sep="\n  ", flush=True)
            told.append({"fault": str(fault), "acknowledged": len(life.acknowledged), "complaints": life.complaints})
    if asked.json:
        asked.json.write_text(json.dumps({"counts": healthy.counts, "faults": told}, indent=1))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
