"""Supervised steps on an environment's own solutions, so that a weak model begins a run with some reward.

    python deploy/local/benchmarks/teach.py MODEL DIRECTORY '{"kind": "sums", "count": 32}' --until-loss 0.25

Every step has `--batch` new examples, of a seed that no run has by itself; only the tokens of the answers
count. It ends when the mean loss of a token over the last five steps is at most `--until-loss`: a model that
was taught to the end has nothing left to earn. Needs the orchestrator's, the trainer's and the settings'
sources; trains on a GPU if there is one. DIRECTORY gets the model and `taught.json`: the losses of all steps.
"""

import argparse
import json
import shutil
import time
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from keptset_orchestrator.environments import make_environment
from keptset_settings.environments import EnvironmentSettings
from keptset_trainer.checkpoint import TOKENIZER_FILES

SEED = 1 << 40
IGNORED = -100
WARM_UP = 10
LAST = 5


def rows(tokenizer: Any, environment: Any, examples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, [examples, longest - 1], labels already shifted."""
    ids, labels = [], []
    for example in examples:
        text = tokenizer.apply_chat_template(
            environment.messages(example), add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = tokenizer(environment.solution(example), add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        ids.append(torch.tensor(prompt + answer[:-1]))
        labels.append(torch.tensor([IGNORED] * (len(prompt) - 1) + answer))
    return (
        pad_sequence(ids, batch_first=True, padding_value=tokenizer.eos_token_id),
        pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    )


def main() -> None:
    """Teach it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("environment", type=TypeAdapter(EnvironmentSettings).validate_json)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--until-loss", type=float, default=0.0, help="of a token, in nats")
    parser.add_argument("--max-seconds", type=float, default=3600.0, help="fewer steps if they take longer")
    options = parser.parse_args()
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    stored = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").dtype
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device).train()
    environment = make_environment(options.environment)
    examples = environment.examples(SEED, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    for step in range(options.steps):
        late = time.monotonic() - began > options.max_seconds
        if late or (len(losses) >= LAST and fmean(losses[-LAST:]) <= options.until_loss):
            break
        ids, labels = rows(tokenizer, environment, list(islice(examples, options.batch)))
        optimizer.param_groups[0]["lr"] = options.lr * min(1.0, (step + 1) / WARM_UP)
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=ids.to(device), use_cache=False).logits
        loss = cross_entropy(logits.float().flatten(0, 1), labels.to(device).flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 9 or step == 0:
            print(f"step {step + 1}: loss {losses[-1]:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    options.directory.mkdir(parents=True, exist_ok=True)
    model.to(stored).save_pretrained(options.directory)
    for pattern in TOKENIZER_FILES:
        for file in options.model.glob(pattern):
            shutil.copyfile(file, options.directory / file.name)
    told = {"environment": options.environment.model_dump(), "lr": options.lr, "batch": options.batch}
    (options.directory / "taught.json").write_text(json.dumps({**told, "losses": losses}) + "\n")
    print(
        f"{options.directory}: {len(losses)} steps, {time.monotonic() - began:.0f} s, "
        f"mean loss of the last {LAST} {fmean(losses[-LAST:]):.3f}"
    )


if __name__ == "__main__":
    main()
