"""The book of suspects: counts, time, room."""

from flashwire_service.ipc.frames import State, decode, encode
from flashwire_service.quarantine import MOST, Entry, Quarantine


def book(seconds: float = 60.0):
    now = [100.0]
    return Quarantine(seconds, lambda: now[0]), now


def test_two_deaths_in_a_row_are_refused_for_a_time():
    suspects, now = book()
    assert suspects.empty
    suspects.died(b"head", b"digest")
    assert suspects.knows(b"head")
    assert not suspects.refuses(b"digest")
    now[0] += 59
    suspects.died(b"head", b"digest")
    assert suspects.refuses(b"digest")
    assert suspects.entries == (Entry(b"head", b"digest", 2, 219.0),)
    now[0] += 60
    assert not suspects.refuses(b"digest")
    assert suspects.entries == ()
    suspects.died(b"head", b"digest")
    assert not suspects.refuses(b"digest")


def test_deaths_in_company_make_a_suspect_and_no_more() -> None:
    suspects, _ = book()
    for _ in range(3):
        suspects.died(b"head", b"digest", alone=False)
    assert suspects.knows(b"head")
    assert not suspects.refuses(b"digest")
    suspects.died(b"head", b"digest")
    assert suspects.refuses(b"digest")
    suspects.died(b"head", b"digest", alone=False)
    assert suspects.refuses(b"digest")


def test_a_death_between_two_others_is_not_forgotten_by_success_of_another():
    suspects, _ = book()
    suspects.died(b"head", b"one")
    assert not suspects.survived(b"two")
    suspects.died(b"head", b"one")
    assert suspects.refuses(b"one")


def test_a_survived_suspect_begins_anew():
    suspects, _ = book()
    suspects.died(b"head", b"digest")
    assert suspects.survived(b"digest")
    suspects.died(b"head", b"digest")
    assert not suspects.refuses(b"digest")


def test_the_oldest_makes_room():
    suspects, _ = book()
    for number in range(MOST + 1):
        suspects.died(b"head", b"%d" % number)
        suspects.died(b"head", b"0")  # again and again, and so never the oldest
    assert len(suspects.entries) == MOST
    assert suspects.refuses(b"0")
    assert not {entry.digest for entry in suspects.entries} & {b"1"}


def test_no_time_is_no_quarantine():
    suspects, _ = book(0.0)
    for _ in range(3):
        suspects.died(b"head", b"digest")
    assert not suspects.refuses(b"digest")
    assert suspects.entries == ()


def test_a_copy_travels_whole():
    suspects, _ = book()
    for number in range(MOST):
        suspects.died(bytes(16), number.to_bytes(32))
    state = State(suspects=suspects.entries)
    assert decode(encode(state)) == state
    assert len(encode(state)) < 65536
    copy, _ = book()
    copy.install(state.suspects)
    assert copy.entries == suspects.entries
