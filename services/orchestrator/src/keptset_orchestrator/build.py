"""From settings to the sources of a run."""

from keptset_settings import OrchestratorSettings, SamplingSettings, is_truncating

from .environments import make_environment
from .sources import Source, share_prompts


def build_sources(settings: OrchestratorSettings) -> list[Source]:
    """The sources of a run; the settings are resolved, so that each has its sampling in full.

    Raises:
        ValueError: a source would get no prompt of a step.
    """
    train = settings.train
    shares = share_prompts(train.prompts_per_step, [source.ratio for source in train.source])
    sources: list[Source] = []
    for source, share in zip(train.source, shares, strict=True):
        sampling = source.sampling
        sources.append(
            Source(
                name=source.name,
                environment=make_environment(source.environment),
                sampling=request_parameters(sampling),
                truncates=is_truncating(sampling),
                prompts=share,
                prompt_seed=settings.seed,
                sampling_seed=settings.seed if sampling.seed is None else sampling.seed,
            )
        )
    return sources


def request_parameters(sampling: SamplingSettings) -> dict[str, object]:
    """Sampling in full by vLLM's names; n, seed and logprobs are the request's own."""
    typed = sampling.model_dump(exclude_none=True, exclude={"extra_body", "seed"})
    return {**sampling.extra_body, **typed}
