"""Load on a real service, for chaos.py, soak.py, crowd.py and fairness.py.

service.py      start a service and stop it; what its processes wrote
processes.py    what the kernel tells of its processes
connection.py   HTTP/1.1 by hand: a client that may be slow, rude or wrong
valid.py        requests whose answers are known, and the judge of the replies (imports torch)
judge.py        the judge in a process of its own
invalid.py      requests that must be refused, and how
history.py      what was done to the service, and what that excuses
tally.py        outcomes, latencies and violations, counted and printed
traffic.py      users: who asks what, how, and what counts as a violation
"""
