"""The threads that take turns on the interpreter are on one core while nobody else wants it, and no others are."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from memd.proxy import one_core
from memd.proxy.one_core import APART_SECONDS, OTHERS_MAX, OneCore, OthersUsage, core_to_hold, on_one_core
from memd.telemetry.metrics import Metrics
from memd.telemetry.tasks import Tasks

MUCH = 2 * OTHERS_MAX
CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
holds_threads = [
    pytest.mark.linux,
    # They see threads move from one core to another, and be on one but not on the other: that takes two.
    pytest.mark.skipif(len(CORES) < 2, reason="with one core there is nothing to choose"),
]


def test_the_freest_core_is_held_and_kept_while_others_take_little_of_it() -> None:
    assert core_to_hold({0: 0.2, 1: 0.1}, None) == 1
    assert core_to_hold({0: 0.2, 1: 0.1}, 0) == 0


def test_a_core_that_others_want_is_left_for_a_freer_one_or_for_none() -> None:
    assert core_to_hold({0: MUCH, 1: 0.1}, 0) == 1
    assert core_to_hold({0: MUCH, 1: MUCH}, 0) is None
    assert core_to_hold({0: MUCH, 1: MUCH}, None) is None


def test_a_core_that_is_no_longer_allowed_is_left() -> None:
    assert core_to_hold({0: 0.1}, 1) == 0


# -- what others take -------------------------------------------------------------------------------------------------


class Proc:
    """A folder as /proc is, with two cores."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tell(self, busy: tuple[int, int], threads: dict[int, tuple[int, int]]) -> None:
        """`busy`: ticks of each core; `threads`: of each its ticks, and the core where it was last."""
        lines = [f"cpu{core} {ticks} 0 0 7777 50 0 0 0 0 0" for core, ticks in enumerate(busy)]
        (self.folder / "stat").write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *lines, "intr 5", "ctxt 6"]))
        for thread, (ticks, core) in threads.items():
            (folder := self.folder / "self/task" / str(thread)).mkdir(parents=True, exist_ok=True)
            fields = ["S", *["0"] * 49]
            fields[11], fields[12], fields[36] = str(ticks - 1), "1", str(core)
            (folder / "stat").write_text(f"{thread} (a (strange) name 3) {' '.join(fields)}\n")


def test_what_others_take_is_what_a_core_did_without_what_this_process_used_of_it(tmp_path: Path) -> None:
    proc, second = Proc(tmp_path), os.sysconf("SC_CLK_TCK")
    usage = OthersUsage(tmp_path)
    proc.tell((1000, 2000), {7: (500, 0), 8: (100, 1)})
    assert usage.since_last(50.0) == {}
    # In two seconds core 0 was busy for one, all of it by thread 7; core 1 for two, half a second by thread 8 and half
    # by a thread that is new.
    proc.tell(
        (1000 + second, 2000 + 2 * second),
        {7: (500 + second, 0), 8: (100 + second // 2, 1), 9: (second // 2, 1)},
    )
    assert usage.since_last(52.0) == pytest.approx({0: 0.0, 1: 0.5})


def test_a_core_that_came_since_is_not_judged(tmp_path: Path) -> None:
    proc, usage = Proc(tmp_path), OthersUsage(tmp_path)
    proc.tell((1000, 2000), {7: (500, 0)})
    usage.since_last(1.0)
    (tmp_path / "stat").write_text((tmp_path / "stat").read_text() + "\ncpu2 5 5 5 5 5 5 5 5 5 5")
    assert set(usage.since_last(2.0)) == {0, 1}


def test_what_others_took_while_nobody_looked_does_not_count(tmp_path: Path) -> None:
    proc, usage = Proc(tmp_path), OthersUsage(tmp_path)
    proc.tell((1000, 2000), {7: (500, 0)})
    usage.since_last(1.0)
    usage.forget()
    proc.tell((9000, 9000), {7: (500, 0)})
    assert usage.since_last(60.0) == {}
    proc.tell((9000, 9000), {7: (500, 0)})
    assert usage.since_last(61.0) == {0: 0.0, 1: 0.0}


@pytest.mark.linux
def test_the_system_tells_what_others_take_of_each_core() -> None:
    usage = OthersUsage()
    usage.since_last(0.0)
    assert set(usage.since_last(1.0)) >= set(CORES)


# -- the threads ------------------------------------------------------------------------------------------------------


class Others(OthersUsage):
    """What they take, as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[int, float] = {}
        self.free(CORES[0])

    def free(self, *cores: int) -> None:
        """Others take much of all cores but these."""
        self.told = {core: 0.0 if core in cores else MUCH for core in CORES}

    def since_last(self, now: float) -> dict[int, float]:
        return self.told


class House:
    """A thread as the event loop's, one that takes turns with it, and one of a model."""

    def __init__(self) -> None:
        self.others = Others()
        self.loop, self.search, self.model = (
            ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("loop", "memd-search", "memd-embed")
        )
        self.pools = self.loop, self.search, self.model
        self.one_core = self.loop.submit(lambda: OneCore(self.others)).result()
        self.now = 1000.0

    def look(self) -> None:
        """As it does each second."""
        self.now += 1
        self.loop.submit(self.one_core.look, self.now).result()

    def hold(self) -> None:
        """See all threads where they belong, on and beside the first core."""
        self.cores()  # each is there
        self.look()
        assert self.one_core.held == CORES[0]
        assert self.cores() == ({CORES[0]}, {CORES[0]}, set(CORES))

    def cores(self) -> tuple[set[int], ...]:
        """Where the three may run."""
        return tuple(map(cores_of, self.pools))


def cores_of(pool: ThreadPoolExecutor) -> set[int]:
    return pool.submit(os.sched_getaffinity, 0).result()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.loop.submit(made.one_core.let_go).result()
    made.one_core._ended.set()
    for pool in made.pools:
        pool.shutdown()


class TestHeldThreads:
    """By the system that runs these tests."""

    pytestmark = holds_threads

    def test_those_that_take_turns_are_on_one_core_and_the_model_s_are_free(self, house: House) -> None:
        house.hold()

    def test_they_move_to_a_freer_core(self, house: House) -> None:
        house.hold()
        house.others.free(CORES[1])
        house.look()
        assert house.cores() == ({CORES[1]}, {CORES[1]}, set(CORES))

    def test_they_are_free_for_a_while_after_others_wanted_all_cores(self, house: House) -> None:
        house.hold()
        house.others.free()
        house.look()
        assert house.cores() == (set(CORES),) * 3
        house.others.free(*CORES)
        house.look()
        assert house.one_core.held is None
        house.now += APART_SECONDS
        house.hold()

    def test_a_thread_that_a_held_one_started_is_let_go_at_the_next_look(self, house: House) -> None:
        house.hold()
        with ThreadPoolExecutor(1, "memd-ingest") as late:
            assert house.loop.submit(cores_of, late).result() == {CORES[0]}, "it inherits the core"
            house.look()
            assert cores_of(late) == set(CORES)

    @pytest.mark.process
    @pytest.mark.parametrize("then", ["held on", "let go"])
    def test_a_process_that_a_held_thread_started_is_let_go(self, house: House, then: str) -> None:
        house.hold()
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        with house.loop.submit(lambda: subprocess.Popen(command, stdin=subprocess.PIPE)).result() as child:
            assert os.sched_getaffinity(child.pid) == {CORES[0]}, "it inherits the core"
            if then == "let go":
                house.others.free()
            house.look()
            assert os.sched_getaffinity(child.pid) == set(CORES)
            child.communicate()

    @pytest.mark.parametrize("is_held", [True, False])
    def test_who_sets_the_cores_of_the_loop_s_thread_is_obeyed(self, house: House, is_held: bool) -> None:
        house.cores()
        if is_held:
            house.hold()
        house.loop.submit(os.sched_setaffinity, 0, {CORES[1]}).result()
        house.others.free(*CORES)
        house.look()
        house.look()
        assert house.one_core.held is None
        assert house.cores() == ({CORES[1]}, set(CORES), set(CORES))

    @pytest.mark.parametrize("core", CORES[:2])
    def test_who_sets_the_cores_of_all_threads_is_obeyed_also_if_that_is_the_one_held(
        self, house: House, core: int
    ) -> None:
        house.hold()
        never_held = house.one_core._never_held.native_id
        for thread in never_held, *(one.submit(threading.get_native_id).result() for one in house.pools):
            os.sched_setaffinity(thread or 0, {core})
        house.others.free(*set(CORES) - {core})
        house.look()
        house.look()
        assert house.one_core.held is None
        assert house.cores() == ({core},) * 3
        for thread in never_held, *(one.submit(threading.get_native_id).result() for one in house.pools):
            os.sched_setaffinity(thread or 0, set(CORES))
        house.others.free(CORES[0])
        house.look()
        house.hold()

    def test_where_the_system_refuses_nothing_is_held_and_it_is_tried_again_later(
        self, house: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(thread: int, cores: set[int]) -> None:
            raise PermissionError

        house.cores()
        with monkeypatch.context() as patched:
            patched.setattr(os, "sched_setaffinity", refuse)
            house.look()
            assert house.one_core.held is None
        house.look()
        assert house.one_core.held is None, "not so soon"
        house.now += APART_SECONDS
        house.hold()

    @pytest.mark.parametrize("trouble", [FileNotFoundError, ValueError, IndexError])
    def test_without_a_proc_as_linux_has_it_what_is_held_is_let_go(
        self, house: House, monkeypatch: pytest.MonkeyPatch, trouble: type[Exception]
    ) -> None:
        def fail(now: float) -> dict[int, float]:
            raise trouble

        house.hold()
        monkeypatch.setattr(house.others, "since_last", fail)
        house.look()
        assert house.cores() == (set(CORES),) * 3

    def test_what_could_not_be_let_go_is_let_go_later(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(process: str) -> list[int]:
            raise OSError(errno.EMFILE, "no descriptor")

        house.hold()
        with monkeypatch.context() as patched, ThreadPoolExecutor(1, "memd-ingest") as late:
            house.loop.submit(cores_of, late).result()
            patched.setattr(one_core, "_threads", fail)
            house.look()
            patched.undo()
            house.look()
            assert (*house.cores(), cores_of(late)) == (set(CORES),) * 4

    def test_what_is_not_known_yet_holds_nothing(self, house: House) -> None:
        house.cores()
        house.others.told = {}
        house.look()
        assert house.one_core.held is None
        house.others.free(CORES[0])
        house.hold()

    @pytest.mark.parametrize("share", [0.0, 1e9], ids=["at its end", "once it has little to do"])
    def test_a_daemon_lets_go(self, house: House, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        house.hold()
        monkeypatch.setattr(one_core, "IDLE_SHARE", share)
        monkeypatch.setattr(one_core, "LOOK_SECONDS", 0.001)

        def tell(work: Callable[..., None], looked: asyncio.Event, *arguments: float) -> None:
            work(*arguments)
            looked.set()

        async def live() -> None:
            looked = asyncio.Event()
            for name in "look", "let_go":
                work = getattr(house.one_core, name)
                monkeypatch.setattr(house.one_core, name, partial(tell, work, looked))
            tending = asyncio.ensure_future(house.one_core.tend())
            await looked.wait()
            assert (house.one_core.held is None) is (share > 0)
            tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await tending

        house.loop.submit(asyncio.run, live()).result()
        assert house.cores() == (set(CORES),) * 3


@pytest.mark.parametrize("is_wanted", [True, False])
async def test_the_daemon_holds_its_threads_only_if_the_settings_say_so(is_wanted: bool) -> None:
    tasks = Tasks(Metrics())
    with on_one_core(tasks, is_wanted=is_wanted):
        assert tasks.names == ({"one core"} if is_wanted and sys.platform == "linux" else set())
    await tasks.finish(timeout_seconds=60)
    assert not len(tasks)
