"""Questions and answers between two containers over one TCP connection or UDP flow; every byte is checked.

Usage: questions.py answer ADDRESS PORT, which prints "ready" and answers by both protocols until it is killed, and
questions.py ask tcp|udp ADDRESS PORT, which asks every millisecond until its standard input ends. Then it prints one
JSON object: the number of answered questions, the longest time without an answer in seconds, and the number of
questions without one (UDP).
"""

import json
import random
import select
import socket
import sys
import threading
import time

LENGTHS = (1, 200, 1400, 9000)
"""Of questions, bytes: also such as take several packets."""
UDP_LENGTHS = (12, 200, 1400, 4000)
DATAGRAM = 1400
"""Longer questions are datagrams of this size, sent by one call, as one super-frame; so are their answers."""
UDP_SEGMENT = 103
UDP_GRO = 104
WAIT_S = 30
UDP_WAIT_S = 5
"""After which a datagram counts as lost: long for a machine that is busy with others."""


def receive(connection: socket.socket, length: int) -> bytes:
    """Exactly `length` bytes."""
    taken = bytearray()
    while len(taken) < length:
        part = connection.recv(length - len(taken))
        if not part:
            raise ConnectionError("the other end has closed")
        taken += part
    return bytes(taken)


def answer_tcp(listener: socket.socket) -> None:
    """Answers connections one after the other with what they send."""
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while part := connection.recv(65536):
                connection.sendall(part)


def answer_udp(server: socket.socket) -> None:
    """Answers datagrams with themselves, super-frames with super-frames."""
    while True:
        data, ancillary, _, sender = server.recvmsg(65536, socket.CMSG_SPACE(4))
        segment = next((int.from_bytes(value, sys.byteorder) for *_, value in ancillary), 0)
        send_udp(server, data, segment, sender)


def send_udp(from_: socket.socket, data: bytes, segment: int, *to: tuple) -> None:
    """Sends datagrams of `segment` bytes by one call, or one datagram if that is 0."""
    options = [(socket.IPPROTO_UDP, UDP_SEGMENT, segment.to_bytes(2, sys.byteorder))] if segment else []
    from_.sendmsg([data], options, 0, *to)


def answer(address: str, port: int) -> None:
    """Answers by both protocols."""
    listener = socket.create_server((address, port))
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, port))
    server.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    threading.Thread(target=answer_udp, args=(server,), daemon=True).start()
    print("ready", flush=True)
    answer_tcp(listener)


def ask_tcp(connection: socket.socket, number: int, chance: random.Random) -> bool:
    """Asks once, and checks the answer."""
    question = number.to_bytes(8) + chance.randbytes(chance.choice(LENGTHS))
    connection.sendall(question)
    assert receive(connection, len(question)) == question
    return True


def ask_udp(connection: socket.socket, number: int, chance: random.Random) -> bool:
    """The same; False if there is no answer."""
    question = number.to_bytes(8) + chance.randbytes(chance.choice(UDP_LENGTHS))
    send_udp(connection, question, DATAGRAM if len(question) > DATAGRAM else 0)
    end, said = time.monotonic() + UDP_WAIT_S, b""
    while (left := end - time.monotonic()) > 0:
        if select.select([connection], [], [], left)[0]:
            said += connection.recv(65536)
            assert question.startswith(said)
            if said == question:
                return True
    return False


def ask(protocol: str, address: str, port: int) -> None:
    """Asks until standard input ends."""
    is_tcp = protocol == "tcp"
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM if is_tcp else socket.SOCK_DGRAM)
    connection.settimeout(WAIT_S)
    connection.connect((address, port))
    if is_tcp:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    once = ask_tcp if is_tcp else ask_udp
    chance, answered, missed, silence, number = random.Random(1), 0, 0, 0.0, 0
    last = time.monotonic()
    print("asking", flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        number += 1
        if once(connection, number, chance):
            now = time.monotonic()
            answered, silence, last = answered + 1, max(silence, now - last), now
        else:
            missed += 1
    silence = max(silence, time.monotonic() - last)
    print(json.dumps({"answered": answered, "silence_s": silence, "missed": missed}))


def main() -> None:
    """See the module."""
    match sys.argv[1:]:
        case ["answer", address, port]:
            answer(address, int(port))
        case ["ask", protocol, address, port]:
            ask(protocol, address, int(port))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
