"""The file of a unix socket: who may use it, what makes room for it, what is left of it."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from flashwire_service.listening import Fatal
from flashwire_service.settings import SettingsError, load, table
from flashwire_service.socket_file import MAX_PATH, SocketFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_only_for_whom_the_mode_lets_in(path: Path, mode: int) -> None:
    before = os.umask(0o022)
    try:
        with SocketFile(str(path), mode):
            connect(path)
            assert stat.S_IMODE(path.stat().st_mode) == mode
        assert os.umask(0o022) == 0o022, "as it was"
    finally:
        os.umask(before)
    assert not path.exists()


def test_a_file_that_nobody_listens_at_makes_room(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with SocketFile(str(path), 0o600):
        connect(path)


def test_a_service_that_listens_stays(path: Path) -> None:
    with SocketFile(str(path), 0o600):
        with pytest.raises(Fatal, match="in use") as caught:
            SocketFile(str(path), 0o600)
        assert caught.value.code == os.EX_UNAVAILABLE
        connect(path)


def test_a_file_that_is_no_socket_stays(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(Fatal, match="no socket"):
        SocketFile(str(path), 0o600)
    assert path.read_text() == "precious"


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match="No such file") as caught:
        SocketFile(str(tmp_path / "none" / "socket"), 0o600)
    assert caught.value.code == os.EX_CANTCREAT


def test_another_one_that_took_the_path_stays(path: Path) -> None:
    first = SocketFile(str(path), 0o600)
    path.unlink()
    with SocketFile(str(path), 0o600):
        first.close()
        connect(path)


def test_settings(tmp_path: Path) -> None:
    loaded = load({"uds": str(tmp_path / "s"), "uds_mode": "0660"}, {})
    assert (loaded.uds, loaded.uds_mode) == (str(tmp_path / "s"), 0o660)
    assert load({}, {}).uds == ""
    (row,) = (row for row in table() if row.name == "uds_mode")
    assert row.default_text == "0600"
    with pytest.raises(SettingsError) as caught:
        load({"uds": "x" * (MAX_PATH + 1), "uds_mode": "rw"}, {})
    assert [line.partition(":")[0] for line in caught.value.mistakes] == ["--uds", "--uds-mode"]
