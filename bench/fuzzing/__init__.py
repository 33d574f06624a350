"""Bodies that nobody would send, and what must hold for each. fuzz.py and tests/wire/test_fuzz.py.

packing.py   msgpack written badly on purpose
mutating.py  a body from a number: examples, taken apart and put together wrongly
targets.py   what reads bodies, and what must hold of what it says
"""
