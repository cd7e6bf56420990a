"""Who is still there. Every rank has a connection to every other one, over which a thread says four times a second what
its rank is doing. So a rank that is killed, stopped, cut off or elsewhere is known by its number, and by all others at
once; the errors of gloo name an address, and only the neighbours of a rank see them.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import struct
import threading
import time
from typing import Any

PERIOD_S = 0.25  # between two signs of life
_MESSAGE = struct.Struct("<4sqqq")  # magic, call, calls done, verdict
_MAGIC = b"spRG"
_NOBODY = -1


class RankError(RuntimeError):
    """Another rank did not do its part. `rank` is its number in the group. The group is of no use any more."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} {text}")
        self.rank = rank
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return RankError, (self.rank, self.text)


def own_address() -> str:
    """As gloo chooses it: of the interface that GLOO_SOCKET_IFNAME names, else what this machine's name stands for."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    try:
        address = socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))  # the name may stand for another machine's address
        return address
    except OSError:
        return "127.0.0.1"


class _Peer:
    """What is known of one other rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unread = b""
        self.heard_s = time.monotonic()
        self.call = 0
        self.done = 0
        self.verdict = _NOBODY
        self.gone = False


class Watch:
    """Made by all ranks of a group together."""

    def __init__(self, store: Any, rank: int, ranks: int, timeout: float) -> None:
        """store: of torch.distributed, for this group and purpose alone. Raises RankError for ranks that do not come."""
        self.rank, self.ranks = rank, ranks
        self.call = 0  # the one at work, counted from 1
        self.done = 0
        self._verdict = _NOBODY
        self._lock = threading.Lock()  # of sending
        self._closing = False
        self.looked_s = time.monotonic()  # the thread has heard all that was there to hear then
        deadline = time.monotonic() + timeout
        self._peers = {peer: _Peer(connection) for peer, connection in _meet(store, rank, ranks, deadline).items()}
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name="sparge-watch", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self.call = self.done + 1
        self._say()

    def end(self) -> None:
        self.done = self.call
        self._say()

    def accuse(self, rank: int) -> None:
        """All others shall know, at once."""
        if self._verdict == _NOBODY:
            self._verdict = rank
            self._say()

    def check(self, waiting_since_s: float, timeout: float) -> None:
        """Raises RankError if a rank cannot do its part of this call any more."""
        now = self.looked_s  # of what came later, this rank knows nothing yet: its own thread may have had no time
        if not self._thread.is_alive():
            raise RankError(self.rank, "(this one) hears nothing of the others: its thread for that has ended, or is not in this process")
        missing = {number: peer for number, peer in self._peers.items() if peer.done < self.call}
        for number, peer in missing.items():
            if peer.verdict != _NOBODY:
                raise self._judged(number, peer.verdict)
        for number, peer in missing.items():
            if peer.gone:
                raise RankError(number, "is gone: its process has ended, or its connections have")
            if now - peer.heard_s > timeout:
                raise RankError(number, f"is silent: nothing from it for {now - peer.heard_s:.1f} s (timeout={timeout:g})")
            if now - waiting_since_s > timeout and peer.call < self.call:
                raise RankError(
                    number, f"has not come: it is in call {peer.call}, not {self.call}, after {timeout:g} s (timeout)"
                )

    def _judged(self, by: int, rank: int) -> RankError:
        if rank == by:
            return RankError(rank, "has failed with an error of its own")
        if rank == self.rank:
            return RankError(rank, f"(this one) was given up by rank {by}")
        return RankError(rank, f"does not do its part, says rank {by}")

    def close(self) -> None:
        self._closing = True
        self._thread.join(timeout=2)

    def _say(self) -> None:
        with self._lock:
            message = _MESSAGE.pack(_MAGIC, self.call, self.done, self._verdict)  # here: messages go in the order of what they say
            for peer in self._peers.values():
                if peer.gone:
                    continue
                try:
                    peer.connection.send(message)
                except BlockingIOError:  # it does not read: it has stopped, and others will say so
                    pass
                except OSError:
                    pass  # reading finds out, after what it said last

    def _run(self) -> None:
        next_sign = time.monotonic()
        while not self._closing:
            now = time.monotonic()
            if now >= next_sign:
                self._say()
                next_sign = now + PERIOD_S
            for key, _ in self._selector.select(timeout=max(next_sign - time.monotonic(), 0.01)):
                self._read(key.data)
            if not self._selector.get_map():
                time.sleep(0.01)
            self.looked_s = now
        for peer in self._peers.values():
            peer.connection.close()
        self._selector.close()

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            peer.gone = True
            self._selector.unregister(peer.connection)
            return
        peer.unread += data
        peer.heard_s = time.monotonic()
        while len(peer.unread) >= _MESSAGE.size:
            magic, peer.call, peer.done, verdict = _MESSAGE.unpack(peer.unread[: _MESSAGE.size])
            peer.unread = peer.unread[_MESSAGE.size :]
            if magic != _MAGIC:
                peer.gone = True
            elif verdict != _NOBODY:
                peer.verdict = verdict


def _meet(store: Any, rank: int, ranks: int, deadline: float) -> dict[int, socket.socket]:
    """A connection to every other rank."""
    try:
        return _connections(store, rank, ranks, deadline)
    except OSError as error:  # an interface or address that is not here, no more files
        raise RankError(rank, f"(this one) cannot be met by others: {error}") from None


def _connections(store: Any, rank: int, ranks: int, deadline: float) -> dict[int, socket.socket]:
    """From the higher to the lower number."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        address = own_address()
        listener.bind((address, 0))
        listener.listen(ranks)
        _ask(lambda: store.set(str(rank), f"{address}:{listener.getsockname()[1]}"))
        found: dict[int, socket.socket] = {}
        for lower in range(rank):
            host, port = _wait_for(store, lower, deadline).rsplit(":", 1)
            try:
                connection = socket.create_connection((host, int(port)), timeout=_left(deadline))
                connection.sendall(struct.pack("<q", rank))
            except OSError as error:
                raise RankError(lower, f"cannot be reached at {host}:{port}: {error}") from None
            found[lower] = connection
        while len(found) < ranks - 1:
            listener.settimeout(_left(deadline))
            try:
                connection, _ = listener.accept()
                connection.settimeout(_left(deadline))
                found[struct.unpack("<q", _exactly(connection, 8))[0]] = connection
            except OSError:
                missing = next(other for other in range(ranks) if other != rank and other not in found)
                raise RankError(missing, "has not come: it did not connect in time") from None
    for connection in found.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise OSError("closed")
        data += more
    return data


def _ask(question: Any) -> Any:
    """Something of the store, which may be a part of rank 0."""
    try:
        return question()
    except Exception as error:
        first = str(error).splitlines()[0]
        raise RankError(0, f"does not answer, or whoever keeps the store of the group: {first}") from None


def _wait_for(store: Any, rank: int, deadline: float) -> str:
    while not _ask(lambda: store.check([str(rank)])):
        if time.monotonic() > deadline:
            raise RankError(rank, "has not come: it did not make a call of this group in time")
        time.sleep(0.02)
    return str(_ask(lambda: store.get(str(rank))).decode())
