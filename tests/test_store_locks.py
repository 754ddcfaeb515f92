"""The order of the locks: whoever takes them in another order is told at once."""

from __future__ import annotations

import threading

import pytest
from crash_files import CrashFiles
from drafts import draft, open_store

from memd.store.locks import LockOrder, OrderedLock


def test_locks_are_taken_in_their_order() -> None:
    locks = [OrderedLock(place) for place in LockOrder]
    for _ in range(2):
        for first in range(len(locks)):
            with locks[first]:
                for later in locks[first + 1 :]:
                    with later:
                        pass


@pytest.mark.parametrize("second", [LockOrder.MERGE, LockOrder.SEAL])
def test_a_lock_that_comes_earlier_or_is_of_the_same_place_fails_loudly(second: LockOrder) -> None:
    held, other = OrderedLock(LockOrder.SEAL), OrderedLock(second)
    with held:
        with pytest.raises(AssertionError, match=f"{second.name} is taken while SEAL is held"), other:
            pass
        with OrderedLock(LockOrder.STATE):
            pass  # the refused lock is not held
    with other:
        pass


def test_what_another_thread_holds_does_not_matter() -> None:
    held, taken = OrderedLock(LockOrder.STATE), []

    def take() -> None:
        with OrderedLock(LockOrder.MERGE):
            taken.append(True)

    with held:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    assert taken == [True]


def test_an_error_under_a_lock_releases_it() -> None:
    lock = OrderedLock(LockOrder.STATE)
    for _ in range(2):
        with pytest.raises(ValueError, match="once"), lock:
            raise ValueError("once")


def test_a_topic_that_is_entered_under_its_own_state_lock_fails_instead_of_hanging() -> None:
    topic = open_store(CrashFiles()).topic("talk")
    with topic._state, pytest.raises(AssertionError, match="STATE is taken while STATE is held"):
        topic.append([draft("one")])
    assert len(topic.append([draft("two")])) == 1
