"""Messages between the ranks of a group, by torch.distributed. They travel while this rank computes; waiting for them
ends when they are there, or with a RankError.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from datetime import timedelta
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist

from ._watch import RankError, Watch

_TAG = 7301  # away from what else a program sends in this group
_HEADER_BYTES = 4096
_POLL_S = 0.05
_MOMENT_S = 1.0  # until the watch knows what gloo knows
_NO_LIMIT = timedelta(days=1)  # of gloo: who is lost, the watch decides


class Transfer:
    """A message on its way. Keeps its memory."""

    def __init__(self, tensor: torch.Tensor, work: Any, peer: int) -> None:
        self.tensor = tensor
        self.work = work
        self.peer = peer
        self.began = time.perf_counter()
        self.ended = 0.0
        self.error: str | None = None
        self.over = threading.Event()


class Links:
    """Of one rank to all others of its group."""

    def __init__(self, group: Any, timeout: float) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.failed: RankError | None = None
        self._watch: Watch | None = None
        self.timeout = timeout
        self.bytes_of: dict[str, int] = {}
        self.waited_s = 0.0
        self.trace: list[tuple[str, float, float]] = []
        if self.ranks == 1:
            return
        self._globals = [dist.get_global_rank(group, r) for r in range(self.ranks)]
        name = getattr(group, "group_name", "world")
        kept = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"sparge/{name}/{_next_generation(name)}", kept)  # type: ignore[attr-defined]
        self._watch = Watch(store, self.rank, self.ranks, timeout)
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        threading.Thread(target=self._wait_in_turn, name="sparge-links", daemon=True).start()

    def begin(self, timeout: float) -> None:
        """A call begins: counts anew."""
        if self.failed is not None:
            raise RankError(self.failed.rank, f"{self.failed.text}; that was an earlier call, and the group is spent")
        self.timeout = timeout
        self.bytes_of, self.waited_s, self.trace = {}, 0.0, []
        if self._watch is not None:
            self._watch.begin()

    def end(self) -> None:
        if self._watch is not None:
            self._watch.end()

    def fail(self, error: BaseException) -> None:
        """The call ends with an error: the others shall know whose."""
        if self._watch is not None and self.failed is None:
            self.failed = error if isinstance(error, RankError) else RankError(self.rank, f"has failed: {error!r}")
            self._watch.accuse(self.failed.rank)

    def close(self) -> None:
        if self._watch is not None:
            self._queue.put(None)
            self._watch.close()

    def send(self, tensor: torch.Tensor, to: int, what: str) -> Transfer:
        flat = _as_bytes(tensor.contiguous())
        self.bytes_of[what] = self.bytes_of.get(what, 0) + flat.numel()
        return self._post(flat, lambda: dist.isend(flat, self._globals[to], group=self.group, tag=_TAG), to)

    def receive(self, into: torch.Tensor, source: int) -> Transfer:
        """into: contiguous."""
        flat = _as_bytes(into)
        return self._post(flat, lambda: dist.irecv(flat, self._globals[source], group=self.group, tag=_TAG), source)

    def _post(self, flat: torch.Tensor, post: Callable[[], Any], peer: int) -> Transfer:
        if flat.numel() == 0:
            transfer = Transfer(flat, None, peer)
            transfer.over.set()
            return transfer
        try:
            transfer = Transfer(flat, post(), peer)
        except RuntimeError as error:  # gloo knows already that the connection is lost
            self._find_culprit(peer, str(error))
        self._queue.put(transfer)
        return transfer

    def wait(self, transfers: Sequence[Transfer], what: str) -> None:
        since = time.monotonic()
        began = time.perf_counter()
        for transfer in transfers:
            while not transfer.over.wait(_POLL_S):
                self._check(since)
            if transfer.error is not None:
                self._find_culprit(transfer.peer, transfer.error)
        self._check(since)
        ended = time.perf_counter()
        self.waited_s += ended - began
        self.trace.append((f"wait {what}", began, ended))

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], what: str) -> list[torch.Tensor]:
        """Flat tensors of all ranks, that have so many elements."""
        flat = tensor.contiguous().view(-1)
        found = [flat if r == self.rank else flat.new_empty(sizes[r]) for r in range(self.ranks)]
        others = [r for r in range(self.ranks) if r != self.rank]
        transfers = [self.receive(found[r], r) for r in others] + [self.send(flat, r, what) for r in others]
        self.wait(transfers, what)
        return found

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], what: str) -> None:
        """outgoing[r] goes to rank r, incoming[r] is filled by it; what a rank has for itself is copied."""
        incoming[self.rank].view(-1).copy_(outgoing[self.rank].reshape(-1))
        others = [r for r in range(self.ranks) if r != self.rank]
        transfers = [self.receive(incoming[r], r) for r in others] + [self.send(outgoing[r], r, what) for r in others]
        self.wait(transfers, what)

    def tell_all(self, message: dict[str, Any], what: str) -> list[dict[str, Any]]:
        """Small messages of all ranks."""
        if self.ranks == 1:
            return [message]
        data = json.dumps(message).encode()
        if len(data) > _HEADER_BYTES:
            raise ValueError(f"a message of {len(data)} bytes: {what}")
        flat = torch.frombuffer(bytearray(data.ljust(_HEADER_BYTES)), dtype=torch.uint8)
        return [json.loads(bytes(of.numpy())) for of in self.all_gather(flat, [_HEADER_BYTES] * self.ranks, what)]

    def _check(self, since: float) -> None:
        if self._watch is not None:
            self._watch.check(since, self.timeout)

    def _find_culprit(self, peer: int, text: str) -> None:
        """The connection to a rank is lost; the watch knows in a moment who is gone, or has accused somebody."""
        since = time.monotonic()
        while self._watch is not None and self._watch.looked_s - since < _MOMENT_S:
            self._check(since)
            time.sleep(0.01)
        raise RankError(peer, f"has lost its connection: {text.splitlines()[0]}")

    def _wait_in_turn(self) -> None:
        while (transfer := self._queue.get()) is not None:
            try:
                transfer.work.wait(_NO_LIMIT)
            except RuntimeError as error:
                transfer.error = str(error)
            transfer.ended = time.perf_counter()
            transfer.over.set()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor; types of two bytes and of four travel alike."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


_generations: dict[str, int] = {}


def _next_generation(name: str) -> int:
    _generations[name] = _generations.get(name, 0) + 1
    return _generations[name]


_links: dict[int, Links] = {}


def links_of(group: Any, timeout: float) -> Links:
    """Made by the first call of a group, in which all its ranks take part."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group: torch.distributed has no process group; call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError("group: this process is none of its ranks")
    known = _links.get(id(group))
    if known is None:
        _close_destroyed()
        backend = group._get_backend(torch.device("cpu")).name()
        if backend != "gloo":
            raise ValueError(f"group: its backend for CPU tensors is {backend}, not gloo")
        known = _links[id(group)] = Links(group, timeout)
    return known


def _close_destroyed() -> None:
    """Groups that are no more; PyTorch does not say when it destroys one."""
    there = dist.distributed_c10d._world.pg_map
    for links in list(_links.values()):
        if links.group not in there:
            close(links.group)


def close(group: Any = None) -> None:
    """Lets go of what calls have made for a group: two threads, and a connection to each other rank. For groups that are
    destroyed the first call of another one does that. A later call makes it anew, together with all other ranks."""
    group = dist.group.WORLD if group is None else group
    links = _links.pop(id(group), None)
    if links is not None:
        links.close()
