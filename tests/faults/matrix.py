"""Every call of a daemon's life on its files fails once, with each error, and for good: `make faults`.

    python tests/faults/matrix.py [--kind write] [--every N] [--json FILE]

First a life without a fault counts the calls of each kind; then each n-th of them fails in a life of its own, some
seconds each. Prints one line a fault; exit code 1 if anything acknowledged was lost, or something else is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from faulty_daemon import ENDS, ERRORS, KINDS, SETTINGS, Fault, Life, compiled, live  # noqa: E402  # needs the path

LASTING = ("write", "sync", "open", "read")


def one_life(library: Path, fault: Fault) -> Life:
    """A life in a folder of its own."""
    from daemon_process import DaemonProcess
    from recording_upstream import recording_upstream

    with tempfile.TemporaryDirectory(prefix="memd-fault-") as folder, recording_upstream(window=2048) as upstream:
        daemon = DaemonProcess(Path(folder), upstream.url, SETTINGS)
        try:
            return live(daemon, library, fault)
        finally:
            daemon.discard()


def faults(counts: dict[str, int], kinds: list[str], every: int) -> Iterator[Fault]:
    """The plan: each `every`-th call of each kind with each error, and lasting ones."""
    for kind in kinds:
        for nth in range(1, counts[kind] + 1, every):
            yield from (Fault(kind, nth, error) for error in ERRORS if error != ENDS or kind != "read")
            if kind in LASTING:
                yield Fault(kind, nth, lasts=True)


def main() -> None:
    """Count, then fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--every", type=int, default=1, help="leave out all but each n-th call")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memd-inject-") as folder:
        library = compiled(Path(folder))
        healthy = one_life(library, Fault())
        print(f"no fault: {healthy.counts}", *healthy.complaints, sep="\n  ", flush=True)
        told, bad = [], len(healthy.complaints)
        for fault in faults(healthy.counts, asked.kind or list(KINDS), asked.every):
            life = one_life(library, fault)
            bad += len(life.complaints)
            start = ", did not start" if life.refused_start else ""
            print(f"{fault}: {len(life.acknowledged)} acknowledged{start}", *life.complaints, sep="\n  ", flush=True)
            told.append({"fault": str(fault), "acknowledged": len(life.acknowledged), "complaints": life.complaints})
    if asked.json:
        asked.json.write_text(json.dumps({"counts": healthy.counts, "faults": told}, indent=1))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
