"""The real `llama-server` program, for a machine that has only the Python package with llama.cpp in it.

Rule: the program is llama.cpp's own, all of it. xllamacpp's extension module holds the compiled library; only the
files with the server's main program, its HTTP routes and its router are missing there. They are compiled here, from the
sources that `llamacpp_sources` fetched, and linked to that module: some forty seconds, once. All are one unit for the
compiler, because most of its time goes into the headers that they share.

The web page that llama-server carries is not in those sources. In its place are files of the same names with one line.
Run as a script it builds what is missing and prints where it is.
"""

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import llamacpp_sources

COMPILED = (
    *("tools/server/main.cpp", "tools/server/server.cpp", "tools/server/server-http.cpp"),
    "tools/server/server-models.cpp",
    "common/json-schema-to-grammar.cpp",  # the module's own leaves schemas to another library, as llama-server does not
    "vendor/cpp-httplib/httplib.cpp",
)
OWN_HTTP = (
    "-Dhttplib=httplib_plain"  # the module's has TLS and so other layouts: in a namespace of its own they never meet
)
INCLUDED = ("common", "include", "ggml/include", "vendor", "tools/mtmd", "tools/server", ".")
PAGE = {
    "index.html": "text/html",
    "sw.js": "text/javascript",
    "manifest.webmanifest": "application/manifest+json",
    "_app/version.json": "application/json",
}
OLD_STRING_SYMBOL = b"_Z15common_tokenizePK11llama_vocabRKSsbb"  # common_tokenize(), as older C++ libraries name it


class CannotBuild(Exception):
    """The program cannot be built on this machine; the message says why and what to do."""


def program() -> Path:
    """Where the program is, or would be."""
    return llamacpp_sources.folder() / "bin" / "llama-server"


def build() -> Path:
    """Compile and link the program, unless that has been done.

    Raises:
        CannotBuild: if the sources, a compiler or Python's library are not there.
    """
    if program().exists():
        return program()
    sources = llamacpp_sources.server_sources()
    if sources is None:
        raise CannotBuild(
            "llama.cpp's sources are not there: fetch them with `python tests/support/llamacpp_sources.py`"
        )
    program().parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program().parent) as there:
        made = Path(there) / "llama-server"
        try:
            compiled = subprocess.run(_command(sources, Path(there), made), capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise CannotBuild("there is no g++: install it (Debian and Ubuntu: apt install g++)") from None
        if compiled.returncode != 0:
            raise CannotBuild(f"g++ could not build llama-server:\n{compiled.stderr[-4000:]}")
        made.rename(program())  # in one step: a program that exists is whole
    return program()


def _command(sources: Path, generated: Path, made: Path) -> list[str]:
    library = _library()
    _write_page(sources / "tools" / "ui", generated)
    unit = generated / "unit.cpp"
    unit.write_text("".join(f'#include "{sources / name}"\n' for name in COMPILED))
    # The router starts its own executable again, so it must be a program, and the module wants Python's library.
    python = Path(sysconfig.get_config_var("LIBDIR") or ".")
    return [
        *(
            "g++",
            "-std=c++17",
            "-O0",
            "-DLLAMA_SUBPROCESS",
            OWN_HTTP,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(OLD_STRING_SYMBOL not in library.read_bytes())}",
        ),
        *(f"-I{sources / name}" for name in INCLUDED),
        f"-I{generated}",
        *(str(unit), str(generated / "ui.cpp"), str(library), f"-Wl,-rpath,{library.parent}"),
        *(f"-L{python}", f"-lpython{sysconfig.get_config_var('LDVERSION')}", f"-Wl,-rpath,{python}"),
        *("-lpthread", "-o", str(made)),
    ]


def _library() -> Path:
    """xllamacpp's extension module; looked for without loading it."""
    package = importlib.util.find_spec(llamacpp_sources.PACKAGE)
    if package is None or package.origin is None:
        raise CannotBuild("xllamacpp is not installed: pip install xllamacpp")
    found = sorted(Path(package.origin).parent.glob("xllamacpp*.so"))
    if not found:
        raise CannotBuild("xllamacpp has no extension module that g++ can link to on this system")
    return found[0]


def _write_page(templates: Path, generated: Path) -> None:
    """`ui.h` and `ui.cpp`, which llama.cpp's own build makes of its web page."""
    rows = "".join(
        f'    {{ "{name}", asset, sizeof(asset) - 1, "\\"1\\"", "{kind}" }},\n' for name, kind in PAGE.items()
    )
    values = {
        "@N_ASSETS@": str(len(PAGE)),
        "@USE_GZIP@": "false",
        "@ASSET_ARRAYS@": 'static const unsigned char asset[] = "<!doctype html>\\n";',
        "@ASSET_TABLE@": rows,
        "#cmakedefine": "#define",
    }
    for name in ("ui.h", "ui.cpp"):
        text = (templates / f"{name}.in").read_text()
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        (generated / name).write_text(text)


if __name__ == "__main__":
    try:
        print(build())
    except CannotBuild as why:
        sys.exit(str(why))
