"""One HTML page about runs: `python -m recipes.report RUN [RUN ...]`."""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from recipes.durable import require_writable, write_text, write_whole
from recipes.report_charts import MADE_BY, Chart, draw_all
from recipes.report_page import GENERATOR, page
from recipes.report_panels import split_panels
from recipes.report_runs import ReportError, Run, group_runs, load_runs
from recipes.report_samples import moments

NAME = "report.html"


def write_report(folders: Sequence[str], out: str | None = None, apart: bool = False) -> Path:
    """Write the page, and its charts as PNG files into the folder NAME_charts beside it.

    folders: of the runs. out: the page; None is report.html in the run's folder, or here for
    several runs. apart: draw runs that differ in the seed alone each on its own, without a band.

    Raises:
        ReportError: a folder holds no run, or another file is in the page's place.
        OutputError: the page cannot be written.
    """
    runs = load_runs(folders)
    path = _page_path(runs, out)
    groups = group_runs(runs, apart)
    panels, constant = split_panels(runs)
    charts = draw_all(groups, panels)
    images = path.with_name(f"{path.stem}_charts")
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    whole = page(runs, groups, charts, constant, moments(runs), images.name, made)
    require_writable(path.parent)
    _write_images(images, charts)
    write_text(path, whole)
    return path


def _page_path(runs: Sequence[Run], out: str | None) -> Path:
    if out is None:
        return (runs[0].folder if len(runs) == 1 else Path.cwd()) / NAME
    path = Path(out).expanduser().absolute()
    path = path / NAME if path.is_dir() else path
    if path.exists() and GENERATOR not in path.read_text("utf-8", "replace")[:2000]:
        raise ReportError(f"--out {out}: holds a file that is no report, choose another name")
    return path


def _write_images(folder: Path, charts: Sequence[Chart]) -> None:
    """The charts; those that only an earlier report had go, and other files stay."""
    require_writable(folder)
    for earlier in folder.glob("*.png"):
        gone = earlier.stem not in {chart.name for chart in charts}
        if gone and MADE_BY.encode() in earlier.read_bytes()[:1000]:
            earlier.unlink()
    for chart in charts:
        write_whole(folder / f"{chart.name}.png", lambda beside, c=chart: beside.write_bytes(c.png))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 1 after a one-line error."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.report",
        description="Write one self-contained HTML page about runs, and its charts as PNG files.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--out", help=f"the page (default: RUN/{NAME}; {NAME} here for several runs)"
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="draw runs that differ in the seed alone each on its own, without a band",
    )
    words = parser.parse_args(arguments)
    try:
        path = write_report(words.runs, words.out, words.apart)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
