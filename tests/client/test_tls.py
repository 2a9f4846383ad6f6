"""Whose certificate the client believes, for its requests and for its WebSocket alike (RFC 6455 §10.6)."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gapless.client.network import open_network
from gapless.client.websocket import knock
from gapless.protocol.cursor import EventId
from gapless.protocol.moves import Failed, Input
from tests.client.machine import LINK0


def certificate(folder: Path) -> Path:
    """A key and a certificate that nobody but itself has signed, for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nobody")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "both.pem"
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@asynccontextmanager
async def served(pem: Path) -> AsyncGenerator[tuple[str, list[bytes]]]:
    """A server by that certificate, which hangs up on whoever gets to say anything; and what was said."""
    said: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said.append(await reader.readline())
        writer.transport.abort()

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pem)
    server = await asyncio.start_server(hear, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp", said


async def both(url: str, **options: Any) -> tuple[str, str]:
    """What a request and a handshake fail with."""
    network, put = open_network(url, options), list[Input]()
    async with network.client:
        with pytest.raises(httpx2.HTTPError) as failed:
            await network.client.post(f"{url}/session")
        cursor = EventId(0, 0, LINK0)
        assert await knock(url, "p", 1, cursor, None, limit=1024, network=network, put=put.append) is None
    (knocked,) = put
    assert isinstance(knocked, Failed)
    return str(failed.value), knocked.message


async def test_a_server_whose_certificate_nobody_vouches_for_is_told_nothing(tmp_path: Path) -> None:
    async with served(certificate(tmp_path)) as (url, said):
        for failed in await both(url):
            assert "certificate verify failed" in failed.lower()
    assert said == []


async def test_one_that_is_vouched_for_is_spoken_to(tmp_path: Path) -> None:
    pem = certificate(tmp_path)
    async with served(pem) as (url, said):
        await both(url, verify=ssl.create_default_context(cafile=pem))
    assert [line.split()[0] for line in said] == [b"POST", b"GET"]
