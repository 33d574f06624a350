"""A certificate and its key from files: every mistake at once, and read again while in use."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from flashwire_service import settings, tls
from flashwire_service.settings import SettingsError, load

Make = Callable[[str], Any]


def mistakes(**flags: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(flags, {})
    return caught.value.mistakes


def test_a_certificate_and_its_key(make_certificate: Make) -> None:
    made = make_certificate("a")
    loaded = load({"tls_cert": str(made.cert)}, {"FLASHWIRE_TLS_KEY": str(made.key)})
    context = tls.context(loaded.tls_cert, loaded.tls_key)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert not list(settings.warnings(loaded, {}))
    os.chmod(made.key, 0o644)
    (said,) = settings.warnings(loaded, {})
    assert str(made.key) in said


def test_one_without_the_other(make_certificate: Make) -> None:
    made = make_certificate("a")
    assert mistakes(tls_cert=str(made.cert)) == ["--tls-key: is missing, and --tls-cert is given"]
    assert mistakes(tls_key=str(made.key)) == ["--tls-cert: is missing, and --tls-key is given"]


def test_files_that_are_not_there_are_both_named(tmp_path: Any) -> None:
    said = mistakes(tls_cert=str(tmp_path / "a.crt"), tls_key=str(tmp_path), port="x")
    assert [line.partition(":")[0] for line in said] == ["--port", "--tls-cert", "--tls-key"]
    assert "No such file" in said[1]


def test_files_that_do_not_belong_together(make_certificate: Make, tmp_path: Any) -> None:
    a, b = make_certificate("a"), make_certificate("b")
    (said,) = mistakes(tls_cert=str(a.cert), tls_key=str(b.key))
    assert "key values mismatch" in said
    a.cert.write_text("no certificate")
    (said,) = mistakes(tls_cert=str(a.cert), tls_key=str(a.key))
    assert "are no certificate and its key" in said


def test_an_encrypted_key_is_refused_and_no_passphrase_asked(make_certificate: Make) -> None:
    made = make_certificate("a")
    subprocess.run(
        ["openssl", "ec", "-in", made.key, "-aes128", "-passout", "pass:word", "-out", made.key],
        check=True,
        capture_output=True,
    )
    (said,) = mistakes(tls_cert=str(made.cert), tls_key=str(made.key))
    assert "is encrypted" in said


def presented(certificate: tls.Certificate, host: str | None) -> bytes:
    """The certificate that a caller sees who asks for this host, without any socket."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    client = asking.wrap_bio(to_client, to_server, server_hostname=host)
    server = certificate.context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return found


@pytest.mark.parametrize("host", ["localhost", None])
def test_a_new_certificate_is_shown_to_the_next_caller(
    make_certificate: Make, host: str | None
) -> None:
    made, other = make_certificate("a"), make_certificate("b")
    certificate = tls.Certificate(str(made.cert), str(made.key))
    first = ssl.PEM_cert_to_DER_cert(made.cert.read_text())
    assert presented(certificate, host) == first
    made.cert.write_bytes(other.cert.read_bytes())
    with pytest.raises(tls.TLSError, match="mismatch"):
        certificate.reload()
    assert presented(certificate, host) == first
    made.key.write_bytes(other.key.read_bytes())
    certificate.reload()
    assert presented(certificate, host) == ssl.PEM_cert_to_DER_cert(other.cert.read_text())
