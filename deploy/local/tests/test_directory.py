import fcntl
import signal
import subprocess
import sys

import pytest

from keptset.directory import create


def test_a_fresh_run_has_its_folders(tmp_path):
    made = create(tmp_path / "runs", "demo", exact=False, overwrite=False)
    assert made.path == tmp_path / "runs" / "demo"
    assert made.configs.is_dir()
    assert made.logs.is_dir()


def test_a_name_from_the_file_gets_a_number_when_it_is_taken(tmp_path):
    names = [create(tmp_path, "demo", exact=False, overwrite=False).path.name for _ in range(3)]
    assert names == ["demo", "demo-2", "demo-3"]


def test_a_name_asked_for_is_refused_when_it_is_taken(tmp_path):
    create(tmp_path, "demo", exact=False, overwrite=False)
    with pytest.raises(FileExistsError, match=r"demo exists .* --name, or .* --overwrite"):
        create(tmp_path, "demo", exact=True, overwrite=False)


def test_an_empty_directory_is_taken(tmp_path):
    (tmp_path / "demo").mkdir()
    assert create(tmp_path, "demo", exact=True, overwrite=False).path.name == "demo"


def test_two_runs_that_see_the_same_empty_directory_get_one_each(tmp_path):
    """The second must not wait for the first one's end, nor write into its directory."""
    (tmp_path / "demo").mkdir()
    mark = (tmp_path / "demo" / ".keptset-run").open("w")  # the other has its mark and its lock, nothing more
    fcntl.flock(mark, fcntl.LOCK_EX)
    assert create(tmp_path, "demo", exact=False, overwrite=False).path.name == "demo-2"
    with pytest.raises(FileExistsError, match="--name"):
        create(tmp_path, "demo", exact=True, overwrite=False)


def test_overwriting_leaves_nothing_of_the_earlier_run(tmp_path):
    made = create(tmp_path, "demo", exact=False, overwrite=False)
    made.metrics.write_text("{}\n")
    with made:
        pass
    again = create(tmp_path, "demo", exact=True, overwrite=True)
    assert again.path == made.path
    assert not again.metrics.exists()


def test_overwriting_spares_what_no_run_made(tmp_path):
    precious = tmp_path / "demo" / "thesis.tex"
    precious.parent.mkdir()
    precious.touch()
    with pytest.raises(FileExistsError, match="was not made by a run"):
        create(tmp_path, "demo", exact=True, overwrite=True)
    assert precious.exists()


def test_overwriting_spares_what_a_link_leads_to(tmp_path):
    with create(tmp_path / "elsewhere", "demo", exact=False, overwrite=False) as made:
        pass
    (tmp_path / "demo").symlink_to(made.path)
    with pytest.raises(FileExistsError, match="was not made by a run"):
        create(tmp_path, "demo", exact=True, overwrite=True)
    assert made.configs.is_dir()


def test_overwriting_spares_a_run_in_progress(tmp_path):
    create(tmp_path, "demo", exact=False, overwrite=False)
    with pytest.raises(FileExistsError, match="a run is using"):
        create(tmp_path, "demo", exact=True, overwrite=True)


def test_a_killed_run_can_be_overwritten(tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom keptset.directory import create\n"
        "create(Path(sys.argv[1]), 'demo', exact=True, overwrite=False)\n"
        "print('made', flush=True)\ntime.sleep(100)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "made\n"
        with pytest.raises(FileExistsError, match="a run is using"):
            create(tmp_path, "demo", exact=True, overwrite=True)
        other.send_signal(signal.SIGKILL)
        other.wait()
    create(tmp_path, "demo", exact=True, overwrite=True)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc"])
def test_a_name_stays_below_the_parent(tmp_path, name):
    with pytest.raises(ValueError, match="must be the name of one directory"):
        create(tmp_path, name, exact=False, overwrite=True)
