"""What llama.cpp ships beside its library: chat templates, its server's main program, and the tests of its server.

Rule: of the very version that the tests run, and nothing of it is kept in this project. xllamacpp's source distribution
carries it, so it comes from the package registry, with pip and its settings, once, into the virtual environment. Run as
a script it fetches what is missing.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "xllamacpp"
COMPILED = ("common/json-schema-to-grammar.cpp", "vendor/cpp-httplib/httplib.cpp")
WANTED = ("models/templates/", "tools/server/", *COMPILED, "LICENSE")
CODE_WANTED = ("common/", "ggml/include/", "include/", "tools/mtmd/", "tools/ui/ui.", "vendor/")
HEADERS = (".h", ".hpp", ".h.in", ".cpp.in")  # of CODE_WANTED: what the server's main program includes


def folder() -> Path:
    """Where a copy for the installed version is, or would be; where none is installed nothing is there."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # `make quick` does without it
        version = "none"
    return Path(sys.prefix) / "llama.cpp" / version


def chat_templates() -> dict[str, Path]:
    """Name → file of every chat template that llama.cpp ships; nothing where they could not be fetched."""
    return {path.stem: path for path in sorted((folder() / "models" / "templates").glob("*.jinja"))}


def server_tests() -> Path | None:
    """The folder of the tests of llama.cpp's server, or None where they could not be fetched."""
    tests = folder() / "tools" / "server" / "tests"
    return tests if tests.is_dir() else None


def server_sources() -> Path | None:
    """The folder from which llama.cpp's server can be compiled, or None where it could not be fetched."""
    return folder() if all((folder() / name).is_file() for name in COMPILED) else None


def fetch() -> None:
    """Download and unpack them, unless that has been done.

    Raises:
        subprocess.CalledProcessError: if pip cannot download the sources.
    """
    if server_sources() is not None:
        return
    folder().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder().parent) as there:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wanted = f"{PACKAGE}=={importlib.metadata.version(PACKAGE)}"
        subprocess.run([*command, "--no-binary", PACKAGE, "--dest", there, wanted], check=True)
        [archive] = Path(there).glob("*.tar.gz")
        unpacked = Path(there) / "unpacked"
        with tarfile.open(archive) as sources:
            for member in sources:
                _, _, name = member.name.partition("/thirdparty/llama.cpp/")
                if member.isfile() and _is_wanted(name):
                    sources.extract(member.replace(name=name), unpacked, filter="data")
        shutil.rmtree(folder(), ignore_errors=True)  # an earlier memd wanted less of it
        unpacked.rename(folder())  # in one step: a copy that exists is whole


def _is_wanted(name: str) -> bool:
    return name.startswith(WANTED) or (name.startswith(CODE_WANTED) and name.endswith(HEADERS))


if __name__ == "__main__":
    fetch()
