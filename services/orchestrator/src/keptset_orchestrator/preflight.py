"""Whether the peers can serve the run, asked before the first rollout."""

from collections.abc import Sequence

from .errors import OrchestratorError, PeerMismatchError
from .inference import InferenceStatus
from .sources import Prompt, Source
from .trainer import TrainerStatus


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


def check_trainer(name: str, trainer: TrainerStatus, sources: Sequence[Source]) -> None:
    """The trainer can do what the sources' algorithms want of it.

    Raises:
        PeerMismatchError: naming trainer and source, with the way out.
    """
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
            raise OrchestratorError(
                f"prompt {prompt.group} has {length} tokens, and with its completion may reach {longest}, "
                f"more than a row of the trainer's (row_tokens {row_tokens}): lower the source's max_tokens "
                f"(now {max_tokens}) or raise trainer.row_tokens"
            )
