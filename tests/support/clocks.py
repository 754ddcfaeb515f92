"""memd on a machine whose clock is behind the real one."""

from daemon_process import DaemonProcess

_SHIFTED = """
import time
from importlib import reload
from pathlib import Path
import memd.clock
shift, wall, wall_ns = Path({!r}), time.time, time.time_ns
time.time = lambda: wall() + float(shift.read_text())
time.time_ns = lambda: wall_ns() + int(float(shift.read_text()) * 1e9)
reload(memd.clock)  # which has the time of its import
"""


def at_time(daemon: DaemonProcess, *, days_ago: float) -> None:
    """Set the clock of a daemon back by so many days, at once if it runs with this clock already."""
    shift = daemon.folder / "shift"
    temporary = shift.with_suffix(".new")
    temporary.write_text(str(-86_400 * days_ago))
    temporary.replace(shift)
    daemon.first = _SHIFTED.format(str(shift))
