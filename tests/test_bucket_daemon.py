"""The backup to a bucket as an operator meets it: a daemon that is killed, a disk that is lost, commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bucket_server import S3Server
from click.testing import CliRunner, Result
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, wait_until
from recording_upstream import RecordingUpstream

from memd.cli.main import main
from memd.store.bucket.objects import Bucket

SECONDS = 0.2
SAID = (
    "",
    "the keeper has two dogs",
    "paint is cheaper in Brest",
    "the stairs were counted in June: 214",
    "oil comes by boat on Fridays",
    "nobody knows who broke the lens",
    "rent is 400 euros a month",
    "the radio needs new batteries",
    "Ann plays the violin upstairs",
    "a museum wants to buy it",
)
"""Nothing is like another: what is nearly the same, and stored together, is stored once."""


def settings_for(s3: S3Server, **more: Any) -> tuple[dict[str, Any], Bucket]:
    made = s3.settings()
    names = ("bucket", "endpoint", "region", "access_key", "secret_key")
    backup = {name: getattr(made, name) for name in names} | {"seconds": SECONDS}
    return {"backup": backup, "buffer": {"store_after_seconds": 0.0}, **more}, Bucket.of(made, {})


def health(daemon: DaemonProcess) -> dict[str, Any]:
    told: dict[str, Any] = ask(f"{daemon.own_url}/memd/stats").json["backup"]
    return told


def remember(daemon: DaemonProcess, *numbers: int) -> None:
    notes = [{"content": f"Of lighthouse number {number} : {SAID[number]}."} for number in numbers]
    assert ask(f"{daemon.own_url}/memd/notes", {"notes": notes, "topic_id": "lamps"}).status == 200


def restored(daemon: DaemonProcess, source: str, folder: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["restore", source, str(folder), "--config", str(daemon.config), *flags])


def texts(daemon: DaemonProcess, folder: Path) -> str:
    told = daemon.run("export", "--data-dir", str(folder))
    assert told.returncode == 0, told.stderr
    return told.stdout


def has(bucket: Bucket, words: str) -> bool:
    every = [one.key for prefix in ("rounds/", "files/") for one in bucket.listed(prefix)]
    return any(words.encode() in (bucket.get(key) or b"") for key in every)


def test_a_disk_that_is_lost_under_a_killed_daemon_comes_back_out_of_the_bucket(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, s3: S3Server, tmp_path: Path
) -> None:
    settings, bucket = settings_for(s3)
    daemon = make_daemon(upstream.url, settings).start()
    for number in range(1, 8):
        remember(daemon, number)
    wait_until(lambda: has(bucket, "lighthouse number 7 "), lambda: f"{health(daemon)}")
    remember(daemon, 8)
    daemon.kill()
    shutil.rmtree(daemon.data_dir)

    daemon.start()  # whoever does not know yet that the disk was lost
    wait_until(lambda: health(daemon)["trouble"] is not None, lambda: f"{health(daemon)}")
    assert "has the backup of another data directory" in health(daemon)["trouble"]
    daemon.terminate()
    shutil.rmtree(daemon.data_dir)

    told = restored(daemon, settings["backup"]["bucket"], daemon.data_dir, "--json")
    assert told.exit_code == 0, told.stderr
    assert json.loads(told.stdout)["topics"] == 1
    assert daemon.run("verify", str(daemon.data_dir)).returncode == 0
    there = b"".join(path.read_bytes() for path in daemon.data_dir.rglob("*") if path.is_file()).decode(
        "utf-8", "ignore"
    )
    told_of = [f"Of lighthouse number {number} : {SAID[number]}." for number in range(1, 8)]
    assert [text for text in told_of if text not in there] == []
    daemon.start()
    daemon.wait_stored(*told_of)  # what was in the journal alone is stored by the start
    found = [entry["content"] for entry in daemon.export()]
    assert [sum(text in one for one in found) for text in told_of] == [1] * 7
    remember(daemon, 9)
    wait_until(lambda: has(bucket, "lighthouse number 9 "), lambda: f"{health(daemon)}")


def test_a_daemon_that_ends_sends_the_last_changes_first(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, s3: S3Server
) -> None:
    settings, bucket = settings_for(s3)
    settings["backup"]["seconds"] = 3600
    daemon = make_daemon(upstream.url, settings).start()
    wait_until(
        lambda: health(daemon)["lag_seconds"] < 60 and health(daemon)["requests"] > 5, lambda: f"{health(daemon)}"
    )
    remember(daemon, 1)
    assert not has(bucket, "lighthouse")
    daemon.terminate()
    assert has(bucket, "lighthouse number 1 ")


def test_erasing_says_that_the_bucket_has_it_until_it_has_not(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, s3: S3Server
) -> None:
    settings, bucket = settings_for(s3)
    daemon = make_daemon(upstream.url, settings).start()
    remember(daemon, 1)
    remember(daemon, 2)
    wait_until(lambda: has(bucket, "lighthouse number 2 "), lambda: f"{health(daemon)}")
    found = [json.loads(line) for line in texts(daemon, daemon.data_dir).splitlines()]
    chunk = next(one["id"] for one in found if "number 1 " in one["content"])
    told = daemon.run("erase", "--chunk", chunk, "--yes", "--data-dir", str(daemon.data_dir))
    assert f"the backup in {settings['backup']['bucket']}, until one of its next rounds" in told.stdout, told.stderr
    wait_until(lambda: not has(bucket, "lighthouse number 1 "), lambda: f"{health(daemon)}")
    assert has(bucket, "lighthouse number 2 ")


def test_requests_go_on_while_the_bucket_is_away_and_the_metric_tells(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, s3: S3Server
) -> None:
    settings, _ = settings_for(s3)
    settings["backup"]["endpoint"] = "http://127.0.0.1:9"
    daemon = make_daemon(upstream.url, settings).start()
    remember(daemon, 1)
    assert daemon.chat([{"role": "user", "content": "hello"}]).status == 200
    wait_until(lambda: health(daemon)["trouble"] is not None, lambda: f"{health(daemon)}")
    told = ask(f"{daemon.own_url}/memd/metrics").body.decode()
    line = next(line for line in told.splitlines() if line.startswith("memd_backup_lag_seconds "))
    assert float(line.split()[1]) > 0
    assert "backup.endpoint" in health(daemon)["trouble"]


def test_the_check_says_how_the_bucket_is(make_daemon: MakeDaemon, upstream: RecordingUpstream, s3: S3Server) -> None:
    settings, _ = settings_for(s3)
    daemon = make_daemon(upstream.url, settings).start()

    def checked() -> list[dict[str, str]]:
        told = daemon.run("check", "--config", str(daemon.config), "--json")
        return [one for one in json.loads(told.stdout)["checks"] if one["check"] == "backup"]

    assert [one["mark"] for one in checked()] == ["ok", "ok"]
    s3.keep_versions(s3.settings_of(settings["backup"]["bucket"]))
    assert checked()[0]["mark"] == "warning"
    assert "keeps versions" in checked()[0]["said"]
    daemon.terminate()
    daemon.configure(settings | {"backup": settings["backup"] | {"bucket": "s3://bucket-none/memd"}})
    [failed] = checked()
    assert (failed["mark"], "does not exist" in failed["remedy"] + failed["said"]) == ("failed", True)


def test_a_restoration_of_nothing_says_so(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, s3: S3Server, tmp_path: Path
) -> None:
    settings, _ = settings_for(s3)
    daemon = make_daemon(upstream.url, settings)
    for source, said in (
        (settings["backup"]["bucket"], "has no backup"),
        ("/some/folder", "has no backup of memd; give its folder, or s3://BUCKET/PREFIX"),
        ("https://bucket", "is no bucket; give s3://BUCKET/PREFIX"),
    ):
        told = restored(daemon, source, tmp_path / "to")
        assert told.exit_code in (1, 2)
        assert said in told.stderr
    assert not (tmp_path / "to").exists()
