"""Commands that read or convert files, where the data directory is the cache of a cluster: it is not all there is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from bucket_server import S3Server
from click.testing import CliRunner, Result
from drafts import draft, open_store
from postgres_server import PostgresServer

from memd.cli.main import main
from memd.settings.encryption import EncryptionSettings
from memd.store.bucket.objects import Bucket
from memd.store.cluster.database import Database
from memd.store.cluster.moving import ClusterPlace, Folder, Wish, move
from memd.store.cluster.postgres_shelf import PostgresShelf
from memd.store.disk import DiskFiles
from memd.store.layout import TopicLayout

pytestmark = pytest.mark.process
_numbers = itertools.count(1)


@pytest.fixture
def cluster(postgres: PostgresServer, s3: S3Server, tmp_path: Path) -> Iterator[ClusterPlace]:
    """With two topics; `cluster.yaml` names it, and `cache` is the data directory of a daemon that has one of them."""
    told, url = s3.told(), postgres.database(f"commands_{next(_numbers)}")
    (tmp_path / "cluster.yaml").write_text(json.dumps({"store": {"url": url, **told}}))
    memory = open_store(DiskFiles(), tmp_path / "memory", segment_entries_max=3)
    for number in range(7):
        for name in ("garden", "talk"):
            memory.topic(name).append([draft(f"{name} {number}")])
    memory.close()
    with closing(Database(url)) as database:
        place = ClusterPlace(database, Bucket.of(s3.settings_of(told["bucket"]), {}))
        list(move(Folder(tmp_path / "memory", EncryptionSettings()), place, Wish(is_into_cluster=True)))
        cache = tmp_path / "cache"
        cache.mkdir()
        shelf = PostgresShelf(database, place.bucket, DiskFiles(), cache, url="http://one", lease_seconds=60.0)
        claim = shelf.claim("garden")
        yield place
        claim.release()


def memd(folder: Path, *arguments: str, knows: bool = True) -> Result:
    """`knows`: whether its settings name the cluster."""
    settings = ["--config", str(folder / "cluster.yaml")] if knows else []
    data_dir = ["--data-dir", str(folder / "cache")]
    return CliRunner().invoke(main, [arguments[0], *settings, *data_dir, *arguments[1:]], prog_name="memd")


def said(result: Result) -> str:
    assert result.exit_code == 1, (result.stdout, result.stderr)
    return result.stderr


def test_export_has_all_topics_also_those_that_a_daemon_has(cluster: ClusterPlace, tmp_path: Path) -> None:
    everything = memd(tmp_path, "export")
    assert everything.exit_code == 0, everything.stderr
    lines = [json.loads(line) for line in everything.stdout.splitlines()]
    assert {(one["topic_id"], one["content"]) for one in lines} == {
        (name, f"user: chunk {name} {number}") for number in range(7) for name in ("garden", "talk")
    }
    plain = CliRunner().invoke(main, ["export", "--data-dir", str(tmp_path / "memory")])
    assert everything.stdout == plain.stdout
    assert len(memd(tmp_path, "export", "--topic", "talk").stdout.splitlines()) == 7
    assert "there is no topic 'nothing'" in memd(tmp_path, "export", "--topic", "nothing").stderr
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["garden", "memd.cluster"], "nothing is left"


def test_verify_reads_what_is_kept_and_not_the_cache(cluster: ClusterPlace, tmp_path: Path) -> None:
    TopicLayout(tmp_path / "cache", "garden").active.write_bytes(b"of nobody")
    whole = memd(tmp_path, "verify")
    assert whole.exit_code == 0, whole.stdout
    assert "checked 2 topics" in whole.stdout and "all whole" in whole.stdout
    cluster.database.ask(
        lambda connection: connection.execute("UPDATE memd_object SET crc = 1 WHERE topic = 'talk'").rowcount
    )
    assert "does not match" in said(memd(tmp_path, "verify"))


@pytest.mark.parametrize("command", ["export", "verify", "stats", "erase"])
def test_who_does_not_know_the_cluster_is_told(cluster: ClusterPlace, tmp_path: Path, command: str) -> None:
    arguments = ("garden", "--yes") if command == "erase" else ()
    told = said(memd(tmp_path, command, *arguments, knows=False))
    assert "is the cache of a cluster" in told and "give store.url and store.bucket" in told


def test_what_cannot_be_done_to_a_cache_says_what_to_do_instead(cluster: ClusterPlace, tmp_path: Path) -> None:
    for knows in (True, False):
        assert "back up the database and the bucket" in said(
            memd(tmp_path, "backup", str(tmp_path / "to"), knows=knows)
        )
        assert "memd move the topics into a folder" in said(memd(tmp_path, "reembed", knows=knows))
        assert "encrypt the disks of database, bucket and caches" in said(memd(tmp_path, "encrypt", knows=knows))


def test_commands_need_no_cache(cluster: ClusterPlace, tmp_path: Path) -> None:
    """They may be run on a machine that has none."""
    there = CliRunner().invoke(
        main, ["token", "list", "--config", str(tmp_path / "cluster.yaml"), "--data-dir", str(tmp_path / "none")]
    )
    assert (there.exit_code, there.stderr) == (0, ""), there.stderr
    assert not (tmp_path / "none").exists()


def test_stats_say_that_the_cache_need_not_have_everything(cluster: ClusterPlace, tmp_path: Path) -> None:
    told = memd(tmp_path, "stats")
    assert told.exit_code == 0, told.stderr
    assert "garden" in told.stdout and "the cluster may have more" in told.stdout
