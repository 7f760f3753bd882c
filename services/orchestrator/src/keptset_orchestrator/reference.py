"""What a reference says of the rollouts of a group: another model, or the policy with the solution shown."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .arrival import Completion
from .environments import MultiTurn
from .errors import EnvironmentFaultError, OrchestratorError
from .sources import Prompt
from .tokenizer import ChatTokenizer


def prompt_of_reference(prompt: Prompt, tokenizer: ChatTokenizer) -> list[int]:
    """The ids that the reference sees before a rollout: the policy's prompt, or with opsd one with the
    solution.

    OPSD (arXiv 2601.18734, "Self-Distilled Reasoner", section 3.2): the teacher is the same model, and sees
    the problem with its solution; the rollouts that it scores are the student's, who saw the problem alone.
    The paper's experiments (section 4.1) keep the initial weights as the teacher; here it has the policy's of
    now, as in the paper's definition.

    Raises:
        EnvironmentFaultError: the environment has no solution.
    """
    hint = prompt.source.algorithm.hint
    if hint is None:
        return prompt.token_ids
    where = f"environment of source {prompt.source.name}: solution of {prompt.group}"
    try:
        solution = prompt.source.environment.solution(prompt.example)
    except Exception as error:
        raise EnvironmentFaultError(f"{where}: {type(error).__name__}: {error}") from error
    *before, last = prompt.messages
    shown = {**last, "content": f"{last['content']}\n{hint.replace('{solution}', solution)}"}
    return tokenizer.encode_messages([*before, shown])


def check_reference_lengths(
    prompts: Sequence[Prompt], tokenizer: ChatTokenizer, max_model_len: int, room: int
) -> None:
    """Where the policy scores itself, the solution and the longest rollout must fit, and the token that is
    asked for.

    Args:
        prompts: Of a step.
        tokenizer: Of the policy.
        max_model_len: Of the inference server with the shortest context.
        room: The most tokens of prompt and rollout.

    Raises:
        OrchestratorError: naming the prompt and the setting to change.
    """
    for prompt in prompts:
        if prompt.source.algorithm.hint is None:
            continue
        length, most = len(prompt_of_reference(prompt, tokenizer)), prompt.source.sampling.get("max_tokens")
        turns = isinstance(prompt.source.environment, MultiTurn)  # max_tokens are those of one
        longest = length + (room - len(prompt.token_ids) if turns or most is None else int(most)) + 1
        if longest > max_model_len:
            way_out = "lower trainer.row_tokens" if turns else f"lower max_tokens (now {most})"
            way_out = "set max_tokens" if most is None else way_out
            raise OrchestratorError(
                f"prompt {prompt.group} has {length} tokens with the solution shown (opsd), and with its "
                f"rollout and the one token that scoring asks for may reach {longest}, more than the "
                f"inference servers' max_model_len of {max_model_len}: {way_out} or raise max_model_len"
            )


def of_sampled_tokens(
    scores: NDArray[np.float32], before: Sequence[int], completion: Completion
) -> NDArray[np.float32]:
    """The scores of a rollout's sampled tokens, 0 on context.

    Args:
        scores: float32 [P + T], of a prompt of P tokens and the rollout's T.
        before: The P ids.
        completion: The rollout.
    """
    scored = scores[len(before) :]
    assert len(scored) == len(completion.token_ids)
    return np.where(completion.is_sampled, scored, np.float32(0))
