"""From settings to the sources of a run."""

from pathlib import Path

import httpx

from keptset_settings import (
    EvalSourceSettings,
    FrozenGenerator,
    OrchestratorSettings,
    SamplingSettings,
    SourceSettings,
    is_truncating,
)

from .algorithms import make_algorithm
from .endpoints import Endpoint
from .environments import make_environment
from .evaluation import Evaluation
from .filters import make_filters
from .sources import Source, derive_seed


def build_sources(settings: OrchestratorSettings, vocab_size: int, client: httpx.AsyncClient) -> list[Source]:
    """The sources of a run; the settings are resolved, so that each has everything that it inherits.

    Args:
        settings: Resolved.
        vocab_size: Of the model.
        client: For endpoints that are not ours.

    Raises:
        ValueError: an API key is not there.
    """
    return [_source(source, settings.seed, vocab_size, client) for source in settings.train.source]


def _source(settings: SourceSettings, seed: int, vocab_size: int, client: httpx.AsyncClient) -> Source:
    sampling, generator = settings.sampling, settings.generator
    assert settings.algorithm is not None
    assert settings.group_size is not None
    frozen = None
    if isinstance(generator, FrozenGenerator):
        frozen = Endpoint("frozen generator", generator, client)
    reference = None
    if settings.reference is not None and make_algorithm(settings.algorithm).reference_weight > 0:
        reference = Endpoint("reference", settings.reference, client)
    return Source(
        name=settings.name,
        environment=make_environment(settings.environment),
        sampling=request_parameters(sampling),
        truncates=frozen is None and is_truncating(sampling),
        prompt_seed=seed,
        sampling_seed=seed if sampling.seed is None else sampling.seed,
        group_size=settings.group_size,
        algorithm=make_algorithm(settings.algorithm),
        frozen=frozen,
        sends_seed=not isinstance(generator, FrozenGenerator) or generator.send_seed,
        reference=reference,
        filters=make_filters(settings.filter or [], vocab_size),
    )


def build_evaluations(settings: OrchestratorSettings) -> list[Evaluation]:
    """What is evaluated; the settings are resolved."""
    assert settings.output_dir is not None
    directory = settings.output_dir / "rollouts"
    return [_evaluation(source, settings.seed, directory) for source in settings.eval.source]


def _evaluation(settings: EvalSourceSettings, seed: int, directory: Path) -> Evaluation:
    sampling = settings.sampling
    source = Source(
        name=settings.name,
        environment=make_environment(settings.environment),
        sampling=request_parameters(sampling),
        truncates=is_truncating(sampling),
        prompt_seed=derive_seed(seed, 0, 0),  # far from that of training
        sampling_seed=seed if sampling.seed is None else sampling.seed,
        group_size=settings.group_size,
        evaluated=True,
    )
    return Evaluation(source, settings.examples, settings.interval, settings.pass_reward, directory)


def request_parameters(sampling: SamplingSettings) -> dict[str, object]:
    """Sampling in full by vLLM's names; n, seed and logprobs are the request's own."""
    typed = sampling.model_dump(exclude_none=True, exclude={"extra_body", "seed"})
    return {**sampling.extra_body, **typed}
