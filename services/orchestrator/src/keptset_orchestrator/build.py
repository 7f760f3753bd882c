"""From settings to the sources of a run."""

from keptset_settings import OrchestratorSettings, SamplingSettings
from keptset_settings.sampling import inherit, is_truncating

from .environments import make_environment
from .sources import Source, share_prompts


def build_sources(settings: OrchestratorSettings) -> list[Source]:
    """The sources of a run, each with its sampling in full.

    Raises:
        ValueError: a source would get no prompt of a step, or two have one name.
    """
    train = settings.train
    names = [source.name for source in train.source]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"orchestrator.train.source: {name!r} names two sources; give each its own name")
    shares = share_prompts(train.prompts_per_step, [source.ratio for source in train.source])
    sources: list[Source] = []
    for source, share in zip(train.source, shares, strict=True):
        sampling = inherit(source.sampling, train.sampling)
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
