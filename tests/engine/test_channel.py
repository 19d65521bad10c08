"""The channel between processes: messages in order whatever their size, no deadlock, an end that is noticed."""

from __future__ import annotations

import socket
import threading
import time

import msgspec
import pytest

from octavo.engine.channel import Channel, ChannelClosedError


class Note(msgspec.Struct, array_like=True, tag=True):
    number: int
    body: bytes


def pair() -> tuple[Channel[Note], Channel[Note]]:
    left, right = socket.socketpair()
    return Channel(left, Note), Channel(right, Note)


def receive(channel: Channel[Note]) -> Note:
    message = None
    while message is None:
        message = channel.receive(10.0)
    return message


def test_messages_arrive_whole_and_in_order() -> None:
    left, right = pair()
    sizes = [0, 1, 3, 4, 5, 1000, 70_000, 3]
    for number, size in enumerate(sizes):
        left.send(Note(number, bytes(size)))
    for number, size in enumerate(sizes):
        message = receive(right)
        assert (message.number, len(message.body)) == (number, size)
    assert right.receive(0) is None
    left.close()
    right.close()


def test_two_ends_that_both_send_more_than_the_socket_holds_do_not_wait_for_each_other() -> None:
    left, right = pair()
    size = 8 << 20

    def talk(channel: Channel[Note], results: list[int]) -> None:
        for number in range(3):
            channel.send(Note(number, bytes(size)))
        for _ in range(3):
            results.append(len(receive(channel).body))
        while channel.backlog:
            channel.receive(0.05)

    seen: tuple[list[int], list[int]] = ([], [])
    threads = [threading.Thread(target=talk, args=pair) for pair in zip((left, right), seen, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == ([size] * 3, [size] * 3)
    left.close()
    right.close()


def test_what_the_socket_does_not_take_at_once_is_flushed_by_the_thread_that_waits() -> None:
    left, right = pair()
    got: list[Note] = []

    def wait() -> None:
        while not got:
            message = left.receive(None)
            if message is not None:
                got.append(message)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    for number in range(20):
        left.send(Note(number, bytes(1 << 20)))  # far more than fits
    for number in range(20):
        assert receive(right).number == number
    right.send(Note(0, b""))
    waiting.join(10)
    assert not waiting.is_alive()
    left.close()
    right.close()


def test_a_closed_end_is_an_error_for_both_sending_and_receiving() -> None:
    left, right = pair()
    left.close()
    with pytest.raises(ChannelClosedError):
        receive(right)
    with pytest.raises(ChannelClosedError):
        right.send(Note(0, b""))
    with pytest.raises(ChannelClosedError):
        left.send(Note(0, b""))
    right.close()
    right.close()


def test_wake_makes_a_waiting_receive_return_without_a_message() -> None:
    left, right = pair()
    results: list[Note | None] = []
    thread = threading.Thread(target=lambda: results.append(right.receive(None)))
    thread.start()
    right.wake()
    thread.join(10)
    assert results == [None]
    left.close()
    right.close()


def test_waking_a_closed_channel_writes_to_no_file_that_got_its_descriptor_since() -> None:
    left, right = pair()
    left.close()
    files = [socket.socketpair() for _ in range(4)]  # the lowest free descriptors, so the ones just closed
    left.wake()
    ends = [end for both in files for end in both]
    for end in ends:
        end.setblocking(False)
        with pytest.raises(BlockingIOError):
            end.recv(1)
    for end in ends:
        end.close()
    right.close()
