"""The front-end process: `python -m flashwire_service.front.server FD`. Its parent starts it."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvicorn

from flashwire_service import logs, meter
from flashwire_service.errors import Refusal
from flashwire_service.front.access import Access
from flashwire_service.front.app import create_app
from flashwire_service.front.door import Door
from flashwire_service.front.http import Protocol
from flashwire_service.front.metrics import Metrics
from flashwire_service.front.pool import Pool
from flashwire_service.ipc.heartbeat import BEAT_S, Heartbeat
from flashwire_service.keys import Keyring
from flashwire_service.logs import Log
from flashwire_service.process import Adopted, adopt
from flashwire_service.settings import Settings
from flashwire_service.tls import Certificate, TLSError

if TYPE_CHECKING:
    from flashwire_service.front.traces import Traces


_UNIX_BUFFER = 4 * 2**20  # by default 200 KB, for which a large reply stops again and again


class Server(uvicorn.Server):
    """uvicorn's server under a supervisor, which alone decides on signals."""

    def __init__(self, adopted: Adopted, log: Log) -> None:
        self._adopted = adopted
        self._listener = adopted.listener()
        self._unix = adopted.listener() if adopted.settings.uds else None
        self._heartbeat = Heartbeat.receive(adopted.page)
        self._log = log
        settings = adopted.settings
        self.pool = Pool(
            on_drain=self.drain,
            on_orphaned=_orphaned,
            on_reload=self.reload,
            quarantine_s=settings.quarantine_s,
        )
        self._metrics = Metrics(settings, adopted.board, adopted.index)
        log.count_on(self._metrics.meter)
        self._traces = _traces(settings)
        self._app = create_app(settings, self.pool, log, self._metrics, self._traces)
        self._certificate = (
            Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
        )
        super().__init__(config_of(self._app, settings, self._certificate))
        Protocol.on_refused = self._refused
        self._door = None
        if settings.shares_memory:
            self._door = Door(
                adopted.listener(), self._app, settings, log, self._metrics.meter,
                self.server_state.tasks, self._refused,
            )  # fmt: skip
        self._metrics.watch(meter.CONNECTIONS, lambda: len(self.server_state.connections))

    async def run_until_drained(self) -> None:
        """Serve on the inherited socket until a Drain frame, then finish what is in flight."""
        self.pool.listen(self._adopted.control)
        gc.freeze()  # what was imported stays: collections need not look at it again
        if self._door is not None:
            self._door.open()
        beating = asyncio.ensure_future(self._beat())
        await self._serve([self._listener])
        beating.cancel()
        if self._traces is not None:
            self._traces.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and on the unix socket, where TLS would protect nothing."""
        await super().startup(sockets)
        if self._unix is None or self.should_exit:
            return
        protocol = functools.partial(_Local, self.config, self.server_state, self.lifespan.state)
        loop = asyncio.get_running_loop()
        self.servers.append(
            await loop.create_unix_server(protocol, sock=self._unix, backlog=self.config.backlog)
        )

    async def _beat(self) -> None:
        """Show that this loop turns."""
        while True:
            self._heartbeat.idle()
            self.pool.sweep()
            self._app.state.front.buffers.sweep()
            if self._door is not None:
                self._door.sweep()
            self._metrics.refresh()
            await asyncio.sleep(BEAT_S)

    def _refused(self, refusal: Refusal, request_id: str) -> None:
        """The protocol has refused what never became a request of the application."""
        self._metrics.rejected(refusal.code)
        status = refusal.row.status
        self._log.info("request", request_id=request_id, status=status, code=refusal.code)

    def drain(self, grace: float) -> None:
        """Not ready at once; new connections are not taken; those in flight have `grace` s."""
        self.pool.drain()
        if self._door is not None:
            self._door.close()
        self.config.timeout_graceful_shutdown = max(1, round(grace))
        self.should_exit = True

    def reload(self, keys: Keyring) -> None:
        """From now on these keys hold, and the certificate is what its files say."""
        access: Access = self._app.state.access
        access.install(keys)
        if self._certificate is None:
            return
        try:
            self._certificate.reload()
            self._log.info("certificate read")
        except TLSError as e:
            self._log.error("certificate not read, the one before stays", why=str(e))
            self._metrics.meter.add(meter.RELOAD_FAILURES, 1, "certificate")


def main(arguments: Sequence[str]) -> int:
    """Serve until told to end. The exit code is EX_CONFIG when the TLS certificate is no good."""
    adopted = adopt(arguments)
    log = Log(f"front-{adopted.index}", adopted.settings.log_level)
    log.forward_logging()
    try:
        server = Server(adopted, log)
    except TLSError as e:  # read well when the service began, and changed since
        log.error("certificate not read", why=str(e))
        return os.EX_CONFIG
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.run_until_drained())
    return os.EX_OK


def config_of(
    app: object, settings: Settings, certificate: Certificate | None = None
) -> uvicorn.Config:
    """How uvicorn serves our application; over TLS where there is a certificate."""
    Protocol.max_header_bytes = settings.max_header_bytes
    Protocol.min_download_rate = settings.min_download_rate
    Protocol.max_connections = settings.max_connections
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]  # a float will do
    )
    if certificate is not None:
        config.load()
        config.ssl = certificate.context
    return config


def _traces(settings: Settings) -> Traces | None:
    """What makes traces, if it is to be done: the packages may not be there."""
    if not settings.traces:
        return None
    from flashwire_service.front.traces import Traces

    return Traces.to_collector()


class _Local(Protocol):
    """A connection by the unix socket."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
        super().connection_made(transport)


def _orphaned() -> None:
    """The supervisor is gone, or wants this process gone now."""
    logs.flush()
    os._exit(os.EX_UNAVAILABLE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
