"""How two peers get to know each other: HELLO, CHALLENGE, PROOF, WELCOME (docs/formats/peers.md).

The side that connects says nothing of itself before the other side has proved the token; the side that listens says
nothing before either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmcache.core.address import host_and_port, host_port
from lmcache.errors import ConfigError, ProtocolError
from lmcache.peers.access import CHALLENGE, CLIENT, SERVER, TOKEN_FLAG, is_proof, prove, read_peer_token
from lmcache.peers.identity import Identity, why_unfit
from lmcache.peers.protocol import NONCE_BYTES, PROTOCOL_VERSION, Challenge, Hello, Introduction, Kind
from lmcache.peers.sockets import PeerRefused, PeerSocket

_ADVERTISE_FLAG = "--p2p-advertise-url"
_SHOWN_CHARACTERS = 100  # of what the other side says it is
_OTHER_TOKEN = f"the two servers have different tokens: give both the same {TOKEN_FLAG}"
_NO_TOKEN = f"one of the two servers has a {TOKEN_FLAG} and the other has none: give both the same"


@dataclass(frozen=True)
class Introducer:
    """This server's side. The file of the token is read for each connection."""

    identity: Identity
    token_file: str
    random_bytes: Callable[[int], bytes]

    async def connect(self, sock: PeerSocket, address: str) -> Identity:
        """Who answers at `address`, HOST:PORT. It must say that this is its own: else somebody without the token could
        stand in between. PeerRefused where the two cannot work together; OSError, EOFError, ProtocolError."""
        token = self._token()
        nonce = self.random_bytes(NONCE_BYTES)
        await sock.send(Kind.HELLO, 0, Hello(PROTOCOL_VERSION, nonce, bool(token)))
        challenge = await sock.expect(Kind.CHALLENGE, 0, Challenge)
        _check_version(challenge.version)
        if not is_proof(challenge.proof, token, CHALLENGE, nonce, challenge.nonce, b""):
            raise PeerRefused(_OTHER_TOKEN if token and challenge.proof else _NO_TOKEN)
        packed = self.identity.pack()
        proof = prove(token, CLIENT, nonce, challenge.nonce, packed)
        await sock.send(Kind.PROOF, 0, Introduction(packed, proof))
        welcome = await sock.expect(Kind.WELCOME, 0, Introduction)
        if not is_proof(welcome.proof, token, SERVER, nonce, challenge.nonce, welcome.identity):
            raise PeerRefused(_OTHER_TOKEN)
        identity = self._fitting(welcome.identity)
        if identity.epoch != self.identity.epoch and not _is_at(identity, address):
            raise PeerRefused(
                f"the server at {address} says that it is {identity.address[:_SHOWN_CHARACTERS]!r}: name peers by "
                f"their {_ADVERTISE_FLAG}"
            )
        sock.handshake_ended()
        return identity

    async def accept(self, sock: PeerSocket) -> Identity:
        """Who connected, as `connect`. The caller says the sentence of what is raised to the other side."""
        token = self._token()
        hello = await sock.expect(Kind.HELLO, 0, Hello)
        _check_version(hello.version)
        if hello.has_token != bool(token):
            raise PeerRefused(_NO_TOKEN)
        nonce = self.random_bytes(NONCE_BYTES)
        proof = prove(token, CHALLENGE, hello.nonce, nonce)
        await sock.send(Kind.CHALLENGE, 0, Challenge(PROTOCOL_VERSION, nonce, proof))
        caller = await sock.expect(Kind.PROOF, 0, Introduction)
        if not is_proof(caller.proof, token, CLIENT, hello.nonce, nonce, caller.identity):
            raise PeerRefused(_OTHER_TOKEN)
        identity = self._fitting(caller.identity)
        packed = self.identity.pack()
        await sock.send(Kind.WELCOME, 0, Introduction(packed, prove(token, SERVER, hello.nonce, nonce, packed)))
        sock.handshake_ended()
        return identity

    def _token(self) -> str:
        try:
            return read_peer_token(self.token_file)
        except ConfigError as error:  # who takes the file away takes access from everybody
            raise PeerRefused(f"the token cannot be read: {error}") from None

    def _fitting(self, packed: bytes) -> Identity:
        identity = Identity.unpack(packed)
        if sentence := why_unfit(self.identity, identity):
            raise PeerRefused(sentence)
        return identity


def _is_at(identity: Identity, address: str) -> bool:
    try:
        return host_port(*host_and_port("A peer", identity.address)).lower() == address.lower()
    except ConfigError:
        return False


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"it speaks version {version} of the protocol of peers, this server {PROTOCOL_VERSION}")
