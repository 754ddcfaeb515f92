"""`memd config`: the settings file to begin with.

Rule: it is the config.yaml of this version, word for word; a test holds it and the settings together.
"""

from __future__ import annotations

from importlib import resources

import click


@click.command()
def config() -> int:
    """Print all settings with their defaults and what they mean.

    Example: memd config > config.yaml
    """
    click.echo(resources.files("memd.settings").joinpath("defaults.yaml").read_text(encoding="utf-8"), nl=False)
    return 0
