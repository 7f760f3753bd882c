import socket

import pytest

from keptset import ports
from keptset.resolve import choose_ports, uncalled
from keptset_settings import RunSettings, resolve_run

from .running import DEMO


@pytest.fixture
def listening():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_taken_port_is_named_with_its_setting(listening):
    with pytest.raises(
        ValueError, match=rf"inference\.port = {listening}: .* 127\.0\.0\.1:{listening}"
    ) as caught:
        ports.require_free("127.0.0.1", listening, "inference.port")
    assert "0 for a free one" in str(caught.value)


def test_a_free_port_passes_and_one_is_found(listening):
    port = ports.pick("127.0.0.1", set())
    assert port != listening
    ports.require_free("127.0.0.1", port, "inference.port")


def test_picked_ports_differ_and_lie_outside_the_ephemeral_range():
    low, high = ports._ephemeral_range()
    taken: set[int] = set()
    for _ in range(50):
        port = ports.pick("127.0.0.1", taken)
        assert port not in taken
        assert not low <= port <= high
        taken.add(port)


def test_an_address_of_another_machine_is_an_error_of_its_own():
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1:9000"):
        ports.require_free("192.0.2.1", 9000, "trainer.port")


def test_ports_in_time_wait_count_as_free():
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            connection, _ = server.accept()
            connection.close()  # the side that closes first lingers
            assert client.recv(1) == b""
    assert ports.is_free("127.0.0.1", port)


def test_a_port_that_is_set_for_one_service_is_not_picked_for_another(monkeypatch):
    first, second = [port for port in range(65536 - 100, 65536) if ports.is_free("127.0.0.1", port)][-2:]
    monkeypatch.setattr(ports, "LOWEST", first)
    run = RunSettings()
    run.inference.port, run.trainer.port = 0, second
    run.orchestrator.port = next(port for port in range(20000, 65000) if ports.is_free("127.0.0.1", port))
    for _ in range(20):
        chosen = choose_ports(run)
        assert chosen["trainer.port"] == second
        assert chosen["inference.port"] != second


@pytest.mark.parametrize(
    ("listens", "called", "noted"),
    [
        ({}, None, False),
        ({"port": 0}, None, False),
        ({"port": 8100}, "http://localhost:8100", False),
        ({"port": 80}, "http://127.0.0.1", False),
        ({"host": "0.0.0.0", "port": 8100}, "http://gpu-1:8100", False),
        ({"host": "gpu-1", "port": 8100}, "http://gpu-1:8100/", False),
        ({"port": 8100}, "http://127.0.0.1:8101", True),
        ({"port": 8100}, "http://gpu-1:8100", True),
        ({"port": 0}, "http://127.0.0.1:8101", True),
        ({"host": "0.0.0.0", "port": 8100}, "http://gpu-1:8101", True),
    ],
)
@pytest.mark.parametrize(
    ("service", "setting"), [("inference", "inference_urls"), ("trainer", "trainer_url")]
)
def test_services_that_are_started_and_not_called_are_noted(service, setting, listens, called, noted):
    own = {} if called is None else {setting: [called] if service == "inference" else called}
    written = {"inference": {"model": "m"}, "orchestrator": own}
    written[service] = written.get(service, {}) | listens
    notes = [str(note) for note in uncalled(resolve_run(RunSettings.model_validate(written)))]
    assert [note.partition(" = ")[0] for note in notes] == [f"[orchestrator] {setting}"] * noted
    assert all("nobody calls it; leave" in note for note in notes)


def test_the_note_is_told_before_anything_starts(keptset, listening):
    urls = ("--orchestrator.trainer-url", "http://gpu-1:8001")
    code, _, error = keptset("run", DEMO, *urls, "--inference.port", listening)
    assert code == 1
    said, then = error.splitlines()
    assert said.startswith('warning: [orchestrator] trainer_url = "http://gpu-1:8001": names others than the')
    assert f"inference.port = {listening}" in then
