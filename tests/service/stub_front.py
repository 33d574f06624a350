"""A front end without HTTP, for tests of the supervisor.

Whoever connects is sent a line: this process's pid, then the pids of the workers that said Hello
and are still there. A connection that sends "slow" first is answered 1 s later.
"""

import json
import os
import select
import socket
import sys
import time

from flashwire_service.ipc.channel import Channel, ChannelClosed
from flashwire_service.ipc.frames import Attach, Drain, Hello, Ready
from flashwire_service.process import adopt


class Front:
    def __init__(self) -> None:
        adopted = adopt(sys.argv[1:])
        self.control = adopted.control
        self.listener = socket.socket(fileno=adopted.fd)
        self.workers: dict[int, tuple[Channel, int | None]] = {}
        self.control.send(Ready())

    def hear_control(self) -> None:
        frame, fd = self.control.recv()
        if isinstance(frame, Attach):
            self.workers[frame.peer] = (Channel(socket.socket(fileno=fd)), None)
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

    def answer(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            return
        with connection:
            if connection.recv(100) == b"slow":
                time.sleep(1)
            workers = [pid for _, pid in self.workers.values() if pid]
            connection.sendall(json.dumps({"pid": os.getpid(), "workers": workers}).encode())

    def run(self) -> None:
        while True:
            waiting = {self.listener: self.answer, self.control: self.hear_control}
            for index, (channel, _) in self.workers.items():
                waiting[channel] = lambda index=index: self.hear_worker(index)
            readable, _, _ = select.select(list(waiting), [], [])
            waiting[readable[-1]]()


if __name__ == "__main__":
    try:
        Front().run()
    except ChannelClosed:
        sys.exit(0)
