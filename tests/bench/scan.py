"""Compares how fast logs are read: ``vllm-oom-exporter analyze`` beside mtail, grep and ripgrep.

Why: the exporter runs beside a server whose cores are busy, so reading a log has to cost less
than what people do today. That is mtail with a counter for every wording; grep and ripgrep are
the floor, as they only count lines and know nothing of incidents, phases or causes. All of them
look for the same wordings, those of ``oom.mtail``.

CPU seconds (user and system, all threads) are compared and not the clock, so that other load on
the machine matters little; of several runs the median counts, and the tools take turns. Nothing
is asserted: figures depend on the machine, which is why it is printed with them.

Peers that are not installed are listed as missing (Debian: ``mtail``, ``ripgrep``). Peers too
slow for the whole log read the first part of it, and their rows say so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from generate import KINDS, write

PROGRAM = Path(__file__).with_name("oom.mtail")
OURS = "vllm-oom-exporter"
REFERENCE = "mtail"
SLOW = 20.0
"""MB per CPU-second below which a peer reads only the first part of a log."""

# A process begins with the peak memory of the one that started it, so a small one has to do that.
# Arguments: where the output goes, then the command.
_STARTER = """
import os, sys
out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
to = [(os.POSIX_SPAWN_DUP2, out, 1)]
_, status, used = os.wait4(os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ, file_actions=to), 0)
print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


@dataclass(frozen=True, slots=True)
class Tool:
    """A program, its arguments before the log, and how to read what it printed.

    ``program`` is None where it is not installed.
    """

    name: str
    program: str | None
    arguments: tuple[str, ...]
    found: Callable[[str], str]
    codes: tuple[int, ...] = (0, 1)

    def command(self, log: Path) -> list[str]:
        """The command that reads ``log``."""
        assert self.program is not None
        return [self.program, *self.arguments, str(log)]

    def version(self) -> str:
        """The first line of ``--version``, or ``missing``."""
        if self.program is None:
            return "missing"
        done = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=False)
        return next(iter((done.stdout or done.stderr).splitlines()), "unknown")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one run cost, its exit code and its output."""

    code: int
    cpu: float
    rss: int
    output: str


@dataclass(slots=True)
class Row:
    """One line of the table. ``note`` says why there are no figures, or what is odd about them."""

    kind: str
    tool: str
    note: str = ""
    megabytes: float = 0.0
    cpu_seconds: list[float] = field(default_factory=list)
    mb_per_cpu_second: float | None = None
    ratio: float | None = None
    peak_rss_mb: float | None = None
    found: str = ""


def measure(command: list[str], directory: Path) -> Usage:
    """Run ``command`` to its end; bytes are compared in all locales alike."""
    output = directory / "output"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _STARTER, str(output), *command],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"LC_ALL": "C"},
    )
    code, cpu, rss = done.stdout.split()
    text = output.read_text(encoding="utf-8", errors="replace")
    return Usage(int(code), float(cpu), int(rss) * 1024, text)


def patterns(program: Path = PROGRAM) -> list[str]:
    """The patterns of the mtail program, in its order."""
    return re.findall(r"^/(.+)/ \{$", program.read_text(encoding="utf-8"), re.MULTILINE)


def _incidents(output: str) -> str:
    document = json.loads(output)
    return f"{len(document['incidents']):,} incidents in {document['lines']:,} lines"


def _counted(output: str) -> str:
    return f"{int(output.strip() or 0):,} lines"


def _counters(output: str) -> str:
    metrics = (metric for program in json.loads(output).values() for metric in program)
    values = (one["Value"]["Value"] for metric in metrics for one in metric.get("LabelValues") or ())
    return f"{sum(values):,} lines"


def tools(directory: Path) -> list[Tool]:
    """The exporter first, then its peers, all with the same wordings."""
    wordings = directory / "patterns"
    wordings.write_text("".join(f"{one}\n" for one in patterns()), encoding="utf-8")
    beside = Path(sys.executable).with_name(OURS)
    ours = str(beside) if beside.exists() else shutil.which(OURS)
    mtail = ("-one_shot", "-log_dir", str(directory), "-progs", str(PROGRAM), "-logs")
    return [
        Tool(OURS, ours, ("analyze", "--format", "json"), _incidents),
        Tool(REFERENCE, shutil.which("mtail"), mtail, _counters, codes=(0,)),
        Tool("grep -E -c", shutil.which("grep"), ("-E", "-c", "-f", str(wordings)), _counted),
        Tool("rg -c", shutil.which("rg"), ("--no-config", "-c", "-f", str(wordings)), _counted),
    ]


class Bench:
    """Measures tools on one kind of log after the other, in one temporary directory."""

    def __init__(self, directory: Path, megabytes: int, slow_megabytes: int, runs: int) -> None:
        self._directory = directory
        self._megabytes = megabytes
        self._slow_megabytes = min(slow_megabytes, megabytes)
        self._runs = runs
        self.tools = tools(directory)
        empty = directory / "empty.log"
        empty.touch()
        self.start_up = {tool.name: self._start_up(tool, empty) for tool in self.tools if tool.program}
        smallest = shutil.which("true")
        self.rss_floor = measure([smallest], directory).rss / 1e6 if smallest else 0.0

    def _start_up(self, tool: Tool, empty: Path) -> float:
        """CPU seconds a tool takes for nothing; the first run may still fill caches."""
        command = tool.command(empty)
        return statistics.median([measure(command, self._directory).cpu for _ in range(6)][1:])

    def rows(self, kind: str) -> list[Row]:
        """The rows of one kind of log."""
        whole, part = self._directory / f"{kind}.log", self._directory / f"{kind}.part.log"
        for path, size in ((whole, self._megabytes), (part, self._slow_megabytes)):
            with path.open("wb") as file:
                write(kind, size * 1_000_000, file)
        logs = {tool.name: self._log_for(tool, whole, part) for tool in self.tools if tool.program}
        usages: dict[str, list[Usage]] = {name: [] for name in logs}
        for run in range(self._runs):
            for tool in self.tools:
                if tool.program:
                    print(f"{kind}: run {run + 1} of {self._runs}: {tool.name}", file=sys.stderr)
                    usages[tool.name].append(measure(tool.command(logs[tool.name]), self._directory))
        rows = [row for tool in self.tools for row in self._tool_rows(kind, tool, logs, usages)]
        whole.unlink()
        part.unlink()
        return with_ratios(rows)

    def _log_for(self, tool: Tool, whole: Path, part: Path) -> Path:
        """The whole log, or its first part for a peer that is slow on that."""
        cpu = measure(tool.command(part), self._directory).cpu
        return part if tool.name != OURS and part.stat().st_size / 1e6 < SLOW * cpu else whole

    def _tool_rows(
        self, kind: str, tool: Tool, logs: dict[str, Path], usages: dict[str, list[Usage]]
    ) -> Iterable[Row]:
        if tool.program is None:
            yield Row(kind, tool.name, "missing")
            return
        runs, log = usages[tool.name], logs[tool.name]
        if (code := next((one.code for one in runs if one.code not in tool.codes), None)) is not None:
            yield Row(kind, tool.name, f"failed with exit code {code}")
            return
        note = f"first {self._slow_megabytes} MB only" if log.name.endswith(".part.log") else ""
        yield self._row(Row(kind, tool.name, note), log, runs, 0.0, tool)
        if tool.name == OURS:
            yield self._row(Row(kind, tool.name, "start-up apart"), log, runs, self.start_up[tool.name], tool)

    @staticmethod
    def _row(row: Row, log: Path, runs: list[Usage], start_up: float, tool: Tool) -> Row:
        row.megabytes = log.stat().st_size / 1e6
        row.cpu_seconds = [max(one.cpu - start_up, 0.001) for one in runs]
        row.mb_per_cpu_second = statistics.median(row.megabytes / cpu for cpu in row.cpu_seconds)
        row.peak_rss_mb = statistics.median(one.rss for one in runs) / 1e6
        row.found = tool.found(runs[-1].output)
        return row


def with_ratios(rows: list[Row]) -> list[Row]:
    """Set how many times as fast as mtail each row is, where mtail was measured."""
    reference = next((row.mb_per_cpu_second for row in rows if row.tool == REFERENCE), None)
    for row in rows:
        if reference and row.mb_per_cpu_second is not None:
            row.ratio = row.mb_per_cpu_second / reference
    return rows


def table(rows: list[Row], rss_floor: float) -> str:
    """The rows as Markdown."""
    lines = [
        "| log | tool | MB per CPU-second | ratio to mtail | peak RSS, MB | found |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        name = f"{row.tool} ({row.note})" if row.note and row.mb_per_cpu_second else row.tool
        cells = (row.kind, name, _rate(row), _ratio(row), _rss(row, rss_floor), row.found or "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _rate(row: Row) -> str:
    if row.mb_per_cpu_second is None:
        return row.note
    return f"{row.mb_per_cpu_second:,.{0 if row.mb_per_cpu_second >= 100 else 1}f}"


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "–"
    return f"{row.ratio:,.{0 if row.ratio >= 10 else 1}f} ×"


def _rss(row: Row, floor: float) -> str:
    """The peak, as far as it stands above what the measuring itself takes."""
    if row.peak_rss_mb is None:
        return "–"
    return f"< {floor:.0f}" if row.peak_rss_mb <= floor * 1.05 else f"{row.peak_rss_mb:,.0f}"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def machine(bench: Bench) -> dict[str, str]:
    """What the figures depend on."""
    empty = ", ".join(f"{name} {cpu:.3f}" for name, cpu in bench.start_up.items())
    return {
        "CPU": f"{_cpu_model()}, {os.cpu_count()} cores",
        "system": platform.platform(),
        "Python": platform.python_version(),
        **{tool.name: tool.version() for tool in bench.tools},
        "wordings": f"{len(patterns())} patterns",
        "CPU seconds for an empty file": empty,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1000, help="size of each log; default: 1000")
    parser.add_argument(
        "--slow-megabytes", type=int, default=50, help="what slow peers read of it; default: 50"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--runs", type=int, default=3, help="runs of each command; default: 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured")
    args = parser.parse_args()
    if min(args.megabytes, args.slow_megabytes, args.runs) < 1:
        parser.error("sizes and runs begin at 1")
    return args


def _write_json(path: Path, facts: dict[str, str], rows: list[Row]) -> None:
    names = Row.__dataclass_fields__
    plain = [{name: getattr(row, name) for name in names} for row in rows]
    path.write_text(json.dumps({"machine": facts, "rows": plain}, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """``scan.py``: measure, print, delete the logs. Exit code 1 if a command failed."""
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="scan-") as name:
        bench = Bench(Path(name), args.megabytes, args.slow_megabytes, args.runs)
        rows = [row for kind in args.kinds for row in bench.rows(kind)]
        facts = machine(bench)
    for key, value in facts.items():
        print(f"- {key}: {value}")
    print(f"- logs: {args.megabytes} MB each, median of {args.runs} runs\n")
    print(table(rows, bench.rss_floor))
    if args.json is not None:
        _write_json(args.json, facts, rows)
    return int(any(row.note.startswith("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
