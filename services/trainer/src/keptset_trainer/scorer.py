"""From a packed row to the logprobs of its trained tokens: what runs forward and backward in every step."""

from collections.abc import Callable

from torch import Tensor, nn

from kept_loss import KeptLogprobs, kept_logprobs

from .graphs import BodyGraphs
from .micro_batch import MicroBatch, Sequences
from .model import Policy

Entropy = float | str | None
Head = Callable[[Tensor, Tensor, MicroBatch, float | None, Entropy, bool], KeptLogprobs]
"""(hidden [N, H], W [V, H], row, soft cap, entropy, full logprobs too) -> logprobs of the row's N labels."""


def kept_head(
    hidden: Tensor,
    weight: Tensor,
    row: MicroBatch,
    softcap: float | None,
    entropy: Entropy,
    full_logprobs: bool,
) -> KeptLogprobs:
    """Logprobs over the kept sets."""
    return kept_logprobs(
        hidden,
        weight,
        row.labels,
        row.kept,
        row.temperatures,
        softcap=softcap,
        entropy=entropy,
        full_logprobs=full_logprobs,
        num_unmasked=row.num_unmasked,  # values were checked when the batch came in: the host need not wait
    )


class Scorer(nn.Module):
    """Body and head in one forward, so that a head that is sharded over ranks is whole when it is needed."""

    def __init__(self, policy: Policy, head: Head = kept_head) -> None:
        super().__init__()
        self.model = policy.model
        self.policy = policy
        self.head = head
        self.graphs: BodyGraphs | None = None
        """If the body is recorded."""
        self.is_last_row = False
        """Of a step: no gradients are added to those of the next row."""

    def arranged(self, row: Sequences) -> Sequences:
        """A row of the host as `forward` likes it best, before it goes to the device."""
        return row if self.graphs is None else self.graphs.arranged(row)

    def forward(
        self,
        sequences: Sequences,
        labelled: Callable[[], MicroBatch],
        entropy: Entropy = None,
        full_logprobs: bool = False,
    ) -> KeptLogprobs:
        """Only positions that predict a token to train on go through the head.

        Args:
            sequences: of the row, on the device.
            labelled: gives the row itself. Called when the device has the body's work: what the host does for
                it takes no time of the device's.
            entropy: as `kept_logprobs` takes it.
            full_logprobs: likewise.
        """
        if self.graphs is not None:
            hidden = self.graphs.hidden(sequences, self.is_last_row)
        else:
            hidden = self.policy.hidden(
                sequences.token_ids, sequences.positions, sequences.borders, sequences.longest
            )
        row = labelled()
        hidden = hidden.index_select(0, row.predicting)  # [N, H]
        return self.head(hidden, self.policy.head, row, self.policy.softcap, entropy, full_logprobs)

    def of_row(self, row: MicroBatch, entropy: Entropy = None, full_logprobs: bool = False) -> KeptLogprobs:
        """`forward` of a row that is there."""
        scored: KeptLogprobs = self(row, lambda: row, entropy, full_logprobs)
        return scored
