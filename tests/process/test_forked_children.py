"""A plugin's forked child takes nothing of the server with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unit.transport.test_peers import GREETING, READY, hung_up

SERVER = """
import os, sys, time
from lmcache.environment import SYSTEM
from lmcache.transport.listening import listen
from lmcache.transport.rpc_server import RpcServer

server = RpcServer(sys.argv[1], int(sys.argv[2]), SYSTEM.clock)
server.start({})
http = listen("localhost", int(sys.argv[3]), "--http-port")
print(server.endpoint, http.getsockname()[1], flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
server.stop()
print("stopped", flush=True)
sys.stdin.readline()
"""


def serve(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def next_line(server: subprocess.Popen[str], goes_on: bool = True) -> str:
    assert server.stdin is not None and server.stdout is not None
    if goes_on:
        server.stdin.write("\n")
        server.stdin.flush()
    return server.stdout.readline().strip()


@pytest.mark.parametrize("end", ["stopped", "killed"])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_a_forked_child_keeps_neither_port_nor_connection(family: int, end: str, tmp_path: Path) -> None:
    host = "localhost" if family == socket.AF_INET else f"ipc://{tmp_path}/socket"
    child = 0
    with serve(host, "0", "0") as server, socket.socket(family) as raw:
        try:
            endpoint, http_port = next_line(server, goes_on=False).split()
            raw.settimeout(10.0)
            port = endpoint.rpartition(":")[2]
            raw.connect(("127.0.0.1", int(port)) if family == socket.AF_INET else f"{tmp_path}/socket")
            raw.sendall(GREETING + READY)
            assert raw.recv(1)
            child = int(next_line(server))
            if end == "stopped":
                assert next_line(server) == "stopped"
            else:
                server.kill()
            assert hung_up(raw)
            server.kill()
            server.wait(10.0)
            with serve(host, port if family == socket.AF_INET else "0", http_port) as second:
                try:
                    assert next_line(second, goes_on=False) == f"{endpoint} {http_port}"
                finally:
                    second.kill()
        finally:
            server.kill()
            if child:
                os.kill(child, signal.SIGKILL)
