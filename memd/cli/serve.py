"""`memd serve`, `demo`, `mcp` and `config`: the daemon, its tools, and the initial settings.

Rule: flags are checked before the daemon is imported, which takes a second. Only the protocol writes to the standard
output of `memd mcp`. `memd config` prints the file of all settings verbatim.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module, resources
from pathlib import Path
from threading import Thread
from typing import Any

import click

from memd.cli import flags
from memd.cli.running import daemon_for, telling_who_serves
from memd.errors import BadQuestion
from memd.settings.loading import SettingsSource, load_config, places_of_settings
from memd.settings.model import Config
from memd.wording import pip_install

_SETTINGS_OF = {
    "data_dir": "data_dir",
    "host": "listen.host",
    "port": "listen.port",
    "admin_port": "admin.port",
    "log_level": "log.level",
}
_PORT = flags.Number(0, 65_535)
SWITCH_SECONDS = 0.001
"""A computing thread yields to the event loop after so long, instead of Python's 5 ms. Beside a request of 25 MB with
300,000 tool calls other requests then take 5 ms instead of 13 (bench/NOTES.md, 2026-11-27)."""


@click.command()
@flags.settings_flags
@click.option("--host", help="Address to listen on. Default: listen.host, 127.0.0.1.")
@click.option("--port", type=_PORT, help="Port to listen on; 0 takes a free one. Default: 8765.")
@click.option("--admin-port", type=_PORT, help="Port of memd's own page. Default: one above --port, 8766.")
@flags.upstream_flag("The model server, or several. Default: upstream.url, http://127.0.0.1:8080.")
@flags.model_flag("Start llama.cpp with this model and use it as the upstream (needs the `llama` extra).")
@flags.key_flag
@click.option("--log-level", type=flags.OneOf(["debug", "info", "warning", "error"]), help="Default: log.level, info.")
def serve(
    config_path: Path | None, upstream: tuple[str, ...], model: Path | None, key_stdin: bool, **chosen: Any
) -> int:
    """Run the daemon until Ctrl-C or SIGTERM.

    Flags override environment variables (MEMD_LISTEN_PORT and so on), which override the settings file.

    Example: memd serve --upstream http://127.0.0.1:8080
    """
    if model is not None and upstream:
        raise BadQuestion("--model starts its own upstream; give either --model or --upstream")
    # Reads the system's certificate authorities twice, which takes 50 ms on another core.
    Thread(target=import_module, args=("aiohttp.connector",)).start()
    named = {_SETTINGS_OF[flag]: value for flag, value in chosen.items()}
    given = {**named, **flags.servers_of(upstream), "encryption.key": flags.key_of(key_stdin)}
    config = flags.config_of(config_path, given, tells_each=True)
    gc.disable()  # imported objects stay: scanning them takes a tenth of the start
    from memd.daemon.app import serve as serve_until_stopped

    gc.freeze()
    gc.enable()
    sys.setswitchinterval(SWITCH_SECONDS)
    flags.note_memory(config)
    known = {key: value for key, value in given.items() if value is not None}
    path, _ = places_of_settings(config_path, os.environ, known)
    source = SettingsSource(path, config, lambda: load_config(path, os.environ, known))
    with telling_who_serves(config):
        return serve_until_stopped(config, model=model, source=source)


@click.command()
@click.option("--fast", is_flag=True, help="Without pauses for reading.")
@flags.model_flag("Ask this model at the end, with memory and without (needs the `llama` extra).")
@click.option("--stay", is_flag=True, help="Open the page at the end, and stay until Ctrl-C or an empty question.")
def demo(fast: bool, model: Path | None, stay: bool) -> int:
    """Play a long conversation and show what is remembered.

    At a terminal you can ask afterwards.

    Example: memd demo --fast
    """
    from memd.demo import main as play

    return play(fast, model, stay)


@click.command()
def config() -> int:
    """Print all settings with their defaults and what they mean.

    Example: memd config > config.yaml
    """
    click.echo(resources.files("memd.settings").joinpath("defaults.yaml").read_text(encoding="utf-8"), nl=False)
    return 0


@click.command()
@flags.with_settings(flags.config_to_begin)
def mcp(config: Config) -> int:
    """Speak MCP on standard input and output, for agents.

    The program that uses it starts it: docs/mcp.md has the lines for each.

    Example: claude mcp add memory -- memd mcp
    """
    try:
        from memd.admin.mcp_tools import server_for  # takes a second to import
    except ModuleNotFoundError:
        raise BadQuestion(f"memd mcp needs the extra: {pip_install('memd-proxy[mcp]')}") from None
    with daemon_for(config) as daemon:
        server_for(daemon).run("stdio")
    return 0
