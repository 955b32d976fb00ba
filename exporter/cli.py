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

    _add_probe(commands)

    explain = commands.add_parser(
        "explain",
        help="what a class of failure is and what to do about it",
        description="Explain one class of memory failure, or list them all.",
    )
    explain.add_argument("class_id", nargs="?", metavar="CLASS")
    explain.set_defaults(command=_explain)
    return parser


def _add_probe(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .config import duration_text
    from .probe import plan

    probe = commands.add_parser(
        "probe",
        help="fill steps of a server on purpose, before traffic does",
        description="Send made-up prompts that fill steps of the prefill budget to a server without traffic, and say "
        "whether it survived. Exit code: 0 survived, 1 the server failed or did not finish, 2 refused or usage.",
    )
    _add_options(probe, "log", "vllm_url")
    of_server = probe.add_argument_group("what is known of the server, where its log does not tell")
    of_server.add_argument(
        "--exporter", metavar="URL", help="a running sidecar, which reads the server's log"
    )
    of_server.add_argument("--target", metavar="NAME", help="which server, where there are several")
    of_server.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    for flag, meaning in (
        ("--max-num-batched-tokens", "tokens a step may hold"),
        ("--max-model-len", "longest sequence"),
        ("--max-num-seqs", "sequences a step may hold"),
    ):
        of_server.add_argument(flag, metavar="N", type=_positive, help=meaning)
    of_server.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help="API key of the server; else the variable VLLM_API_KEY",
    )
    of_server.add_argument("--ca-file", metavar="FILE", help="certificates to trust beside https")
    todo = probe.add_argument_group("what to do")
    shapes = "; ".join(f"{name}: {meaning}" for name, meaning in plan.SHAPES.items())
    todo.add_argument(
        "--shape", action="append", choices=tuple(plan.SHAPES), default=[],
        help=f"repeatable; default: all that make sense, and there is time for. {shapes}",
    )  # fmt: skip
    todo.add_argument(
        "--repeat", metavar="N", type=_positive, help="how often each shape; default: 1, with --replay 3"
    )
    todo.add_argument(
        "--full-steps", metavar="N", type=_positive, default=plan.DEFAULT_STEPS,
        help=f"how many full steps 'steady' adds up to; default: {plan.DEFAULT_STEPS}",
    )  # fmt: skip
    todo.add_argument(
        "--max-tokens-total", metavar="N", type=_positive, default=plan.DEFAULT_TOKENS,
        help=f"plan no more than this; default: {plan.DEFAULT_TOKENS}",
    )  # fmt: skip
    for flag, default, meaning in (
        (
            "--spend",
            plan.DEFAULT_SPEND,
            "time after which nothing more is begun, once a step was full; of no effect on what --shape asks for",
        ),
        ("--timeout", plan.DEFAULT_TIMEOUT, "time after which it was not finished"),
    ):
        todo.add_argument(
            flag, metavar="DURATION", type=_seconds, default=default,
            help=f"{meaning}; default: {duration_text(default)}",
        )  # fmt: skip
    todo.add_argument(
        "--while-serving", action="store_true", help="also where the server has traffic, which may die of it"
    )
    todo.add_argument("--dry-run", action="store_true", help="print the plan and its cost, send no prompt")
    todo.add_argument(
        "--replay", metavar="INCIDENT.json",
        help="the prompt lengths of an incident instead, from 'analyze --format json' or the API; '-': standard input",
    )  # fmt: skip
    todo.add_argument(
        "--failed-before", metavar="N", type=_positive, default=1,
        help="with --replay: how many replays failed at the old budget, of as many; default: 1, the incident",
    )  # fmt: skip
    probe.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    probe.set_defaults(command=_probe)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 12 and int(text)):
        raise argparse.ArgumentTypeError("must be a whole number above 0")
    return int(text)


def _seconds(text: str) -> float:
    from .config import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError("must be a duration such as 20s or 2m, of a day at most")
    return seconds


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


def _probe(args: argparse.Namespace) -> int:
    from .config import ConfigError, load
    from .probe.command import Asked, probe, read_key
    from .probe.plan import PlanError
    from .probe.replay import DEFAULT_REPEAT
    from .probe.server import RefusedError

    try:
        config = load(args.config, os.environ, vars(args), needs_log=False)
        chosen = [one for one in config.targets if len(config.targets) == 1 or one.name == args.target]
        if len(chosen) != 1:
            names = ", ".join(one.name for one in config.targets)
            return _refuse([f"probe: the configuration has {names or 'no target'}; choose one with --target"])
        asked = Asked(
            vllm_url=chosen[0].vllm_url, logs=chosen[0].log, exporter=args.exporter, target=args.target,
            model=args.model, step=args.max_num_batched_tokens, max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs, shapes=tuple(dict.fromkeys(args.shape)),
            repeat=args.repeat or (DEFAULT_REPEAT if args.replay else 1), full_steps=args.full_steps,
            max_tokens=args.max_tokens_total, timeout=args.timeout, spend=args.spend,
            while_serving=args.while_serving, dry_run=args.dry_run, replay=args.replay,
            failed_before=args.failed_before, ca_file=args.ca_file, as_json=args.format == "json",
            api_key=read_key(args.api_key_file) if args.api_key_file else os.environ.get("VLLM_API_KEY") or None,
        )  # fmt: skip
        return probe(asked, sys.stdout, sys.stderr)
    except ConfigError as error:
        return _refuse(error.problems)
    except (RefusedError, PlanError) as error:
        return _refuse([f"probe: {error}"])


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
