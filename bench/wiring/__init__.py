"""The parts of bench/wire.py: ways for bytes to travel, side by side.

cases        what travels: a request's tensors, and the size of its reply
raw          the same bytes over a bare socket, into a buffer that is used again
plain        what one would write by hand: FastAPI, msgpack, SDPA in a thread
running      a service of bench/wire.py as a child process, and its end
wires        each way to carry a case, as a call that says how long computing took
computing    the same cases computed with no wire at all
company      eight callers at once
memory       what a service's processes hold
report       the table, and the ratios with their bars
"""
