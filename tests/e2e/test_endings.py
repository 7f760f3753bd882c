"""However a run ends, it says why and leaves nothing running."""

import os
import signal

import httpx
import pytest

from keptset import ports

from ..started import CACHE_BLOCKS, ONE_THREAD, UNTIL_ENDED, UNTIL_HEALTHY

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", ["inference", "trainer", "orchestrator"])
def test_a_service_killed_at_start_is_named(started, name):
    run = started.run()
    started.wait_until(lambda: started.living(f"-m keptset_{name} "), UNTIL_HEALTHY, f"the start of {name}")
    os.kill(min(started.living(f"-m keptset_{name} ")), signal.SIGKILL)
    assert run.wait(timeout=UNTIL_ENDED) == 1
    error = started.output("keptset", "err")
    assert f"keptset: {name} died (killed by SIGKILL)" in error
    assert f"logs/{name}.log" in error
    assert "Traceback" not in error.partition("; the end of ")[0]
    started.assert_nothing_is_left()


def test_ctrl_c_in_the_middle_leaves_nothing_running(started):
    run = started.run("--orchestrator.steps", 10_000)
    started.wait_until(lambda: "step 2/10000" in started.output("keptset"), 1.5 * UNTIL_HEALTHY, "two steps")
    assert len(started.living()) >= 6
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=UNTIL_ENDED) == 130
    assert "stopped by SIGINT" in started.output("keptset", "err")
    started.assert_nothing_is_left()


def test_a_server_that_does_not_capture_is_refused_before_the_first_rollout(started):
    taken: set[int] = set()
    for _ in range(3):
        taken.add(ports.pick("127.0.0.1", taken))
    inference, trainer, orchestrator = (f"http://127.0.0.1:{port}" for port in taken)
    port = dict(zip((inference, trainer, orchestrator), taken, strict=True))
    engine = {"dtype": "float32", "enforce_eager": "true", "max_model_len": 128, "max_num_seqs": 16}
    engine["num_gpu_blocks_override"] = CACHE_BLOCKS
    options = [part for name, value in engine.items() for part in (f"--vllm.{name}", value)]
    weights = ("--weights_dir", started.folder / "weights")
    common = ("--model", started.model, *weights)
    started.start("keptset_inference", *common, "--port", port[inference], *options, environment=ONE_THREAD)
    output = ("--output_dir", started.folder / "trainer")
    started.start("keptset_trainer", *common, "--port", port[trainer], *output, environment=ONE_THREAD)
    lone = started.start(
        "keptset_orchestrator",
        *("--port", port[orchestrator], "--inference_urls", f'["{inference}"]', "--trainer_url", trainer),
        *("--tokenizer", started.model, "--output_dir", started.folder / "out"),
        *("--train.sampling.top_p", 0.97, "--startup_timeout", UNTIL_HEALTHY),
    )
    assert lone.wait(timeout=UNTIL_HEALTHY + 30) == 1
    error = started.output("keptset_orchestrator", "err")
    assert f"{inference} does not capture kept sets" in error
    assert "enable_return_sampling_mask" in error
    assert "Traceback" not in error
    metrics = httpx.get(f"{inference}/metrics", timeout=UNTIL_ENDED).text
    sampled = [line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total")]
    assert sampled
    assert all(float(line.split()[-1]) == 0 for line in sampled)
    assert httpx.get(f"{trainer}/keptset/v1/status", timeout=UNTIL_ENDED).json()["next_step"] == 1
    for child in started.children:
        child.terminate()
    started.assert_nothing_is_left()
