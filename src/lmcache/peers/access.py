"""The secret that peers share, and how each proves that it has it: the secret itself never travels.

Both sides draw a nonce. A proof is an HMAC-SHA256, under the token, of a label, both nonces and what it is a proof for.
"""

from __future__ import annotations

import hashlib
import hmac

from lmcache.core.secret_file import read_secret

TOKEN_FLAG = "--p2p-token-file"
CHALLENGE, CLIENT, SERVER = b"lmcache-peer challenge 1", b"lmcache-peer client 1", b"lmcache-peer server 1"


def read_peer_token(path: str) -> str:
    """ "" without a path. ConfigError when the file has no token."""
    return read_secret(path, TOKEN_FLAG)


def prove(token: str, label: bytes, client_nonce: bytes, server_nonce: bytes, subject: bytes = b"") -> bytes:
    """b"" without a token."""
    if not token:
        return b""
    return hmac.new(token.encode(), label + client_nonce + server_nonce + subject, hashlib.sha256).digest()


def is_proof(given: bytes, token: str, label: bytes, client_nonce: bytes, server_nonce: bytes, subject: bytes) -> bool:
    return hmac.compare_digest(given, prove(token, label, client_nonce, server_nonce, subject))
