"""A front end without HTTP, for tests of the supervisor.

Whoever connects is sent a line: this process's pid, then the pids of the workers that said Hello
and are still there. A connection that sends "slow" first is answered 1 s later, one that sends
"state" with what the supervisor told last.
"""

import dataclasses
import json
import os
import select
import socket
import sys
import time

from flashwire_service.ipc.channel import Channel, ChannelClosed
from flashwire_service.ipc.frames import Attach, Drain, Hello, Ready, State
from flashwire_service.ipc.heartbeat import BEAT_S, Heartbeat
from flashwire_service.meter import WORKER_RESTARTS
from flashwire_service.process import adopt


class Front:
    def __init__(self) -> None:
        adopted = adopt(sys.argv[1:])
        self.control = adopted.control
        self.board = adopted.board
        self.listener = adopted.listener()
        self.heartbeat = Heartbeat.receive(adopted.page)
        self.state = State()
        self.workers: dict[int, tuple[Channel, int | None]] = {}
        self.control.send(Ready())

    def hear_control(self) -> None:
        frame, fd = self.control.recv()
        if isinstance(frame, Attach):
            self.workers[frame.peer] = (Channel(socket.socket(fileno=fd)), None)
        elif isinstance(frame, State):
            self.state = frame
        elif isinstance(frame, Drain):
            sys.exit(0)

    def hear_worker(self, index: int) -> None:
        channel, _ = self.workers[index]
        try:
            frame, _ = channel.recv()
        except ChannelClosed:
            del self.workers[index]
            return
        if isinstance(frame, Hello):
            self.workers[index] = (channel, frame.pid)

    @property
    def restarts(self) -> dict[str, float]:
        """By cause, of workers."""
        rows = self.board.regions["supervisor"].rows()
        return {key[1]: n[0] for key, n in rows if key[0] == WORKER_RESTARTS.name and n[0]}

    def answer(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            return
        with connection:
            word = connection.recv(100)
            if word == b"slow":
                time.sleep(1)
            if word == b"state":
                workers = [dataclasses.asdict(worker) for worker in self.state.workers]
                answer = {"restarts": self.restarts, "state": workers}
            else:
                workers = [pid for _, pid in self.workers.values() if pid]
                answer = {"pid": os.getpid(), "workers": workers}
            connection.sendall(json.dumps(answer).encode())

    def run(self) -> None:
        while True:
            waiting = {self.listener: self.answer, self.control: self.hear_control}
            for index, (channel, _) in self.workers.items():
                waiting[channel] = lambda index=index: self.hear_worker(index)
            self.heartbeat.idle()
            readable, _, _ = select.select(list(waiting), [], [], BEAT_S)
            if readable:
                waiting[readable[-1]]()


if __name__ == "__main__":
    try:
        Front().run()
    except ChannelClosed:
        sys.exit(0)
