"""How the sources of a run sample, as far as a report needs to know."""

from keptset_settings import CAPTURE_WIDTH, RunSettings, SamplingSettings, limits, policy_sources


def sampling_of(run: RunSettings) -> list[SamplingSettings]:
    """The sampling of each source of the policy; resolving a run has filled in what they inherit."""
    return [source.sampling for _, source in policy_sources(run.orchestrator)]


def describe(sampling: SamplingSettings) -> str:
    """What is cut, in words; the top_k that every truncating source gets goes without saying."""
    cuts = _cuts(sampling)
    if len(cuts) > 1 and sampling.top_k == CAPTURE_WIDTH:
        del cuts["top_k"]
    masks = [name for name in limits(sampling) if name not in ("top_p", "top_k", "min_p")]
    return " ".join([*(f"{name} {value:g}" for name, value in cuts.items()), *masks]) or "no truncation"


def _cuts(sampling: SamplingSettings) -> dict[str, float]:
    cuts: dict[str, float] = {}
    if sampling.top_p is not None and sampling.top_p < 1:
        cuts["top_p"] = sampling.top_p
    if sampling.top_k is not None and sampling.top_k > 0:
        cuts["top_k"] = sampling.top_k
    if sampling.min_p is not None and sampling.min_p > 0:
        cuts["min_p"] = sampling.min_p
    return cuts
