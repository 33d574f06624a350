"""Frames and descriptors over a socket pair: whole, in order, never blocking, never leaking."""

import asyncio
import fcntl
import os
import socket
import threading
from array import array

import pytest

from flashwire_service.ipc import frames
from flashwire_service.ipc.channel import (
    MAX_PACKET,
    AsyncChannel,
    Channel,
    ChannelClosed,
    PacketTooLarge,
    socketpair,
)
from flashwire_service.ipc.frames import Cancel, Failure, Job, Reply, TensorSlot
from flashwire_service.ipc.memory import Memory


@pytest.fixture
def pair():
    a, b = Channel.pair()
    yield a, b
    a.close()
    b.close()


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def fill(channel: Channel) -> int:
    """Post until the socket is full and frames wait in the outbox; how many were posted."""
    posted = 0
    while channel.waiting < 3:
        channel.post(Reply(id=posted, size=0, body=bytes(20000)))
        posted += 1
    return posted


def test_every_kind_of_frame_arrives_as_it_was(pair):
    a, b = pair
    sent = [
        Job(
            id=2**63,
            route="attention",
            options={"scale": 0.5, "window": (1, None), "dropout": {"p": 0.1, "seed": 2**64 - 1}},
            tensors={"q": TensorSlot("float32", (1, 2), ((7, 8),))},
            size=15,
            body=b"\0" * 15,
            owner="me",
            received=1.5,
            deadline=2.5,
        ),
        Cancel(id=1),
        frames.Hello(worker=0, pid=5, facts={"device": "cpu", "gflops": 1.5}),
        Reply(id=1, size=3, body=b"abc", backend="cpu", queue_ms=0.1),
        Failure(id=1, code="invalid", detail="no", field="q", reasons=("a", "b"), retry_after=1.0),
        frames.Attach(peer=3),
        frames.Drain(grace=1.0),
    ]
    for frame in sent:
        a.send(frame)
    assert [b.recv() for _ in sent] == [(frame, None) for frame in sent]


def test_a_descriptor_stays_with_its_frame_and_is_close_on_exec(pair):
    a, b = pair
    with Memory.create(4096) as memory:
        a.post(Cancel(id=0))
        a.post(Job(id=1, route="attention", size=4096), memory.fd)
        a.post(Cancel(id=2))
        inode = os.fstat(memory.fd).st_ino
    assert b.recv() == (Cancel(id=0), None)
    frame, fd = b.recv()
    assert frame.id == 1
    assert os.fstat(fd).st_ino == inode
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)
    assert b.recv() == (Cancel(id=2), None)


def test_a_full_socket_keeps_frames_in_order_and_does_not_block(pair):
    a, b = pair
    posted = fill(a)
    assert not a.flush()
    ids = [b.recv()[0].id]  # room for one that must not overtake those in the outbox
    a.post(Reply(id=posted, size=0))
    posted += 1
    while len(ids) < posted:
        while (got := b.try_recv()) is not None:
            ids.append(got[0].id)
        a.flush()
    assert ids == list(range(posted))
    assert a.waiting == 0


def test_send_gives_up_after_its_timeout(pair):
    a, _ = pair
    fill(a)
    with pytest.raises(TimeoutError):
        a.send(Cancel(id=0), timeout=0.01)


def test_recv_gives_up_after_its_timeout(pair):
    with pytest.raises(TimeoutError):
        pair[1].recv(timeout=0.01)


def test_end_of_file_comes_after_what_was_sent(pair):
    a, b = pair
    a.post(Cancel(id=0))
    a.close()
    assert b.recv() == (Cancel(id=0), None)
    with pytest.raises(ChannelClosed):
        b.recv()
    with pytest.raises(ChannelClosed):
        b.post(Cancel(id=1))


def test_last_words_of_a_peer_that_did_not_read_all_it_was_sent(pair):
    a, b = pair
    a.post(Cancel(id=0))
    b.post(Cancel(id=1))
    b.post(Cancel(id=2))
    b.close()
    assert a.recv() == (Cancel(id=1), None)
    assert a.recv() == (Cancel(id=2), None)
    with pytest.raises(ChannelClosed):
        a.recv()


def test_a_frame_too_large_for_a_packet_is_refused_and_the_channel_lives(pair):
    a, b = pair
    with pytest.raises(PacketTooLarge, match=str(MAX_PACKET)):
        a.post(Reply(id=0, size=0, body=bytes(MAX_PACKET)))
    a.post(Reply(id=1, size=0, body=bytes(MAX_PACKET - 500)))
    assert b.recv()[0].id == 1


def test_descriptors_in_the_outbox_are_closed_with_the_channel():
    before = open_fds()
    a, b = Channel.pair()
    fill(a)
    with Memory.create(1) as memory:
        a.post(Cancel(id=0), memory.fd)
    a.close()
    b.close()
    assert open_fds() == before


def test_descriptors_of_a_bad_packet_are_closed():
    before = open_fds()
    raw, sock = socketpair()
    channel = Channel(sock)
    r, w = os.pipe()
    two = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [r, w]))]
    raw.sendmsg([frames.encode(Cancel(id=0))], two)
    raw.sendmsg([b"\xc1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [r]))])
    with pytest.raises(ValueError, match="one descriptor"):
        channel.recv()
    with pytest.raises(ValueError):  # noqa: PT011 - msgpack says no more
        channel.recv()
    for fd in (r, w):
        os.close(fd)
    raw.close()
    channel.close()
    assert open_fds() == before


def test_a_frame_arrives_without_the_descriptor_that_there_is_no_room_for(pair, starved):
    a, b = pair
    before = open_fds()
    sent = Job(id=1, route="attention", size=4096)
    with Memory.create(4096) as memory:
        a.post(sent, memory.fd)
        with starved():
            assert b.recv(1) == (sent, None)
        a.post(sent, memory.fd)
        frame, fd = b.recv(1)
        assert frame == sent
        os.close(fd)
    assert open_fds() == before


def test_frames_posted_by_many_threads_arrive_whole(pair):
    a, b = pair
    per_thread = 200

    def post(first: int) -> None:
        for i in range(per_thread):
            a.send(Reply(id=first + i, size=0, body=bytes(1000)))

    threads = [threading.Thread(target=post, args=(n * per_thread,)) for n in range(4)]
    for t in threads:
        t.start()
    got = sorted(b.recv()[0].id for _ in range(4 * per_thread))
    for t in threads:
        t.join()
    assert got == list(range(4 * per_thread))


async def test_async_both_ways_and_close_reported_once():
    a, b = Channel.pair()
    got, closed = [], asyncio.Event()
    reader = AsyncChannel(a, lambda frame, fd: got.append((frame, fd)), closed.set)
    b.post(Cancel(id=1))
    b.post(Cancel(id=2))
    reader.send(Cancel(id=3))
    assert b.recv() == (Cancel(id=3), None)
    b.close()
    await asyncio.wait_for(closed.wait(), 10)
    assert got == [(Cancel(id=1), None), (Cancel(id=2), None)]
    with pytest.raises(ChannelClosed):
        reader.send(Cancel(id=4))
    reader.close()


async def test_async_sends_what_a_full_socket_kept_back():
    a, b = Channel.pair()
    writer = AsyncChannel(a, lambda frame, fd: None, lambda: None)
    count = 300
    with Memory.create(1) as memory:
        for i in range(count):
            writer.send(Reply(id=i, size=0, body=bytes(20000)), memory.fd)
    assert a.waiting
    ids = []
    while len(ids) < count:
        await asyncio.sleep(0)
        while (got := b.try_recv()) is not None:
            ids.append(got[0].id)
            os.close(got[1])
    assert ids == list(range(count))
    writer.close()
    b.close()
