"""`keptset check`: what a configuration comes to, source by source, before anything is started."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from keptset.sampling import describe
from keptset_settings import (
    CAPTURE_WIDTH,
    EvalSourceSettings,
    Examination,
    Filter,
    FrozenGenerator,
    GibberishFilter,
    Problem,
    PromptShares,
    RepetitionFilter,
    RunSettings,
    SftAlgorithm,
    SourceSettings,
    examine_settings,
    inherit,
    is_frozen,
    limits,
    policy_sources,
    uses_full_scores,
    write_service_configs,
)

INDENT = 14
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check(argv: list[str], write: Path | None) -> int:
    """Print what `CONFIG.toml ... [--any.setting value ...]` comes to; write the services' configs to
    `write`.

    Returns:
        0 if the run can start; 1 if something is refused, and then nothing is written.
    """
    found = examine_settings(argv)
    problems = list(found.problems)
    if write is not None and found.resolved is not None:
        problems += unwritable(found.resolved)
        found.notes.extend(unheard(found.resolved))
    for line in report(found, problems):
        print(line)
    if problems:
        return 1
    if write is not None and found.resolved is not None:
        print()
        for path in write_service_configs(found.resolved, write):
            print(f"{'wrote':{INDENT}}{path}")
    return 0


def unwritable(run: RunSettings) -> list[Problem]:
    """What only `keptset run` can fill in."""
    services = {"inference": run.inference.port, "trainer": run.trainer.port}
    return [
        Problem((name, "port"), "is chosen by keptset run only; name a port to write configs with", port)
        for name, port in services.items()
        if port == 0
    ]


def unheard(run: RunSettings) -> list[Problem]:
    """What keeps services apart that are to reach each other: a written config that does not listen where
    the orchestrator will call, and ports that nobody can name beforehand.
    """
    nodes = [("inference", url, run.inference) for url in run.orchestrator.inference_urls]
    found = []
    for name, url, settings in [*nodes, ("trainer", run.orchestrator.trainer_url, run.trainer)]:
        assert url is not None, "a run fills it in"
        called = urlsplit(url)
        if settings.host in LOOPBACK and called.hostname not in LOOPBACK:
            why = f'hears this machine alone, and the orchestrator calls {url}; "0.0.0.0" hears all'
            found.append(Problem((name, "host"), why, settings.host))
        several = name == "inference" and len(nodes) > 1  # then each has the port of its URL
        if called.port is not None and called.port != settings.port and not several:
            found.append(Problem((name, "port"), f"is not that of {url}, which is called", settings.port))
    assert run.orchestrator.trainer_url is not None
    hosts = {
        urlsplit(url).hostname for url in (*run.orchestrator.inference_urls, run.orchestrator.trainer_url)
    }
    if run.weights.transfer == "nccl" and len(hosts) > 1:
        why = (
            "opens ports that NCCL chooses anew each time, between the trainer and every inference server: "
            'network policies and firewalls must let them reach each other on all; "files" needs a shared '
            "weights_dir only"
        )
        found.append(Problem(("weights", "transfer"), why, run.weights.transfer))
    return list(dict.fromkeys(found))


def report(found: Examination, problems: list[Problem]) -> Iterator[str]:
    """The lines."""
    if found.resolved is not None and found.written is not None:
        run = found.resolved
        for written, source in zip(
            found.written.orchestrator.train.source, run.orchestrator.train.source, strict=True
        ):
            yield f"train source {source.name}"
            lines = (
                frozen_lines(source) if is_frozen(source) else policy_lines(found.written, written, source)
            )
            yield from laid_out([*lines, *share_lines(run, source)])
            yield ""
        for evaluated in run.orchestrator.eval.source:
            yield f"eval source {evaluated.name}"
            yield from laid_out(eval_lines(evaluated))
            yield ""
        yield from laid_out(service_lines(found.written, run), "")
    for problem in problems:
        yield from laid_out([("refused", str(problem))], "")
    for note in found.notes:
        yield from laid_out([("noted", str(note))], "")
    if not problems:
        yield from laid_out([("refused", "nothing")], "")


def laid_out(lines: list[tuple[str, str]], indent: str = "  ") -> Iterator[str]:
    """Names and texts in two columns."""
    width = INDENT - len(indent)
    return (f"{indent}{name:{width}}{text}" for name, text in lines)


def share_lines(run: RunSettings, source: SourceSettings) -> list[tuple[str, str]]:
    """How much of a step it is."""
    train = run.orchestrator.train
    means = PromptShares(train.prompts_per_step, [one.ratio for one in train.source]).means
    mean = next(mean for mean, one in zip(means, train.source, strict=True) if one is source)
    whole, text = int(mean), f"{mean} of {train.prompts_per_step} prompts a step"
    if mean != whole:
        text = (
            f"{whole} or {whole + 1} of {train.prompts_per_step} prompts a step, {float(mean):.3g} on average"
        )
    return [("share", f"{text}, {source.group_size} rollouts each")]


def policy_lines(run: RunSettings, written: SourceSettings, source: SourceSettings) -> list[tuple[str, str]]:
    """A source of the policy: what cuts, the bound, the algorithm, the filters."""
    sampling = source.sampling
    cut = limits(inherit(written.sampling, run.orchestrator.train.sampling))
    lines = [
        ("generator", "the policy"),
        ("environment", source.environment.kind),
        ("samples", f"temperature {sampling.temperature:g}, {describe(sampling)}"),
    ]
    if cut:
        lines += [
            ("truncates", f"yes ({', '.join(cut)}): every token trained on needs its kept set"),
            ("bound", bound(run, written, source)),
        ]
    else:
        lines += [
            ("truncates", "no: logprobs are over the whole vocabulary, no kept sets are needed"),
            ("bound", "none is needed"),
        ]
    return [
        *lines,
        ("algorithm", algorithm(source, bool(cut), run.trainer.full_vocabulary_scores)),
        ("filters", filters(run, written, source)),
    ]


def bound(run: RunSettings, written: SourceSettings, source: SourceSettings) -> str:
    """How many ids a kept set has at most, and who said so."""
    top_k = source.sampling.top_k
    own, shared = written.sampling.top_k, run.orchestrator.train.sampling.top_k
    said, where = (own, f"of {source.name}") if own is not None else (shared, "[orchestrator.train.sampling]")
    if said is not None and said > CAPTURE_WIDTH:
        return f"refused: top_k = {said} {where}, and capture holds {CAPTURE_WIDTH} ids a token"
    if said is not None and said > 0:
        return f"{top_k} ids a token: top_k {where}"
    return f"{top_k} ids a token: no top_k is set, and capture holds {CAPTURE_WIDTH}"


def algorithm(source: SourceSettings, cut: bool, full_vocabulary_scores: bool) -> str:
    """Which, and what it compares."""
    assert source.algorithm is not None
    text = source.algorithm.kind
    if isinstance(source.algorithm, SftAlgorithm):
        return f"{text}; refused: the rollouts are the policy's own"
    if source.group_size == 1 and hasattr(source.algorithm, "reference_kl"):
        return f"{text}; refused: a group of one has nobody to compare with"
    if not uses_full_scores(source):
        return text
    if text != "opsd":
        if source.reference is None:
            return f"{text}; refused: no reference is named"
        text += f" with the reference {source.reference.model} at {source.reference.url}"
    if source.sampling.temperature != 1.0:
        return f"{text}; refused: the reference is scored at temperature 1"
    if cut and not full_vocabulary_scores:
        return f"{text}; refused: the rollout's logprobs are over the kept sets"
    if cut:
        return f"{text}; compared over the whole vocabulary by the trainer (full_vocabulary_scores)"
    return f"{text}; compared with the rollout's logprobs, which nothing cuts"


def filters(run: RunSettings, written: SourceSettings, source: SourceSettings) -> str:
    """Which, and why not the default ones."""
    cut = bool(limits(source.sampling))
    named = [one.kind + remark(one, cut) for one in source.filter or []]
    if named:
        return ", ".join(named)
    if written.filter is None and run.orchestrator.train.filter is None:
        return (
            "none: gibberish and repetition, whose thresholds are for the whole vocabulary, left the default"
        )
    return "none"


def remark(one: Filter, cut: bool) -> str:
    """What is to be said of a filter; `cut`: its source truncates."""
    if cut and isinstance(one, GibberishFilter | RepetitionFilter):
        return " (refused: its threshold is for the whole vocabulary)"
    return "" if one.enforce else " (only counted)"


def frozen_lines(source: SourceSettings) -> list[tuple[str, str]]:
    """A source of a frozen generator: exempt from the rules of kept sets."""
    assert isinstance(source.generator, FrozenGenerator)
    assert source.algorithm is not None
    cut = ", ".join(limits(source.sampling))
    typed = source.sampling.model_dump(exclude_none=True, exclude={"extra_body"})
    told = ", ".join([*(f"{name} {value:g}" for name, value in typed.items()), *source.sampling.extra_body])
    loss = ": cross-entropy, no importance ratio"
    if not isinstance(source.algorithm, SftAlgorithm):
        loss = "; refused: the rollouts are another model's"
    return [
        ("generator", f"frozen: {source.generator.model} at {source.generator.url}"),
        ("environment", source.environment.kind),
        ("samples", f"{told}; the rest is up to it" if told else "as it likes"),
        ("truncates", f"{f'as it likes ({cut})' if cut else 'as it likes'}: nothing of it is replayed"),
        ("bound", "none: it is exempt"),
        ("algorithm", f"{source.algorithm.kind}{loss}"),
    ]


def eval_lines(source: EvalSourceSettings) -> list[tuple[str, str]]:
    """An evaluation: exempt as well."""
    cut = ", ".join(limits(source.sampling))
    return [
        ("environment", source.environment.kind),
        ("samples", f"temperature {source.sampling.temperature:g}, {describe(source.sampling)}"),
        ("truncates", f"yes ({cut}), without kept sets: nothing of it is trained on" if cut else "no"),
        (
            "gives",
            f"avg@{source.group_size} and pass@k of {source.examples} prompts every {source.interval} steps",
        ),
    ]


def service_lines(written: RunSettings, run: RunSettings) -> list[tuple[str, str]]:
    """Capture, and what the trainer does."""
    cutting = [s.name for _, s in policy_sources(run.orchestrator) if limits(s.sampling)]
    nodes = len(run.orchestrator.inference_urls)
    where = "inference-0.toml" if nodes == 1 else f"inference-0.toml to inference-{nodes - 1}.toml"
    if cutting:
        verb = "truncates" if len(cutting) == 1 else "truncate"
        capture = f"on in {where} ({run.inference.capture}): {', '.join(cutting)} {verb}"
    elif run.inference.enable_return_sampling_mask:
        capture = f"on in {where} ({run.inference.capture}): set by hand, no source truncates"
    else:
        capture = "off: no source of the policy truncates"
    replay = "whatever kept sets a batch carries"
    if run.trainer.unsafe_ignore_kept_tokens:
        replay = "nothing (unsafe_ignore_kept_tokens): every metric row is marked"
    lines = [("capture", capture), ("replay", replay)]
    if run.colocated:
        lines.append(("gpu", f"one for both: engine and trainer take turns ({run.trainer.gpu_lock})"))
    if run.trainer.full_vocabulary_scores:
        lines.append(("scores", "over the whole vocabulary, given with each step (full_vocabulary_scores)"))
    return lines
