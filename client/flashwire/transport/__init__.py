"""httpx transports for large bodies: sent from where they lie, received where they are to stay.

What httpx does for HTTP/1.1 over TCP, TLS and unix sockets, without its copies; docs/client.md says
when they are used.

heads        the bytes of a request's head; a reply's head and framing, read strictly
connection   one connection on a socket that never blocks: sans waiting, so that blocking and
             asyncio share it
content      a request's body that lies in memory
exchange     a request and its reply as steps
pool         which connections there are, who may have one, who waits
blocking     Transport, for httpx.Client
aio          AsyncTransport, for httpx.AsyncClient under asyncio; `opening` connects
"""

from flashwire.transport.blocking import Transport
from flashwire.transport.content import Content

__all__ = ["Content", "Transport"]
