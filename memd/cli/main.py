"""The `memd` command.

Rule: a command only reads its flags, calls one function and turns the outcome into an exit code: 0 fine, 1 a finding
or failure, 2 wrong usage or settings. A `MemdError` becomes one line on stderr; any other exception is a bug and keeps
its traceback. What a command needs is imported inside it: aiohttp, ONNX Runtime and hnswlib take a second to import,
and `memd --help` or `memd verify` should not wait for what they do not use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from memd import __version__
from memd.cli import memory
from memd.cli.check.command import COMMANDS as CHECK_COMMANDS
from memd.cli.flags import FOUND_SOMETHING, WRONG_USAGE, config_of, existing_data_dir, print_lines, settings_flags
from memd.errors import BadQuestion, BadTopicId, ConfigError, MemdError, StoreError
from memd.store.disk import DiskFiles
from memd.wording import counted, tallied


class ExitCodes(click.Group):
    """A group whose commands return their exit code and may raise `MemdError`."""

    def invoke(self, ctx: click.Context) -> None:
        """Run the command that was named and leave with its exit code."""
        try:
            ctx.exit(super().invoke(ctx))
        except MemdError as error:
            click.echo(f"memd: {error}", err=True)
            ctx.exit(WRONG_USAGE if isinstance(error, ConfigError | BadTopicId | BadQuestion) else FOUND_SOMETHING)


@click.group(cls=ExitCodes, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="memd %(version)s")
def main() -> None:
    """A local daemon that gives any language model an unbounded memory without its client noticing.

    Exit codes: 0 fine, 1 a finding or failure, 2 wrong usage or settings.
    """


@main.command()
@settings_flags
@click.option("--host", help="Address to listen on. Default: listen.host, 127.0.0.1.")
@click.option("--port", type=click.IntRange(0, 65_535), help="Port to listen on; 0 takes a free one. Default: 8765.")
@click.option("--upstream", metavar="URL", help="The model server. Default: upstream.url, http://127.0.0.1:8080.")
@click.option(
    "--model",
    metavar="FILE.gguf",
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
    help="Start llama.cpp with this model and use it as the upstream (needs the `llama` extra).",
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Default: log.level, info.")
def serve(
    config_path: Path | None,
    data_dir: str | None,
    host: str | None,
    port: int | None,
    upstream: str | None,
    model: Path | None,
    log_level: str | None,
) -> int:
    """Run the daemon until Ctrl-C or SIGTERM.

    Flags override environment variables (MEMD_LISTEN_PORT and so on), which override the settings file.
    """
    if model is not None and upstream is not None:
        raise click.UsageError("--model starts its own upstream; give either --model or --upstream")
    given = {
        "data_dir": data_dir,
        "listen.host": host,
        "listen.port": port,
        "upstream.url": upstream,
        "log.level": log_level,
    }
    config = config_of(config_path, given)
    from memd.proxy.app import serve as serve_until_stopped

    return serve_until_stopped(config, model=model)


@main.command()
@click.option("--fast", is_flag=True, help="Without pauses for reading.")
def demo(fast: bool) -> int:
    """Play a long conversation through the whole daemon and show what is remembered. Needs no model."""
    from memd.demo.play import main as play

    return play(fast)


@main.command()
@settings_flags
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
@click.argument("folder", metavar="[DIR]", required=False)
def verify(config_path: Path | None, data_dir: str | None, as_json: bool, folder: str | None) -> int:
    """Read every byte of the log, or of the backup in DIR, and say what was checked and what is damaged.

    Works beside a running daemon and changes nothing.
    """
    checked = existing_data_dir(config_path, folder or data_dir)
    from memd.store.layout import LOCK_NAME
    from memd.store.tools.verify import verify as verify_log

    files = DiskFiles()
    report = verify_log(checked, files, is_served=files.is_locked(checked / LOCK_NAME))
    if as_json:
        click.echo(msgspec.json.encode(report, enc_hook=str))  # str: paths
    else:
        for line in report.lines:
            click.echo(line)
    return 0 if report.ok else FOUND_SOMETHING


@main.command()
@settings_flags
@click.option("--topic", help="Only this topic.")
@click.option("--live", is_flag=True, help="Only chunks as they are now: no superseded and no deprecated entries.")
@click.option("--output", metavar="FILE", default="-", help="Write to this file instead of stdout.")
def export(config_path: Path | None, data_dir: str | None, topic: str | None, live: bool, output: str) -> int:
    """Write the log as JSON Lines, one entry per line, oldest first.

    Works beside a running daemon and changes nothing.
    """
    folder = existing_data_dir(config_path, data_dir)
    from memd.store.tools.export import export as export_log

    # A new or regular file is replaced only when it is complete; /dev/null or a pipe is written as it is.
    atomic = output != "-" and (not Path(output).exists() or Path(output).is_file())
    try:
        with click.open_file(output, "wb", atomic=atomic) as file:
            for entry in export_log(folder, DiskFiles(), topic_id=topic, live_only=live):
                file.write(msgspec.json.encode(entry) + b"\n")
            file.flush()
    except BrokenPipeError:
        # The reader has seen enough (`memd export | head`). Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        name = "stdout" if output == "-" else output
        raise StoreError(f"the export to {name} failed: {error.strerror or error}; try another --output") from None
    return 0


@main.command()
@settings_flags
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def backup(config_path: Path | None, data_dir: str | None, folder: Path) -> int:
    """Bring the folder DIR up to date with the log; DIR is new, empty or an earlier backup.

    Works beside a running daemon. To restore, serve from it: memd serve --data-dir DIR.
    """
    source = existing_data_dir(config_path, data_dir)
    from memd.store.tools.backup import backup as back_up

    report = back_up(source, folder, DiskFiles())
    for finding in report.findings:
        click.echo(finding)
    click.echo(
        f"{folder}: {counted(report.topics, 'topic')}: {counted(report.linked, 'file')} linked, {report.copied:,} "
        f"copied ({counted(report.bytes_copied, 'byte')}), {report.kept:,} there already"
    )
    return FOUND_SOMETHING if report.findings else 0


@main.command(name="import")
@settings_flags
@click.option("--topic", help="Put everything into this topic.")
@click.argument("file", metavar="FILE.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def import_(config_path: Path | None, data_dir: str | None, topic: str | None, file: Path) -> int:
    """Add the lines of FILE.jsonl to the log: entries of `memd export`, or conversations.

    A conversation is a JSON array of messages in OpenAI's format, or an object with such an array as `messages`. What
    the log has already is left out, so an interrupted import is simply done again. Not beside a running daemon.
    """
    config = config_of(config_path, {"data_dir": data_dir})
    from memd.ingest.importing import import_file

    with _progress("importing") as advanced:
        counts = import_file(config, file, topic_id=topic, advanced=advanced)
    said = [f"{file}: {counted(counts.lines, 'line')} read"]
    if counts.entries or counts.entries_known:
        said.append(f"{counted(counts.entries, 'entry')} imported, {counts.entries_known:,} there already")
    if counts.conversations:
        said.append(
            f"{counted(counts.conversations, 'conversation')} imported as {counted(counts.chunks, 'chunk')}, "
            f"{counted(counts.messages_known, 'message')} there already or empty"
        )
    if counts.redacted:
        said.append(f"redacted: {tallied(counts.redacted)}")
    click.echo("; ".join(said))
    return 0


@main.command()
@settings_flags
def reembed(config_path: Path | None, data_dir: str | None) -> int:
    """After a change of embedding.model: embed again what another model wrote, so that it is found again.

    Nothing is lost when it is interrupted: the next one goes on from there. Not beside a running daemon.
    """
    existing_data_dir(config_path, data_dir)
    config = config_of(config_path, {"data_dir": data_dir})
    from memd.ingest.reembedding import reembed as embed_again

    with _progress("embedding") as advanced:
        count, problems = embed_again(config, advanced)
    for problem in problems:
        click.echo(problem)
    click.echo(f"{config.data_dir}: {counted(count, 'chunk')} embedded again")
    return FOUND_SOMETHING if problems else 0


@main.command()
@settings_flags
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
def stats(config_path: Path | None, data_dir: str | None, as_json: bool) -> int:
    """Show what is stored, and how fast a running daemon finds it.

    Works with and without a daemon and changes nothing. Topics that the daemon has not in memory are shown as on disk.
    """
    folder = existing_data_dir(config_path, data_dir)
    config = config_of(config_path, {})
    from memd.cli.stats import gathered, table

    figures = gathered(folder, config.auth.token)
    if as_json:
        click.echo(msgspec.json.encode(figures))
    else:
        print_lines(table(figures))
    return 0


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere; what is yielded takes how much is done and how much there is."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


for command in (*memory.COMMANDS, *CHECK_COMMANDS):
    main.add_command(command)
