"""Real HTTP peers that the tests can make misbehave, a small tokenizer, and a run to drive."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keptset_settings import OrchestratorSettings

from .driving import Drive
from .fake_endpoint import FakeEndpoint
from .fake_inference import FakeInference
from .fake_trainer import FakeTrainer
from .real_router import RealRouter
from .small_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the small tokenizer."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def session_inference() -> Iterator[FakeInference]:
    """One server for all tests: starting one takes longer than most tests."""
    server = FakeInference()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def session_trainer() -> Iterator[FakeTrainer]:
    """One trainer for all tests."""
    server = FakeTrainer()
    yield server
    server.kill()


@pytest.fixture
def inference(session_inference: FakeInference) -> FakeInference:
    """An inference server as it is after its start."""
    session_inference.reset()
    return session_inference


@pytest.fixture
def trainer(session_trainer: FakeTrainer) -> FakeTrainer:
    """A trainer as it is after its first start."""
    session_trainer.reset()
    return session_trainer


@pytest.fixture(scope="session")
def session_endpoint() -> Iterator[FakeEndpoint]:
    """One server that is not ours for all tests."""
    server = FakeEndpoint()
    yield server
    server.kill()


@pytest.fixture
def endpoint(session_endpoint: FakeEndpoint) -> FakeEndpoint:
    """A server that is not ours as it is after its start."""
    session_endpoint.reset()
    return session_endpoint


@pytest.fixture
def drive(inference: FakeInference, trainer: FakeTrainer, tokenizer_dir: Path, tmp_path: Path) -> Drive:
    """Three steps of 2 x 4 rollouts at top_p 0.97 over the two fakes, with time for a busy machine."""
    settings = OrchestratorSettings.model_validate(
        {
            "inference_urls": [inference.url],
            "trainer_url": trainer.url,
            "tokenizer": str(tokenizer_dir),
            "output_dir": tmp_path / "run",
            "port": 0,
            "steps": 3,
            "startup_timeout": 30,
            "request_timeout": 30,
            "step_timeout": 30,
            "weights_timeout": 30,
            "train": {
                "prompts_per_step": 2,
                "group_size": 4,
                "sampling": {"temperature": 0.7, "top_p": 0.97, "top_k": 512, "max_tokens": 12, "seed": 3},
            },
        }
    )
    return Drive(settings)


@pytest.fixture(scope="session")
def session_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRouter]:
    """One router for all tests."""
    router = RealRouter(tmp_path_factory.mktemp("router") / "log")
    yield router
    router.kill()


@pytest.fixture
def router(session_router: RealRouter) -> Iterator[RealRouter]:
    """A router that knows no server; also afterwards, as later ones may have their ports."""
    yield session_router
    session_router.forget_servers()


@pytest.fixture
def second(drive: Drive) -> Iterator[FakeInference]:
    """Another inference server of the run."""
    server = FakeInference()
    drive.settings.inference_urls.append(server.url)
    yield server
    server.kill()
