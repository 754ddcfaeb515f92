"""A real nginx with the servers of a documented configuration.

Rule: a test that needs it is skipped where the machine has none. What the package registries have of it are binaries of
people whom the project does not know, so it is the system's own or none.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon_process import wait_until


@contextmanager
def running_nginx(folder: Path, servers: str, is_up: Callable[[], bool]) -> Iterator[None]:
    """Serve until the block ends; it begins as soon as `is_up()`.

    Args:
        folder: for its files.
        servers: what stands within `http {}`.
    """
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("there is no nginx; on Debian and Ubuntu: apt install nginx-light")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\nevents {{}}\n"
        f"http {{ access_log off;\n{paths}{servers} }}\n"
    )
    process = subprocess.Popen([program, "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.PIPE)
    try:
        wait_until(lambda: process.poll() is not None or is_up(), lambda: (folder / "error.log").read_text())
        assert process.poll() is None, process.communicate()
        yield
    finally:
        process.terminate()
        process.communicate(timeout=120)
