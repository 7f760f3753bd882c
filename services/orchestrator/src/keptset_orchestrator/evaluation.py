"""Evaluation: rollouts that are only looked at, and what they come to."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .durable import write_durably
from .rollout_lines import eval_lines
from .rollouts import Group, RolloutCollector
from .sources import Prompt, Source, step_prompts
from .tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Evaluation:
    """One `[[orchestrator.eval.source]]`.

    Attributes:
        source: Who is asked what, and how.
        examples: How many, from the first on.
        interval: In steps.
        pass_reward: A rollout with at least this reward has passed.
        directory: Of the files with the rollouts.
    """

    source: Source
    examples: int
    interval: int
    pass_reward: float
    directory: Path

    def is_due(self, step: int) -> bool:
        """Is it evaluated after this step?"""
        return step % self.interval == 0

    def prompts(self, step: int, tokenizer: ChatTokenizer) -> list[Prompt]:
        """The same examples and seeds each time, under names that tell the step."""
        asked = step_prompts([self.source], 1, tokenizer, [range(self.examples)])
        return [
            Prompt(
                prompt.source,
                f"eval-{self.source.name}/{step}/{index}",
                prompt.example,
                prompt.token_ids,
                prompt.seed,
                prompt.messages,
            )
            for index, prompt in enumerate(asked)
        ]

    async def evaluate(
        self, step: int, tokenizer: ChatTokenizer, collector: RolloutCollector
    ) -> dict[str, float]:
        """The metrics of one evaluation, under `eval/<name>/`; its rollouts go to a file of their own."""
        groups = await collector.collect(self.prompts(step, tokenizer))
        path = self.directory / f"eval-{self.source.name}-{step:06d}.jsonl"
        lines = await asyncio.to_thread(eval_lines, groups, tokenizer, collector.room)
        await asyncio.to_thread(write_durably, path, lines)
        return eval_metrics(self.source.name, groups, self.pass_reward)


def eval_metrics(name: str, groups: Sequence[Group], pass_reward: float) -> dict[str, float]:
    """avg@n is the mean reward of n rollouts a prompt; pass@k for k = 1, 2, 4, ... and n itself.

    Args:
        name: Of the source.
        groups: n rollouts each.
        pass_reward: A rollout with at least this reward has passed.
    """
    rewards = np.array([group.rewards for group in groups])  # [prompts, n]
    n = rewards.shape[1]
    passed = (rewards >= pass_reward).sum(axis=1)
    ks = sorted({1 << power for power in range(n.bit_length()) if 1 << power <= n} | {n})
    completions = [completion for group in groups for completion in group.completions]
    lengths = [int(completion.is_sampled.sum()) for completion in completions]
    cut_off = [completion.finish_reason == "length" for completion in completions]
    return {
        f"eval/{name}/avg@{n}": float(rewards.mean()),
        **{f"eval/{name}/pass@{k}": float(np.mean([pass_at(k, n, int(c)) for c in passed])) for k in ks},
        f"eval/{name}/length_mean": float(np.mean(lengths)),
        f"eval/{name}/truncated_share": float(np.mean(cut_off)),
    }


def pass_at(k: int, n: int, passed: int) -> float:
    """The chance that of k rollouts drawn from these n at least one is among the `passed`.

    1 - C(n - passed, k) / C(n, k): the unbiased estimate of pass@k (arXiv 2107.03374, equation 1).
    """
    assert 1 <= k <= n
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)
