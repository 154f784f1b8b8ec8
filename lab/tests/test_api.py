"""The HTTP API over TCP, as used by scripts, Prometheus and unauthorised clients."""

import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from standalone import TOKEN, Remote, certificates, stream, token_file, vnetd

from vnetlab import underlay
from vnetlab.run import run

LINK = {"name": "h2", "remote": "127.0.0.2:9000", "trusted": True}
NAMESPACE = "test-api"


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    with vnetd(tmp_path, token_file(tmp_path)) as running:
        yield running


def test_reading_is_open_and_changes_need_the_token(remote: Remote):
    assert remote.get("/v1/status")["host"] == "h1"
    for token, status in ((None, 401), ("x" * 32, 401), (TOKEN, 201)):
        assert remote.request("POST", "/v1/links", LINK, token)[0] == status
    assert [link["name"] for link in remote.get("/v1/links")] == ["h2"]
    assert remote.request("DELETE", "/v1/links/h2")[0] == 401
    assert remote.request("DELETE", "/v1/links/h2", token=TOKEN)[0] == 204
    assert "HTTP client 127.0.0.1:" in remote.log
    assert "refused a change without the right token" in remote.log


def test_every_change_is_logged_with_its_client(remote: Remote):
    assert remote.vnet("link", "add", "h3", "--remote", "127.0.0.3:9000", "--trusted").returncode == 0
    change = next(line for line in remote.log.splitlines() if "+ link h3" in line)
    assert "uid 0 pid " in change


def test_without_a_token_file_tcp_clients_change_nothing(tmp_path: Path):
    with vnetd(tmp_path) as remote:
        status, body = remote.request("POST", "/v1/links", LINK, TOKEN)
        assert (status, b"token_file" in body) == (403, True)


def test_curl_speaks_tls(tmp_path: Path):
    certificates(tmp_path)
    keys = f'tls_cert = "{tmp_path}/server.pem"\ntls_key = "{tmp_path}/server.key"\n'
    with vnetd(tmp_path, keys + token_file(tmp_path)) as remote:
        url = f"https://127.0.0.1:{remote.http}/v1"
        curl = ["curl", "-sS", "--max-time", "5", "--cacert", str(tmp_path / "ca.pem")]
        assert '"host":"h1"' in run([*curl, f"{url}/status"])
        change = ["-H", f"Authorization: Bearer {TOKEN}", "-d", '{"dst": "any", "to": "link none"}', f"{url}/routes"]
        assert "names link 'none'" in run([*curl, *change])
        with pytest.raises(ssl.SSLCertVerificationError):
            ssl.create_default_context().wrap_socket(
                socket.create_connection(("127.0.0.1", remote.http)), server_hostname="127.0.0.1"
            )
        with socket.create_connection(("127.0.0.1", remote.http), timeout=5) as clear:
            clear.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"h1" not in clear.recv(4096), "clear text at a TLS port"


@pytest.mark.parametrize("break_it", ["none", "readable", "short"])
def test_a_bad_token_file_is_refused(tmp_path: Path, break_it: str):
    key = token_file(tmp_path)
    file = tmp_path / "token"
    if break_it == "none":
        file.unlink()
    elif break_it == "readable":
        file.chmod(0o644)
    else:
        file.write_text("short")
    with pytest.raises(AssertionError, match="token_file"), vnetd(tmp_path, key):
        pass
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_prometheus_parses_the_metrics(remote: Remote):
    remote.vnet("link", "add", "h2", "--remote", "127.0.0.2:9000", "--trusted")
    status, text = remote.request("GET", "/metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    for name, kind, unit in (
        ("vnet_port_in_bytes", "counter", "bytes"),
        ("vnet_port_drops", "counter", ""),
        ("vnet_link_up", "gauge", ""),
        ("vnet_dispatch_latency_seconds", "histogram", "seconds"),
        ("vnet_dispatch_batch_frames", "histogram", ""),
        ("vnet_uptime_seconds", "gauge", "seconds"),
    ):
        assert (families[name].type, families[name].unit) == (kind, unit), name
    drops = {(s.labels["port"], s.labels["reason"]): s.value for s in families["vnet_port_drops"].samples}
    assert drops[("h2", "no_route")] == 0
    assert [sample.value for sample in families["vnet_link_up"].samples] == [0], "nobody is there"


def test_events_are_streamed(remote: Remote):
    connection = remote.connect()
    connection.request("GET", "/v1/events")
    answer = connection.getresponse()
    assert answer.getheader("content-type") == "text/event-stream"
    time.sleep(0.7)  # State events report differences to the first poll: wait for it.
    remote.vnet("link", "add", "h2", "--remote", "127.0.0.2:9000", "--trusted")
    first, second = islice(stream(answer), 2)
    assert first["event"] == "configuration"
    assert first["who"].startswith("uid 0 pid ")
    assert [(change["action"], change["object"], change["name"]) for change in first["changes"]] == [
        ("add", "link", "h2")
    ]
    assert "nothing came from the other host yet" in second.pop("reason")
    assert second == {"event": "state", "object": "link", "name": "h2", "state": "down"}
    connection.close()


def test_many_slow_clients_block_nobody(remote: Remote):
    """Opens more connections than vnetd serves, each with an unfinished request."""
    before = remote.descriptors()
    clients = [socket.create_connection(("127.0.0.1", remote.http), timeout=5) for _ in range(500)]
    for client in clients:
        try:
            client.sendall(b"GET /v1/status HTTP/1.1\r\nX: ")
        except OSError:
            continue  # Closed at once: over the limit.
    assert remote.vnet("status").returncode == 0, "the control socket has a limit of its own"
    assert remote.descriptors() - before <= 70
    for client in clients:
        client.close()
    deadline = time.monotonic() + 5
    while remote.descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert remote.get("/v1/status")["host"] == "h1"


def test_garbage_is_refused(remote: Remote):
    for garbage in (b"\x00" * 100_000, b"GET / HTTP/9\r\n\r\n", b"\x16\x03\x01\x02\x00", b"A" * 40_000 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", remote.http), timeout=5) as client:
            try:
                client.sendall(garbage)
                client.recv(4096)
            except OSError:
                continue  # A reset counts as an answer, too.
    body = "x" * ((1 << 20) + 1)
    with suppress(BrokenPipeError, ConnectionResetError):  # vnetd may refuse the request before reading all of it.
        assert remote.request("POST", "/v1/apply", body, TOKEN)[0] == 400
    assert remote.get("/v1/status")["host"] == "h1"


def test_schemathesis_finds_nothing(tmp_path: Path):
    """Tests the running API against its OpenAPI document, in a network namespace because it creates devices."""
    if NAMESPACE in underlay.namespaces():
        run(["ip", "netns", "delete", NAMESPACE])
    underlay.add_namespace(NAMESPACE)
    inside = ["ip", "netns", "exec", NAMESPACE]
    try:
        with vnetd(tmp_path, token_file(tmp_path), prefix=inside) as remote:
            checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
            command = [*inside, str(Path(sys.executable).parent / "st"), "run", "--checks", checks]
            command += ["--max-examples", "10", "--seed", "1", "--phases", "examples,coverage,fuzzing"]
            command += ["--exclude-path", "/v1/events", "--header", f"Authorization: Bearer {TOKEN}"]
            command += ["--no-color", "--generation-database", "none"]
            url = f"http://127.0.0.1:{remote.http}/v1/openapi.json"
            done = subprocess.run(
                [*command, url], check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path
            )
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    finally:
        run(["ip", "netns", "delete", NAMESPACE])
