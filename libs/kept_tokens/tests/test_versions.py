"""Weight versions as text and number."""

import pytest

from kept_tokens.versions import version_name, version_number


def test_names_and_numbers() -> None:
    assert version_name(3) == "v000003"
    assert [version_number(v) for v in ("v000003", "base", 7, "v1234567")] == [3, 0, 7, 1234567]
    assert all(version_number(version_name(n)) == n for n in (0, 1, 999999, 1000000))


@pytest.mark.parametrize("name", ["", "v", "3", "v-1", "vx", "V000001", -1, True, None, "v\u0661"])
def test_anything_else_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="weight version"):
        version_number(name)


def test_negative_has_no_name() -> None:
    with pytest.raises(ValueError, match="negative"):
        version_name(-1)
