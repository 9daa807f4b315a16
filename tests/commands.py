"""Runs the command `everstep` in this process, as a terminal would."""

import json

import pytest

from everstep.cli import main as command

CAPTURED = pytest.CaptureFixture[str]


def run(*words: object) -> int:
    """The exit code."""
    return command.main([str(word) for word in words])


def run_json(capsys: CAPTURED, *words: object, code: int = 0):
    """What it prints for programs."""
    assert run(*words, "--json") == code
    return json.loads(capsys.readouterr().out)
