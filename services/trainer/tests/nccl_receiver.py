"""Rank 1 of a group of two, as vLLM's worker joins and receives: prints a digest of each buffer,
and waits for ever after the last one if it is to hang.

python nccl_receiver.py UNIQUE_ID_IN_HEX GPU BUFFERS BYTES_OF_A_BUFFER [hang]
"""

import hashlib
import signal
import sys

import torch

from keptset_trainer.nccl import Communicator

if __name__ == "__main__":
    device, buffers, size = (int(text) for text in sys.argv[2:5])
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream()
    group = Communicator(bytes.fromhex(sys.argv[1]), 2, 1)
    with torch.cuda.stream(stream):
        group.all_reduce(torch.zeros(1, device="cuda"), stream.cuda_stream)
        for _ in range(buffers):
            buffer = torch.zeros(size, dtype=torch.uint8, device="cuda")
            group.broadcast(buffer, 0, stream.cuda_stream)
            print(hashlib.sha256(buffer.cpu().numpy().tobytes()).hexdigest(), flush=True)
    if "hang" in sys.argv:
        signal.pause()
