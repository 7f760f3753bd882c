"""Whether the peers can serve the run, asked before the first rollout."""

import logging
from collections.abc import Sequence

from keptset_settings import GibberishFilter, SourceSettings

from .errors import OrchestratorError, PeerMismatchError
from .inference import InferenceStatus
from .sources import Prompt, Source
from .trainer import TrainerStatus

log = logging.getLogger(__name__)


def check_server(
    name: str, status: InferenceStatus, sources: Sequence[Source], trainer_name: str, trainer: TrainerStatus
) -> None:
    """Capture works where a source truncates, and server and trainer have one vocabulary.

    Raises:
        PeerMismatchError: naming server and source, with the way out.
    """
    if status.vocab_size != trainer.vocab_size:
        raise PeerMismatchError(
            f"{name} has a vocabulary of {status.vocab_size}, {trainer_name} one of {trainer.vocab_size}: "
            f"they run different models ({status.model!r} and {trainer.model!r})"
        )
    capture = status.capture
    for source in sources:
        if not source.truncates:
            continue
        if not capture.works:
            raise PeerMismatchError(
                f"{name} does not capture kept sets (enabled {capture.enabled}, kind {capture.kind!r}, "
                f"proven {capture.proven}), but source {source.name!r} truncates: start it with "
                "inference.enable_return_sampling_mask = true, or sample without truncation"
            )
        top_k = int(source.sampling.get("top_k") or -1)
        if capture.width is not None and top_k > capture.width:
            raise PeerMismatchError(
                f"{name} captures {capture.width} ids a token, but source {source.name!r} samples with "
                f"top_k {top_k}: lower its top_k"
            )


def check_turns(name: str, takes_turns: bool, colocated: bool) -> None:
    """A server or trainer takes turns on its GPU if the run has it so, and not otherwise.

    Raises:
        PeerMismatchError: naming it, with the way out.
    """
    if takes_turns and not colocated:
        raise PeerMismatchError(
            f"{name} takes turns on a GPU, but this orchestrator gives none: set colocated = true for the "
            "run (orchestrator.colocated), or start it without gpu_lock"
        )
    if colocated and not takes_turns:
        raise PeerMismatchError(
            f"{name} takes no turns on its GPU, as colocated = true asks for: start it with gpu_lock, the "
            "same file for inference and trainer, or leave colocated out"
        )


def check_same_server(name: str, first: InferenceStatus, now: InferenceStatus) -> None:
    """A server that came back runs the model that it ran before; its weights are loaded anew anyway.

    Raises:
        PeerMismatchError: naming server and models.
    """
    if now.model != first.model:
        raise PeerMismatchError(
            f"{name} came back with model {now.model!r}; when the run began it ran {first.model!r}: start it "
            "with that again, or stop the run and start it anew"
        )


REMEMBERED = ("model", "vocab_size", "row_tokens", "full_vocabulary_scores", "unsafe_ignore_kept_tokens")
"""Of a trainer's status: what prompts, batches and rows were made for."""


def check_same_trainer(name: str, first: TrainerStatus, now: TrainerStatus) -> None:
    """The trainer is still the one that the run began with, or one that was started again as it.

    Raises:
        PeerMismatchError: naming trainer and setting, with both values.
    """
    for setting in REMEMBERED:
        before, after = getattr(first, setting), getattr(now, setting)
        if before != after:
            raise PeerMismatchError(
                f"{name} was replaced while the run went on: its {setting} is {after!r}, and was {before!r}; "
                "put it back, or start the orchestrator again if that is meant"
            )


def check_trainer(
    name: str, trainer: TrainerStatus, sources: Sequence[Source], colocated: bool = False
) -> None:
    """The trainer can do what the run and the sources' algorithms want of it.

    Raises:
        PeerMismatchError: naming trainer and source, with the way out.
    """
    check_turns(name, trainer.shares_gpu, colocated)
    for source in sources:
        compares = source.algorithm.reference_weight > 0
        if source.algorithm.cross_entropy and trainer.full_vocabulary_scores is None:
            raise PeerMismatchError(
                f"{name} (version {trainer.version}) knows no objectives, but source {source.name!r} trains "
                "by "
                "cross-entropy: start a trainer of this version"
            )
        if compares and source.truncates and not trainer.full_vocabulary_scores:
            raise PeerMismatchError(
                f"{name} gives no logprobs over the whole vocabulary, but source {source.name!r} truncates "
                "and "
                "compares with a reference: set trainer.full_vocabulary_scores = true, or sample without "
                "truncation"
            )


def warn_of_idle_filters(settings: Sequence[SourceSettings], vocab_size: int) -> None:
    """Of filters for rare ids where the model has none that high."""
    idle = [
        (source.name, one.min_token_id)
        for source in settings
        for one in source.filter or []
        if isinstance(one, GibberishFilter) and one.min_token_id >= vocab_size
    ]
    if idle:
        log.warning(
            "the gibberish filter of %s flags nothing: it looks at ids from %d on, and the model has %d; set "
            "its min_token_id to where rare ids begin",
            ", ".join(name for name, _ in idle),
            min(first for _, first in idle),
            vocab_size,
        )


def warn_of_padding(known: int, vocab_size: int, sources: Sequence[Source]) -> None:
    """Of sources that may sample ids which are no text: those of a padded head are masked where kept sets are
    recorded, and nowhere else.

    Args:
        known: Ids that the tokenizer has.
        vocab_size: Of the model.
        sources: Of the run.
    """
    names = [source.name for source in sources if source.frozen is None and not source.truncates]
    if names and known < vocab_size:
        log.warning(
            "the model has %d ids and the tokenizer %d: %s without truncation, where the others are not "
            "masked and may be sampled; any truncation masks them, such as top_k = 512",
            vocab_size,
            known,
            f"source {names[0]} samples" if len(names) == 1 else f"sources {', '.join(names)} sample",
        )


def check_lengths(prompts: Sequence[Prompt], max_model_len: int, row_tokens: int | None) -> None:
    """Every prompt leaves room for its longest completion, in the engine and in a row of the trainer.

    Args:
        prompts: Of a step.
        max_model_len: Of the inference server with the shortest context.
        row_tokens: Of the trainer; None if it does not say.

    Raises:
        OrchestratorError: naming the prompt and the setting to change.
    """
    for prompt in prompts:
        length, max_tokens = len(prompt.token_ids), prompt.source.sampling.get("max_tokens")
        if prompt.source.frozen is not None:  # what it says is cut to the row; something must be left of it
            if row_tokens is not None and length >= row_tokens:
                raise OrchestratorError(
                    f"prompt {prompt.group} has {length} tokens and leaves no room for a rollout in a row "
                    "of the "
                    f"trainer's (row_tokens {row_tokens}): raise trainer.row_tokens"
                )
            continue
        longest = max_model_len if max_tokens is None else length + max_tokens
        if longest > max_model_len or length >= max_model_len:
            raise OrchestratorError(
                f"prompt {prompt.group} has {length} tokens; with max_tokens {max_tokens} it does not fit "
                f"the inference servers' max_model_len of {max_model_len}"
            )
        if row_tokens is not None and longest > row_tokens:
            shorter = f"lower the source's max_tokens (now {max_tokens})"
            if (
                max_tokens is None
            ):  # its bound is not left to the row: where that ends is no choice of anyone's
                shorter = "set the source's max_tokens"
            raise OrchestratorError(
                f"prompt {prompt.group} has {length} tokens, and with its completion may reach {longest}, "
                f"more than a row of the trainer's (row_tokens {row_tokens}): {shorter} or raise "
                "trainer.row_tokens"
            )
