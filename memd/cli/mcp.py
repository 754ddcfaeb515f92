"""`memd mcp`: the tools of memory for a program that starts memd itself and speaks MCP on standard input and output.

Rule: standard output belongs to the protocol; whatever else is said goes to standard error.
"""

from __future__ import annotations

from pathlib import Path

import click

from memd.cli.flags import config_of, settings_flags
from memd.cli.running import daemon_for
from memd.errors import BadQuestion

NOT_INSTALLED = "memd mcp needs the extra: pip install 'memd-proxy[mcp]'"


@click.command()
@settings_flags
def mcp(config_path: Path | None, data_dir: str | None) -> int:
    """Speak MCP on standard input and output, for agents.

    The program that uses it starts it: docs/mcp.md has the lines for each.

    Example: claude mcp add memory -- memd mcp
    """
    config = config_of(config_path, {"data_dir": data_dir})
    try:
        from memd.admin.mcp_tools import server_for  # takes a second
    except ModuleNotFoundError:
        raise BadQuestion(NOT_INSTALLED) from None
    with daemon_for(config) as daemon:
        server_for(daemon).run("stdio")
    return 0
