"""What an environment is: a few methods, no state."""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

Example = TypeVar("Example")


class Environment(Protocol[Example]):
    """Asks something and rewards the answer.

    The orchestrator calls the methods from several threads; an environment that keeps no state needs no lock.
    """

    def examples(self, seed: int, start: int) -> Iterator[Example]:
        """An endless stream, from item `start` on (0 is the first).

        Item i is a function of (seed, i) alone, whatever was drawn before: a run that comes back at
        step n continues with the prompts that it would have had.
        """
        ...

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The conversation to complete, as a chat template takes it: [{"role": ..., "content": ...}, ...]."""
        ...

    def reward(self, example: Example, completion: str) -> float:
        """How good the completion is: a finite number, the higher the better.

        Args:
            example: What `messages` asked.
            completion: The text of the sampled tokens, without the token that ended it; of the last turn,
                where there are several.
        """
        ...

    def solution(self, example: Example) -> str:
        """A right answer, for opsd: the policy sees it when it scores its own rollouts."""
        ...


@runtime_checkable
class MultiTurn(Protocol[Example]):
    """An environment that answers the policy, and lets it go on."""

    def reply(self, example: Example, turns: Sequence[str]) -> list[dict[str, str]] | None:
        """What follows the last turn; None if the rollout is over.

        Args:
            example: What `messages` asked.
            turns: The texts of the policy's turns so far, without the tokens that ended them.

        Returns:
            Messages, none of them the assistant's.
        """
        ...
