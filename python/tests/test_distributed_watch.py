"""Who is blamed where a call over several ranks fails: the watch and the links of one rank, in this process alone."""

import datetime
import queue
import socket
import threading
import time
import types

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import sparge.distributed as sd
from sparge.distributed import _links, _watch

LONG_S = 600.0


@pytest.fixture
def two():
    """The watches of two ranks, over sockets as ever."""
    store, made = torch.distributed.HashStore(), {}
    threads = [threading.Thread(target=lambda r=r: made.update({r: _watch.Watch(store, r, 2, LONG_S)})) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield made[0], made[1]
    for watch in made.values():
        watch.close()


def until(true):
    deadline = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def still(watch):
    """A watch that hears nothing from now on."""
    watch.close()
    watch._thread = types.SimpleNamespace(is_alive=lambda: True, join=lambda timeout: None)
    return watch


def check(watch, timeout=LONG_S):
    watch.check(time.monotonic(), timeout)


def test_a_call_that_is_complete_stays_so(two):
    """Rank 1 has done its part, and fails in the next call while rank 0 is still in this one."""
    mine, other = two
    for watch in two:
        watch.begin()
    other.end()
    other.begin()
    other.accuse(1)
    until(lambda: mine._peers[1].verdict == 1)
    check(mine)
    mine.end()
    mine.begin()
    with pytest.raises(sd.RankError, match="rank 1 has failed") as caught:
        check(mine)
    assert caught.value.rank == 1


def test_who_had_no_time_to_listen_blames_nobody(two):
    mine = still(two[0])
    mine.call = 1
    peer = mine._peers[1]
    peer.call = 1
    peer.heard_s = time.monotonic() - 100
    mine.looked_s = peer.heard_s + 2.9
    check(mine, timeout=3.0)
    mine.looked_s = peer.heard_s + 3.1
    with pytest.raises(sd.RankError, match=r"rank 1 is silent: nothing from it for 3\.1 s"):
        check(mine, timeout=3.0)
    peer.heard_s, peer.call = mine.looked_s, 0
    since_s = mine.looked_s - 2.9
    mine.check(since_s, 3.0)
    with pytest.raises(sd.RankError, match="rank 1 has not come"):
        mine.check(since_s - 0.2, 3.0)


def test_a_watch_that_has_ended_is_said(two):
    mine, _ = two
    mine.begin()
    mine.close()
    with pytest.raises(sd.RankError, match=r"rank 0 \(this one\) hears nothing"):
        check(mine)


def test_signs_of_life_are_never_stale(two):
    """What changes before a message is on its way is in it."""
    mine = still(two[0])
    sent = []

    class Turn:
        def __enter__(self):
            mine.call, mine.done = 7, 7

        def __exit__(self, *error):
            pass

    mine._peers[1].connection = types.SimpleNamespace(send=sent.append)
    mine._lock = Turn()
    mine._say()
    assert _watch._MESSAGE.unpack(sent[0])[1:3] == (7, 7)


def test_address_is_one_of_this_machine(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "192.0.2.1")  # of nobody: for documentation
    assert _watch.own_address() == "127.0.0.1"


def test_an_interface_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(sd.RankError, match=r"rank 1 \(this one\) cannot be met by others: .*No such device"):
        _watch.Watch(torch.distributed.HashStore(), 1, 2, LONG_S)


def test_a_lost_connection_is_its_other_end_and_gloo_sets_no_limit(two):
    """Where the watch knows of nobody. gloo's own limit, that of the group, may be shorter than the timeout of a call."""
    mine = still(two[0])
    mine.begin()
    mine.looked_s = time.monotonic() + LONG_S
    limits = []

    def wait(limit=datetime.timedelta(0)):
        limits.append(limit)
        raise RuntimeError("Connection closed by peer\nand more")

    links = _links.Links.__new__(_links.Links)
    links.rank, links.timeout, links._watch, links._queue = 0, LONG_S, mine, queue.SimpleQueue()
    transfer = links._post(torch.ones(1), lambda: types.SimpleNamespace(wait=wait), 1)
    links._queue.put(None)
    links._wait_in_turn()
    with pytest.raises(sd.RankError, match="rank 1 has lost its connection: Connection closed by peer$"):
        links.wait([transfer], "nothing")
    assert limits[0].total_seconds() >= 86400  # the longest timeout
