"""The training recipe, top to bottom. Runs in the loop process (see `loop`).

Reads batches from files and leaves checkpoints, weights and results as files (see `folders`). The order
checkpoint -> weights -> result makes every moment a safe one to be killed at: what is missing is made up at
the next start from what is there, and steps after the newest checkpoint are trained once more (see `saver`).
On a GPU that engines use too (`one_gpu`) the trainer has left it before the result is there: whoever reads
that wakes an engine.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kept_tokens.messages import BatchView, StepResult, check_samples, encode
from keptset_guards import GpuTurn
from keptset_settings import TrainerSettings

from . import checkpoint, weights
from .claim import Claim
from .disk_errors import writing
from .durable import mapped, sweep, write_file, write_json
from .folders import Folders, folders_of, numbered
from .full_scores import FullScores
from .losses import loss_function
from .master_weights import MasterWeights
from .model import load_policy
from .one_gpu import OneGpu
from .optimizer import adamw
from .packing import pack
from .prepare import chosen_sharding, prepare
from .ranks import Ranks
from .recipe import write_recipe
from .resume import where_to_start
from .saver import Saver
from .schedule import learning_rate
from .train_step import Abandoned, NotFinite, train_step
from .weight_sender import WeightSender

POLL_SECONDS = 0.02
SECONDS_BETWEEN_WORDS = 30.0
WAIT, GO, STOP, SEND = range(4)


def train(settings: TrainerSettings, ranks: Ranks, parent: int | None, claim: Claim | None = None) -> None:
    """Train until told to stop.

    Args:
        settings: the same on every rank.
        ranks: all that train together; only the first one writes, but for its own part of a checkpoint.
        parent: of this process; when it is gone this one goes. None = started by torchrun or by hand.
        claim: of the first rank, which says before each step whether it may still begin one.

    Raises:
        ValueError: it may not.
    """
    assert settings.model
    folders = folders_of(settings)
    of_the_loop = (folders.checkpoints, folders.weights, folders.results, folders.scores)
    ranks.first_alone(lambda: [sweep(folder) for folder in of_the_loop])
    one_gpu = None
    if settings.gpu_lock is not None:
        one_gpu = OneGpu(GpuTurn(settings.gpu_lock, "the trainer", shared=False), ranks)
        one_gpu.first_turn(parent)

    # where we are: the newest checkpoint, or the model of the settings; other nodes may see older ones only
    start, record = ranks.found_by_first(partial(where_to_start, settings, folders))
    if settings.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    policy = load_policy(str(start or settings.model), ranks.device, settings.dtype, settings.attention)
    vocab_size = policy.vocab_size
    on_cuda = ranks.device.type == "cuda"
    scorer, weights = prepare(
        policy,
        ranks,
        checkpointing=settings.checkpointing,
        compiled=settings.compile == "on" or (settings.compile == "auto" and on_cuda),
        sharding=chosen_sharding(settings.sharding, policy, ranks),
        # what was recorded would read the weights where they lay before they left
        graphs=settings.cuda_graphs if one_gpu is None else "off",
    )
    optimizer = adamw(
        weights,
        lr=settings.optimizer.lr,
        betas=settings.optimizer.betas,
        eps=settings.optimizer.eps,
        weight_decay=settings.optimizer.weight_decay,
    )
    loss = loss_function(settings.loss)
    if start is not None:
        checkpoint.restore(start, weights, optimizer, ranks)
    saver = Saver(
        folders,
        policy.model,
        weights,
        optimizer,
        ranks,
        interval=settings.checkpoint_interval,
        tokenizer_from=start or checkpoint.directory_of(settings.model),
        log=log,
    )
    saver.begin(start, record)
    ranks.first_alone(partial(write_recipe, settings, folders))
    if one_gpu is not None:
        one_gpu.leave(policy.model, weights, optimizer)
    ranks.first_alone(partial(finish, folders, record, settings.keep_weights, settings.keep_batches))
    if ranks.is_first:
        where = f"{ranks.size} x {ranks.device.type}" if ranks.size > 1 else ranks.device
        log(f"{type(policy.model).__name__} with {vocab_size} ids on {where}, at step {record['step']}")

    sender = weight_sender(settings, folders, policy.model, weights, ranks)
    if sender is not None:
        sender.differs = saver.differs
    told_to_stop = stop_on_signals(
        [signal.SIGTERM] if parent is not None else [signal.SIGTERM, signal.SIGINT]
    )
    while True:
        step = record["step"] + 1
        if ranks.is_first:
            say(folders, vocab_size, training=step if saver.is_again(step) else None)
        batch = wait_for_batch(folders.batch(step), step, ranks, parent, told_to_stop, sender, one_gpu, claim)
        if batch is None:
            break
        took = {} if one_gpu is None else one_gpu.come_back()
        if ranks.is_first:
            say(folders, vocab_size, training=step)
        began = time.monotonic()
        rows = pack(batch.samples, settings.row_tokens, ranks.rank, ranks.size)
        check_samples(rows.own_samples(), vocab_size, rows.indices)
        torch.manual_seed(settings.seed + step)  # the same step again is the same step
        lr = optimizer.param_groups[0]["lr"] = learning_rate(step, settings.optimizer)
        full_scores = FullScores() if settings.full_vocabulary_scores else None
        try:
            metrics, grad_norm = train_step(
                scorer,
                weights,
                optimizer,
                ranks,
                batch.samples,
                rows,
                loss,
                max_grad_norm=settings.optimizer.max_grad_norm,
                entropy=settings.entropy,
                ignore_masks=settings.unsafe_ignore_kept_tokens,
                told_to_stop=told_to_stop,
                full_scores=full_scores,
                version=step - 1,
            )
        except NotFinite as error:
            way_out = f"To give the step another batch, remove {folders.batch(step)}"
            if saver.is_again(step):
                way_out = (
                    "It was finite when it was trained first, and later batches come from what it gave: set "
                    "back what was changed since (settings, ranks, device)"
                )
            raise NotFinite(f"step {step}: {error}. {way_out}") from error
        except Abandoned:
            log(f"told to stop, step {step} abandoned; it is trained after the next start")
            break
        result = metrics.result(
            grad_norm=grad_norm,
            lr=lr,
            seconds=time.monotonic() - began,
            ignored_masks=settings.unsafe_ignore_kept_tokens,
        )
        if full_scores is not None:  # before the weights, after which the step's scores are not made again
            scores = full_scores.of_samples(batch.samples, ranks)
            if ranks.is_first and not saver.is_again(step):
                with writing(f"step {step}: its scores", folders.scores):
                    write_file(folders.score(step), encode(StepResult(step, step, result, scores)))
        del metrics, full_scores  # and what they have on the device
        record = {
            "step": step,
            "content_hash": batch.content_hash.hex(),
            "metrics": result,
            "model": settings.model,
        }
        saving = time.monotonic()
        saver.after(record)
        if sender is not None:
            sender.differs = saver.differs
        took["seconds/publish"] = time.monotonic() - saving
        if one_gpu is not None:
            took |= one_gpu.leave(policy.model, weights, optimizer)
        ranks.first_alone(
            partial(finish, folders, record, settings.keep_weights, settings.keep_batches, took)
        )
        if ranks.is_first:
            mismatch = result.get("mismatch_kl/mean")
            said = "" if mismatch is None else f", mismatch KL {mismatch:.2g}"
            log(f"step {step}: loss {result['loss']:.4g}{said}")
        del batch, rows  # the file is not mapped while the next one is waited for
    if one_gpu is None:  # else its states are not where they are saved from, and engines may have the GPU
        saver.at_the_end(record)
    if claim is not None and claim.problem is not None:
        raise ValueError(claim.problem)


def finish(
    folders: Folders,
    record: dict[str, Any],
    keep_weights: int,
    keep_batches: int,
    took: dict[str, float] | None = None,
) -> None:
    """Everything that follows published weights; done again after a restart it changes nothing.

    `took`: seconds of what followed the step; None: it was before a restart.
    """
    step = record["step"]
    if step > 0 and not folders.result(step).exists():
        result = {
            "step": step,
            "weight_version": step,
            "content_hash": record["content_hash"],
            "metrics": record["metrics"] | (took or {}),
        }
        with writing(f"step {step}: its result", folders.results):
            write_json(folders.result(step), result)
    weights.keep_newest(folders, keep_weights)
    checkpoint.keep_newest(folders)
    oldest = min(numbered(folders.checkpoints, "step-"))  # what came after it is needed to go on from it
    for folder, newest_to_go in (
        (folders.spool, min(step - keep_batches, oldest)),
        (folders.scores, step - checkpoint.KEEP),
    ):
        for old, path in numbered(folder, "step-").items():
            if old <= newest_to_go:
                path.unlink()  # its hash is in the result


def weight_sender(
    settings: TrainerSettings, folders: Folders, model: PreTrainedModel, weights: MasterWeights, ranks: Ranks
) -> WeightSender | None:
    """Who sends weights, if that is wanted.

    Raises:
        ValueError: it is wanted and impossible.
    """
    if settings.weights_transfer != "nccl":
        return None
    if ranks.device.type != "cuda":
        raise ValueError(
            f'weights.transfer = "nccl" sends from a GPU, but this trainer is on {ranks.device}; '
            'set weights.transfer = "files"'
        )
    from .nccl_wire import NcclWire, new_unique_id, prove

    def proved() -> None:
        try:
            version = prove(ranks.device)
        except Exception as error:
            raise ValueError(
                f'weights.transfer = "nccl" is not possible here: {error}; set weights.transfer = "files"'
            ) from error
        log(f"weights are sent by NCCL {version}")

    ranks.first_alone(proved)
    return WeightSender(
        folders, model, weights, ranks, settings.bucket_bytes, mint=new_unique_id, make_wire=NcclWire
    )


def wait_for_batch(
    path: Path,
    step: int,
    ranks: Ranks,
    parent: int | None,
    told_to_stop: Callable[[], bool],
    sender: WeightSender | None = None,
    one_gpu: OneGpu | None = None,
    claim: Claim | None = None,
) -> BatchView | None:
    """The batch of `step` when it is there, and the GPU; None if the loop is to stop. Meanwhile weights
    are sent.

    The first rank looks for it and is asked to stop; the others hear from it, often enough to know it alive.
    """
    answer = WAIT
    while answer == WAIT:
        word_at = time.monotonic() + SECONDS_BETWEEN_WORDS
        while ranks.is_first and answer == WAIT and time.monotonic() < word_at:
            if told_to_stop() or (claim is not None and claim.problem is not None):
                answer = STOP
            elif sender is not None and sender.is_asked():
                answer = SEND  # before the step that changes them
            elif path.exists() and (one_gpu is None or one_gpu.is_ours()):
                answer = GO if claim is None or claim.look() is None else STOP
            elif parent is not None and os.getppid() != parent:
                raise SystemExit(f"the ingest process {parent} is gone")
            else:
                time.sleep(POLL_SECONDS)
        answer = ranks.from_first(answer)
        if answer == SEND:
            assert sender is not None
            sender.serve(step - 1)
            answer = WAIT
    if answer == STOP:
        return None
    batch = BatchView(mapped(path))
    assert batch.step == step, f"{path} says step {batch.step}"
    return batch


def say(folders: Folders, vocab_size: int, training: int | None) -> None:
    """Tell the ingest process what is going on.

    `training`: the step; also between steps that are trained once more, so that nobody takes the trainer for
    one that is done.
    """
    write_json(folders.loop_state, {"pid": os.getpid(), "vocab_size": vocab_size, "training": training})


def log(text: str) -> None:
    print(f"trainer: {text}", flush=True)


def stop_on_signals(numbers: list[signal.Signals]) -> Callable[[], bool]:
    """From here on they are a question that the loop answers; before, they just end the process."""
    asked: list[bool] = []
    for number in numbers:
        signal.signal(number, lambda *_: asked.append(True))
    return lambda: bool(asked)
