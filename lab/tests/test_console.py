"""The console over TCP and by `vnet console`: the language, and hostile clients."""

import os
import pty
import random
import resource
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from standalone import Remote, certificates, lines, trusting, vnetd

from vnetlab import daemon

LINE_MAX = 4096
CLIENTS = 10_000


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    with vnetd(tmp_path) as running:
        yield running


def test_a_session(remote: Remote):
    said = lines(
        remote.talk(),
        "HELLO\nLINK ADD 127.0.0.2 9000 udp\nroute add any 52:54:00:00:00:02 edge 127.0.0.2 any\nROUTES?\n"
        "LINK DEL 1\nROUTE DEL 1\nLINK DEL 1\nLINKS?\nNONSENSE\nDONE\nLINK ADD 127.0.0.9 9000\n",
    )
    assert said[0].startswith("OK vnet ")
    assert said[1:5] == ["OK link 1", "OK route 1", "1 any 52:54:00:00:00:02 edge 127.0.0.2:9000 any network=1", "."]
    assert said[5].startswith("ERROR link link1 is named by route 1")
    assert said[6:9] == ["OK route 1 removed", "OK link 1 removed", "."]
    assert said[9].startswith("ERROR 'NONSENSE' is not a command")
    assert said[10:] == ["OK bye"], "nothing after DONE"
    assert "console client 127.0.0.1:" in next(line for line in remote.log.splitlines() if "+ link link1" in line)


def test_files_of_vnet_p(remote: Remote, tmp_path: Path):
    (tmp_path / "links").write_text("# two hosts\nADD 127.0.0.2 9000 udp\nADD 127.0.0.3 9000 udp\n")
    (tmp_path / "routes").write_text("ADD any 52:54:00:00:00:02 edge 127.0.0.2 any\nADD any any edge 127.0.0.9 any\n")
    done = remote.vnet("console", str(tmp_path / "links"), str(tmp_path / "routes"))
    assert done.stdout == "OK link 1\nOK link 2\nOK route 1\n"
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path}/routes:2: there is no link to 127.0.0.9; LINKS? lists them\n"
    done = remote.vnet("console", text="LINKS?\nROUTE DEL 1\n")
    assert done.stdout.splitlines()[2:] == [".", "OK route 1 removed"]
    assert (done.returncode, done.stderr) == (0, "")
    assert remote.get("/v1/routes") == []


def test_an_interactive_terminal(remote: Remote, tmp_path: Path):
    """History, completion and Ctrl-D on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    command = [daemon.binaries() / "vnet", "--socket", tmp_path / "control.sock", "console"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    seen = ""

    def expect(text: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 5
        while text not in seen:
            assert time.monotonic() < deadline, (text, seen)
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 4096).decode()
        seen = seen.partition(text)[2]

    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        for keys, answer in (
            (b"HELLO\r", "OK vnet "),
            (b"LINK A\t127.0.0.2 9000\r", "OK link 1"),
            (b"ROUTE ADD any any edge lin\tany\r", "OK route 1"),
            (b"LINK DEL 9\r", "ERROR there is no link 9"),
            (b"\x1b[A\r", "ERROR there is no link 9"),
        ):
            expect("vnet> ")
            os.write(ours, keys)
            expect(answer)
        expect("vnet> ")
        os.write(ours, b"\x04")
        assert process.wait(5) == 0
    os.close(ours)
    assert "LINK ADD 127.0.0.2 9000" in (tmp_path / "vnet" / "console_history").read_text()
    assert [route["to"] for route in remote.get("/v1/routes")] == ["link link1"]


def test_lines_typed_ahead_are_executed_in_order(remote: Remote, tmp_path: Path):
    """Four lines arrive at once, as when a user pastes them, or types faster than vnetd answers."""
    ours, theirs = pty.openpty()
    command = [daemon.binaries() / "vnet", "--socket", tmp_path / "control.sock", "console"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        os.write(ours, b"".join(b"LINK ADD 127.0.0.%d 9000\r" % number for number in range(2, 6)) + b"DONE\r")
        seen = b""
        with suppress(OSError):  # The other end of the terminal is closed.
            while select.select([ours], [], [], 10)[0]:
                seen += os.read(ours, 4096)
        if process.poll() is None:
            os.write(ours, b"\x04")
    os.close(ours)
    assert [f"OK link {number}" for number in range(1, 5)] == [
        line for line in seen.decode().replace("\r", "").splitlines() if line.startswith("OK link")
    ]
    assert [link["remote"] for link in remote.get("/v1/links")] == [f"127.0.0.{number}:9000" for number in range(2, 6)]


def test_long_lines_and_garbage(remote: Remote):
    fits = "HELLO " + "x" * (LINE_MAX - 6)
    said = lines(remote.talk(), f"{fits}\n{fits}x\n{'y' * 1_000_000}\nHELLO\n")
    assert [line.split()[0] for line in said] == ["OK", "ERROR", "ERROR", "OK"]
    assert "longer than 4096 bytes" in said[1]
    chance = random.Random(1)
    for _ in range(50):
        with suppress(OSError):
            lines(remote.talk(), chance.randbytes(chance.randrange(20_000)))
    assert lines(remote.talk(), "HELLO\n")[0].startswith("OK")


def test_slow_clients_block_nobody(remote: Remote):
    slow = [remote.talk() for _ in range(40)]
    for client in slow:
        client.sendall(b"LINKS")
    # A client that requests long listings and reads no answer.
    deaf = remote.talk()
    deaf.settimeout(0.2)
    with suppress(OSError):
        while deaf.send(b"HELP\n" * 1000):
            pass
    begin = time.monotonic()
    assert lines(remote.talk(), "LINKS?\n") == ["."]
    assert time.monotonic() - begin < 2
    for client in [*slow, deaf]:
        client.close()


def test_ten_thousand_clients(remote: Remote):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CLIENTS + 1000
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), max(hard, wanted)))
    before = remote.descriptors()
    clients = []
    try:
        waiting = select.poll()
        for _ in range(CLIENTS):
            clients.append(socket.socket())
            clients[-1].settimeout(0)
            clients[-1].connect_ex(("127.0.0.1", remote.console))
            waiting.register(clients[-1], select.POLLOUT)
        left = {client.fileno(): client for client in clients}
        deadline = time.monotonic() + 20  # With a full backlog the kernel retries after seconds.
        while left:
            assert time.monotonic() < deadline, f"{len(left)} clients are not connected"
            for descriptor, _ in waiting.poll(100):
                waiting.unregister(descriptor)
                left.pop(descriptor).settimeout(5)
        # All clients are connected at once; those within the limit are answered, the others refused.
        answered, refused = 0, 0
        for client in clients:
            with suppress(OSError):
                client.sendall(b"HELLO\n")
        for client in clients:
            with suppress(OSError):  # A refused connection may be reset.
                words = client.recv(100)
                answered += words.startswith(b"OK vnet ")
                refused += words.startswith(b"ERROR too many clients")
        assert 1 <= answered <= 64
        assert refused > 0
        assert remote.descriptors() - before < 100
        assert remote.vnet("status").returncode == 0
    finally:
        for client in clients:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def served() -> bool:
        with suppress(OSError):
            return lines(remote.talk(), "HELLO\n")[0].startswith("OK")
        return False

    deadline = time.monotonic() + 5
    while not served():
        assert time.monotonic() < deadline, "the limit still counts clients that are gone"
        time.sleep(0.05)
    assert remote.descriptors() - before < 10


def test_only_clients_with_a_certificate(tmp_path: Path):
    certificates(tmp_path)
    keys = f'tls_cert = "{tmp_path}/server.pem"\ntls_key = "{tmp_path}/server.key"\ntls_client_ca = "{tmp_path}/ca.pem"'
    with vnetd(tmp_path, keys) as remote:
        with remote.talk(trusting(tmp_path, "client")) as client:
            client.sendall(b"HELLO\nDONE\n")
            assert client.makefile("r").read().startswith("OK vnet ")
        for stranger in (None, "stranger"):
            # vnetd refuses the client in the handshake or at its first bytes.
            with suppress(OSError), remote.talk(trusting(tmp_path, stranger)) as client:
                client.sendall(b"LINK ADD 127.0.0.2 9000\n")
                assert client.recv(100) == b""
        with remote.talk() as clear:
            clear.sendall(b"LINK ADD 127.0.0.2 9000\n")
            with suppress(OSError):
                assert b"OK" not in clear.recv(100)
        remote.tls = trusting(tmp_path)
        assert remote.get("/v1/links") == []
