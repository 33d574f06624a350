"""A worker without torch, for tests of the supervisor. FLASHWIRE_STUB says how it misbehaves."""

import os
import socket
import sys
import time

from flashwire_service.ipc.channel import Channel, ChannelClosed
from flashwire_service.ipc.frames import Attach, Drain, Failure, Hello, Ready
from flashwire_service.ipc.heartbeat import Heartbeat
from flashwire_service.process import adopt


def main() -> int:
    adopted = adopt(sys.argv[1:])
    heartbeat = Heartbeat.receive(adopted.page)
    mode = os.environ.get("FLASHWIRE_STUB", "")
    device = adopted.settings.device
    if mode == "no device" or (mode == "device vanishes" and device == "cuda:0"):
        adopted.control.send(Failure(id=0, code="no_device", detail="there is no such device"))
        return os.EX_CONFIG
    if mode == "crash":
        return 1
    if mode == "warm-up kills" and adopted.settings.warmup:
        return 1
    if mode == "busy too long":
        heartbeat.busy(time.monotonic() + 0.2)
    else:
        heartbeat.idle()
    adopted.control.send(
        Ready(facts={"environment": os.environ["OMP_NUM_THREADS"], "device": "cuda:0"})
    )
    fronts = []
    while True:
        try:
            frame, fd = adopted.control.recv(timeout=0.1)
        except TimeoutError:
            if mode != "busy too long":
                heartbeat.idle()
            continue
        except ChannelClosed:
            return 0
        if isinstance(frame, Attach):
            fronts.append(Channel(socket.socket(fileno=fd)))
            fronts[-1].post(Hello(worker=adopted.index, pid=os.getpid(), facts={}))
        elif isinstance(frame, Drain) and mode != "stubborn":
            return 0


if __name__ == "__main__":
    sys.exit(main())
