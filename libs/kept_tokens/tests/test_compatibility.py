"""Published layouts stay readable: bytes recorded from each, and readers and writers of different ages.

Never record these bytes anew. A new layout is recorded beside them.
"""

import msgspec
import numpy as np

from kept_tokens import KeptTokens
from kept_tokens.answers import GenerateAnswer
from kept_tokens.messages import (
    CROSS_ENTROPY,
    POLICY_GRADIENT,
    StepResult,
    TrainingBatch,
    TrainingSample,
    check_batch,
    decode,
    encode,
)

BATCH_LAYOUT_1 = bytes.fromhex(
    """
    9307929cc41009000000080000000300000005000000c40400000101c4100000000000000000000000bf00000000c410
    0000803f0000803f3333333f0000803fc41000000000000000000000003f000000bfa772657665727365a167a3732d31
    929300020393010304c40c030000000700000005000000c41000000000000000000200000001000000c39cc410090000
    00080000000300000005000000c40400000101c4100000000000000000000000bf00000000c4100000803f0000803f33
    33333f0000803fc41000000000000000000000003f000000bfa772657665727365a167a3732d3290c400c400c2c410d4
    63712f584a02f7f2d821bc332f1245
    """
)
STEP_RESULT_LAYOUT_1 = bytes.fromhex(
    """
    93070781a46c6f7373cbbfd0000000000000
    """
)
BATCH_LAYOUT_2 = bytes.fromhex(
    """
    9307929fc41009000000080000000300000005000000c40400000101c4100000000000000000000000bf00000000c410
    0000803f0000803f0000803f0000803fc41000000000000000000000003f000000bfa772657665727365a167a3732d31
    929300020393010304c40c030000000700000005000000c41000000000000000000200000001000000c3af706f6c6963
    795f6772616469656e74c4100000000000000000000080be000080bfcb3fe00000000000009fc40c0900000008000000
    03000000c403000101c40c000000000000000000000000c40c0000803f0000803f0000803fc40c000000000000803f00
    00803fa5626f6f6b73a168a3732d3290c400c400c2ad63726f73735f656e74726f7079c400cb0000000000000000c410
    d5a656654fa14f6b6b2453807962553d
    """
)
STEP_RESULT_LAYOUT_2 = bytes.fromhex(
    """
    94070781a46c6f7373cbbfd000000000000091c40800000000000000bf
    """
)
ANSWER_LAYOUT_1 = bytes.fromhex(
    """
    83aa726571756573745f6964a3722d31a56d6f64656ca16da763686f696365739188a5696e64657800a9746f6b656e5f
    696473c4081100000005000000ad66696e6973685f726561736f6ea473746f70ab73746f705f726561736f6e02a86c6f
    6770726f6273c408000080be00000000ab6b6570745f746f6b656e7382a3696473c40c030000001100000005000000a6
    636f756e7473c4080200000001000000af7765696768745f76657273696f6e739183a776657273696f6ea77630303030
    3031a5737461727400a3656e6402ac746f705f6c6f6770726f627383a3696473c40401000000a86c6f6770726f6273c4
    0400000000a6636f756e7473c4080100000000000000
    """
)


class NextSample(TrainingSample, array_like=True, frozen=True):
    """TrainingSample as a later release might publish it."""

    priority: float = 1.0


class NextBatch(msgspec.Struct, array_like=True):
    step: int
    samples: list[NextSample]
    content_hash: bytes
    run: str = "unnamed"


class NextResult(StepResult, array_like=True, frozen=True):
    worker: str = "only"


def test_recorded_batch_decodes() -> None:
    batch = decode(BATCH_LAYOUT_1, TrainingBatch)
    check_batch(batch, vocab_size=10)
    assert batch.step == 7
    masked, free = batch.samples
    arrays = masked.arrays()
    assert arrays.token_ids.tolist() == [9, 8, 3, 5]
    assert arrays.loss_mask.tolist() == [False, False, True, True]
    assert arrays.logprobs.tolist() == [0, 0, -0.5, 0]
    assert arrays.temperatures.tolist() == [1, 1, np.float32(0.7), 1]
    assert arrays.advantages.tolist() == [0, 0, 0.5, -0.5]
    assert masked.kept() == KeptTokens.from_rows([[], [], [3, 7], [5]])
    assert (masked.source, masked.group, masked.sample_id) == ("reverse", "g", "s-1")
    assert masked.weight_versions == [(0, 2, 3), (1, 3, 4)]
    assert masked.must_have_masks
    assert free.sample_id == "s-2"
    assert free.kept() is None
    assert not free.must_have_masks


def test_recorded_batch_of_the_first_layout_is_a_policy_gradient_without_reference() -> None:
    for sample in decode(BATCH_LAYOUT_1, TrainingBatch).samples:
        assert (sample.objective, sample.reference(), sample.reference_weight) == (POLICY_GRADIENT, None, 0)


def test_recorded_batch_of_the_second_layout_decodes() -> None:
    batch = decode(BATCH_LAYOUT_2, TrainingBatch)
    check_batch(batch, vocab_size=10)
    compared, frozen = batch.samples
    reference = compared.reference()
    assert reference is not None
    assert reference.tolist() == [0, 0, -0.25, -1]
    assert (compared.objective, compared.reference_weight) == (POLICY_GRADIENT, 0.5)
    assert (frozen.objective, frozen.reference()) == (CROSS_ENTROPY, None)


def test_recorded_batch_is_still_what_is_written() -> None:
    assert encode(decode(BATCH_LAYOUT_2, TrainingBatch)) == BATCH_LAYOUT_2


def test_recorded_step_results_decode() -> None:
    assert decode(STEP_RESULT_LAYOUT_1, StepResult) == StepResult(7, 7, {"loss": -0.25})
    second = StepResult(7, 7, {"loss": -0.25}, [bytes(4) + np.float32(-0.5).tobytes()])
    assert decode(STEP_RESULT_LAYOUT_2, StepResult) == second
    assert encode(second) == STEP_RESULT_LAYOUT_2


def test_recorded_answer_decodes() -> None:
    answer = decode(ANSWER_LAYOUT_1, GenerateAnswer)
    (choice,) = answer.choices
    arrays = choice.arrays(vocab_size=18, require_masks=True)
    assert (answer.request_id, answer.model) == ("r-1", "m")
    assert (choice.index, choice.finish_reason, choice.stop_reason) == (0, "stop", 2)
    assert arrays.token_ids.tolist() == [17, 5]
    assert arrays.kept == KeptTokens.from_rows([[3, 17], [5]])
    assert choice.weight_versions is not None
    assert choice.weight_versions[0].version == "v000001"
    assert choice.top_logprobs is not None
    assert choice.top_logprobs.counts == np.array([1, 0], "<i4").tobytes()


def test_old_reader_reads_new_payload() -> None:
    old = decode(BATCH_LAYOUT_1, TrainingBatch).samples
    fields = [{name: getattr(one, name) for name in one.__struct_fields__} for one in old]
    samples = [NextSample(**one, priority=3.0) for one in fields]
    content_hash = TrainingBatch.build(7, samples).content_hash  # over what the old reader does not know, too
    batch = decode(msgspec.msgpack.encode(NextBatch(7, samples, content_hash, "mine")), TrainingBatch)
    check_batch(batch, vocab_size=10)
    assert batch.samples == old
    assert decode(encode(NextResult(1, 2, {}, worker="a")), StepResult) == StepResult(1, 2, {})


def test_new_reader_reads_old_payload() -> None:
    batch = msgspec.msgpack.decode(BATCH_LAYOUT_1, type=NextBatch)
    assert batch.run == "unnamed"
    assert [one.priority for one in batch.samples] == [1.0, 1.0]
    assert batch.samples[0].kept() == KeptTokens.from_rows([[], [], [3, 7], [5]])
    assert decode(STEP_RESULT_LAYOUT_1, NextResult) == NextResult(7, 7, {"loss": -0.25}, worker="only")
