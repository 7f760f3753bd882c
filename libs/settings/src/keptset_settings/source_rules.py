"""Resolving the sources: what each inherits, and the rules between generator, sampling, algorithm, filters.

Every rule names the source's own table where that wrote the value, else the table that it inherits from.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from .algorithms import (
    GrpoAlgorithm,
    MaxRlAlgorithm,
    OpdAlgorithm,
    OpsdAlgorithm,
    RlooAlgorithm,
    SftAlgorithm,
)
from .errors import Path, Problem
from .filters import GibberishFilter, RepetitionFilter, default_filters
from .generators import FrozenGenerator
from .orchestrator import OrchestratorSettings, TrainSettings
from .rollout_sources import SamplingSettings, SourceSettings
from .sampling import bounded_top_k, check_sampling, check_unreplayed_sampling, inherit, limits
from .shares import PromptShares

TRAIN: Path = ("orchestrator", "train")
SHARED_SAMPLING: Path = (*TRAIN, "sampling")
SOURCES: Path = (*TRAIN, "source")
EVAL_SOURCES: Path = ("orchestrator", "eval", "source")

NO_TRUNCATION = "sample without truncation (top_p = 1.0, top_k = -1, min_p = 0.0 and no masks in extra_body)"


@dataclass
class Findings:
    """What resolving has to say: problems stop, notes warn."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)


def is_frozen(source: SourceSettings) -> bool:
    """Does another model than the policy generate?"""
    return isinstance(source.generator, FrozenGenerator)


def policy_sources(settings: OrchestratorSettings) -> Iterator[tuple[int, SourceSettings]]:
    """The sources whose rollouts the policy samples, with their positions.

    Those of a frozen generator are left out: nothing of them is replayed, so the rules of sampling and masks
    do not concern them.
    """
    return ((n, source) for n, source in enumerate(settings.train.source) if not is_frozen(source))


def resolve_sources(
    settings: OrchestratorSettings, findings: Findings, full_vocabulary_scores: bool | None
) -> None:
    """Give every source all that it inherits, and check it.

    Args:
        settings: Changed in place.
        findings: Gets what is wrong and what was chosen.
        full_vocabulary_scores: Of the trainer; None if it is not known here, and asked for at the start.
    """
    train = settings.train
    for index, source in enumerate(train.source):
        table: Path = (*SOURCES, index)
        if is_frozen(source):
            _resolve_frozen(source, train, table, findings)
            continue
        limited_by = _resolve_sampling(source, train, (*table, "sampling"), findings)
        wrote = (*table, "algorithm") if source.algorithm is not None else (*TRAIN, "algorithm")
        source.algorithm = source.algorithm or train.algorithm.model_copy()
        source.group_size = source.group_size or train.group_size
        _resolve_reference(source, train, table, findings)
        findings.problems += _check_algorithm(source, wrote, limited_by, full_vocabulary_scores)
        _resolve_filters(source, train, table, limited_by, findings)
    if train.reference is not None and not any(one.reference == train.reference for one in train.source):
        why = (
            "is never asked, as no source compares with it; opd does, and grpo, rloo and max_rl with "
            "reference_kl above 0"
        )
        findings.notes.append(Problem((*TRAIN, "reference"), why))
    for index, evaluated in enumerate(settings.eval.source):
        table = (*EVAL_SOURCES, index, "sampling")
        evaluated.sampling = inherit(evaluated.sampling, SamplingSettings())
        _located(check_unreplayed_sampling(evaluated.sampling, ours=True), table, findings)
        if evaluated.sampling.temperature == 0 and evaluated.group_size > 1:
            why = (
                "asks for the same greedy rollout again and again, and vLLM takes no more than one; set 1, "
                "or a temperature above 0"
            )
            findings.problems.append(Problem((*EVAL_SOURCES, index, "group_size"), why, evaluated.group_size))
    findings.problems += _check_endpoints(settings)
    findings.problems += _check_shares(settings)
    for table, names in (
        (SOURCES, [source.name for source in train.source]),
        (EVAL_SOURCES, [evaluated.name for evaluated in settings.eval.source]),
    ):
        findings.problems += _check_names(table, names)


def _located(problems: list[Problem], table: Path, findings: Findings) -> None:
    findings.problems += [replace(problem, path=(*table, *problem.path)) for problem in problems]


def _resolve_sampling(
    source: SourceSettings, train: TrainSettings, table: Path, findings: Findings
) -> list[str]:
    """A policy source's sampling in full; returns what limits its support."""
    sampling = inherit(source.sampling, train.sampling)
    for problem in check_sampling(sampling):
        wrote_it = table if _sets(source.sampling, problem.path) else SHARED_SAMPLING
        _located([problem], wrote_it, findings)
    assert sampling.top_k is not None
    limited_by = limits(sampling)
    sampling.top_k, note = bounded_top_k(sampling.top_k, limited_by)
    if note is not None:
        findings.notes.append(Problem((*table, "top_k"), note))
    source.sampling = sampling
    return limited_by


def _sets(sampling: SamplingSettings, path: Path) -> bool:
    """Does this table itself set that parameter, rather than inherit it?"""
    value = getattr(sampling, str(path[0]))
    return path[1] in value if len(path) > 1 else value is not None


def _resolve_frozen(source: SourceSettings, train: TrainSettings, table: Path, findings: Findings) -> None:
    _located(check_unreplayed_sampling(source.sampling, ours=False), (*table, "sampling"), findings)
    generator = source.generator
    if (
        isinstance(generator, FrozenGenerator)
        and not generator.send_seed
        and source.sampling.seed is not None
    ):
        why = "is never sent, as send_seed of the generator is false; remove one of the two"
        findings.problems.append(Problem((*table, "sampling", "seed"), why, source.sampling.seed))
    shared = train.algorithm.model_copy() if isinstance(train.algorithm, SftAlgorithm) else SftAlgorithm()
    source.algorithm = source.algorithm or shared
    source.group_size = source.group_size or train.group_size
    if not isinstance(source.algorithm, SftAlgorithm):
        why = (
            "needs the policy's own rollouts with their logprobs, but the generator of "
            f'{source.name} is frozen, another model; set "sft", or leave the generator out'
        )
        findings.problems.append(Problem((*table, "algorithm", "kind"), why, source.algorithm.kind))
    for name, what in (
        ("reference", "there is nothing to score"),
        ("filter", "they look at what the policy thought of its own tokens"),
    ):
        if getattr(source, name):
            why = f"means nothing to a frozen generator: {what}; remove it"
            findings.problems.append(Problem((*table, name), why))


def _resolve_reference(source: SourceSettings, train: TrainSettings, table: Path, findings: Findings) -> None:
    """Inherited by what compares with one; a source's own that nothing looks at is refused."""
    if uses_full_scores(source) and not isinstance(source.algorithm, OpsdAlgorithm):
        source.reference = source.reference or train.reference
    elif source.reference is not None:
        assert source.algorithm is not None
        kind = source.algorithm.kind
        why = (
            "the reference of opsd is the policy itself; remove it"
            if kind == "opsd"
            else f"{kind} compares with it only if reference_kl is above 0; set that, or remove it"
        )
        findings.problems.append(Problem((*table, "reference"), f"would never be asked: {why}"))


def _check_algorithm(
    source: SourceSettings, table: Path, limited_by: list[str], full_vocabulary_scores: bool | None
) -> list[Problem]:
    """Rules of a policy source's algorithm; `limited_by`: what truncates its sampling."""
    algorithm, problems = source.algorithm, []
    assert algorithm is not None
    kind = (*table, "kind")
    if isinstance(algorithm, SftAlgorithm):
        why = (
            f"trains on another model's rollouts, but {source.name} is sampled by the policy; give it a "
            '[generator] of kind "frozen", or set "grpo"'
        )
        return [Problem(kind, why, algorithm.kind)]
    if isinstance(algorithm, GrpoAlgorithm | RlooAlgorithm | MaxRlAlgorithm):
        said = Problem((*table, "reference_kl"), "", algorithm.reference_kl)
        uses_reference = algorithm.reference_kl > 0
        if source.group_size == 1:
            why = f"compares the rollouts of a prompt, but group_size of {source.name} is 1; set at least 2"
            problems.append(Problem(kind, why, algorithm.kind))
    else:
        said = Problem(kind, "", algorithm.kind)
        uses_reference = True
    if not uses_reference:
        return problems
    if not isinstance(algorithm, OpsdAlgorithm) and source.reference is None:
        why = (
            f"needs somebody to score the rollouts of {source.name}; set url and model in "
            "[orchestrator.train.reference]"
        )
        problems.append(replace(said, text=why))
    if source.sampling.temperature != 1.0:
        why = (
            "compares with a reference that is scored at temperature 1.0, but "
            f"{source.name} samples at {source.sampling.temperature}; set temperature = 1.0 there"
        )
        problems.append(replace(said, text=why))
    if limited_by and full_vocabulary_scores is False:
        why = (
            f"compares logprobs over the whole vocabulary, but {source.name} truncates "
            f"({', '.join(limited_by)}), so those of its rollouts are over the kept sets; set "
            f"trainer.full_vocabulary_scores = true, or {NO_TRUNCATION}"
        )
        problems.append(replace(said, text=why))
    return problems


def _resolve_filters(
    source: SourceSettings, train: TrainSettings, table: Path, limited_by: list[str], findings: Findings
) -> None:
    """Filters that look at full-vocabulary logprobs go by themselves from the default, else are refused."""
    explicit = source.filter if source.filter is not None else train.filter
    wrote = (*table, "filter") if source.filter is not None else (*TRAIN, "filter")
    source.filter = list(default_filters() if explicit is None else explicit)
    if not limited_by:
        return
    if explicit is None:
        source.filter = []
        return
    for index, one in enumerate(explicit):
        if isinstance(one, GibberishFilter | RepetitionFilter):
            way_out = (
                "remove it" if wrote[2] == "source" else f"give {source.name} a filter list without it, or []"
            )
            why = (
                f"has thresholds for logprobs over the whole vocabulary, but {source.name} truncates "
                f"({', '.join(limited_by)}), so those of its rollouts are over the kept sets; "
                f"{way_out}, or {NO_TRUNCATION}"
            )
            findings.problems.append(Problem((*wrote, index, "kind"), why, one.kind))


def _check_endpoints(settings: OrchestratorSettings) -> list[Problem]:
    """A frozen generator or a reference at one of the policy's own servers is the policy, and not frozen."""
    own = {_place(url) for url in settings.inference_urls}
    problems = []
    if settings.router_url is not None and _place(settings.router_url) in own:
        why = "is one of orchestrator.inference_urls; name what stands before them, or leave it out"
        problems.append(Problem(("orchestrator", "router_url"), why, settings.router_url))
    own |= set() if settings.router_url is None else {_place(settings.router_url)}
    for index, source in enumerate(settings.train.source):
        table: Path = (*SOURCES, index)
        generator, reference = source.generator, source.reference
        if isinstance(generator, FrozenGenerator) and _place(generator.url) in own:
            why = (
                f"is one of orchestrator.inference_urls or their router, so {source.name} would be sampled "
                "by the policy, without kept sets and importance ratio; leave the generator out, or name a "
                "server of its own"
            )
            problems.append(Problem((*table, "generator", "url"), why, generator.url))
        if reference is not None and _place(reference.url) in own:
            why = (
                f"is one of orchestrator.inference_urls or their router, so {source.name} would be compared "
                "with the policy itself; name a server of its own, or choose opsd"
            )
            written = (
                (*TRAIN, "reference") if reference is settings.train.reference else (*table, "reference")
            )
            problems.append(Problem((*written, "url"), why, reference.url))
    return list(dict.fromkeys(problems))


def _place(url: str) -> tuple[str, int | None, str]:
    """Host, port and path of a base URL, with or without /v1."""
    parts = urlsplit(url)
    host = {"localhost": "127.0.0.1", "::1": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(
        parts.hostname or "", parts.hostname or ""
    )
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return host, port, parts.path.rstrip("/").removesuffix("/v1")


def _check_shares(settings: OrchestratorSettings) -> list[Problem]:
    train, prompts = settings.train, settings.steps * settings.train.prompts_per_step
    why = (
        f"its share of the run's {prompts} prompts is less than one; raise it, orchestrator.steps or "
        "orchestrator.train.prompts_per_step"
    )
    means = PromptShares(train.prompts_per_step, [source.ratio for source in train.source]).means
    return [
        Problem((*SOURCES, index, "ratio"), why, train.source[index].ratio)
        for index, mean in enumerate(means)
        if settings.steps * mean < 1
    ]


def _check_names(table: Path, names: list[str]) -> list[Problem]:
    seen: dict[str, int] = {}
    problems = []
    for index, name in enumerate(names):
        first = seen.setdefault(name, index)
        if first != index:
            why = f"is the name of source[{first}] too, and metrics go by name; choose another"
            problems.append(Problem((*table, index, "name"), why, name))
    return problems


def uses_full_scores(source: SourceSettings) -> bool:
    """Does a resolved source compare the policy's full-vocabulary logprobs with a reference's?"""
    algorithm: Any = source.algorithm
    return isinstance(algorithm, OpdAlgorithm | OpsdAlgorithm) or getattr(algorithm, "reference_kl", 0) > 0
