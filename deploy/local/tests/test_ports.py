import socket

import pytest

from keptset import ports
from keptset.resolve import choose_ports
from keptset_settings import RunSettings


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
