"""Attacks on sockets and devices until SIGTERM; then prints how often, for how long (s), with how much processor (s).

Usage: pester.py ATTACK PER_S ADDRESS PORT [FROM] | pester.py macs PER_S DEVICE TO_MAC

`connections` connects and closes, `handshakes` begins TLS handshakes, `garbage` sends bytes that are none, `datagrams`
sends what looks like keepalives of sealed links; their source address may be FROM. `learned` requests all learned
addresses, `console` sends HTTP to the console, `idle` opens connections and keeps the last 500 of them. `macs` sends
frames from invented addresses. Each is as fast as it can, but no faster than PER_S, if that is not 0.
"""

import contextlib
import os
import signal
import socket
import ssl
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

REQUEST = b"GET /v1/learned HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
EXPERIMENTAL = struct.pack(">H", 0x88B5)
"""EtherType for local experiments (IEEE 802)."""
PATIENCE_S = 10
BURST = 50
IDLE = 500


def reached(words: list[str]) -> socket.socket:
    """A connection to ADDRESS PORT, from FROM."""
    address, port, *own = words
    source = (own[0], 0) if own else None
    return socket.create_connection((address, int(port)), PATIENCE_S, source)


def connections(words: list[str]) -> None:
    reached(words).close()


def handshakes(words: list[str]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["vnet-seal/1"])
    with reached(words) as stream, context.wrap_socket(stream) as sealed:
        sealed.recv(1)


def garbage(words: list[str]) -> None:
    with reached(words) as stream:
        stream.sendall(os.urandom(300))
        stream.recv(1)


def talk(words: list[str], request: bytes) -> None:
    with reached(words) as stream:
        stream.sendall(request)
        while stream.recv(1 << 20):
            pass


def burst(send: Callable[[int], object]) -> Callable[[], int]:
    """Sends BURST times, with the number of each."""
    sent = 0

    def step() -> int:
        nonlocal sent
        for number in range(sent, sent + BURST):
            # A frame for which the device has no room is lost, as on a network.
            with contextlib.suppress(OSError):
                send(number)
        sent += BURST
        return BURST

    return step


def datagrams(words: list[str]) -> Callable[[], int]:
    """A sealed keepalive's header (type 4, flag SEALED), number and length; the rest is random."""
    address, port, *own = words
    out = socket.socket(type=socket.SOCK_DGRAM)
    out.bind((own[0] if own else "0.0.0.0", 0))
    out.connect((address, int(port)))
    tail = os.urandom(44)
    return burst(lambda number: out.send(struct.pack("!BBHQ", 0x14, 5, 0, number) + tail))


def macs(words: list[str]) -> Callable[[], int]:
    device, to = words
    out = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    out.bind((device, 0))
    destination, tail = bytes.fromhex(to.replace(":", "")), EXPERIMENTAL + bytes(46)
    return burst(lambda number: out.send(destination + struct.pack(">HI", 0x0200, number) + tail))


def idle(words: list[str]) -> Callable[[], int]:
    kept: deque[socket.socket] = deque(maxlen=IDLE)

    def step() -> int:
        if len(kept) == IDLE:
            kept[0].close()
        kept.append(reached(words))
        return 1

    return step


def once(attack: Callable[[], object]) -> Callable[[], int]:
    """Counts attacks that vnetd ends by closing the connection."""

    def step() -> int:
        with contextlib.suppress(OSError):
            attack()
        return 1

    return step


def attack(name: str, per_s: float, words: list[str]) -> NoReturn:
    simple = {"connections": connections, "handshakes": handshakes, "garbage": garbage}
    over = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal over
        over = True

    signal.signal(signal.SIGTERM, stop)
    if name in simple:
        step = once(lambda: simple[name](words))
    elif name in ("learned", "console"):
        step = once(lambda: talk(words, REQUEST))
    else:
        step = {"datagrams": datagrams, "macs": macs, "idle": idle}[name](words)
    print("ready", flush=True)
    count, begin, used = 0, time.monotonic(), time.process_time()
    while not over:
        count += step()
        if per_s:
            time.sleep(max(0.0, begin + count / per_s - time.monotonic()))
    print(count, time.monotonic() - begin, time.process_time() - used, flush=True)
    sys.exit()


attack(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
