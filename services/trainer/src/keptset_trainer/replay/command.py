"""`keptset-trainer replay`: scores a stored step again and says whether its ratios are healthy."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers

from kept_tokens.messages import BatchView, check_samples
from keptset_settings import TrainerSettings, load_service

from ..folders import Folders
from ..model import load_policy, prove
from ..scorer import Scorer
from .report import findings, text
from .rescore import rescore
from .stored import stored_batch, stored_weights

BOUNDS = {torch.float32: (1e-4, 0.0), torch.bfloat16: (0.1, 0.01)}
"""Type that is computed in -> largest |log ratio|, and the share of tokens that may be above it. Two float32
programs differ by rounding alone; in bfloat16 single tokens differ by more."""


def replay(argv: list[str]) -> int:
    """Entry point of the command; 0: healthy, 1: not, 2: it could not be scored."""
    options, rest = parser().parse_known_args(argv)
    settings = load_service("trainer", rest)
    assert settings.model
    assert settings.output_dir
    assert settings.weights_dir
    transformers.utils.logging.disable_progress_bar()
    folders = Folders(settings.output_dir, settings.weights_dir)
    try:
        return replay_step(settings, folders, options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The options that are not the trainer's settings."""
    made = argparse.ArgumentParser(
        prog="keptset-trainer replay",
        description="Score a stored step again, each token by the weights that sampled it, and look at the "
        "importance ratios: they are 1 up to arithmetic noise if rollout and trainer agree on the kept sets.",
        epilog="Everything else is a setting of the trainer (--config FILE, --output-dir DIR, --device cpu). "
        "Exit code 0: healthy; 1: too many tokens above the bound, or the batch was changed since it was "
        "accepted; 2: it could not be scored.",
        allow_abbrev=False,
    )
    made.add_argument("--step", type=int, help="which one; the newest that was trained if left out")
    made.add_argument("--weights-version", type=int, help="score all tokens by this one instead")
    made.add_argument("--bound", type=float, help="largest |log ratio| (default: 1e-4 in float32)")
    made.add_argument("--allow", type=float, help="share of tokens above the bound that is still healthy")
    made.add_argument("--worst", type=int, default=10, help="tokens to list (default: 10)")
    made.add_argument("--json", type=Path, help="also write what was found to this file")
    return made


def replay_step(settings: TrainerSettings, folders: Folders, options: argparse.Namespace) -> int:
    """Print what is found of one step; the exit code.

    Raises:
        ValueError: something of the step is not there any more, or cannot be scored.
    """
    batch = stored_batch(folders, options.step)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
    device = torch.device(kind)
    dtypes: set[torch.dtype] = set()

    def scorer_of(version: int) -> Scorer:
        wanted = version if options.weights_version is None else options.weights_version
        path = stored_weights(folders, wanted)
        policy = load_policy(str(path), device, settings.dtype, settings.attention)
        prove(policy)
        dtypes.add(policy.head.dtype)
        check_samples(batch.samples, policy.vocab_size)
        return Scorer(policy)

    tokens = rescore(scorer_of, batch.samples, settings.row_tokens, device, batch.step - 1)
    bound, allowed = BOUNDS[dtypes.pop()]
    found = findings(
        tokens,
        batch.samples,
        partial(text_of, tokenizer_of(folders, int(tokens.version[0]))),
        bound if options.bound is None else options.bound,
        allowed if options.allow is None else options.allow,
        options.worst,
    )
    changed = change_of(batch, folders)
    healthy = changed is None and found["above_share"] <= found["allowed_share"]
    heading = f"step {batch.step} of {folders.output}: {len(batch.samples)} samples"
    if options.weights_version is not None:
        heading += f", all of them scored by v{options.weights_version:06d}"
    print(text(found, heading))
    verdict = "healthy" if healthy else "NOT healthy"
    print(f"\n{verdict}" + ("" if changed is None else f": {changed}"))
    if options.json is not None:
        whole = {"step": batch.step, "healthy": healthy, "changed": changed, **found}
        options.json.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return 0 if healthy else 1


def change_of(batch: BatchView, folders: Folders) -> str | None:
    """How the batch differs from what was accepted and trained on, if it does."""
    if batch.hash_of_content() != batch.content_hash:
        return f"{folders.batch(batch.step)} was changed after it was accepted: its content hash does not fit"
    result = folders.result(batch.step)
    if result.exists():
        trained = json.loads(result.read_bytes())["content_hash"]
        if trained != batch.content_hash.hex():
            return f"{result} is of another batch: it was trained with content {trained}"
    return None


def tokenizer_of(folders: Folders, version: int) -> Callable[[list[int]], str] | None:
    """Decodes ids; None if the published model has no tokenizer."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(stored_weights(folders, version))
    except (OSError, ValueError):
        return None
    return tokenizer.decode


def text_of(decode: Callable[[list[int]], str] | None, token_id: int) -> str:
    """An id's text."""
    return "" if decode is None else decode([token_id])
