"""A receiver that is gone in the middle: the group is left, and the next one is of those that are there."""

import os
import re
import signal
import threading
import time
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from keptset_trainer import errands
from keptset_trainer.nccl_wire import StuckInGroup
from keptset_trainer.ranks import Ranks
from keptset_trainer.weight_sender import TransferBroken

from .socket_wire import Receiver, SocketWire
from .test_ranks import Trained
from .test_weight_sender import SEND, folders, published, sender_of, serve, unpacked

__all__ = ["folders"]


@pytest.mark.parametrize("gone", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("how", ["the time is up", "it is called off"])
def test_a_receiver_that_is_gone_in_the_middle_leaves_the_others_and_the_loop_as_they_were(
    gone, how, folders, tiny_directory, tmp_path, request
):
    """As over NVLink: nobody notices but by waiting. The next group is of those that are left."""
    trained = Trained(Ranks(torch.device("cpu")), tiny_directory, "none")
    published(folders, trained, tiny_directory)
    addresses = [f"{tmp_path}/group-{n}" for n in (1, 2)]
    # On a busy machine the time may be up before the one has taken its two: it does not join the next group.
    lost, kept = receivers = Receiver(addresses[:1]), Receiver(addresses)
    for receiver in receivers:
        request.addfinalizer(receiver.process.kill)
    wires = [partial(SocketWire, address) for address in addresses]
    sender = sender_of(folders, trained, [])
    sender.make_wire = lambda _, world_size, device, give_up: wires.pop(0)(world_size, give_up)
    group = serve(folders, sender, 0, kind="group")
    threading.Thread(target=lambda: (lost.wait_for(2), os.kill(lost.process.pid, gone)), daemon=True).start()
    seconds = 2.0 if how == "the time is up" else 60.0
    if how == "it is called off":
        threading.Timer(1.5, lambda: folders.errand.unlink()).start()
    began = time.monotonic()
    with pytest.raises(errands.ErrandFailed) as failed:
        serve(folders, sender, 0, seconds, **SEND)
    assert failed.value.kind == "peers_missing"
    says = r"not all of 2 .* have taken what was sent: " + (
        r"waited 2.0 s" if how == "the time is up" else r"called off after \d+\.\d s"
    )
    assert re.search(says, str(failed.value)), failed.value
    assert time.monotonic() - began < 40, "it waited until the time was up"
    assert not kept.buffers()[0], "what it has of the version is not whole"
    serve(folders, sender, 0, kind="group")
    serve(folders, sender, 0, **SEND | {"world_size": 2})
    whole, sent = kept.buffers()
    assert whole
    received = unpacked(sent, group["tensors"], group["bucket_bytes"])
    for name, tensor in load_file(folders.version(0) / "model.safetensors").items():
        assert torch.equal(received[name], tensor)


def test_a_group_that_is_not_let_go_of_while_it_is_made_ends_the_trainer(folders, tiny_directory):
    """A receiver that goes between joining and its first word: the device waits for it."""
    trained = Trained(Ranks(torch.device("cpu")), tiny_directory, "none")
    published(folders, trained, tiny_directory)
    sender = sender_of(folders, trained, [])

    def stuck(*_: object) -> SocketWire:
        raise StuckInGroup("NCCL does not let go")

    sender.make_wire = stuck
    serve(folders, sender, 0, kind="group")
    with pytest.raises(TransferBroken, match=r"does not let go; .* start the trainer again"):
        serve(folders, sender, 0, **SEND)
