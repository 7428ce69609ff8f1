"""What all of `gapless bench` has in common: the options, the envelope, and reports that are not lost."""

import argparse
import datetime
import json
import os
import threading

import pytest

from gapless.bench import cli, report
from gapless.bench.report import envelope, write_json
from gapless.runtime.cli import main
from gapless.runtime.core.errors import InternalError

NAMES = [name for name, _, _ in cli.COMMANDS]


def parser_of(name):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    cli.add_commands(commands)
    return commands.choices[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_has_the_same_options_for_the_same_thing(name):
    options = {flag: action for action in parser_of(name)._actions for flag in action.option_strings}
    assert options["--json"] is options["--output-file"]
    assert options["--json"].dest == "json" and options["--seed"].default == 1
    repeated = {"offline", "overlap", "programs", "radix", "shared-prefix", "serve"}
    assert ("--repeat" in options) == (name in repeated)


@pytest.mark.parametrize("name", NAMES)
def test_a_report_that_could_not_be_written_is_an_error_before_the_work(name, tmp_path, capsys):
    path = tmp_path / "nowhere" / "report.json"
    with pytest.raises(SystemExit) as exit:
        main(["bench", name, f"--output-file={path}"])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and f"{path}: No such file or directory" in error and error.count("\n") == 1


@pytest.mark.parametrize("kind", ["a directory", "new", "there", "a pipe"])
def test_looking_whether_a_file_can_be_written_leaves_it_as_it_is(kind, tmp_path):
    path = tmp_path / "report.json"
    if kind == "a directory":
        with pytest.raises(argparse.ArgumentTypeError, match="Is a directory"):
            report.output_file(str(tmp_path))
    elif kind == "new":
        assert report.output_file(str(path)) == path and not path.exists()
    elif kind == "there":
        path.write_text("what it was")
        assert report.output_file(str(path)) == path and path.read_text() == "what it was"
    else:
        os.mkfifo(path)  # to open it would wait for its reader
        looking = threading.Thread(target=report.output_file, args=[str(path)], daemon=True)
        looking.start()
        looking.join(30)
        assert not looking.is_alive()


def test_a_finished_report_is_saved_elsewhere_where_its_file_has_become_unwritable(tmp_path, monkeypatch):
    monkeypatch.setattr(report.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(InternalError, match="No such file or directory; the report is in") as raised:
        write_json(tmp_path / "gone" / "report.json", {"duration": 1.5})
    (saved,) = tmp_path.iterdir()
    assert str(saved) in raised.value.message
    assert json.loads(saved.read_text()) == {"duration": 1.5}


def test_the_envelope_has_the_common_keys_in_their_order():
    made = envelope("radix", {"repeat": 3}, 7, model="demo")
    assert tuple(made) == report.KEYS
    assert (made["benchmark"], made["options"], made["seed"]) == ("radix", {"repeat": 3}, 7)
    assert made["model"] == "demo" and made["device"] is None
    assert set(made["machine"]) == {"cpu", "cores", "system"}
    assert set(made["versions"]) == {"gapless", "python", "torch", "numpy"}
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(made["started"])
    assert datetime.timedelta(seconds=-2) < age < datetime.timedelta(minutes=5)
