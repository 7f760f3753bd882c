"""What the tables of a run take from each other, and the rules between them.

Everything here is idempotent: a resolved run resolves to itself.
"""

import warnings
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from . import colocation
from .engine_arguments import check_engine_arguments
from .errors import Problem, SettingsError, SettingsWarning
from .external_ranks import check_external_ranks
from .inference import InferenceSettings
from .internal_token import share_internal_token
from .orchestrator import OrchestratorSettings
from .run import RunSettings
from .sampling import limits
from .source_rules import Findings, policy_sources, resolve_sources
from .trainer import OptimizerSettings, TrainerSettings


def _require(findings: Findings, table: str, settings: BaseModel, **ways_out: str) -> None:
    """These settings have no default once everything is filled in."""
    for name, way_out in ways_out.items():
        if getattr(settings, name) in (None, []):
            findings.problems.append(Problem((table, name), f"not set; {way_out}"))


def _finish(findings: Findings) -> None:
    """Raise the problems, else warn of the notes."""
    if findings.problems:
        raise SettingsError(findings.problems)
    for note in findings.notes:
        warnings.warn(str(note), SettingsWarning, stacklevel=3)


def examine_run(run: RunSettings) -> tuple[RunSettings, Findings]:
    """The run as far as it can be resolved, and what there is to say of it; raises nothing."""
    run, findings = run.model_copy(deep=True), Findings()
    _fill_in(run, findings)
    resolve_sources(run.orchestrator, findings, run.trainer.full_vocabulary_scores)
    _resolve_capture(run, findings)
    _check_inference(run.inference, findings)
    _check_orchestrator(run.orchestrator, findings)
    _check_trainer(run.trainer, findings)
    _check_transfer(run, findings)
    _check_lengths(run, findings)
    _check_ports(run, findings)
    if run.inference.model is None:  # said once is enough: the others take it
        takers = (("trainer", "model"), ("orchestrator", "tokenizer"))
        findings.problems = [problem for problem in findings.problems if problem.path not in takers]
    return run, findings


def resolve_run(run: RunSettings) -> RunSettings:
    """The run with everything filled in that its tables take from each other, and every rule checked.

    Each source ends with complete sampling; a truncating one switches capture on. What was chosen for the
    user is told with a SettingsWarning.

    Raises:
        SettingsError: all problems that were found.
    """
    run, findings = examine_run(run)
    _finish(findings)
    return run


def resolve_inference(settings: InferenceSettings) -> InferenceSettings:
    """An inference server that is started alone; raises SettingsError."""
    settings, findings = settings.model_copy(deep=True), Findings()
    _check_inference(settings, findings)
    findings.problems += colocation.check_alone("inference", settings)
    _finish(findings)
    return settings


def resolve_orchestrator(settings: OrchestratorSettings) -> OrchestratorSettings:
    """An orchestrator that is started alone: complete sampling for each source; raises SettingsError."""
    settings, findings = settings.model_copy(deep=True), Findings()
    resolve_sources(settings, findings, None)
    _check_orchestrator(settings, findings)
    findings.problems += colocation.check_alone("orchestrator", settings)
    _finish(findings)
    return settings


def resolve_trainer(settings: TrainerSettings) -> TrainerSettings:
    """A trainer that is started alone; raises SettingsError."""
    settings, findings = settings.model_copy(deep=True), Findings()
    _check_trainer(settings, findings)
    findings.problems += colocation.check_alone("trainer", settings)
    _finish(findings)
    return settings


def reachable(host: str, port: int) -> str:
    """Base URL under which a server that listens on `host` is called from the same machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _set_unset(settings: BaseModel, **values: Any) -> None:
    for name, value in values.items():
        if getattr(settings, name) in (None, []):
            setattr(settings, name, value)


def _fill_in(run: RunSettings, findings: Findings) -> None:
    root = run.runs_dir / run.name
    if (warm := run.warm_start) is not None:
        name = f"{warm.task}-{warm.min_letters}-{warm.max_letters}-seed{warm.seed}"
        _set_unset(warm, directory=run.runs_dir / "models" / name)
        assert warm.directory is not None
        _set_unset(run.inference, model=warm.directory.as_posix())
    _set_unset(run.inference, model=run.trainer.model)
    _set_unset(run.trainer, model=run.inference.model)
    _set_unset(run.trainer, output_dir=root / "trainer", weights_dir=root / "weights")
    if run.trainer.optimizer.schedule != "constant":
        _set_unset(run.trainer.optimizer, decay_steps=run.orchestrator.steps)
    _set_unset(run.inference, weights_dir=run.trainer.weights_dir)
    _set_unset(
        run.orchestrator,
        tokenizer=run.inference.model,
        output_dir=root,
        inference_urls=[reachable(run.inference.host, run.inference.port)],
        trainer_url=reachable(run.trainer.host, run.trainer.port),
        inference_api_key=run.inference.api_key,
    )
    for service in (run.inference, run.trainer, run.orchestrator):
        _set_unset(service, weights_transfer=run.weights.transfer)
    findings.problems += share_internal_token(run)
    findings.problems += colocation.share_gpu(run)
    if run.inference.api_key is not None and run.orchestrator.inference_api_key != run.inference.api_key:
        why = "differs from [inference] api_key, so every rollout would be refused; leave one of them out"
        findings.problems.append(Problem(("orchestrator", "inference_api_key"), why))


def _resolve_capture(run: RunSettings, findings: Findings) -> None:
    truncating = [source.name for _, source in policy_sources(run.orchestrator) if limits(source.sampling)]
    if not truncating:
        return
    by_hand = "enable_return_sampling_mask" in run.inference.model_fields_set
    if by_hand and not run.inference.enable_return_sampling_mask:
        verb = "truncates" if len(truncating) == 1 else "truncate"
        why = (
            f"but {', '.join(truncating)} {verb}, and without masks every ratio is wrong; remove it, or "
            "set top_p = 1.0, top_k = -1, min_p = 0.0 and no masks in extra_body"
        )
        findings.problems.append(Problem(("inference", "enable_return_sampling_mask"), why, False))
    run.inference.enable_return_sampling_mask = True


def _check_inference(settings: InferenceSettings, findings: Findings) -> None:
    _require(findings, "inference", settings, model="name a directory, or give a run a [warm_start]")
    capture = settings.enable_return_sampling_mask
    own_capture = capture and settings.capture != "native"
    for problem in check_engine_arguments(settings.vllm, capture, own_capture):
        findings.problems.append(replace(problem, path=("inference", "vllm", *problem.path)))
    findings.problems += colocation.check_inference(settings)


def _check_orchestrator(settings: OrchestratorSettings, findings: Findings) -> None:
    _require(
        findings,
        "orchestrator",
        settings,
        inference_urls='name the servers, such as ["http://127.0.0.1:8000"]',
        trainer_url='name the trainer, such as "http://127.0.0.1:8001"',
        tokenizer="name the directory of the model's tokenizer",
        output_dir="name the directory for metrics.jsonl",
    )
    findings.problems += colocation.check_orchestrator(settings)


def _check_trainer(settings: TrainerSettings, findings: Findings) -> None:
    _require(
        findings,
        "trainer",
        settings,
        model="name the directory of the model to start from",
        output_dir="name the directory for the spool and the checkpoints",
        weights_dir="name the directory for the published weights",
    )
    _check_schedule(settings.optimizer, findings)
    findings.problems += colocation.check_trainer(settings)
    findings.problems += check_external_ranks(settings)


def _check_schedule(settings: OptimizerSettings, findings: Findings) -> None:
    """What its own table could not know: that a run gives it its number of steps."""
    table = ("trainer", "optimizer", "decay_steps")
    if settings.schedule != "constant" and settings.decay_steps is None:
        why = f'not set, and schedule = "{settings.schedule}" wants it; give the number of steps'
        findings.problems.append(Problem(table, why))
    elif settings.decay_steps is not None and settings.decay_steps <= settings.warmup_steps:
        why = f"leaves nothing after warmup_steps = {settings.warmup_steps}; raise it or lower that"
        findings.problems.append(Problem(table, why, settings.decay_steps))


def _check_transfer(run: RunSettings, findings: Findings) -> None:
    """NCCL goes from GPU to GPU, and all three must mean it."""
    chosen = run.weights.transfer
    for name in ("inference", "trainer", "orchestrator"):
        own = getattr(run, name).weights_transfer
        if own != chosen:
            why = f"differs from weights.transfer = {chosen!r}; leave it out"
            findings.problems.append(Problem((name, "weights_transfer"), why, own))
    if chosen == "nccl" and run.trainer.device == "cpu":
        why = 'sends from a GPU, but trainer.device is "cpu"; set weights.transfer = "files"'
        findings.problems.append(Problem(("weights", "transfer"), why, chosen))


def _check_lengths(run: RunSettings, findings: Findings) -> None:
    """A sequence is a prompt of at least one token and a completion: it must fit the engine and a row."""
    rows, context = run.trainer.row_tokens, run.inference.vllm.get("max_model_len")
    context = context if type(context) is int else None
    for evaluated in run.orchestrator.eval.source:
        most = evaluated.sampling.max_tokens
        if most is not None and context is not None and most >= context:
            why = f"leaves no room for a prompt beside max_tokens = {most} (eval {evaluated.name})"
            problem = f"{why}; raise it or lower that"
            findings.problems.append(Problem(("inference", "vllm", "max_model_len"), problem, context))
    for _, source in policy_sources(run.orchestrator):
        most, way_out = source.sampling.max_tokens, f"({source.name}); raise it or lower that"
        if most is not None and context is not None and most >= context:
            why = f"leaves no room for a prompt beside max_tokens = {most} {way_out}"
            findings.problems.append(Problem(("inference", "vllm", "max_model_len"), why, context))
        longest = most + 1 if most is not None else context
        if longest is not None and longest > rows:
            what = f"a prompt and max_tokens = {most}"
            if most is None:
                what = f"max_model_len = {context}"
                way_out += f", or set max_tokens, to at most {rows} less the prompt"
            findings.problems.append(
                Problem(("trainer", "row_tokens"), f"is too few for {what} {way_out}", rows)
            )


def _check_ports(run: RunSettings, findings: Findings) -> None:
    taken: dict[str, str] = {}
    listeners = (
        ("inference", run.inference.host, run.inference.port),
        ("trainer", run.trainer.host, run.trainer.port),
        ("orchestrator", run.orchestrator.host, run.orchestrator.port),
    )
    for name, host, port in listeners:
        other = taken.setdefault(reachable(host, port), name)
        if port != 0 and other != name:
            findings.problems.append(Problem((name, "port"), f"is [{other}] port too; choose another", port))
