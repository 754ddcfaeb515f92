"""memd on a machine whose clock is behind the real one."""

from __future__ import annotations

import sys

from daemon_process import DaemonProcess

_SHIFTED = """
import sys, time
from pathlib import Path
shift, wall, wall_ns = Path(sys.argv.pop(1)), time.time, time.time_ns
time.time = lambda: wall() + float(shift.read_text())
time.time_ns = lambda: wall_ns() + int(float(shift.read_text()) * 1e9)
from memd.cli.main import main
sys.exit(main())
"""


def at_time(daemon: DaemonProcess, *, days_ago: float) -> None:
    """Set the clock of a daemon back by so many days, at once if it runs with this clock already."""
    shift = daemon.folder / "shift"
    temporary = shift.with_suffix(".new")
    temporary.write_text(str(-86_400 * days_ago))
    temporary.replace(shift)
    real = type(daemon).command
    daemon.forks = False  # it is not `memd` that is started

    def command(*flags: str) -> list[str]:
        return [sys.executable, "-c", _SHIFTED, str(shift), *real(daemon, *flags)[3:]]

    vars(daemon)["command"] = command
