"""The parts of transports that need no cluster."""

import gc
import os
import threading

import jax
import ml_dtypes
import numpy as np
import pytest

from cluster.info import GroupInfo
from cluster.transports import inbox as inboxes
from cluster.transports.edges import Edges, check_name, choose, offered
from cluster.transports.inbox import HEADER, Inbox
from cluster.transports.slots import Chunk, layout_of, shared_memory
from cluster.transports.window import Window
from mpmd.errors import StepAborted
from mpmd.runtime.transport import MessageId

ALL = ("shared_memory", "device", "object_store")


def group(mpmd_idx, node, transports=ALL):
    return GroupInfo(mpmd_idx, "10.0.0.1", node, 1, (), transports)


def test_each_pair_of_groups_gets_the_best_that_both_offer():
    groups = [group(0, "a"), group(1, "a"), group(2, "b"), group(3, "b", ("object_store",))]
    assert choose("auto", groups) == {
        (0, 1): "shared_memory",
        (0, 2): "device",
        (1, 2): "device",
        (0, 3): "object_store",
        (1, 3): "object_store",
        (2, 3): "object_store",
    }


@pytest.mark.parametrize("name", ALL)
def test_a_transport_that_is_asked_for_is_taken(name):
    assert choose(name, [group(0, "a"), group(1, "a")]) == {(0, 1): name}


def test_a_transport_that_does_not_connect_all_groups_is_refused_with_all_such_pairs():
    with pytest.raises(ValueError, match="transport 'shared_memory' does not connect all groups") as caught:
        choose("shared_memory", [group(0, "a"), group(1, "a"), group(2, "b")])
    assert "groups 0 and 2 can use device, object_store" in str(caught.value)
    assert "groups 1 and 2" in str(caught.value)
    assert "groups 0 and 1" not in str(caught.value)


def connected(name):
    """Both ends of an edge in this process."""
    submeshes = [jax.sharding.Mesh(np.array(jax.devices()[i : i + 1]), ("stage",)) for i in range(2)]
    ends = [Edges(mpmd_idx, submesh) for mpmd_idx, submesh in enumerate(submeshes)]
    addresses = [edges.listen([name], "127.0.0.1", b"secret") for edges in ends]
    threads = [
        threading.Thread(target=edges.connect, args=({1 - i: name}, addresses))
        for i, edges in enumerate(ends)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return ends


@pytest.mark.parametrize("name", ["shared_memory", "device"])
def test_who_closes_is_gone_for_its_peers(monkeypatch, name):
    monkeypatch.setattr(inboxes, "PATIENCE_SECONDS", 0.1)
    ends = connected(name)
    message, other = MessageId(0, 0, 1, 0), MessageId(0, 0, 1, 1)
    ends[0].send(message, [np.arange(70_000)])
    wanted = [jax.sharding.SingleDeviceSharding(jax.devices()[1])]
    np.testing.assert_array_equal(ends[1].recv(message, wanted)[0], np.arange(70_000))
    ends[0].close()
    with pytest.raises(StepAborted, match="group 0 is gone"):
        ends[1].recv(other, wanted)
    with pytest.raises(StepAborted, match="group 0 is gone"):
        ends[1].send(MessageId(0, 1, 0, 0), [np.arange(70_000)])
    ends[1].close()


@pytest.mark.parametrize("name", ["shared_memory", "device"])
def test_who_dies_before_it_has_read_is_gone_too(monkeypatch, name):
    monkeypatch.setattr(inboxes, "PATIENCE_SECONDS", 0.1)
    ends = connected(name)
    for tag in range(3):
        ends[0].send(MessageId(0, 0, 1, tag), [np.arange(1000 * (tag + 1))])
    ends[1].close()
    with pytest.raises(StepAborted, match="group 1 is gone"):
        for tag in range(3, 9):
            ends[0].send(MessageId(0, 0, 1, tag), [np.arange(1000 * (tag + 1))])
    ends[0].close()


def test_a_message_that_cannot_be_made_leaves_its_memory_free():
    class Broken:
        dtype, shape = np.dtype("float32"), (3,)

        @property
        def is_fully_replicated(self):
            raise RuntimeError("the task that makes it failed")

    ends = connected("shared_memory")
    for tag in range(3):
        with pytest.raises(RuntimeError, match="the task that makes it failed"):
            ends[0].send(MessageId(0, 0, 1, tag), [Broken()])
    (outgoing,) = ends[0]._shared_memory._outgoing.values()
    assert all(slot.free for slots in outgoing._slots.values() for slot in slots)
    for edges in ends:
        edges.close()


def test_messages_of_an_aborted_step_in_both_directions_block_nobody():
    """More of them than sockets can hold."""
    ends = connected("device")
    for edges in ends:
        edges.abort(0, "a task failed")
    packet = np.zeros(16 * 1024, "uint8")

    def send(mpmd_idx):
        for tag in range(1500):
            ends[mpmd_idx].send(MessageId(0, mpmd_idx, 1 - mpmd_idx, tag), [packet])

    threads = [threading.Thread(target=send, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    for edges in ends:
        edges.close()


def test_unknown_transports_are_refused():
    with pytest.raises(ValueError, match="one of auto, shared_memory, device, object_store, not 'pigeon'"):
        check_name("pigeon")


def test_accelerators_prefer_what_does_not_go_through_host_memory():
    assert offered("cpu") == ("shared_memory", "device", "object_store")
    assert offered("cuda") == ("device", "shared_memory", "object_store")
    assert offered("unheard of") == ("shared_memory", "object_store")


def test_a_sender_may_be_one_step_ahead():
    window = Window()
    for step in (7, 7, 9):
        assert window.admits(step, taken=0)
        window.note_sent()
    assert not window.admits(12, taken=0)
    assert not window.admits(12, taken=1)
    assert window.admits(12, taken=2)
    window.note_sent()
    assert not window.admits(13, taken=2)
    assert window.admits(13, taken=3)


SIGNATURE = ((np.dtype("float32"), (3, 5)), (np.dtype(bool), ()), (np.dtype(ml_dtypes.bfloat16), (0, 4)))


def test_values_lie_aligned_and_apart():
    layout = layout_of(4, SIGNATURE)
    assert [part.offset for part in layout.parts] == [0, 64, 128]
    assert (layout.number, layout.nbytes) == (4, 128)
    assert layout.size == os.sysconf("SC_PAGE_SIZE")
    assert layout_of(0, ((np.dtype("uint8"), (4096,)),)).size == 2 * 4096


@pytest.fixture
def ends():
    """Both ends of a slot."""
    size = layout_of(0, SIGNATURE).size
    descriptor = shared_memory(size)
    yield tuple(Chunk(size, 1).slots(descriptor, 0)[0] for _ in range(2))
    os.close(descriptor)


def test_a_slot_is_free_again_when_all_that_was_lent_is_dead(ends):
    sender, reader = ends
    layout = layout_of(0, SIGNATURE)
    assert sender.free
    for part in sender.occupy(layout):
        part[...] = 1
    matrix, flag, empty = reader.lend(layout)
    assert (matrix.sum(), bool(flag), empty.shape, empty.dtype) == (15, True, (0, 4), ml_dtypes.bfloat16)
    assert not matrix.flags.writeable
    del flag, empty
    row = matrix[1]
    del matrix
    assert not sender.free
    del row
    assert sender.free


@pytest.mark.parametrize("how", ["put", "run", "donated"])
def test_a_slot_is_held_while_jax_reads_it(ends, how):
    sender, reader = ends
    signature = ((np.dtype("float32"), (512,)),)
    layout = layout_of(1, signature)
    sender.occupy(layout)[0][...] = 3
    (value,) = reader.lend(layout)
    if how == "put":
        array = jax.device_put(value)
        assert array.unsafe_buffer_pointer() == value.ctypes.data, "nothing is copied"
    else:
        donated = 0 if how == "donated" else ()
        (array,) = jax.jit(lambda x: (x * 2,), donate_argnums=donated)(value)
        assert (value == 3).all(), "what was received is not written to"
    del value
    expected = 3 if how == "put" else 6
    assert (np.asarray(array) == expected).all()
    del array
    gc.collect()
    jax.device_put(0.0)  # JAX lets go of host memory when it is next called
    assert sender.free


class Dropped:
    """An arrival that counts."""

    def __init__(self):
        self.times = 0

    def open(self, shardings):
        return [np.ones(1)]

    def drop(self):
        self.times += 1


def test_an_inbox_hands_out_what_arrives_in_any_order():
    inbox, messages = Inbox(), [MessageId(0, 1, 0, tag) for tag in range(3)]
    threads = [
        threading.Timer(0.05 * i, lambda m=m: (inbox.add(m, Dropped()), inbox.wake()))
        for i, m in enumerate(messages)
    ]
    for thread in threads:
        thread.start()
    for message in reversed(messages):
        assert len(inbox.take(message).open([])) == 1
    inbox.close()


def test_headers_reach_the_listener_of_their_source():
    inbox, heard = Inbox(), []
    inbox.listen(3, lambda *header: heard.append(header))
    os.write(inbox.mouth, HEADER.pack(3, 5, 2**40, 7, 8))
    inbox.wait(0, lambda: bool(heard))
    assert heard == [(5, 2**40, 7, 8)]
    inbox.close()


def test_aborting_a_step_drops_its_messages_and_no_others():
    inbox, early, late, other = Inbox(), Dropped(), Dropped(), Dropped()
    inbox.add(MessageId(4, 1, 0, 0), early)
    inbox.add(MessageId(5, 1, 0, 0), other)
    inbox.abort(4, "group 1 failed")
    inbox.add(MessageId(4, 1, 0, 1), late)
    assert (early.times, late.times, other.times) == (1, 1, 0)
    with pytest.raises(StepAborted, match="group 1 failed"):
        inbox.take(MessageId(4, 1, 0, 0))
    assert inbox.take(MessageId(5, 1, 0, 0)) is other
    inbox.close()


def test_an_abort_ends_a_wait():
    inbox = Inbox()
    threading.Timer(0.05, inbox.abort, (4, "group 1 failed")).start()
    with pytest.raises(StepAborted, match="group 1 failed"):
        inbox.take(MessageId(4, 1, 0, 0))
    inbox.close()


def test_who_has_lost_a_peer_waits_for_the_reason(monkeypatch):
    monkeypatch.setattr(inboxes, "PATIENCE_SECONDS", 60)
    inbox = Inbox()
    inbox.lose(1)
    threading.Timer(0.05, inbox.abort, (4, "group 1 died: out of memory")).start()
    with pytest.raises(StepAborted, match="out of memory"):
        inbox.take(MessageId(4, 1, 0, 0))
    inbox.close()


def test_who_is_never_told_why_a_peer_is_gone_names_it(monkeypatch):
    monkeypatch.setattr(inboxes, "PATIENCE_SECONDS", 0.1)
    inbox = Inbox()
    inbox.add(MessageId(4, 1, 0, 0), Dropped())
    inbox.lose(1)
    inbox.take(MessageId(4, 1, 0, 0))  # had arrived before
    with pytest.raises(StepAborted, match="group 1 is gone"):
        inbox.take(MessageId(4, 2, 0, 0))
    inbox.close()
