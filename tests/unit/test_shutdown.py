"""Signals to stop: a wish first, an order when repeated."""

from __future__ import annotations

import os
import signal

import pytest

from kedge.backends.shutdown import GracefulShutdown


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_the_first_signal_is_a_wish_and_the_second_an_order(number, raised):
    wishes = GracefulShutdown()
    before = signal.getsignal(number)
    with wishes.install():
        assert not wishes.newly_requested()
        os.kill(os.getpid(), number)
        assert [wishes.newly_requested(), wishes.newly_requested()] == [True, False]
        with pytest.raises(raised):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
    with pytest.raises(raised):
        wishes.reraise()


def test_what_a_launcher_adds_is_no_second_wish():
    wishes = GracefulShutdown()
    with wishes.install():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wishes.requested
    with pytest.raises(KeyboardInterrupt):
        wishes.reraise()
