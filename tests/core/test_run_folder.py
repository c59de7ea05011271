"""The run folder: its readers take what is there, and nobody else writes its file names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratbench.cell.run_folder import RunFolder, format_server_name, format_worker_name, parse_rank

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder.from_log_dir(tmp_path)
    found.create_empty_folder()
    return found


def test_an_empty_folder_holds_nothing(folder):
    assert (
        folder.read_worker_result(0)
        is folder.read_server_statistics(0)
        is folder.read_node0_endpoint()
        is None
    )
    assert folder.read_worker_results(2) == folder.read_load_of_other_processes() == {}
    found = (
        folder.read_all_server_statistics(2),
        folder.read_epoch_results(),
        folder.list_log_paths(),
    )
    assert [*found, folder.list_phase_log_paths(), folder.list_timeline_samples_paths()] == [[]] * 5


def test_what_was_written_is_read(folder):
    folder.write_worker_result(1, {"status": "ok"})
    folder.get_server_statistics_path(1).write_text('{"lost": []}')
    folder.write_node0_endpoint("n0", 4711)
    for node in (0, 1):
        folder.write_load_of_other_processes(node, {"load_1m": node})
    assert folder.read_worker_results(3) == {1: {"status": "ok"}}
    assert folder.read_all_server_statistics(2) == [{"lost": []}]
    assert folder.read_node0_endpoint() == ("n0", 4711)
    assert folder.read_load_of_other_processes() == {"0": {"load_1m": 0}, "1": {"load_1m": 1}}
    assert folder.write_job("{}").read_text() == "{}"


def test_who_waits_for_the_place_where_all_meet_says_what_is_wrong(folder):
    with pytest.raises(
        TimeoutError, match=r"endpoint\.json.* 0\.1 s.*nodes do not share this folder"
    ):
        folder.wait_for_node0_endpoint(0.1)
    folder.write_node0_endpoint("n0", 4711)
    assert folder.wait_for_node0_endpoint(0.0) == ("n0", 4711)


def test_an_epoch_that_is_half_written_is_left_out(folder):
    folder.append_epoch_result({"epoch": 1})
    folder.append_epoch_result({"epoch": 2})
    with folder.epoch_results_path.open("a") as f:
        f.write('{"epoch": 3')
    assert folder.read_epoch_results() == [{"epoch": 1}, {"epoch": 2}]


def test_a_file_that_is_not_whole_is_an_error(folder):
    """They are written at once; one that is not whole was not written by us."""
    folder.write_worker_result(0, {"status": "ok"})
    path = folder.path / "rank0.json"
    path.write_text(path.read_text()[:-1])
    with pytest.raises(ValueError, match="Expecting"):
        folder.read_worker_result(0)


def test_what_an_earlier_run_left_is_gone(folder):
    folder.write_worker_result(0, {"status": "ok"})
    folder.create_empty_folder()
    assert list(folder.path.iterdir()) == []


def test_what_one_node_shares_stays_on_it(tmp_path):
    shared, alone = RunFolder(tmp_path / "shared"), RunFolder(tmp_path / "shared", tmp_path)
    for of in (
        lambda f: f.file_store_path,
        lambda f: f.get_snapshot_dir(False),
        lambda f: f.get_heartbeat_path(0),
    ):
        assert (of(shared).parent, of(alone).parent) == (shared.path, tmp_path)
    for path in (alone.job_secret_path, alone.get_snapshot_dir(True)):
        assert path.parent == shared.path


@pytest.mark.parametrize("number", [0, 3, 12])
def test_a_workers_name_gives_its_rank(number):
    assert parse_rank(format_worker_name(number)) == number
    assert parse_rank(format_server_name(number)) is None


def names(in_package: bool) -> Iterator[str]:
    """Patterns of the folder's file names, as a source would write them.

    Tests and benchmarks have a `secret` or a `store` of their own elsewhere.
    """
    folder = RunFolder(Path("of-a-cell"))
    with_number = (
        folder.get_log_path(format_worker_name(7)), folder.get_log_path(format_server_name(7)),
        folder.get_phase_log_path(7),
        folder.get_timeline_samples_path(7), folder.get_pid_list_path(7),
        folder.get_server_statistics_path(7), folder._get_worker_result_path(7), Path("busy7.json"),
    )  # fmt: skip
    for path in with_number:
        yield r"[\"'/]" + re.escape(path.name).replace("7", r"(\d+|\*|\{[^}\n]*\})") + r"[\"'/]"
    for path in (
        folder.epoch_results_path,
        folder._node0_endpoint_path,
        folder.profile_trace_path,
        Path("job.json"),
    ):
        yield r"[\"'/]" + re.escape(path.name) + r"[\"'/]"
    words = (
        folder.job_secret_path,
        folder.server_rendezvous_path,
        folder.get_snapshot_dir(True),
        folder.file_store_path,
    )
    for path in words if in_package else ():
        yield r"/ \"" + re.escape(path.name) + r"\"|\}/" + re.escape(path.name) + r"[\"'/]"


def sources() -> Iterator[Path]:
    """Python and Snakemake sources, but for the folder's own and this one."""
    own = {"run_folder.py", "test_run_folder.py"}
    for part in ("workflow", "benchmarks", "tests"):
        for path in (ROOT / part).rglob("*"):
            if path.suffix in (".py", ".smk") and path.name not in own:
                yield path


@pytest.mark.slow
def test_nobody_else_writes_a_name_of_its_files():
    texts = {path: path.read_text(encoding="utf-8") for path in sources()}
    found = [
        f"{path.relative_to(ROOT)}: {hit[0]}"
        for path, text in texts.items()
        for name in names(ROOT / "workflow" in path.parents)
        for hit in re.finditer(name, text)
    ]
    assert not found, "use RunFolder:\n" + "\n".join(found)


def test_the_search_finds_what_it_should():
    """Names as they were written before the folder had a class."""
    written = [
        'job.run_dir / f"rank{rank}.json"', 'run_dir / f"phases{w["rank"]}.jsonl"'.replace('"rank"', "0"),
        'glob("samples*.csv")', '(folder / "logs" / "run" / "samples0.pids")', 'run_dir / "secret"',
        'run_dir / "endpoint.json"', 'f"{folder}/snapshots"', 'work_dir / "server"',
    ]  # fmt: skip
    for line in written:
        assert any(re.search(name, line) for name in names(in_package=True)), line
