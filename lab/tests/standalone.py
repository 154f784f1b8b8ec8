"""A single vnetd for tests of its TCP ports, whose numbers are read from its ready line."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path

from vnetlab import daemon
from vnetlab.run import run, wait_until

TOKEN = "0123456789abcdef" * 2


@dataclass
class Remote:
    """A running vnetd."""

    directory: Path
    http: int
    console: int
    pid: int
    tls: ssl.SSLContext | None = None

    @property
    def log(self) -> str:
        """The log so far."""
        return (self.directory / "log").read_text()

    def connect(self) -> HTTPConnection:
        """A connection to the API."""
        if self.tls:
            return HTTPSConnection("127.0.0.1", self.http, timeout=60, context=self.tls)
        return HTTPConnection("127.0.0.1", self.http, timeout=60)

    def request(self, method: str, path: str, body: object = None, token: str | None = None) -> tuple[int, bytes]:
        """Sends one request; returns status and body."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        text = body if isinstance(body, str) or body is None else json.dumps(body)
        connection = self.connect()
        try:
            connection.request(method, path, text, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> object:
        """The parsed answer to a GET request."""
        status, body = self.request("GET", path)
        assert status == 200, body
        return json.loads(body)

    def vnet(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs `vnet` on the control socket."""
        command = [daemon.binaries() / "vnet", "--socket", self.directory / "control.sock", *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, input=text, timeout=60)

    def talk(self, context: ssl.SSLContext | None = None) -> socket.socket:
        """A connection to the console."""
        client = socket.create_connection(("127.0.0.1", self.console), timeout=60)
        return context.wrap_socket(client, server_hostname="127.0.0.1") if context else client

    def descriptors(self) -> int:
        """Number of vnetd's open descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def lines(client: socket.socket, text: str | bytes) -> list[str]:
    """Sends text to the console, ends the session, and returns all answers."""
    client.sendall(text if isinstance(text, bytes) else text.encode())
    client.shutdown(socket.SHUT_WR)
    with client, client.makefile("r") as answers:
        return answers.read().splitlines()


def stream(answer: HTTPResponse) -> Iterator[dict]:
    """The events of `/v1/events`."""
    for line in answer:
        if line.startswith(b"data:"):
            yield json.loads(line[5:])


@contextmanager
def vnetd(directory: Path, control: str = "", more: str = "", prefix: Sequence[str] = ()) -> Iterator[Remote]:
    """Runs a vnetd with API and console on free loopback ports; asserts that it exits cleanly."""
    file, log = directory / "vnet.toml", directory / "log"
    file.write_text(
        f'[host]\nname = "h1"\n[control]\nsocket = "{directory}/control.sock"\nhttp = "127.0.0.1:0"\n'
        f'console = "127.0.0.1:0"\n{control}\n[bridge]\nlisten = "127.0.0.1:0"\n{more}'
    )
    with log.open("wb") as output:
        words = [*prefix, str(daemon.binaries() / "vnetd"), "--config", str(file)]
        with subprocess.Popen(words, stdout=output, stderr=output) as process:
            try:
                wait_until("vnetd to run", lambda: " ready: " in log.read_text() or process.poll(), 10, log)
                assert process.poll() is None, log.read_text()
                http, console = re.findall(r"(?:http|console) at 127\.0\.0\.1:(\d+)", log.read_text())
                yield Remote(directory, int(http), int(console), process.pid)
                assert process.poll() is None, log.read_text()
                process.send_signal(signal.SIGTERM)
                assert process.wait(5) == 0
            finally:
                process.kill()


def token_file(directory: Path) -> str:
    """Writes the token file; returns its configuration line."""
    file = directory / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    return f'token_file = "{file}"'


def certificates(directory: Path) -> None:
    """Creates certificates for a server at 127.0.0.1 and a client, and a client certificate of another authority."""
    for authority in ("ca", "stranger-ca"):
        _openssl(directory, f"req -x509 -days 2 -subj /CN={authority} -keyout {authority}.key -out {authority}.pem")
    (directory / "server.ext").write_text("subjectAltName=IP:127.0.0.1\n")
    (directory / "client.ext").write_text("extendedKeyUsage=clientAuth\n")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "stranger-ca")):
        extensions = "server.ext" if name == "server" else "client.ext"
        _openssl(directory, f"req -subj /CN={name} -keyout {name}.key -out {name}.csr")
        sign = f"x509 -req -days 2 -in {name}.csr -CA {authority}.pem -CAkey {authority}.key -out {name}.pem"
        run(["openssl", *f"{sign} -CAcreateserial -extfile {extensions}".split()], cwd=directory)


def _openssl(directory: Path, arguments: str) -> None:
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    run(["openssl", *arguments.split(), *key.split()], cwd=directory)


def trusting(directory: Path, client: str | None = None) -> ssl.SSLContext:
    """A TLS context that trusts the authority; with the certificate of `client`, if given."""
    context = ssl.create_default_context(cafile=directory / "ca.pem")
    if client:
        context.load_cert_chain(directory / f"{client}.pem", directory / f"{client}.key")
    return context
