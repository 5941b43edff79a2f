"""Signals to stop: a wish first, an order when repeated."""

from __future__ import annotations

import os
import signal

import pytest

from kedge.backends.wishes import Wishes


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_the_first_signal_is_a_wish_and_the_second_an_order(number, raised):
    wishes = Wishes()
    before = signal.getsignal(number)
    with wishes.heard():
        assert not wishes.new()
        os.kill(os.getpid(), number)
        assert [wishes.new(), wishes.new()] == [True, False]
        with pytest.raises(raised):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
    with pytest.raises(raised):
        wishes.fulfil()


def test_what_a_launcher_adds_is_no_second_wish():
    wishes = Wishes()
    with wishes.heard():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wishes.any
    with pytest.raises(KeyboardInterrupt):
        wishes.fulfil()
