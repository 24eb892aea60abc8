import pytest
from engine_runtime.health import check


def gpus(number: int) -> int:
    return number


def refuse() -> int:
    raise OSError("Driver Not Loaded")


def idle() -> bool:
    return False


def down(path: str) -> int:
    raise OSError(f"Connection refused for {path}")


def test_an_engine_that_answers_and_sees_its_gpus_is_healthy() -> None:
    assert check("engine", 4, lambda path: 200 if path == "/health" else 404, lambda: 4, idle) is None


def test_the_router_is_asked_for_its_workers_and_not_whether_it_lives() -> None:
    assert check("router", 0, lambda path: 200 if path == "/readiness" else 404, refuse, idle) is None


def test_without_expected_gpus_the_driver_is_not_asked() -> None:
    assert check("engine", 0, lambda path: 200, refuse, idle) is None


@pytest.mark.parametrize("seen", [0, 3, 5, 8])
def test_another_number_of_gpus_is_a_fault_even_when_the_engine_answers(seen: int) -> None:
    fault = check("engine", 4, lambda path: 200, lambda: seen, idle)
    assert fault == f"the driver shows {seen} GPUs, this role needs 4"


def test_a_lost_driver_is_a_fault_that_names_the_driver() -> None:
    assert "Driver Not Loaded" in str(check("engine", 4, lambda path: 200, refuse, idle))


@pytest.mark.parametrize("status", [204, 404, 500, 503])
def test_any_other_answer_than_200_is_a_fault(status: int) -> None:
    assert check("engine", 0, lambda path: status, refuse, idle) == f"/health answered {status}"


def test_an_engine_that_compiles_need_not_answer_and_needs_its_gpus() -> None:
    assert check("engine", 4, down, lambda: 4, lambda: True) is None
    assert check("engine", 4, lambda path: 503, lambda: 4, lambda: True) is None
    assert check("engine", 4, down, lambda: 3, lambda: True) is not None


def test_no_answer_is_a_fault() -> None:
    assert "Connection refused" in str(check("router", 0, down, refuse, idle))
