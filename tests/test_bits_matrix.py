"""Bits under other instructions and thread counts: a short form of `make matrix`, and its table."""

from __future__ import annotations

import json

import pytest

from benchmarks import bits_matrix
from benchmarks.bits_matrix import CONTRACTS, INSTRUCTION_SETS, Cell, line, main, run_cell

SSE4, AVX2, AVX512 = INSTRUCTION_SETS


@pytest.mark.parametrize("threads", [1, 3])
def test_contracts_hold_on_a_processor_without_avx512(threads):
    cell = run_cell(AVX2, threads, CONTRACTS)
    if cell.skipped:
        pytest.skip(cell.skipped)
    assert cell.holds, cell.output[-3000:]
    assert cell.passed > 200 and cell.compared > 10_000_000


def bit_test(folder, body: str) -> str:
    path = folder / "test_bits_of_a_test.py"
    path.write_text(
        f"import torch\nfrom bits import differing, threads\n\ndef test_it():\n    {body}\n"
    )
    (folder / "conftest.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(bits_matrix.PROJECT / 'tests')!r})\n"
        "from tally import total\n"
        "def pytest_terminal_summary(terminalreporter):\n"
        "    terminalreporter.write_line(str(total()))\n"
    )
    return str(path)


@pytest.mark.parametrize(("second", "found"), [(1.0, (1, 0, 3, 0)), (2.0, (0, 1, 3, 1))])
def test_a_cell_holds_where_something_was_compared_and_nothing_differed(tmp_path, second, found):
    body = f"assert differing(torch.ones(3), torch.tensor([1.0, {second}, 1.0])) == 0"
    cell = run_cell(SSE4, 2, [bit_test(tmp_path, body)])
    if cell.skipped:
        pytest.skip(cell.skipped)
    assert (cell.passed, cell.failed, cell.compared, cell.differing) == found
    assert cell.holds == (second == 1.0)


def test_other_settings_than_those_asked_for_fail(tmp_path):
    other = SSE4._replace(variables=AVX2.variables)
    if bits_matrix.lacking(AVX2):
        pytest.skip(bits_matrix.lacking(AVX2))
    body = "assert differing(torch.ones(3), torch.ones(3)) == 0"
    cell = run_cell(other, 1, [bit_test(tmp_path, body)])
    assert (cell.passed, cell.failed) == (1, 1)


def test_what_the_machine_lacks_is_skipped_with_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bits_matrix.torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(bits_matrix.platform, "machine", lambda: "x86_64")
    output = tmp_path / "matrix.json"
    words = ["--instructions", "AVX-512", "--threads", "1", "2", "--output", str(output)]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "AVX-512              2  skipped: this processor has AVX2 at most"
    cells = json.loads(output.read_text())["cells"]
    assert [(each["threads"], each["compared"]) for each in cells] == [(1, 0), (2, 0)]
    monkeypatch.setattr(bits_matrix.platform, "machine", lambda: "arm64")
    assert run_cell(SSE4, 1).skipped == "arm64 has no SSE4"


def test_the_table_has_a_line_a_cell_and_its_columns_line_up():
    cell = Cell("AVX2", 3, 285, 0, 35_873_146, 0, 18.04)
    assert cell.holds
    for broken in ({"compared": 0}, {"passed": 0}, {"failed": 1}, {"differing": 1}):
        assert not cell._replace(**broken).holds
    assert line(cell).split() == ["AVX2", "3", "285", "0", "35,873,146", "0", "18.0"]
    assert len(line(cell)) == len(bits_matrix.table_head())
