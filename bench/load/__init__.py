"""Load on a real service, for chaos.py, soak.py, crowd.py and fairness.py.

service.py       start a service and stop it; what its processes wrote
processes.py     what the kernel tells of its processes
connection.py    HTTP/1.1 by hand: a client that may be slow, rude or wrong
tiny.py          the smallest request, whose answer needs no reference
valid.py         requests whose answers are known, and the judge of the replies (imports torch)
judge.py         the judge in a process of its own
invalid.py       requests that must be refused, and how
checking.py      the form of a reply
disturbances.py  what is done to the service
history.py       what that excuses
recovery.py      how soon it is itself again
tally.py         outcomes, latencies and violations, counted and printed
traffic.py       a user: what is asked, how, and what counts as a violation
users.py         many of them
timing.py        one caller timed while others press
machine.py       what else the machine does meanwhile
flood.py         callers who ask without pause, cheaply
"""
