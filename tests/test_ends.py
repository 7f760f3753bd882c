"""Whatever ends a request in the engine is something that the orchestrator knows."""

from vllm.v1.engine import FINISH_REASON_STRINGS

from keptset_orchestrator.arrival import ENDS


def test_every_end_of_a_request_is_a_rollouts_or_a_failure():
    """An end that nobody knows of would stop a run that asked for it, as repetition_detection does."""
    assert {*FINISH_REASON_STRINGS} - {*ENDS} == {"abort", "error"}
    assert {*ENDS} <= {*FINISH_REASON_STRINGS}
