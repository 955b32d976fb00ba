"""The command line: one small function a command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__

if TYPE_CHECKING:
    from .config import Config

EXIT_OK = 0
EXIT_INCIDENT = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code of the contract."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "command"):
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    try:
        code: int = args.command(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader (head, less) has seen enough; keep the interpreter from complaining at exit
        sys.stdout = None
        return EXIT_OK
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-oom-exporter",
        description="Say why a vLLM server ran out of memory, on what evidence, and what to do.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    analyze = commands.add_parser(
        "analyze",
        help="say what happened in the log of a vLLM server",
        description="Read logs of one vLLM server and say which memory failures are in them. "
        "Exit code: 0 no incident, 1 at least one, 2 usage or an input that could not be read.",
    )
    analyze.add_argument(
        "files", nargs="*", default=["-"], metavar="FILE",
        help="log files, .gz too; '-' or nothing reads standard input; several are one history",
    )  # fmt: skip
    analyze.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    analyze.add_argument(
        "--bundle", metavar="FILE.zip", type=Path,
        help="also write an archive to attach to a vLLM issue, with nothing of a user in it",
    )  # fmt: skip
    analyze.set_defaults(command=_analyze)

    run = commands.add_parser(
        "run",
        help="the sidecar: follow a server's log, scrape it, count and serve",
        description="Follow the log of a vLLM server and serve what happens as metrics. Every option is also "
        "a key of the configuration file and a variable VLLM_OOM_…; a flag wins over a variable, and that over the file.",
    )
    _add_options(run)
    run.set_defaults(command=_run)

    check = commands.add_parser(
        "check",
        help="validate the configuration",
        description="Read the configuration as 'run' would and name every problem with its place. "
        "Exit code: 0 valid, 2 not.",
    )
    _add_options(check)
    check.set_defaults(command=_check)

    test_page = commands.add_parser(
        "test-page",
        help="send a marked test alert to every Alertmanager",
        description="Send an alert that takes the way of a page, marked as a test, to every Alertmanager of the "
        "configuration, and say what came back. Exit code: 0 all took it, 1 not all, 2 usage.",
    )
    _add_options(test_page, "alertmanager_url")
    test_page.set_defaults(command=_test_page)

    explain = commands.add_parser(
        "explain",
        help="what a class of failure is and what to do about it",
        description="Explain one class of memory failure, or list them all.",
    )
    explain.add_argument("class_id", nargs="?", metavar="CLASS")
    explain.set_defaults(command=_explain)
    return parser


def _add_options(parser: argparse.ArgumentParser, *only: str) -> None:
    from .config import options

    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file, YAML")
    for option in options():
        if only and option.key not in only:
            continue
        text = option.help + (f"; default: {option.default}" if option.default else "")
        text = text.replace("%", "%%")
        if option.kind.switch:
            parser.add_argument(
                option.flag, dest=option.key, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            parser.add_argument(
                option.flag, dest=option.key, metavar=option.kind.metavar, help=text,
                action="append" if option.kind.repeatable else "store",
            )  # fmt: skip


def _load(args: argparse.Namespace) -> Config:
    from .config import load

    return load(args.config, os.environ, vars(args))


def _refuse(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"vllm-oom-exporter: {problem}", file=sys.stderr)
    return EXIT_USAGE


def _run(args: argparse.Namespace) -> int:
    from .app import run
    from .config import ConfigError
    from .diagnosis.knowledge import KnowledgeError, builtin_classes, load_classes

    try:
        config = _load(args)
        classes = dict(builtin_classes())
        if config.classes is not None:
            classes |= load_classes(config.classes, complete=False)
    except ConfigError as error:
        return _refuse(error.problems)
    except KnowledgeError as error:
        return _refuse([f"--classes {config.classes}: {problem}" for problem in error.problems])
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return _refuse([f"--classes {config.classes}: {reason}; give a directory of class files"])
    return run(config, classes, lambda: _load(args))


def _check(args: argparse.Namespace) -> int:
    from .config import ConfigError, describe

    try:
        sys.stdout.write(describe(_load(args)))
    except ConfigError as error:
        return _refuse(error.problems)
    return EXIT_OK


def _test_page(args: argparse.Namespace) -> int:
    from .config import ConfigError, load
    from .notify.test_page import test_page

    try:
        config = load(args.config, os.environ, vars(args), needs_log=False)
    except ConfigError as error:
        return _refuse(error.problems)
    if not config.alertmanager_url:
        return _refuse(["test-page: no Alertmanager is configured; give --alertmanager-url URL"])
    return EXIT_OK if test_page(config, sys.stdout) else EXIT_INCIDENT


def _analyze(args: argparse.Namespace) -> int:
    from .analyze import analyze
    from .document import document
    from .report.progress import progress
    from .report.text import report
    from .sources.logfile import size_of

    files = list(dict.fromkeys(args.files))
    sizes = [size_of(one) for one in files]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    with progress(total) as advance:
        result = analyze(files, progress=advance)
    for problem in result.problems:
        print(f"vllm-oom-exporter: {problem}", file=sys.stderr)
    if args.format == "json":
        json.dump(document(result.history, result.lines, result.bytes), sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif result.bytes or len(result.problems) < len(files):
        sys.stdout.write(report(result))
    if args.bundle is not None and not _bundle(result, args.bundle):
        return EXIT_USAGE
    if result.problems:
        return EXIT_USAGE
    return EXIT_INCIDENT if result.history.incidents() else EXIT_OK


def _bundle(result: object, path: Path) -> bool:
    from .analyze import Analysis
    from .report.bundle import write_bundle

    assert isinstance(result, Analysis)
    try:
        write_bundle(result, path)
    except OSError as error:
        reason = error.strerror or error
        print(
            f"vllm-oom-exporter: --bundle {path}: {reason}; choose a path that can be written",
            file=sys.stderr,
        )
        return False
    print(f"wrote {path}", file=sys.stderr)
    return True


def _explain(args: argparse.Namespace) -> int:
    from .diagnosis.knowledge import CLASS_IDS
    from .report.text import class_list, explain

    if args.class_id is None:
        sys.stdout.write(class_list())
        return EXIT_OK
    if args.class_id not in CLASS_IDS:
        print(
            f"vllm-oom-exporter: explain: {args.class_id!r} is not a class; "
            "'vllm-oom-exporter explain' lists them",
            file=sys.stderr,
        )
        return EXIT_USAGE
    sys.stdout.write(explain(args.class_id))
    return EXIT_OK
