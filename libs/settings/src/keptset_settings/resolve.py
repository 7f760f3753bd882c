"""What the tables of a run take from each other."""

from typing import Any

from .run import RunSettings


def reachable(host: str, port: int) -> str:
    """Base URL under which a server that listens on `host` is called from the same machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def fill_in(settings: Any, **values: Any) -> None:
    """Set what is unset."""
    for name, value in values.items():
        if getattr(settings, name) in (None, []):
            setattr(settings, name, value)


def resolve_run(run: RunSettings) -> RunSettings:
    """The run with everything that its tables take from each other filled in; idempotent."""
    run = run.model_copy(deep=True)
    root = run.runs_dir / run.name
    if run.warm_start is not None:
        w = run.warm_start
        name = f"{w.task}-{w.min_letters}-{w.max_letters}-seed{w.seed}"
        fill_in(w, directory=run.runs_dir / "models" / name)
        fill_in(run.inference, model=str(w.directory))
    fill_in(run.trainer, model=run.inference.model, output_dir=root / "trainer", weights_dir=root / "weights")
    fill_in(run.inference, weights_dir=run.trainer.weights_dir)
    fill_in(
        run.orchestrator,
        tokenizer=run.inference.model,
        output_dir=root,
        inference_urls=[reachable(run.inference.host, run.inference.port)],
        trainer_url=reachable(run.trainer.host, run.trainer.port),
        inference_api_key=run.inference.api_key,
    )
    return run
